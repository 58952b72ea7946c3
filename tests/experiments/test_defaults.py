"""Out of the box no method ends far below training alone: the recipe `defaults_digits`, one seed of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailorfl.core.method import methods
from tailorfl.experiments.config import load
from tailorfl.experiments.runner import run_experiment

FEW_STEPS = {"afl"}
"""Takes one step a round, so 30 in all: it ends near FedAvg after 300 rounds."""
BELOW = 0.02
"""Points of accuracy that a default may end below LocalTrain."""


def test_the_recipe_has_every_method_and_no_settings_of_theirs() -> None:
    config = load("defaults_digits")
    assert {m.name for m in config.methods} == set(methods())
    assert not any(m.options or m.rounds or dict(**m.train) for m in config.methods)


@pytest.mark.slow
def test_no_default_ends_far_below_local_training(tmp_path: Path) -> None:
    config = load("defaults_digits", {"seeds": [0], "eval": {"every": 0, "final": ["local"]}})
    found = run_experiment(config, tmp_path / "out")
    mean = {summary["method"]: summary["metrics"]["mean"] for summary, _ in found.jobs}
    assert set(mean) == set(methods())
    assert not {
        n: value for n, value in mean.items() if value < mean["local"] - BELOW and n not in FEW_STEPS
    }, mean["local"]
