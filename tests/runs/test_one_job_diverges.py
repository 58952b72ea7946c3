"""A method that diverges is left out of a comparison; the other jobs are done, and their table stands."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import tailorfl
from tailorfl.data.own import from_tensors
from tailorfl.report.document import write_report
from tailorfl.report.experiment import run_experiment
from tailorfl.settings.loading import load

SETTINGS = ["seeds=1", "rounds=2", "data.clients=4", "engine=sequential"]


def test_a_loss_that_grows_is_divergence_though_all_numbers_are_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load(None, [*SETTINGS, "methods=[{name: local, label: wild, train: {lr: 1000}}, local]"])
    with caplog.at_level(logging.WARNING, logger="tailorfl"):
        result = run_experiment(config, tmp_path / "out")
    assert "wild, seed 0: the training loss grew from" in caplog.text
    assert "local, seed 0: the training loss" not in caplog.text
    report = write_report(result)[0].read_text()
    assert "## Diverged" in report
    assert "| wild, seed 0 |" in report
    summary = result.jobs[0][0]
    rounds = result.rounds[result.rounds["label"] == "wild"]["loss/train"]
    assert summary["loss_grew"] == [rounds.iloc[0], rounds.iloc[-1]]


def test_a_rejected_client_is_named_in_summary_and_report(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 4)).astype(np.float32), rng.integers(0, 2, 90)
    clients = np.array(["Basel", "Bern", "Genf"])[np.arange(90) % 3]
    x[clients == "Bern"] *= 1e30  # the square of a logit is infinite
    result = tailorfl.run(
        method="local",
        model="mlp",
        rounds=2,
        seeds=1,
        source=from_tensors(x, y, clients),
        out=tmp_path / "out",
    )
    assert result.jobs[0][0]["rejected_clients"] == {"Bern": [1, 2]}
    report = write_report(result)[0].read_text()
    assert "| LocalTrain, seed 0 | Bern | 2 | 1, 2 |" in report
