"""Bad input of every kind: a clear message, the right exit code, no traceback, and nothing lost."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import tailorfl
from runs.killing import assert_identical, ended, forked, numbers
from tailorfl.cli.main import app
from tailorfl.data.source import Source
from tailorfl.errors import DataError
from tailorfl.runs.store import RunStore

QUICK = ["rounds=2", "seeds=1", "eval.every=1"]
TABLE = ["data=table", "data.path=table.csv", "data.options={label: y, client: hospital}", "model=logistic"]
Edit = Callable[[pd.DataFrame], pd.DataFrame]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go to an empty folder, and lines are wide enough not to wrap."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["run", *QUICK, *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(*arguments: str, code: int = 1) -> str:
    """The message of an experiment that does not even start; nothing is left of it."""
    before = set(Path().iterdir())
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert {path for path in Path().iterdir() if path.name != "runs"} == before
    assert not list(Path().glob("runs/*"))
    message: str = result.stderr.split("error: ")[1]
    return message


def table(edit: Edit = lambda frame: frame, sizes: Sequence[int] = (20, 20, 20)) -> None:
    """Write table.csv: hospitals of these numbers of rows, two features, two classes in turn."""
    rng, rows = np.random.default_rng(0), sum(sizes)
    frame = pd.DataFrame(
        {"age": rng.normal(size=rows), "dose": rng.normal(size=rows), "y": np.arange(rows) % 2}
    )
    frame.insert(0, "hospital", np.repeat([f"h{client}" for client in range(len(sizes))], sizes))
    edit(frame).to_csv("table.csv", index=False)


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["train.lrr=1"], 2, ["train.lrr", "Did you mean 'train.lr'?"]),
        (["model=lenett"], 2, ["unknown model 'lenett'", "Did you mean 'lenet'?"]),
        (["model=lenet"], 1, ["at least 16x16 pixels", "8x8", "'cnn2'"]),
        (["data.options.foo=1"], 2, ["option of data source 'digits' 'foo'"]),
        (["eval.sets=[val]", "eval.final=[global]"], 2, ["eval.final", "should contain 'local'"]),
        (["data=table", "data.options.label=y"], 2, ["'table' needs the option 'path'"]),
        (
            ["data.partition=labels_per_client", "data.partition_options.classes=20"],
            1,
            ["cannot give every client 20 classes: the data have 10", "smaller 'classes'"],
        ),
        (["data.partition_options.alpha=-1"], 2, ["alpha", "-1"]),
        (["data.partition=natural"], 1, ["source 'digits' has none", "another partition"]),
        (
            ["data.clients=60", "data.partition_options={alpha: 0.01, min_size: 0}"],
            1,
            ["clients have no training samples: clients 'client-", "a larger min_size"],
        ),
        (["data.split={train: 0.5, val: 0.5}"], 1, ["no client has test samples", "data.split"]),
        (["data.split=perfed"], 2, ["Did you mean 'perfed_ckt'?"]),
        (["data.heldout_clients=-1"], 2, ["data.heldout_clients = -1", "at least 0"]),
        (["data.heldout_clients=[clinic-7]"], 2, ["unknown held-out client 'clinic-7'", "Did you mean"]),
        (["data.heldout_domain=sketch"], 1, ["source 'digits' has no domains"]),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(
    arguments: list[str], code: int, parts: list[str]
) -> None:
    message = refused(*arguments, code=code)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (lambda t: t.assign(age=t.age.mask(t.index == 3)), ["'age' is empty", "in 1 of 60 rows", "3"]),
        (lambda t: t.assign(age=t.age.where(t.index != 3, np.inf)), ["column 'age' is infinite", "row 3"]),
        (lambda t: t.assign(dose="much"), ["column 'dose' is not a number"]),
        (lambda t: t.iloc[:0], ["has 0 rows"]),
        (lambda t: t.drop(columns="y"), ["has no column 'y'", "Columns: hospital, age, dose"]),
    ],
)
def test_a_table_that_cannot_be_read_is_told_by_column_and_row(edit: Edit, parts: list[str]) -> None:
    table(edit)
    message = refused(*TABLE)
    assert all(part in message for part in ["table 'table.csv'", *parts]), message


@pytest.mark.parametrize(
    ("x", "y"),
    [(torch.nan, 1), (torch.inf, 1), (0.0, 2), (0.0, -1)],
    ids=["nan", "inf", "beyond", "negative"],
)
def test_bad_numbers_in_data_of_ones_own_are_told_by_sample(x: float, y: int, tmp_path: Path) -> None:
    features, labels = torch.randn(60, 3), torch.arange(60) % 2
    features[7, 1], labels[7] = x, y

    def run() -> None:
        mine = Source("mine", features, labels, "classification", 2)
        tailorfl.run({"seeds": 1, "data": {"clients": 3}}, source=mine, out=tmp_path / "out")

    with pytest.raises(DataError, match=r"'mine'.*sample|sample 7 of client") as error:
        run()
    assert error.value.exit_code == 1
    assert "7" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "engine"),
    [
        ("logistic", "sequential"),
        ("{name: mlp, norm: batch}", "vectorized"),
        pytest.param("logistic", "vectorized", marks=pytest.mark.slow),
        pytest.param("{name: mlp, norm: batch}", "sequential", marks=pytest.mark.slow),
    ],
)
def test_a_client_with_one_sample_takes_part_and_is_pointed_out(model: str, engine: str) -> None:
    """Also with batch norm, which cannot train on one sample and leaves the model of that client as it is."""
    table(sizes=(20, 1, 20))
    result = invoke(*TABLE, f"model={model}", f"engine={engine}", "data.seed=0", "seeds=2")
    assert result.exit_code == 0, result.output
    warning = "warning: data of seed 0: 1 of 3 clients have a single training sample: client 'h1'\n"
    assert result.stderr.count(warning) == 1
    rounds = RunStore.open("runs/table/ditto/seed-1", readonly=True).rounds()
    assert rounds["rejected"].tolist() == [[], []]


def test_a_client_with_one_class_takes_part_and_is_pointed_out() -> None:
    table(lambda t: t.assign(y=t.y.where(t.hospital != "h1", 1)))
    result = invoke(*TABLE, "method=fedrep", "--quiet")
    assert result.exit_code == 0, result.output
    assert "1 of 3 clients have only one class" in result.stderr


def test_warnings_are_shown_by_a_dry_run_and_found_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    table(sizes=(20, 1, 20))
    result = invoke(*TABLE, "--dry-run")
    assert result.exit_code == 0
    assert "warning: data of seed 0: 1 of 3 clients have a single training sample" in result.stderr
    data = {"name": "table", "path": "table.csv", "options": {"label": "y", "client": "hospital"}}
    tailorfl.run({"rounds": 1, "seeds": 1, "data": data, "model": "logistic"}, out="out")
    assert any("single training sample" in record.message for record in caplog.records)
    assert {record.name.split(".")[0] for record in caplog.records} == {"tailorfl"}


@pytest.mark.parametrize("method", ["local", "fedavg", "ditto"])
def test_a_diverging_client_is_rejected_named_and_counted(method: str) -> None:
    table(lambda t: t.assign(age=t.age.where(t.hospital != "h1", 1e30)))
    result = invoke(*TABLE, f"method={method}")
    assert result.exit_code == 0, result.output
    for round in (1, 2):
        assert f"warning: round {round}: update of client 1 is not finite and was rejected" in result.stderr
    store = RunStore.open(f"runs/table/{method}/seed-0", readonly=True)
    assert store.rounds()["rejected"].tolist() == [[1], [1]]
    assert store.summary is not None
    assert store.summary["rejected"] == 2
    last = store.latest_checkpoint()
    assert last is not None
    assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in last[1].values())


def test_if_all_diverge_the_job_stops_and_the_others_stand() -> None:
    diverging = "{name: fedavg, train: {lr: 1e30}}"
    result = invoke(f"methods=[{diverging}, local]", "--out", "out")
    assert result.exit_code == 0
    assert "warning: fedavg, seed 0, is left out of the results" in result.stderr
    assert "all 20 clients diverged" in result.stderr
    assert "lower train.lr, set train.clip" in result.stderr
    assert "LocalTrain" in result.stdout
    assert "FedAvg" not in result.stdout
    assert RunStore.open("out/local/seed-0", readonly=True).status == "finished"
    assert RunStore.open("out/fedavg/seed-0", readonly=True).status == "failed"
    assert "LocalTrain" in CliRunner().invoke(app, ["report", "out"]).stdout
    alone = invoke(f"methods=[{diverging}]", "--out", "alone")
    assert alone.exit_code == 1
    assert "all 20 clients diverged" in alone.stderr
    assert "Traceback" not in alone.output


@pytest.mark.parametrize("out", ["file", "file/out"])
def test_a_result_folder_that_cannot_be_written_is_told_at_once(out: str) -> None:
    Path("file").write_text("mine")
    message = refused("--out", out)
    assert f"cannot create the result folder '{out}'" in message
    assert "choose another name" in message
    assert Path("file").read_text() == "mine"


FULL: dict[str, Any] = {
    "seeds": 1,
    "rounds": 6,
    "methods": ["local", "ditto"],
    "data": {"samples": 480, "clients": 20},
    "model": {"name": "mlp", "hidden": [8]},
    "engine": "vectorized",
    "eval": {"every": 1},
    "checkpoint_every": 2,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of FULL where nothing goes wrong."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    tailorfl.run(FULL, out=out)
    return out


def test_a_full_disk_loses_nothing_and_the_run_goes_on_once_there_is_space(undisturbed: Path) -> None:
    """A limit of the size of files stands for the full disk; it hits Ditto, whose records are the larger."""
    sizes = [(undisturbed / name / "seed-0" / "clients.jsonl").stat().st_size for name in ("local", "ditto")]
    limit = (sizes[0] + sizes[1]) // 2
    Path("full.yaml").write_text(tailorfl.load_config(FULL).to_yaml())
    arguments = ("run", "full.yaml", "--out", "out", "--quiet")
    small = (limit, resource.RLIM_INFINITY)
    code, said = ended(*forked(*arguments, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, small)))
    assert code == 1, said
    assert "error: cannot append to 'out/ditto/seed-0/clients.jsonl': File too large" in said
    assert "free some space" in said
    assert "--resume" in said
    assert "Traceback" not in said
    finished = RunStore.open("out/local/seed-0", readonly=True)
    assert finished.status == "finished"
    begun = RunStore.open("out/ditto/seed-0", readonly=True)
    assert begun.status == "failed"
    assert 1 <= len(begun.rounds()) < 6
    resumed = CliRunner().invoke(app, ["run", "--resume", "out"])
    assert resumed.exit_code == 0, resumed.output
    assert_identical(numbers(Path("out")), numbers(undisturbed))


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job of a run that stopped after round 5, with the checkpoints of rounds 2 and 4."""
    real = RunStore.append_round

    def stop(store: RunStore, record: dict[str, Any]) -> None:
        real(store, record)
        if record["round"] == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "append_round", stop)
        with pytest.raises(KeyboardInterrupt):
            tailorfl.run(FULL, out="out")
    return Path("out/local/seed-0")


def truncate(checkpoint: Path) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])


def test_a_truncated_checkpoint_gives_way_to_the_one_before(stopped: Path, undisturbed: Path) -> None:
    truncate(stopped / "checkpoint-000004.safetensors")
    result = CliRunner().invoke(app, ["run", "--resume", "out"])
    assert result.exit_code == 0, result.output
    assert "warning: skipping a damaged checkpoint in 'out/local/seed-0'" in result.stderr
    assert "checkpoint-000004.safetensors has 100 bytes instead of" in result.stderr
    assert "LocalTrain seed 0: 6 rounds, resumed after round 2" in result.stderr
    assert_identical(numbers(Path("out")), numbers(undisturbed))


def test_without_a_sound_checkpoint_the_records_are_left_alone(stopped: Path) -> None:
    for checkpoint in stopped.glob("*.safetensors"):
        truncate(checkpoint)
    before = (stopped / "rounds.jsonl").read_bytes()
    result = CliRunner().invoke(app, ["run", "--resume", "out"])
    assert result.exit_code == 1
    assert "no usable checkpoint in 'out/local/seed-0'" in result.stderr
    assert "restore the files from a copy, or move the folder away" in result.stderr
    assert (stopped / "rounds.jsonl").read_bytes() == before


def test_a_damaged_record_is_told_by_file_and_line(stopped: Path) -> None:
    lines = (stopped / "rounds.jsonl").read_text().splitlines()
    (stopped / "rounds.jsonl").write_text("\n".join([json.dumps({"round": 1}), "{oops", *lines[2:], ""]))
    result = CliRunner().invoke(app, ["run", "--resume", "out"])
    assert result.exit_code == 1
    assert "line 2 of 'out/local/seed-0/rounds.jsonl' is damaged" in result.stderr
    assert "Traceback" not in result.output
