"""Devices on which clients compute, the data on them, and the precisions that they support.

States, messages and results stay in host memory (or in files); a chunk of clients is moved to the device, runs, and its
results are moved back. Data and frozen tensors are on the device once, for all clients and rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tailorfl.data.source import S, Source, copied
from tailorfl.engines.base import Inference
from tailorfl.engines.memory import free_memory
from tailorfl.errors import ConfigError, unknown
from tailorfl.models.functional import Model
from tailorfl.models.half import in_bfloat16
from tailorfl.settings.execution import PrecisionName
from tailorfl.settings.experiment import DEFAULT
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort

WORTH = 1.15
"""Least speed-up for which a lower precision is chosen automatically."""
AMPERE = (8, 0)
"""Compute capability of the first GPUs with TF32."""


def check_precision(precision: str, device: torch.device) -> None:
    """Check that a device supports a precision.

    Raises:
        ConfigError: the precision is unknown, or the device does not support it.
    """
    if precision not in get_args(PrecisionName):
        raise unknown("precision", precision, get_args(PrecisionName))
    if precision == "tf32" and device.type != "cuda":
        raise ConfigError(
            f"engine.precision=tf32 needs a GPU, but engine.device is {device}; set engine.device=cuda, or use "
            "bfloat16, float32 or auto"
        )
    if precision in ("bfloat16", "tf32") and precision not in available(device):
        named = (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"this processor ({torch.backends.cpu.get_cpu_capability()}, without AVX512_BF16 or AMX)"
        )
        raise ConfigError(
            f"engine.precision={precision} needs instructions that {named} does not have; set "
            "engine.precision=float32, or auto"
        )


def available(device: torch.device) -> tuple[str, ...]:
    """Return the precisions that a device supports, float32 first."""
    if device.type == "cuda":
        tensor_cores = torch.cuda.get_device_capability(device) >= AMPERE
        half = torch.cuda.is_bf16_supported(including_emulation=False)
        return "float32", *(["tf32"] if tensor_cores else []), *(["bfloat16"] if half else [])
    return ("float32", "bfloat16") if _processor_has_bfloat16() else ("float32",)


def _processor_has_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 with processor instructions (AVX-512 BF16, AMX, Arm's)."""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def computing(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which clients compute in a precision on a device; it restores all settings."""
    if precision == "bfloat16":
        return in_bfloat16(device.type)
    return _tf32() if precision == "tf32" else nullcontext()


def at_server(precision: str) -> AbstractContextManager[Any]:
    """Return a context in which the server's networks compute in the clients' precision.

    If the host does not support it, they compute in float32.
    """
    half = precision == "bfloat16" and _processor_has_bfloat16()
    return in_bfloat16("cpu") if half else nullcontext()


@contextmanager
def _tf32() -> Iterator[None]:
    """Round the inputs of float32 products and convolutions on GPUs to 10 bits."""
    cudnn: Any = torch.backends.cudnn
    parts: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [part.fp32_precision for part in parts]
    try:
        for part in parts:
            part.fp32_precision = "tf32"
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            part.fp32_precision = value


def chosen(seconds: Mapping[str, float]) -> tuple[str, str]:
    """Return (precision to take, the reason as text) from the seconds of a few steps in each, including float32.

    The fastest is taken if it is at least `WORTH` times as fast as float32.
    """
    base = seconds["float32"]
    best = min(seconds, key=lambda name: seconds[name])
    ratios = ", ".join(
        f"{name} is {base / max(taken, 1e-12):.2f} x the speed of float32"
        for name, taken in seconds.items()
        if name != "float32"
    )
    if not ratios:
        return (
            "float32",
            "this machine has no instructions for a lower precision, or cannot use them for this model",
        )
    if best != "float32" and base >= WORTH * seconds[best]:
        return best, ratios
    return "float32", f"{ratios}, but at least {WORTH} x is required"


HOST = torch.device("cpu")

DATA_SHARE = 0.5
"""Data that take more than this share of a device's free memory stay on the host."""


def device_of(setting: str) -> torch.device:
    """Return the device of a setting: cpu, cuda (the first GPU), cuda:N, or auto (cuda if there is one).

    Raises:
        ConfigError: it is none of these, or torch does not see such a GPU.
    """
    kind, colon, number = setting.partition(":")
    is_valid = setting in ("auto", "cpu", "cuda") or (kind == "cuda" and number.isdecimal())
    if not is_valid:
        raise ConfigError(f"engine.device must be auto, cpu, cuda or cuda:N, but is '{setting}'")
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return HOST
    if not torch.cuda.is_available():
        built = torch.version.cuda
        state = "is built without CUDA" if built is None else f"is built for CUDA {built} but finds no GPU"
        raise ConfigError(
            f"engine.device={setting} needs a GPU, but torch {torch.__version__} {state}; set engine.device=cpu, "
            f"or {'install a build of torch with CUDA' if built is None else 'check the driver (nvidia-smi)'}"
        )
    index = int(number) if colon else 0
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"engine.device={setting}, but torch sees {torch.cuda.device_count()} GPU(s): cuda:0 to "
            f"cuda:{torch.cuda.device_count() - 1}"
        )
    return torch.device("cuda", index)


class Place:
    """A device, the data on it, and the precision of networks there.

    Args:
        device: where clients compute.
        precision: float32, tf32 or bfloat16.
    """

    def __init__(self, device: torch.device = HOST, precision: str = DEFAULT.engine.precision) -> None:
        self.device, self.precision = device, precision
        self.bytes_each: WeakKeyDictionary[Model, float] = WeakKeyDictionary()
        """Largest memory that a client of each model took, if measured."""
        self._sources: WeakKeyDictionary[Source, Source] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it without its data, and check the precision on the machine that unpickles it."""
        return _place_there, (self.device, self.precision)

    @property
    def is_host(self) -> bool:
        """Whether the device is the host, so that nothing has to be moved."""
        return self.device.type == "cpu"

    def tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors on the device."""
        if self.is_host:
            return dict(tensors)
        return {path: t.to(self.device, non_blocking=True) for path, t in tensors.items()}

    def source(self, source: Source) -> Source:
        """Return the data set on the device; if it does not fit, one that moves each batch to the device."""
        if self.is_host:
            return source
        if source not in self._sources:
            host_source = source.at_hand(self.device)
            free, size = free_memory(self.device), host_source.x.nbytes + host_source.y.nbytes
            if free is not None and size > DATA_SHARE * free:
                self._sources[source] = Fetched.of(host_source, self.device)
            else:
                x, y = host_source.x.to(self.device), host_source.y.to(self.device)
                self._sources[source] = _to_train_on(Source, host_source, x=x, y=y)
        return self._sources[source]

    def inference(self, task: Inference) -> Inference:
        """Return the models and their source on the device; rows are not moved."""
        if self.is_host:
            return task
        states = tree.nest(self.tensors(dict(tree.leaves(task.states))).items(), task.states.batch_size)
        model, source = task.model.on(self.device), self.source(task.source)
        return replace(task, model=model, states=states, source=source)

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

    def calculating(self) -> AbstractContextManager[Any]:
        """Return a context with its precision, in which new tensors, also those of method code, are on the device."""
        if self.is_host:
            return computing(self.precision, self.device)
        return self.device if self.precision == "float32" else self._calculating()

    @contextmanager
    def _calculating(self) -> Iterator[None]:
        with self.device, computing(self.precision, self.device):
            yield


def _place_there(device: torch.device, precision: str) -> Place:
    """Return the place in another process.

    Raises ConfigError if its machine does not support the precision.
    """
    check_precision(precision, device)
    return Place(device, precision)


class Fetched(Source):
    """A data set on the host whose batches are moved to a device."""

    target: torch.device

    @classmethod
    def of(cls, source: Source, device: torch.device) -> Fetched:
        """Return the samples of `source`, moved to `device` batch by batch."""
        return _to_train_on(cls, source, target=device)

    def _picked(self, rows: Tensor) -> Tensor:
        return self._moved(super()._picked(rows.to(HOST)))

    def targets(self, rows: Tensor) -> Tensor:
        """Return the targets of the samples `rows`, on the device."""
        return self._moved(super().targets(rows.to(HOST)))

    def _moved(self, batch: Tensor) -> Tensor:
        # From pinned memory the copy overlaps with computations queued before it.
        batch = batch.pin_memory() if self.target.type == "cuda" else batch
        return batch.to(self.target, non_blocking=True)


def _to_train_on(kind: type[S], source: Source, **changes: Any) -> S:
    """Return a data set with the samples of `source` for clients to train on.

    Natural groups, the official split and the credit of answers are left out.
    """
    return copied(kind, source, test=None, groups={}, group_names={}, credit=None, **changes)
