"""What every client has, by its name: against the records, and intervals against the kept predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, brier_score_loss

import tailorfl
from cli import commands
from report.tiny import invoke
from tailorfl.data.own import from_tensors
from tailorfl.errors import ConfigError
from tailorfl.evaluation.bootstrap import Interval, resampled
from tailorfl.evaluation.calibration import probabilities
from tailorfl.report.clients import ClientReport, clients_of
from tailorfl.report.page.charts import Look
from tailorfl.runs.records import load_predictions

SETTINGS: dict[str, Any] = {
    "methods": ["local", "fedavg", "ditto"], "rounds": 3, "seeds": 2, "model": "logistic", "train": {"lr": 0.3},
    "engine": "sequential", "data": {"clients": 3, "samples": 900, "split": {"train": 0.5, "val": 0.2, "test": 0.3}},
    "eval": {"every": 0, "calibrate": "temperature"},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tailorfl.ExperimentResult:
    return tailorfl.run(SETTINGS, out=tmp_path_factory.mktemp("clients") / "run")


def test_lines_are_the_records_and_what_the_predictions_say(run: tailorfl.ExperimentResult) -> None:
    found = clients_of(run, 1)
    assert [(line.client, line.label) for line in found.lines] == [
        (client, label) for client in range(3) for label in ("local", "fedavg", "ditto")
    ]
    for line in found.lines:
        folder = run.path / line.label / "seed-1"
        said, alone = load_predictions(folder), load_predictions(run.path / "local" / "seed-1")
        assert said is not None
        assert alone is not None
        mine, other = said.of(line.client), alone.of(line.client)
        assert line.samples == len(mine.y)
        assert line.value == accuracy_score(mine.y, mine.outputs.argmax(1))
        values, before = (resampled("accuracy", one, 1) for one in (mine, other))
        assert line.interval is not None
        assert [line.interval.low, line.interval.high] == list(np.quantile(values, [0.025, 0.975]))
        p = probabilities("classification", mine.outputs)
        assert line.brier == pytest.approx(
            brier_score_loss(mine.y, p, labels=range(p.shape[1]), scale_by_half=False)
        )
        assert (line.temperature is None) == (line.ece_calibrated is None)
        if line.label == "local":
            assert line.alone
            assert line.gain is None
            continue
        assert line.gain == pytest.approx(line.value - accuracy_score(other.y, other.outputs.argmax(1)))
        assert line.gain_interval is not None
        ends = np.quantile(values - before, [0.025, 0.975])
        assert [line.gain_interval.low, line.gain_interval.high] == pytest.approx(list(ends))


def test_temperatures_are_those_of_the_job(run: tailorfl.ExperimentResult) -> None:
    table = pd.read_csv(run.path / "fedavg" / "seed-0" / "calibration.csv").set_index("client")
    assert table["temperature"].notna().any()
    for line in clients_of(run, methods=["fedavg"]).lines:
        for name, value in (("temperature", line.temperature), ("ece_calibrated", line.ece_calibrated)):
            assert np.isnan(table[name][line.client]) if value is None else value == table[name][line.client]


def test_gains_are_one_table_at_80_columns_or_json(run: tailorfl.ExperimentResult) -> None:
    """A method is found by its label and by the name that the table has for it."""
    narrow, wide = (commands.invoke("gains", run.path, columns=columns).stdout for columns in (80, 200))
    assert max(map(len, narrow.splitlines())) <= 80
    for text in (narrow, wide):
        assert text.count("┡") == 1
        assert text.count("│ Ditto ") == 3
        for word in ("client-0", "FedAvg", "gain over", "95 % bootstrap interval", "Numbers are for seed 0"):
            assert word in text
    assert "further columns are in --json: ECE if calibrated, T, ECE with T" in " ".join(narrow.split())
    assert "further columns" not in wide
    assert [text[: text.index("┓")].count("┳") for text in (narrow, wide)] == [5, 8]
    for name in ("fedavg", "FedAvg"):
        text = invoke("gains", run.path, "--method", name)
        assert text.count("│ FedAvg ") == 3
        assert "LocalTrain │" not in text
    line_of = ("--seed", "1", "--client", "client-2", "--method", "ditto")
    (line,) = json.loads(invoke("gains", run.path, "--json", *line_of))
    (wanted,) = clients_of(run, 1, clients=["client-2"], methods=["ditto"]).lines
    assert line == json.loads(json.dumps(wanted.to_dict()))
    assert line["gain_interval"][0] <= line["gain"] <= line["gain_interval"][1]


@pytest.mark.parametrize(
    ("metric", "number", "bounds", "sign", "text"),
    [
        ("accuracy", 0.857, (0.643, 1.0), "", "85.7 [64, 100]"),
        ("accuracy", 0.05, (0.004, 0.0951), "+", "+5.0 [+0.4, +10]"),
        ("accuracy", 0.05, (-0.0001, 0.006), "+", "+5.0 [+0, +1]"),
        ("mse", 0.1, (-0.0042, 0.234), "+", "+0.100 [-0.004, +0.23]"),
        ("mse", 0.1, None, "", "0.100"),
        ("mse", None, None, "", "–"),
    ],
)
def test_bounds_have_a_digit_less_unless_they_would_be_0(
    metric: str, number: float | None, bounds: tuple[float, float] | None, sign: str, text: str
) -> None:
    report = ClientReport(Look(metric, ()), 0, [0], [], [])
    assert report._spread(number, None if bounds is None else Interval(*bounds), sign) == text
    assert ("lower is better" in report.table.head[-1]) == (metric == "mse")


def test_what_is_not_there_is_said(run: tailorfl.ExperimentResult, tmp_path: Path) -> None:
    for given, why in (
        ({"seed": 7}, "no finished job with seed 7"),
        ({"clients": ["client-9"]}, "client-9"),
        ({"methods": ["fedavgg"]}, "Did you mean 'fedavg'"),
    ):
        with pytest.raises(ConfigError, match=why):
            clients_of(run, **given)  # type: ignore[arg-type]
    bare = {**SETTINGS, "methods": ["fedavg"], "seeds": 1, "rounds": 1, "eval": {"predictions": 0}}
    found = clients_of(tailorfl.run(bare, out=tmp_path / "bare"))
    assert all(line.value is not None and line.gain is None and line.interval is None for line in found.lines)
    assert "LocalTrain was not run" in found.notes[0]
    assert "No intervals for fedavg" in found.notes[1]
    assert len(found.notes) == 2, "nothing is said of intervals that nobody has"
    assert found.table.head == ["client", "method", "test samples", "accuracy", "gain over LocalTrain"]


def test_numbers_that_are_not_defined_are_absent(tmp_path: Path) -> None:
    """Two clients of one class each, led by AUC: no number is made up."""
    rng = np.random.default_rng(0)
    y = np.concatenate([np.repeat([0, 1], 40), np.tile([0, 1], 20)])
    owner = np.repeat(["a", "b", "mixed"], 40)
    source = from_tensors(rng.normal(size=(120, 3)).astype(np.float32), y, clients=owner, task="binary")
    settings = {
        "methods": ["local", "fedavg"], "rounds": 1, "seeds": 1, "model": "logistic",
        "data": {"partition": "natural"}, "eval": {"every": 0, "metric": "auc"},
    }  # fmt: skip
    found = clients_of(tailorfl.run(settings, source=source, out=tmp_path / "run"))
    assert all(line.value is not None for line in found.lines[4:])
    for line in found.lines[:4]:
        assert (line.value, line.interval, line.gain, line.gain_interval) == (None,) * 4
        assert line.ece is not None
        assert line.label in ("local", "fedavg")
    assert [row[3].text for row in found.table.rows[:4]] == ["–"] * 4
    assert any("only one class" in note and "of a, b has" in note for note in found.notes)
