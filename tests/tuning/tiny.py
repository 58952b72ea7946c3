"""Tunings that take a second: four clients with 240 samples of digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import load
from tailorfl.tuning.plan import TuningRequest, begin, plan
from tailorfl.tuning.run import Tuning, tune

TINY: dict[str, Any] = {
    "data": {"name": "digits", "clients": 4, "samples": 240},
    "model": {"name": "mlp", "hidden": [8]},
    "methods": ["ditto", "fedavg"],
    "rounds": 9,
    "seeds": 2,
    "engine": "sequential",
    "train": {"batch_size": 0, "lr": 0.5},
    "checkpoint_every": 1,
}
"""Batches of everything: a round is one step, and rounds differ little from each other in cost."""


def experiment(**settings: Any) -> ExperimentConfig:
    """The small experiment with other settings."""
    return load(None, {**TINY, **settings})


def tuned(folder: Path, request: TuningRequest, workers: int = 1, **settings: Any) -> Tuning:
    """A small tuning from its beginning to its end."""
    made = plan(experiment(**settings), request)
    begin(folder, made)
    return tune(folder, made, workers=workers)


def untimed(file: Path) -> dict[str, Any]:
    """A tuning.json without what the clock says."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for row in found["methods"].values():
        for trial in row["trials"]:
            del trial["seconds"]
    return found
