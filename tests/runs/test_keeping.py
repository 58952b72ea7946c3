"""What a job keeps for single clients: predictions of their test samples, and temperatures that exports have."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import tailorfl
from runs.small import StopAt
from tailorfl.errors import ConfigError, RunError
from tailorfl.evaluation.predictions import Predictions
from tailorfl.export.folder import export
from tailorfl.report.experiment import run_experiment
from tailorfl.runs.build import check
from tailorfl.runs.records import PREDICTIONS, load_predictions
from tailorfl.runs.store import RunStore
from tailorfl.runs.trained_models import restore
from tailorfl.settings.loading import load

SETTINGS: dict[str, Any] = {
    "methods": ["local", "fedavg"],
    "data": {"clients": 3, "samples": 1000, "heldout_clients": 1, "split": {"train": 0.5, "val": 0.3, "test": 0.2}},
    "model": "logistic",
    "train": {"lr": 0.3},
    "engine": "sequential",
    "rounds": 3,
    "seeds": 1,
    "eval": {"every": 2, "sets": ["local"], "final": ["local", "heldout"], "calibrate": "temperature"},
}  # fmt: skip


def kept(folder: Path, method: str) -> Predictions:
    found = load_predictions(folder / method / "seed-0")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tailorfl.ExperimentResult:
    return run_experiment(load(SETTINGS), tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.parametrize(("method", "model"), [("local", "personal"), ("fedavg", "global")])
def test_predictions_are_those_of_the_last_evaluation(
    result: tailorfl.ExperimentResult, method: str, model: str
) -> None:
    said, run = kept(result.path, method), restore(result.path, method)
    records = result.clients.query(f"label == '{method}' and set == 'local' and model == '{model}'")
    last = records[records["round"] == 3].set_index("client")
    assert sorted(set(said.client)) == [0, 1, 2]
    for client in range(3):
        mine = said.of(client)
        assert mine.row.tolist() == run.sim.federation.test[client].tolist()
        assert float((mine.outputs.argmax(1) == mine.y).mean()) == last["accuracy"][client]
        x = run.sim.federation.source.take(torch.from_numpy(mine.row))
        with torch.no_grad():
            wanted = next(iter(run.models([client]))).module(x)
        assert mine.outputs == pytest.approx(wanted.numpy(), abs=1e-5)


def test_temperatures_are_written_and_leave_with_the_model(
    result: tailorfl.ExperimentResult, tmp_path: Path
) -> None:
    table = pd.read_csv(result.path / "local" / "seed-0" / "calibration.csv")
    assert list(table["client"]) == [0, 1, 2]
    assert table["temperature"].notna().all()
    assert (table["temperature"] != 1).all()
    summary = result.jobs[0][0]["calibration"]
    assert summary["ece"] == pytest.approx(table["ece"].mean())
    assert summary["ece_calibrated"] == pytest.approx(table["ece_calibrated"].mean())
    names = restore(result.path, "local").sim.federation.names
    one, late = export(result.path, tmp_path / "out", clients=[names[1], names[3]], method="local")
    assert one.facts["temperature"] == table["temperature"][1]
    assert "temperature" not in late.facts  # a held-out client has none
    said = kept(result.path, "local").of(1)
    source = restore(result.path, "local").sim.federation.source
    raw = pd.DataFrame(source.x[torch.from_numpy(said.row)].flatten(1).numpy())
    wanted = torch.from_numpy(said.outputs).double().div(one.facts["temperature"]).softmax(1).numpy()
    for found in (
        tailorfl.predict(tmp_path / "out" / one.path.name, raw),
        tailorfl.predict(result.path, raw, client=names[1], method="local"),
    ):
        chances = found[[c for c in found.columns if c.startswith("p(")]].to_numpy()
        assert chances == pytest.approx(wanted, abs=1e-5)


def test_a_job_that_stopped_after_its_last_evaluation_keeps_the_same(
    result: tailorfl.ExperimentResult, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_experiment(load(SETTINGS), tmp_path / "run", observer=StopAt("local, seed 0", 2))
    assert load_predictions(tmp_path / "run" / "local" / "seed-0") is None
    run_experiment(load(SETTINGS), tmp_path / "run", way="resume")
    for name in ("predictions.safetensors", "calibration.csv"):
        for method in ("local", "fedavg"):
            one, other = (f / method / "seed-0" / name for f in (result.path, tmp_path / "run"))
            assert one.read_bytes() == other.read_bytes()


def test_what_is_too_many_or_private_is_not_kept(tmp_path: Path) -> None:
    def folder(name: str, **more: Any) -> Path:
        settings = {**SETTINGS, "methods": ["local"], "rounds": 1, "eval": {"every": 0}, **more}
        run_experiment(load(settings), tmp_path / name)
        return tmp_path / name / "local" / "seed-0"

    samples = len(kept_rows := kept(folder("all").parents[1], "local").row)
    assert len(set(kept_rows)) == samples
    assert load_predictions(folder("just", eval={"every": 0, "predictions": samples})) is not None
    assert load_predictions(folder("few", eval={"every": 0, "predictions": samples - 1})) is None
    private = {"dp": {"clip": 1.0, "noise": 1.0}}
    assert load_predictions(folder("private", train=private)) is None


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    private = {**SETTINGS, "train": {"dp": {"clip": 1.0, "noise": 1.0}}}
    with pytest.raises(ConfigError, match=r"eval.calibrate.*sample-level privacy does not cover"):
        check(load(private))
    numbers = {**SETTINGS, "data": {"name": "synthetic_linear"}, "model": "linear", "methods": ["local"]}
    with pytest.raises(ConfigError, match=r"eval\.calibrate=temperature .* regression"):
        run_experiment(load(numbers), tmp_path / "numbers")
    few = {**SETTINGS["data"], "split": {"train": 0.7, "val": 0.05, "test": 0.25}}
    with caplog.at_level(logging.WARNING):
        run_experiment(load({**SETTINGS, "data": few, "rounds": 1, "methods": ["local"]}), tmp_path / "few")
    assert "no temperature was fitted" in caplog.text


def test_damage_is_told_and_more_rounds_begin_anew(result: tailorfl.ExperimentResult, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_experiment(load({**SETTINGS, "methods": ["local"], "rounds": 2}), out)
    folder = out / "local" / "seed-0"
    before = (folder / PREDICTIONS).read_bytes()
    run_experiment(load({**SETTINGS, "methods": ["local"], "rounds": 3}), out, way="extend")
    again = kept(out, "local")
    assert before != (folder / PREDICTIONS).read_bytes()
    assert np.array_equal(again.outputs, kept(result.path, "local").outputs)
    (folder / PREDICTIONS).write_bytes(before[:100])
    problems = RunStore.open(folder, readonly=True).problems()
    assert problems == ["predictions.safetensors was changed after it was written"]
    with pytest.raises(RunError, match="is damaged"):
        load_predictions(folder)
