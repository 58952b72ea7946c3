"""Out of the box no method ends far below training alone: the recipe `defaults_digits`, one seed of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailorfl.core.method import methods
from tailorfl.experiments.config import load
from tailorfl.experiments.runner import run_experiment

FEW_STEPS = {"afl", "cyclic"}
"""One step a round, and one client a round: these get ten times the rounds, and still no more steps than the others."""
BELOW = 0.02
"""Points of accuracy that a default may end below LocalTrain."""


def test_the_recipe_has_every_method_and_no_settings_of_theirs() -> None:
    config = load("defaults_digits")
    assert {m.name for m in config.methods} == set(methods())
    assert not any(m.options or m.rounds or dict(**m.train) for m in config.methods)


@pytest.mark.slow
def test_no_default_ends_far_below_local_training(tmp_path: Path) -> None:
    config = load("defaults_digits", {"seeds": [0], "eval": {"every": 0, "final": ["local"]}})
    few = [m for m in config.methods if m.name in FEW_STEPS]
    longer = config.model_copy(update={"methods": few, "rounds": 10 * config.rounds})
    others = config.model_copy(update={"methods": [m for m in config.methods if m not in few]})
    jobs = [
        *run_experiment(others, tmp_path / "out").jobs,
        *run_experiment(longer, tmp_path / "longer").jobs,
    ]
    mean = {summary["method"]: summary["metrics"]["mean"] for summary, _ in jobs}
    assert set(mean) == set(methods())
    assert not {n: value for n, value in mean.items() if value < mean["local"] - BELOW}, mean["local"]
