"""TensorBoard, MLflow and W&B hold what rounds.jsonl holds, also of an experiment that was killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tailorfl
from report.tiny import TINY
from report.tracked import Series, assert_same, mlflow, recorded, tensorboard, wandb
from runs.killing import ENVIRONMENT
from runs.small import first_job
from tailorfl.errors import ConfigError, MissingExtraError, RunError
from tailorfl.report.trackers import TIMED, Wandb
from tailorfl.runs.files import decode
from tailorfl.runs.job import Job, Observer
from tailorfl.runs.store import RunStore

SINGLE = 1e-6
"""TensorBoard keeps numbers in single precision."""
SMALL = {
    **TINY, "name": "tracked", "seeds": [3], "methods": ["ditto", "fedavg"], "rounds": 4, "eval": {"every": 2},
    "checkpoint_every": 2,
}  # fmt: skip
JOBS = ("ditto", "fedavg")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a database of MLflow's, which takes seconds to make."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


def lines(job: Path) -> list[dict[str, Any]]:
    """A job's rounds.jsonl without what a clock says."""
    found = [json.loads(line) for line in (job / "rounds.jsonl").read_text().splitlines()]
    return [{name: value for name, value in one.items() if name not in TIMED} for one in found]


def untimed(series: Series) -> Series:
    return {name: points for name, points in series.items() if name not in TIMED}


def check_all(out: Path, address: str, experiment: str, status: str = "FINISHED") -> None:
    """Every tracker has every job's rounds once."""
    runs = mlflow(address, experiment)
    assert runs.keys() == {f"{label}, seed 3" for label in JOBS}
    for label in JOBS:
        expected = recorded(out / label / "seed-3")
        assert_same(tensorboard(out / "tensorboard" / label / "seed-3"), expected, SINGLE)
        ended, metrics = runs[f"{label}, seed 3"]
        assert ended == status
        assert_same(untimed(metrics), untimed(expected))
        assert metrics["seconds"][-1][0] == 4
        begun, history, code = wandb(out / "wandb" / label / "seed-3")
        assert_same(history, expected, 1e-12)
        assert (begun.display_name, begun.project, code) == (f"{label}, seed 3", experiment, 0)


class Stop(Observer):
    """Somebody who presses Ctrl-C after the third round, of which the checkpoint of the second knows nothing."""

    def round_done(self, job: Job, done: Any) -> None:
        if done.round == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_trackers_hold_the_records_also_after_ctrl_c(tmp_path: Path, database: str) -> None:
    """Seconds of it are MLflow's, which makes a database."""
    track = {"tensorboard": True, "mlflow": database, "wandb": "offline"}
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        tailorfl.run({**SMALL, "name": "stopped", "track": track}, out=out, observer=Stop())
    status, metrics = mlflow(database, "stopped")["ditto, seed 3"]
    assert status == "KILLED"
    assert [step for step, _ in metrics["loss/train"]] == [1, 2, 3]
    tailorfl.run(out=out, resume=True)
    check_all(out, database, "stopped")


def killed_apart(label: str, point: str, count: int, *arguments: str) -> None:
    """The command line killed at a moment, in a process without what W&B had started in this one."""
    program = (
        "import sys; from runs.dying import die; from tailorfl.cli.main import run; "
        f"die({label!r}, {point!r}, {count}); sys.argv = ['tailorfl', *sys.argv[1:]]; run()"
    )
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([tests, *sys.path])},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.slow
def test_trackers_hold_the_records_also_after_kills(tmp_path: Path, database: str) -> None:
    """Killed in the middle of a record and of the end; resumed = uninterrupted, line for line."""
    tailorfl.run({**SMALL, "track": {}}, out=tmp_path / "whole")
    out = tmp_path / "broken"
    track = {"tensorboard": True, "mlflow": database, "wandb": "offline"}
    file = tmp_path / "experiment.yaml"
    file.write_text(tailorfl.load_config({**SMALL, "track": track}).to_yaml())
    killed_apart("ditto", "record", 6, "run", str(file), "--out", str(out), "--quiet")
    killed_apart("fedavg", "summary", 1, "run", "--resume", str(out), "--quiet")
    tailorfl.run(out=out, resume=True)
    for label in JOBS:
        there = lines(out / label / "seed-3")
        assert there == lines(tmp_path / "whole" / label / "seed-3")
        assert [record["round"] for record in there] == [1, 2, 3, 4]
    check_all(out, database, "tracked")


@pytest.mark.slow
def test_more_rounds_take_the_last_evaluation_back(tmp_path: Path, database: str) -> None:
    """Where a longer run evaluates other rounds, trackers forget what the shorter one had at its end."""
    settings = {
        **SMALL, "name": "longer", "methods": ["fedavg"], "eval": {"every": 4},
        "track": {"tensorboard": True, "mlflow": database},
    }  # fmt: skip
    out = tmp_path / "out"
    tailorfl.run(settings, out=out, rounds=2)
    events = out / "tensorboard/fedavg/seed-3"
    assert tensorboard(events)["global/local/accuracy"][0][0] == 2
    tailorfl.run(out=out, rounds=4, extend=True)
    expected = recorded(out / "fedavg/seed-3")
    assert [step for step, _ in expected["global/local/accuracy"]] == [4]
    assert_same(tensorboard(events), expected, SINGLE)
    assert_same(untimed(mlflow(database, "longer")["fedavg, seed 3"][1]), untimed(expected))


@pytest.mark.slow
def test_metrics_that_come_after_their_round_are_in_its_line(tmp_path: Path) -> None:
    """As in a deployment, whose clients are asked for metrics when the round has been recorded."""
    pytest.importorskip("wandb")
    job, tracker = first_job(SMALL), Wandb(tmp_path, "offline")
    tracker.begin(job, "key", ())
    for round, numbers in (
        (1, {"loss": 2.0}),
        (1, {"accuracy": 0.5}),
        (2, {"loss": 1.0}),
        (2, {"accuracy": 0.75}),
    ):
        tracker.add(round, numbers)
    tracker.end("finished")
    _, history, _ = wandb(tmp_path / job.folder)
    assert history == {"loss": [(1, 2.0), (2, 1.0)], "accuracy": [(1, 0.5), (2, 0.75)]}


@pytest.mark.slow
def test_mlflow_gets_sets_with_names_that_it_refuses(tmp_path: Path, database: str) -> None:
    """Its names have no +, but a personal method's last round has the set heldout+10."""
    data = {**SMALL["data"], "heldout_clients": 1}
    settings = {**SMALL, "name": "heldout", "methods": ["ditto"], "rounds": 1, "data": data}
    tailorfl.run({**settings, "track": {"mlflow": database}}, out=tmp_path / "out")
    tailorfl.run(out=tmp_path / "out", resume=True)  # and finds it again: `mlflow` refuses a second run
    expected = recorded(tmp_path / "out/ditto/seed-3")
    assert "personal/heldout+10/accuracy" in expected
    status, metrics = mlflow(database, "heldout")["ditto, seed 3"]
    assert status == "FINISHED"
    assert_same(untimed(metrics), untimed({k.replace("+", "-"): v for k, v in expected.items()}))


def test_a_tracker_that_comes_later_is_told_all_or_says_that_it_cannot_write(tmp_path: Path) -> None:
    out = tmp_path / "out"
    tailorfl.run({**SMALL, "methods": ["fedavg"]}, out=out)
    (out / "tensorboard").write_text("in the way")
    later: dict[str, Any] = {"out": out, "resume": True, "track": {"tensorboard": True}}
    with pytest.raises(RunError, match=r"track\.tensorboard: cannot write there"):
        tailorfl.run(out / "config.yaml", **later)
    (out / "tensorboard").unlink()
    tailorfl.run(out / "config.yaml", **later)
    expected = recorded(out / "fedavg/seed-3")
    assert_same(tensorboard(out / "tensorboard/fedavg/seed-3"), expected, SINGLE)


def test_a_new_experiment_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    tailorfl.run({**SMALL, "methods": ["fedavg"], "rounds": 1, "track": {"tensorboard": True}}, out=out)
    assert (out / "tensorboard/fedavg").is_dir()
    tailorfl.run({**SMALL, "methods": ["local"], "rounds": 1}, out=out, overwrite=True)
    assert not (out / "tensorboard").exists()
    assert not (out / "tracked.json").exists()
    # A folder of the same name that no tracker of ours made is somebody else's.
    (out / "wandb").mkdir()
    tailorfl.run({**SMALL, "methods": ["local"], "rounds": 1}, out=out, overwrite=True)
    assert (out / "wandb").is_dir()


@pytest.mark.parametrize(
    ("package", "track"), [("tensorboard", True), ("mlflow", True), ("wandb", "offline")]
)
def test_a_missing_package_is_named_with_its_extra(
    package: str, track: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"'{package}'.*the extra 'track'"):
        tailorfl.run({**SMALL, "track": {package: track}}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("track", "named"),
    [
        ({"mlflow": "runs"}, "track"),
        ({"mlflow": "https://me:secret@host"}, "track"),
        ({"wandb": "live"}, "track"),
        ({"tensorbord": True}, "track"),
        ({"mlflow": "file:/tmp/runs"}, r"track\.mlflow: 'file:/.*cannot be used"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_the_first_round(
    track: Any, named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        tailorfl.run({**SMALL, "track": track}, out=tmp_path / "out")


def test_quantiles_are_those_of_the_clients_records(tmp_path: Path) -> None:
    tailorfl.run({**SMALL, "methods": ["ditto"]}, out=tmp_path / "out")
    store = RunStore.open(tmp_path / "out/ditto/seed-3", readonly=True)
    last = decode((store.path / "rounds.jsonl").read_bytes().splitlines()[-1])
    rows = store.clients().query("round == 4 and model == 'personal' and set == 'local'")
    for q in (10, 25, 50, 75, 90):
        ours = last[f"personal/local/accuracy/p{q}"]
        assert ours == np.nanpercentile(rows["accuracy"], q)
    assert not [name for name in last if name.startswith("personal/local/loss/")]


def test_epsilon_of_a_round_ends_at_that_of_the_summary(tmp_path: Path) -> None:
    """With full participation all clients of equal size are alike, and the largest ε is anybody's."""
    dp = {"clip": 1.0, "noise": 2.0, "delta": 1e-3, "accountant": "rdp"}
    settings = {**SMALL, "methods": ["fedavg"], "train": {"dp": dp}, "track": {"tensorboard": True}}
    out = tmp_path / "out"
    tailorfl.run(settings, out=out)
    summary = RunStore.open(out / "fedavg/seed-3", readonly=True).summary
    assert summary is not None
    spent = tensorboard(out / "tensorboard/fedavg/seed-3")["epsilon"]
    assert [step for step, _ in spent] == [2, 4]
    assert 0 < spent[0][1] < spent[1][1] == pytest.approx(summary["privacy"]["epsilon"]["max"], rel=1e-6)
