"""Small runs to export, and what an evaluation sees of their models, for a process without tailorfl."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from tailorfl.evaluation.judges import Portions, make_judge
from tailorfl.export.folder import loaded
from tailorfl.runs.trained_models import Restored
from tailorfl.settings.eval import GenerationConfig

QUICK: dict[str, Any] = {"seeds": [0], "rounds": 1, "engine": "sequential", "eval": {"every": 0}}
APART = Path(__file__).with_name("apart.py")


def table(
    path: Path, label: Any, task: str, *, options: dict[str, Any] | None = None, **data: Any
) -> dict[str, Any]:
    """Settings of data: a table of towns, which are its clients."""
    roles = {"label": label, "client": "town", "task": task, **(options or {})}
    return {"name": "table", "path": str(path), "options": roles, **data}


def pictures(folder: Path, lights: dict[str, int], shape: tuple[int, ...], count: int = 12) -> dict[str, Any]:
    """Settings of data: images of two clients by label, each label of another lightness."""
    rng = np.random.default_rng(0)
    for client in ("north", "south"):
        for label, light in lights.items():
            (folder / client / label).mkdir(parents=True)
            for number in range(count):
                pixels = rng.normal(light, 20, shape).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / client / label / f"{number}.png")
    return {"name": "folder", "path": str(folder)}


def outputs(run: Restored, client: int | None, rows: Tensor, steps: int | None = None) -> Tensor:
    """What the evaluation makes of rows: of a client's personal model, of its method's only model, or of the global."""
    sim = run.sim
    judge = make_judge(sim.engine, sim.federation.source.task, GenerationConfig(), Portions(sim), sim.method)
    cohort = sim.cohort((client or 0,), own=True)
    with torch.no_grad():
        if client is None or not sim.method.has_personal:
            name = next(g.name for g in sim.groups if (client or 0) in g.clients)
            model = sim.global_model(name)
            assert model is not None
            return judge.shared(cohort, model, sim.federation.source, [rows])[0]
        kinds = sim.personal_models((client,)) if steps is None else sim.newcomer_models((client,), steps)
        ((_, models),) = kinds
        return judge.own(cohort, models, [rows])[0]


def note(
    run: Restored, folder: Path, client: int | None, raw: Tensor | None = None, steps: int | None = None
) -> None:
    """Write raw samples of a client's test part (for the global model client 0's) and their outputs beside an export.

    `raw` are those of the whole source, where it holds others than were read.
    """
    rows = torch.from_numpy(np.asarray(run.sim.federation.test[client or 0]))[:8]
    noted = {"raw": run.sim.federation.source.x[rows] if raw is None else raw[rows]}
    noted["outputs"] = outputs(run, client, rows, steps).contiguous()
    save_file({name: tensor.contiguous() for name, tensor in noted.items()}, folder / "seen.safetensors")


def assert_gives(folder: Path) -> None:
    """The model in this folder gives what was noted, here: a process of its own costs seconds."""
    code, noted = loaded(folder), load_file(folder / "seen.safetensors")
    with torch.no_grad():
        answers = code.load()(code.prepare(noted["raw"]))
    torch.testing.assert_close(answers, noted["outputs"], atol=1e-6, rtol=1e-6)


def assert_apart(folders: Iterable[Path]) -> None:
    """In a process without tailorfl, the models in these folders give what was noted."""
    words = [sys.executable, "-I", str(APART), *map(str, folders)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
