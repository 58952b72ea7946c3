"""Further forms of an exported model: ONNX and TorchScript, each compared with the original model."""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tailorfl.errors import ModelError, needs_extra
from tailorfl.runs.files import reporting

ONNX, TORCHSCRIPT = "model.onnx", "model.ts"
SUMMARY = "## Exception summary"
"""Heading in a long message that precedes what is missing."""
TOLERANCE = 1e-4
"""Largest difference of outputs, relative to the largest: other programs sum in another order."""


def several(sample: Tensor) -> Tensor:
    """Return at least two samples: with a single one, exporters treat their number as a constant."""
    return torch.cat([sample, sample])[: max(2, len(sample))]


@torch.no_grad()
def compared(
    module: nn.Module, form: Any, sample: Tensor, tolerance: float, problem: str, advice: str
) -> float:
    """Return the largest difference of the outputs of another form of a module, for several samples and for one.

    Raises:
        ModelError: it exceeds `tolerance`, relative to the largest output.
    """
    worst = 0.0
    for part in (sample, sample[:1]):
        outputs = module(part)
        off = float((outputs - form(part)).abs().max())
        if not off <= tolerance * max(1.0, float(outputs.abs().max())):
            raise ModelError(f"{problem} (by {off:.3g}); {advice}")
        worst = max(worst, off)
    return worst


def write_onnx(module: nn.Module, sample: Tensor, path: Path) -> float:
    """Write a module as ONNX for any number of samples, and return the largest difference of onnxruntime's outputs.

    Raises:
        MissingExtraError: a package of the extra `export` is missing.
        ModelError: ONNX does not support an operation of the module, or outputs differ.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        with needs_extra(package, "export"):
            importlib.import_module(package)
    runtime: Any = importlib.import_module("onnxruntime")
    with _explained("ONNX"), _quiet(), reporting(path, "write"):
        torch.onnx.export(
            module,
            (several(sample),),
            str(path),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("samples", min=1)},),
            input_names=["x"],
            output_names=["outputs"],
            external_data=False,
            verbose=False,
        )
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return _compared(
        module, sample, "ONNX", lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])
    )


def write_torchscript(module: nn.Module, sample: Tensor, path: Path) -> float:
    """Write a module as a TorchScript trace, for `torch.jit.load`, and return the largest difference of its outputs.

    Raises:
        ModelError: it cannot be traced, or outputs differ, for instance with another number of samples.
    """
    with _explained("TorchScript"), _quiet(), reporting(path, "write"):
        script: Any = torch.jit
        traced = script.trace(module, (sample,), check_trace=False)
        script.save(traced, str(path))
        loaded = script.load(str(path))
    return _compared(module, sample, "TorchScript", loaded)


def _compared(module: nn.Module, sample: Tensor, name: str, form: Any) -> float:
    with _explained(name):
        problem = f"as {name} the network gives different outputs"
        return compared(module, form, sample, TOLERANCE, problem, "leave that form out")


@contextmanager
def _explained(form: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # an exporter may raise anything for a user's network
        if isinstance(error, ModelError):
            raise
        lines = [line for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
        first = lines.index(SUMMARY) + 1 if SUMMARY in lines else 0
        reason = lines[first].rpartition("'>: ")[2] if lines else type(error).__name__
        raise ModelError(f"the network cannot be written as {form}: {reason}; leave that form out") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' logs and warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
