"""The precision in which clients calculate: what this machine has instructions for, and the block that turns it on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, get_args

import torch

from tailorfl.errors import ConfigError, unknown
from tailorfl.models.half import in_bfloat16
from tailorfl.settings.engine import PrecisionName

WORTH = 1.15
"""A lower precision is taken by itself only where it is so many times as fast."""
AMPERE = (8, 0)
"""The first GPUs with TF32."""


def check_precision(asked: str, device: torch.device) -> None:
    """Nothing if clients can calculate like that on a device.

    Raises:
        ConfigError: it is no precision, or one that the device has no instructions for.
    """
    if asked not in get_args(PrecisionName):
        raise unknown("precision", asked, get_args(PrecisionName))
    if asked == "tf32" and device.type != "cuda":
        raise ConfigError(
            f"engine.precision=tf32 is a way in which GPUs multiply, but engine.device is {device}; set "
            "engine.device=cuda, or take bfloat16, float32 or auto"
        )
    if asked in ("bfloat16", "tf32") and asked not in available(device):
        raise ConfigError(
            f"engine.precision={asked} needs {_needed(asked, device)}, which {_named(device)} does not have: products "
            "would take many times as long; set engine.precision=float32, or auto to have it found out"
        )


def available(device: torch.device) -> tuple[str, ...]:
    """Return the precisions that a device has instructions for, float32 first."""
    if device.type == "cuda":
        tensor_cores = torch.cuda.get_device_capability(device) >= AMPERE
        half = torch.cuda.is_bf16_supported(including_emulation=False)
        return "float32", *(["tf32"] if tensor_cores else []), *(["bfloat16"] if half else [])
    return ("float32", "bfloat16") if _processor_has_bfloat16() else ("float32",)


def _processor_has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 here by instructions of the processor (AVX-512 BF16, AMX, or Arm's)."""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def computing(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a block in which clients calculate in a precision on a device; afterwards everything is as it was."""
    if precision == "bfloat16":
        return in_bfloat16(device.type)
    return _tf32() if precision == "tf32" else nullcontext()


def at_server(precision: str) -> AbstractContextManager[Any]:
    """Return a block in which the server's networks compute as the clients' do.

    The host may lack the instructions for it.
    """
    half = precision == "bfloat16" and _processor_has_bfloat16()
    return in_bfloat16("cpu") if half else nullcontext()


@contextmanager
def _tf32() -> Iterator[None]:
    """Has products and convolutions of float32 on GPUs round what goes into them to 10 bits."""
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
    """Return (precision to take, why in words) by what a few steps took in each; float32 is among them.

    The fastest is taken where it is `WORTH` times as fast as float32 or more.
    """
    base = seconds["float32"]
    best = min(seconds, key=lambda name: seconds[name])
    ratios = ", ".join(
        f"{name} is {base / max(taken, 1e-12):.2f} x the speed of float32"
        for name, taken in seconds.items()
        if name != "float32"
    )
    if not ratios:
        return "float32", "this machine has no instructions for a lower precision, or not for this model"
    if best != "float32" and base >= WORTH * seconds[best]:
        return best, ratios
    return "float32", f"{ratios}, and {WORTH} is asked for"


def _needed(asked: str, device: torch.device) -> str:
    if asked == "tf32":
        return "a GPU of compute capability 8.0 or later"
    return (
        "a GPU that multiplies bfloat16" if device.type == "cuda" else "a processor that multiplies bfloat16"
    )


def _named(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"this one ({torch.backends.cpu.get_cpu_capability()}, without AVX512_BF16 or AMX)"
