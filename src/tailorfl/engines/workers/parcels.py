"""Messages to other machines: bytes, and beside them the tensors as arrays, which Ray moves without copying.

A tensor that stands in several messages of one call (what all clients receive) is put into the object store once.
"""

from __future__ import annotations

import io
import pickle
import types
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.engines.workers.wire import LASTING, Known, rebuilt

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Parcel:
    """One message."""

    message: bytes
    own: dict[int, Bytes]
    """Tensors of this message, by number."""
    shared: dict[int, Bytes]
    """Tensors that stand in other messages too."""

    def without_shared(self) -> Parcel:
        """The message to send where the shared tensors travel by themselves; it still has their numbers."""
        return replace(self, shared=dict.fromkeys(self.shared, np.empty(0, dtype=np.uint8)))


def parcels(values: Sequence[Any], known: Known, *, share_all: bool = False) -> list[Parcel]:
    """Returns the messages that say `values`; with `share_all` all their tensors travel by themselves."""
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []
    written: list[tuple[bytes, set[int]]] = []
    for value in values:
        used: set[int] = set()

        def place(tensor: Tensor, used: set[int] = used) -> int:
            number = numbers.setdefault(id(tensor), len(numbers))
            if number == len(tensors):
                tensors.append(tensor)
            used.add(number)
            return number

        buffer = io.BytesIO()
        _writer(buffer, known, place, share_all).dump(value)
        written.append((buffer.getvalue(), used))
    counts = Counter(number for _, used in written for number in used)
    arrays = [bytes_of(t) for t in tensors]
    return [
        Parcel(
            message,
            {n: arrays[n] for n in sorted(used) if counts[n] == 1 and not share_all},
            {n: arrays[n] for n in sorted(used) if counts[n] > 1 or share_all},
        )
        for message, used in written
    ]


def bytes_of(tensor: Tensor) -> Bytes:
    """Returns the bytes of a tensor in the order of its elements, uint8 [bytes]; not a copy where they lie so."""
    whole = tensor.detach().contiguous()
    # A tensor of one element counts as contiguous whatever its stride, 0 where it was expanded.
    flat = whole.as_strided((whole.numel(),), (1,))
    found: Bytes = flat.view(torch.uint8).numpy()
    return found


def opened(parcel: Parcel, shared: Sequence[Bytes], known: Known, *, copy: bool = True) -> Any:
    """Returns what a message says; `shared` are its shared tensors where they travelled by themselves.

    Without `copy`, tensors lie in the object store and must not be written to.
    """
    apart = dict(zip(parcel.shared, shared, strict=True)) if shared else parcel.shared
    return _Reader(io.BytesIO(parcel.message), {**parcel.own, **apart}, known, copy).load()


def _writer(buffer: io.BytesIO, known: Known, place: Any, by_value: bool) -> Any:
    from ray import cloudpickle

    class Writer(cloudpickle.CloudPickler):  # type: ignore[misc]
        def persistent_id(self, thing: Any) -> Any:
            plain = type(thing) is Tensor and thing.device.type == "cpu" and thing.layout is torch.strided
            if plain and not thing.requires_grad:
                return "tensor", place(thing), thing.dtype, tuple(thing.shape)
            nameless = isinstance(thing, types.FunctionType) and "<" in thing.__qualname__
            if not by_value and (nameless or isinstance(thing, LASTING)):
                return "known", known.number(thing)
            return None

        def reducer_override(self, thing: Any) -> Any:
            if isinstance(thing, TensorDict):
                return rebuilt, (dict(thing.items()), tuple(thing.batch_size))
            return super().reducer_override(thing)

    return Writer(buffer)


class _Reader(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, arrays: dict[int, Bytes], known: Known, copy: bool) -> None:
        super().__init__(buffer)
        self._arrays, self._known, self._copy = arrays, known, copy
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, mark: Any) -> Any:
        if mark[0] == "known":
            return self._known.objects[mark[1]]
        _, number, dtype, shape = mark
        if number not in self._made:
            array = self._arrays[number]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of arrays that must not be written to
                flat = torch.from_numpy(array.copy() if self._copy else array)
            self._made[number] = flat.view(dtype).reshape(shape)
        return self._made[number]
