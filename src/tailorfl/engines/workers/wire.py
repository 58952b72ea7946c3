"""How a process tells another one what to do: tensors lie in shared memory, and only where they lie is sent.

What stays the same for a whole run (data, models, methods, stores of states) is known to both sides and travels as a
number. Everything else is pickled, between processes of one program that trust each other.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.method import Method
from tailorfl.data.source import Source
from tailorfl.engines.state import StateStore
from tailorfl.engines.workers.shared import Block, aligned
from tailorfl.models.functional import Model
from tailorfl.models.split import Split

LASTING = (Source, Model, Split, Method, StateStore)
"""What is not sent with every message; functions that have no name to be found by are not either."""


class Known:
    """The objects that both sides have, by number."""

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self.objects: list[Any] = list(objects)
        self._numbers = {id(o): n for n, o in enumerate(self.objects)}

    def __len__(self) -> int:
        return len(self.objects)

    def number(self, thing: Any) -> int:
        """Returns the number of an object, a new one where it was not known."""
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self.objects)
            self.objects.append(thing)
        return self._numbers[id(thing)]


class Outbox:
    """Writes messages whose tensors lie in a block, until `clear`; one that is sent twice lies there once."""

    def __init__(self, block: Block, known: Known) -> None:
        self._block, self._known = block, known
        self.clear()

    def clear(self) -> None:
        """Forgets the messages so far: their place is used again."""
        self._end = 0
        self._placed: dict[int, tuple[Tensor, Any]] = {}

    def write(self, value: Any) -> bytes:
        """Returns the message that says `value`."""
        buffer = io.BytesIO()
        _Writer(buffer, self).dump(value)
        return buffer.getvalue()

    def mark(self, thing: Any) -> Any:
        """Returns what stands in a message for an object that is not pickled, or None."""
        if isinstance(thing, Tensor):
            return self._place(thing)
        nameless = isinstance(thing, types.FunctionType) and "<" in thing.__qualname__
        return ("known", self._known.number(thing)) if nameless or isinstance(thing, LASTING) else None

    def _place(self, tensor: Tensor) -> Any:
        if id(tensor) not in self._placed:
            start = aligned(self._end)
            self._end = start + tensor.numel() * tensor.element_size()
            self._block.reserve(self._end)
            self._block.tensor(tensor.dtype, tensor.shape, start).copy_(tensor)
            # The tensor is kept, so that no other one is given its id meanwhile.
            self._placed[id(tensor)] = tensor, ("tensor", tensor.dtype, tuple(tensor.shape), start)
        return self._placed[id(tensor)][1]


def read(message: bytes, block: Block, known: Known) -> Any:
    """Returns what a message says; its tensors are those in the block, not copies."""
    return _Reader(io.BytesIO(message), block, known).load()


class _Writer(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, outbox: Outbox) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._outbox = outbox

    def persistent_id(self, thing: Any) -> Any:
        return self._outbox.mark(thing)

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, TensorDict):
            return rebuilt, (dict(thing.items()), tuple(thing.batch_size))
        return NotImplemented


class _Reader(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, block: Block, known: Known) -> None:
        super().__init__(buffer)
        self._block, self._known = block, known

    def persistent_load(self, mark: Any) -> Any:
        if mark[0] == "known":
            return self._known.objects[mark[1]]
        return self._block.tensor(*mark[1:])


def rebuilt(items: dict[str, Any], batch_size: tuple[int, ...]) -> TensorDict:
    """Returns a TensorDict that was taken apart."""
    return TensorDict(items, batch_size=torch.Size(batch_size))
