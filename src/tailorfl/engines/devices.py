"""Where clients calculate: a device, and what of a federation lies on it.

States, messages and results stay in host memory (or in files); a chunk of clients is moved to the device, runs, and
what comes out is moved back. Data and frozen tensors lie on the device once, for all clients and rounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tailorfl.data.source import S, Source, copied
from tailorfl.engines.base import Inference
from tailorfl.engines.memory import free_memory
from tailorfl.engines.precision import check_precision, computing
from tailorfl.errors import ConfigError
from tailorfl.models.functional import Model
from tailorfl.settings.experiment import DEFAULT
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort

HOST = torch.device("cpu")

DATA_SHARE = 0.5
"""Data that take more than this share of a device's free memory stay on the host."""


def device_of(asked: str) -> torch.device:
    """Return the device of a setting: cpu, cuda (the first GPU), cuda:N, or auto (cuda where there is one).

    Raises:
        ConfigError: it is not one of these, or torch does not see such a GPU.
    """
    kind, colon, number = asked.partition(":")
    known = asked in ("auto", "cpu", "cuda") or (kind == "cuda" and number.isdecimal())
    if not known:
        raise ConfigError(f"engine.device must be auto, cpu, cuda or cuda:N, but is '{asked}'")
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return HOST
    if not torch.cuda.is_available():
        built = torch.version.cuda
        seen = "is built without CUDA" if built is None else f"is built for CUDA {built} but finds no GPU"
        raise ConfigError(
            f"engine.device={asked} needs a GPU, but torch {torch.__version__} {seen}; set engine.device=cpu or auto, "
            + (
                "or install a build of torch with CUDA"
                if built is None
                else "or check the driver (nvidia-smi)"
            )
        )
    index = int(number) if colon else 0
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.device={asked}, but torch sees {torch.cuda.device_count()} GPU(s): cuda:0 to "
            f"cuda:{torch.cuda.device_count() - 1}"
        )
    return torch.device("cuda", index)


class Place:
    """A device, the data that lie on it, and the precision in which networks compute there.

    Args:
        device: where clients calculate.
        precision: float32, tf32 or bfloat16.
    """

    def __init__(self, device: torch.device = HOST, precision: str = DEFAULT.engine.precision) -> None:
        self.device, self.precision = device, precision
        self.bytes_each: WeakKeyDictionary[Model, float] = WeakKeyDictionary()
        """What a client of each model took at most, where that is measured."""
        self._sources: WeakKeyDictionary[Source, Source] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process the data are put on the device anew; on another machine it may not have the precision."""
        return _place_there, (self.device, self.precision)

    @property
    def is_host(self) -> bool:
        """Whether nothing has to be moved."""
        return self.device.type == "cpu"

    def tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors on the device."""
        if self.is_host:
            return dict(tensors)
        return {path: t.to(self.device, non_blocking=True) for path, t in tensors.items()}

    def source(self, source: Source) -> Source:
        """Return the data set on the device, or one that hands it over batch by batch where it does not fit."""
        if self.is_host:
            return source
        if source not in self._sources:
            given = source.at_hand(self.device)
            free, size = free_memory(self.device), given.x.nbytes + given.y.nbytes
            if free is not None and size > DATA_SHARE * free:
                self._sources[source] = Fetched.of(given, self.device)
            else:
                x, y = given.x.to(self.device), given.y.to(self.device)
                self._sources[source] = _to_train_on(Source, given, x=x, y=y)
        return self._sources[source]

    def inference(self, asked: Inference) -> Inference:
        """Return the models and their source on the device; rows stay where they are."""
        if self.is_host:
            return asked
        states = tree.nest(self.tensors(dict(tree.leaves(asked.states))).items(), asked.states.batch_size)
        model, source = asked.model.on(self.device), self.source(asked.source)
        return replace(asked, model=model, states=states, source=source)

    def cohort(self, cohort: Cohort) -> Cohort:
        """Return the cohort with its data and the frozen tensors of its model on the device."""
        if self.is_host:
            return cohort
        return replace(
            cohort,
            source=self.source(cohort.source),
            public=None if cohort.public is None else self.source(cohort.public),
            model=cohort.model.on(self.device),
            device=self.device,
        )

    def calculating(self) -> contextlib.AbstractContextManager[Any]:
        """Return a block of its precision, in which new tensors lie on the device, those of a method's own code too."""
        if self.is_host:
            return computing(self.precision, self.device)
        return self.device if self.precision == "float32" else self._calculating()

    @contextlib.contextmanager
    def _calculating(self) -> Iterator[None]:
        with self.device, computing(self.precision, self.device):
            yield


def _place_there(device: torch.device, precision: str) -> Place:
    """Return the place of another process.

    Raises ConfigError where its machine has no instructions for the precision.
    """
    check_precision(precision, device)
    return Place(device, precision)


class Fetched(Source):
    """A data set on the host whose batches are handed over to a device."""

    target: torch.device

    @classmethod
    def of(cls, source: Source, device: torch.device) -> Fetched:
        """Return the samples of `source`, taken to `device` batch by batch."""
        return _to_train_on(cls, source, target=device)

    def _picked(self, rows: Tensor) -> Tensor:
        return self._moved(super()._picked(rows.to(HOST)))

    def targets(self, rows: Tensor) -> Tensor:
        """Return the targets of the samples `rows`, on the device."""
        return self._moved(super().targets(rows.to(HOST)))

    def _moved(self, batch: Tensor) -> Tensor:
        # From pinned memory the copy runs beside the calculations that are queued before it.
        batch = batch.pin_memory() if self.target.type == "cuda" else batch
        return batch.to(self.target, non_blocking=True)


def _to_train_on(kind: type[S], source: Source, **changes: Any) -> S:
    """Return a data set with the samples of `source` for clients to train on.

    Natural groups, the official split and what partitions look at stay behind.
    """
    return copied(kind, source, test=None, groups={}, group_names={}, credit=None, **changes)
