"""Further forms of an exported model: ONNX and TorchScript, each compared with the model that it was made of."""

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
"""Of a long message: below it stands what is missing."""
TOLERANCE = 1e-4
"""Other programs add up in other orders: outputs may differ by this, relative to the largest."""


def several(sample: Tensor) -> Tensor:
    """Return samples, at least two: with one alone, exporters take their number for a constant."""
    return torch.cat([sample, sample])[: max(2, len(sample))]


@torch.no_grad()
def compared(
    module: nn.Module, form: Any, sample: Tensor, tolerance: float, problem: str, advice: str
) -> float:
    """Return by how much the outputs of another form of a module differ at most, for several samples and for one.

    Raises:
        ModelError: by more than rounding, which is `tolerance` relative to the largest output.
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
    """Write a module as ONNX with any number of samples, and return by how much onnxruntime's outputs differ.

    Raises:
        MissingExtraError: a package of the extra `export` is missing.
        ModelError: ONNX has no words for something in the module, or its outputs are others.
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
    """Write a module as a TorchScript trace, for `torch.jit.load`, and return by how much its outputs differ.

    Raises:
        ModelError: it cannot be traced, or its outputs are others with other numbers of samples.
    """
    with _explained("TorchScript"), _quiet(), reporting(path, "write"):
        script: Any = torch.jit
        traced = script.trace(module, (sample,), check_trace=False)
        script.save(traced, str(path))
        loaded = script.load(str(path))
    return _compared(module, sample, "TorchScript", loaded)


def _compared(module: nn.Module, sample: Tensor, name: str, form: Any) -> float:
    with _explained(name):
        problem = f"as {name} the network gives other outputs"
        return compared(module, form, sample, TOLERANCE, problem, "leave that form out")


@contextmanager
def _explained(form: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever an exporter raises at a stranger's network
        if isinstance(error, ModelError):
            raise
        lines = [line for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if line.strip()]
        first = lines.index(SUMMARY) + 1 if SUMMARY in lines else 0
        reason = lines[first].rpartition("'>: ")[2] if lines else type(error).__name__
        raise ModelError(f"the network cannot be written as {form}: {reason}; leave that form out") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters say of themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
