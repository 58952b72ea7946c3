"""A method that diverges is left out of a comparison; the other jobs are done, and their table stands."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tailorfl.errors import DivergenceError
from tailorfl.experiments.config import load
from tailorfl.experiments.runner import run_experiment

WILD = "{name: fedavg, label: wild, train: {lr: 1.0e+30}}"
SETTINGS = ["seeds=1", "rounds=2", "data.clients=4", "engine=sequential"]


def test_the_others_are_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load(None, [*SETTINGS, f"methods=[{WILD}, local]"])
    with caplog.at_level(logging.WARNING, logger="tailorfl"):
        result = run_experiment(config, tmp_path / "out")
    assert list(result.table.index) == ["local"]
    assert "wild, seed 0, is left out of the results" in caplog.text
    assert (tmp_path / "out" / "comparison.csv").is_file()


def test_nothing_but_divergence_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"lower train\.lr"):
        run_experiment(load(None, [*SETTINGS, f"methods=[{WILD}]"]), tmp_path / "out")
