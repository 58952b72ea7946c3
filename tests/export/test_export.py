"""Exports carry the scaling, labels, metrics and origin of a model; what cannot be written as code is a program."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import tailorfl
from export.exporting import QUICK, assert_apart, assert_gives, note, pictures, table
from tailorfl.cli.main import app
from tailorfl.data.own import from_table
from tailorfl.errors import ConfigError, RunError
from tailorfl.export.folder import export
from tailorfl.runs.trained_models import restore

TWICE: dict[str, Any] = {**QUICK, "rounds": 2, "eval": {"every": 1}}


def houses(path: Path) -> pd.DataFrame:
    """A table of three towns whose features have other scales than numbers around 0, as the target does."""
    rng = np.random.default_rng(0)
    size, age = rng.normal(120, 30, 90).round(1), rng.normal(1960, 20, 90).round()
    frame = pd.DataFrame({"town": np.repeat(["ash", "elm", "oak"], 30), "size": size, "age": age})
    frame["price"] = 3000 * size + 500 * (age - 1900) + rng.normal(0, 5000, 90)
    frame.to_csv(path, index=False)
    return frame


@pytest.fixture(scope="module")
def sold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the table, whose features every client scales for itself, and a client that never trains."""
    home = tmp_path_factory.mktemp("houses")
    houses(home / "houses.csv")
    more = {"normalise": "client", "heldout_clients": ["oak"]}
    data = table(home / "houses.csv", ["price"], "regression", **more)
    settings = {**TWICE, "train": {"lr": 1e-6}, "model": {"name": "mlp", "hidden": [4]}}
    tailorfl.run(settings, method="ditto", data=data, out=home / "run")
    return home / "run"


def test_a_regression_takes_raw_features_and_gives_the_target_in_its_own_unit(
    sold: Path, tmp_path: Path
) -> None:
    found = export(sold, tmp_path, everyone=True, shared=True)
    assert [one.path.name for one in found] == ["ash", "elm", "oak", "global"]
    run = restore(sold)
    frame = pd.read_csv(sold.parent / "houses.csv")
    raw = torch.from_numpy(frame[["size", "age"]].to_numpy(dtype=np.float32))
    for client in range(3):
        note(run, found[client].path, client, raw, steps=10 if client == 2 else None)
    assert_apart(one.path for one in found[:3])
    inputs = found[0].facts["inputs"]
    assert inputs["features"] == ["size", "age"]
    train = raw[torch.from_numpy(np.asarray(run.sim.federation.train[0]))].double()
    prepared = inputs["preparation"]
    for name, values in (("mean", train.mean(0)), ("deviation", train.std(0))):
        assert [column[name] for column in prepared["columns"].values()] == pytest.approx(values.tolist())
    assert "clients" not in prepared  # other clients' constants stay with them
    assert found[3].facts["inputs"]["preparation"] != prepared


def test_metrics_are_those_of_the_last_evaluation_and_the_origin_is_told(sold: Path, tmp_path: Path) -> None:
    (elm,) = export(sold, tmp_path, clients=["elm"])
    told = json.loads((elm.path / "model.json").read_text())
    run = restore(sold)
    frame = run.store.clients()
    mine = frame[(frame["round"] == 2) & (frame["client"] == 1) & (frame["model"] == "personal")]
    for part, name in (("validation", "val"), ("test", "local")):
        assert told["metrics"][part]["mse"] == mine[mine["set"] == name]["mse"].item()
    origin = told["provenance"]
    assert (origin["method"], origin["seed"], origin["round"]) == ("ditto", 0, 2)
    assert origin["settings"]["train"]["lr"] == 1e-6
    assert origin["data"] == run.store.config["data"]
    (again,) = export(sold, tmp_path, clients=["1"], overwrite=True)
    assert again.facts["provenance"]["fingerprint"] == origin["fingerprint"]


def test_the_printed_lines_load_the_model(
    sold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["export", str(sold), "--client", "ash", "-o", "models"])
    assert done.exit_code == 0, done.output
    (code, _), lines = done.output.splitlines()[0].split(": "), done.output.partition(" tailorfl:\n")[2]
    assert len(lines.strip().splitlines()) <= 10
    assert "size, age" in lines
    names: dict[str, Any] = {}
    monkeypatch.syspath_prepend(Path(code).parent)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    exec(lines, names)
    monkeypatch.delitem(sys.modules, "model")
    with torch.no_grad():
        wanted = tailorfl.ExperimentResult.load(sold).model(0)(names["model"].prepare(names["raw"]))
    assert torch.equal(names["model"].predict(names["net"], names["raw"]), wanted)


def test_images_are_scaled_by_the_constants_of_training(tmp_path: Path) -> None:
    data = pictures(tmp_path / "images", {"dark": 60, "light": 160}, (8, 8, 3))
    model = {"name": "resnet20", "adapters": True}
    tailorfl.run(QUICK, method="fedbn", data=data, model=model, out=tmp_path / "run")
    (north,) = export(tmp_path / "run", tmp_path, clients=["north"])
    note(restore(tmp_path / "run"), north.path, 0)
    assert_gives(north.path)
    assert north.facts["inputs"]["classes"] == ["dark", "light"]


def test_clients_of_different_architectures_leave_with_their_own(tmp_path: Path) -> None:
    model = {"name": "logistic", "larger": [{"name": "mlp", "hidden": [5]}]}
    data = {"samples": 200, "clients": 4, "public": "digits", "public_samples": 20}
    method = {"name": "feddf", "distil": {"steps": 1}}
    tailorfl.run(QUICK, method=method, data=data, model=model, out=tmp_path / "run")
    found = export(tmp_path / "run", tmp_path / "out", everyone=True, shared=True)
    assert [one.path.name for one in found[4:]] == ["global-logistic", "global-mlp"]
    sizes = restore(tmp_path / "run").sim.federation.sizes().tolist()
    wanted = ["mlp" if size > sorted(sizes)[1] else "logistic" for size in sizes]
    assert [one.facts["architecture"]["name"] for one in found[:4]] == wanted
    run = restore(tmp_path / "run")
    for client in range(4):
        note(run, found[client].path, client)
        assert_gives(found[client].path)
    # The card of a global model is about the clients that have its architecture.
    accuracy = {one.facts["name"]: one.facts["metrics"]["test"]["accuracy"] for one in found}
    for one in found[4:]:
        own = [k for k, name in enumerate(wanted) if f"global-{name}" == one.facts["name"]]
        mean = sum(accuracy[f"client-{k}"] for k in own) / len(own)
        assert one.facts["metrics"]["test"]["accuracy"] == pytest.approx(mean)
        assert one.facts["samples"]["training"] == sum(sizes[k] for k in own)


def test_the_model_of_the_best_validation_round_is_what_is_exported(tmp_path: Path) -> None:
    settings = {**TWICE, "rounds": 6, "eval": {"every": 1, "select": "val"}, "train": {"lr": 1.0}}
    data = {"samples": 200, "clients": 3}
    tailorfl.run(method="local", data=data, out=tmp_path / "run", **settings)
    run = restore(tmp_path / "run")
    assert run.selection is not None
    chosen = [run.selection.choices[k].round for k in range(3)]
    assert [one.round for one in run.models(range(3))] == chosen != [6, 6, 6]


class Twisted(nn.Module):
    """A network whose forward pass uses a function that no export can copy."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return twisted(self.head(x.flatten(1)))


def twisted(x: Tensor) -> Tensor:
    return x.roll(1, 1) * 2


def make(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Twisted(int(np.prod(input_shape)), outputs)


@pytest.mark.slow
def test_a_network_that_cannot_be_copied_is_exported_as_a_program(tmp_path: Path) -> None:
    tailorfl.run(
        QUICK, method="local", data={"samples": 90, "clients": 2}, model=f"{__name__}:make", out=tmp_path / "run",
        imports=[__name__],
    )  # fmt: skip
    (one,) = export(tmp_path / "run", tmp_path, clients=["0"])
    assert one.facts["files"]["weights"] == "model.pt2"
    note(restore(tmp_path / "run"), one.path, 0)
    assert_apart([one.path])


def test_the_global_model_is_compared_on_samples_of_a_client_that_has_some(tmp_path: Path) -> None:
    data = {"samples": 90, "clients": 3, "excluded_clients": ["0"]}
    tailorfl.run(QUICK, method="fedavg", model="logistic", data=data, out=tmp_path / "run")
    (one,) = export(tmp_path / "run", tmp_path, shared=True)
    assert one.off["model.py"] <= 1e-6


def test_what_cannot_be_exported_is_said(sold: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the models"):
        export(sold, tmp_path)
    with pytest.raises(ConfigError, match=r"unknown client of the run 'esh'.*ash"):
        export(sold, tmp_path, clients=["esh"])
    export(sold, tmp_path, clients=["ash"])
    with pytest.raises(ConfigError, match="--overwrite"):
        export(sold, tmp_path, clients=["ash"])
    (tmp_path / "elm").mkdir()
    (tmp_path / "elm" / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match="is not an exported model"):
        export(sold, tmp_path, clients=["elm"], overwrite=True)
    assert (tmp_path / "elm" / "mine.txt").read_text() == "kept"


def test_a_run_without_its_data_or_states_says_what_to_do(tmp_path: Path) -> None:
    frame = houses(tmp_path / "houses.csv")
    source = from_table(frame, label=["price"], client="town", task="regression")
    tailorfl.run(
        QUICK, method="local", source=source, model="linear", train={"lr": 1e-9}, out=tmp_path / "run"
    )
    with pytest.raises(ConfigError, match=r"export_models\(.*source="):
        export(tmp_path / "run", tmp_path, clients=["ash"])
    export(tmp_path / "run", tmp_path, clients=["ash"], source=source)
    other = from_table(frame.assign(size=1.0), label=["price"], client="town", task="regression")
    with pytest.raises(RunError, match="the data differ"):
        export(tmp_path / "run", tmp_path, clients=["elm"], source=other)
    for file in (tmp_path / "run").glob("*/*/checkpoint-*"):
        file.unlink()
    with pytest.raises(RunError, match=r"checkpoint.*are missing"):
        export(tmp_path / "run", tmp_path, clients=["elm"], source=source)
