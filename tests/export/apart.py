"""Run by tests in a process of its own, which cannot import tailorfl: exports give the outputs that lie beside them.

    python -I apart.py FOLDER...

Each folder has, beside an export, `seen.safetensors`: raw samples and the outputs that the run's evaluation sees.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TOLERANCE = 1e-6


class Refusing:
    """Finds no tailorfl, wherever it is installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuse tailorfl and leave all else to others."""
        if name.partition(".")[0] == "tailorfl":
            raise ModuleNotFoundError(f"no {name} here")


sys.meta_path.insert(0, Refusing())  # type: ignore[arg-type]
try:
    import tailorfl  # noqa: F401
except ModuleNotFoundError:
    pass
else:
    sys.exit("tailorfl can be imported")

wrong = []
for folder in map(Path, sys.argv[1:]):
    spec = importlib.util.spec_from_file_location("model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    model = sys.modules["model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    noted = load_file(folder / "seen.safetensors")
    with torch.no_grad():
        answers = model.load()(model.prepare(noted["raw"]))
    off = float((answers - noted["outputs"]).abs().max() / noted["outputs"].abs().max().clamp(min=1))
    if not off <= TOLERANCE:
        wrong.append(f"{folder}: {off:.3g}")
assert not [name for name in sys.modules if name.startswith("tailorfl")]
sys.exit("\n".join(wrong) if wrong else 0)
