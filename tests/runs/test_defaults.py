"""Out of the box no method ends far below training alone: the recipe `defaults_digits`, one seed of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailorfl.core.method import methods
from tailorfl.report.experiment import run_experiment
from tailorfl.settings.loading import load

TIMES = {"afl": 10, "cyclic": 10, "fedem": 2}
"""Method -> times as many rounds: one step a round, one client a round, and steps that three networks share."""
BELOW = 0.02
"""Points of accuracy that a default may end below LocalTrain."""


def test_the_recipe_has_every_method_and_no_settings_of_theirs() -> None:
    config = load("defaults_digits")
    assert {m.name for m in config.methods} == set(methods())
    assert not any(m.options or m.rounds or dict(**m.train) for m in config.methods)


@pytest.mark.slow
def test_no_default_ends_far_below_local_training(tmp_path: Path) -> None:
    config = load("defaults_digits", {"seeds": [0], "eval": {"every": 0, "final": ["local"]}})
    jobs = []
    for times in sorted({1, *TIMES.values()}):
        lines = [m for m in config.methods if TIMES.get(m.name, 1) == times]
        part = config.model_copy(update={"methods": lines, "rounds": times * config.rounds})
        jobs += run_experiment(part, tmp_path / str(times)).jobs
    mean = {summary["method"]: summary["metrics"]["mean"] for summary, _ in jobs}
    assert set(mean) == set(methods())
    assert not {n: value for n, value in mean.items() if value < mean["local"] - BELOW}, mean["local"]
