"""Tasks and results as bytes, and beside them the tensors, which each pool moves in its own way.

What stays the same for a whole run (data, models, methods, stores of states) is known to both sides and travels as a
number. Everything else is pickled, between processes of one program that trust each other.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.method import Method
from tailorfl.data.source import Source
from tailorfl.engines.state import StateStore
from tailorfl.models.functional import Model
from tailorfl.models.split import Split

LASTING = (Source, Model, Split, Method, StateStore)
"""Types of objects that are sent once; so are functions without a name to import them by."""

Load = Callable[[int, torch.dtype, tuple[int, ...]], Tensor]
"""(number of a tensor in its message, dtype, shape) -> the tensor."""


class Known:
    """The objects that both sides have, by number."""

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self.objects: list[Any] = list(objects)
        self._numbers = {id(o): n for n, o in enumerate(self.objects)}

    def __len__(self) -> int:
        return len(self.objects)

    def number(self, value: Any) -> int:
        """Return the number of an object, a new one if it was not known."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self._numbers[id(value)]


class Packing:
    """Mixin of pickle.Pickler: takes tensors out of the message, and known objects too unless `known` is None."""

    known: Known | None
    tensors: list[Tensor]
    numbers: dict[int, int]

    def persistent_id(self, value: Any) -> Any:
        """Return what stands in the message for a tensor or a known object; None for what is pickled."""
        if type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided:
            number = self.numbers.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
            return "tensor", number, value.dtype, tuple(value.shape)
        if self.known is None:
            return None
        nameless = isinstance(value, types.FunctionType) and "<" in value.__qualname__
        return ("known", self.known.number(value)) if nameless or isinstance(value, LASTING) else None

    def reducer_override(self, value: Any) -> Any:
        """Take a TensorDict apart by its own items; leave the rest to the base class."""
        if isinstance(value, TensorDict):
            return _tensordict, (dict(value.items()), tuple(value.batch_size))
        inherited = getattr(super(), "reducer_override", None)
        return NotImplemented if inherited is None else inherited(value)


class Packer(Packing, pickle.Pickler):
    """Packs for processes that have the same modules."""


def pack(value: Any, known: Known | None, packer: Any = Packer) -> tuple[bytes, list[Tensor]]:
    """Return the message that says `value`, and its tensors by number."""
    buffer = io.BytesIO()
    writer = packer(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    writer.known, writer.tensors, writer.numbers = known, [], {}
    writer.dump(value)
    return buffer.getvalue(), writer.tensors


def unpack(message: bytes, load: Load, known: Known) -> Any:
    """Return what a message says, with its tensors from `load`."""
    return _Unpacker(io.BytesIO(message), load, known).load()


class _Unpacker(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, load: Load, known: Known) -> None:
        super().__init__(buffer)
        self._load, self._known = load, known
        self._loaded: dict[int, Tensor] = {}

    def persistent_load(self, mark: Any) -> Any:
        if mark[0] == "known":
            return self._known.objects[mark[1]]
        _, number, dtype, shape = mark
        if number not in self._loaded:
            self._loaded[number] = self._load(number, dtype, shape)
        return self._loaded[number]


def _tensordict(items: dict[str, Any], batch_size: tuple[int, ...]) -> TensorDict:
    return TensorDict(items, batch_size=torch.Size(batch_size))
