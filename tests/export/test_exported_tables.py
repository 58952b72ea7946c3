"""Models of tables with words and gaps leave with their constants, and read raw rows as the run did."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import tailorfl
from tailorfl.data.constants import Constants
from tailorfl.data.cross_silo import heart
from tailorfl.errors import DataError
from tailorfl.export.folder import export, loaded
from tailorfl.export.predict import predict
from tailorfl.runs.trained_models import restore

QUICK: dict[str, Any] = {"seeds": [0], "rounds": 2, "engine": "sequential", "eval": {"every": 0}}
SITES = ("ash", "elm", "oak")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sites").mkdir()
    for number, name in enumerate(SITES):
        rng = np.random.default_rng(number)
        choices = {
            "pain": ["dull", "sharp", "1"],
            "ward": [1.0, 2.5, 7],
            "stay": ["3", "4.5", "?"],
            "ill": ["yes", "no"],
        }
        frame = pd.DataFrame({name: rng.choice(words, 40) for name, words in choices.items()})
        frame.insert(2, "age", rng.normal(60, 10, 40).round(1))
        frame.loc[rng.random(40) < 0.3, "age"] = None
        frame.loc[rng.random(40) < 0.3, "pain"] = None
        frame.to_csv(tmp_path / "sites" / f"{name}.csv", index=False)
    return tmp_path / "sites"


@pytest.mark.parametrize(("by", "impute"), [("client", "median"), ("federated", "mean")])
def test_raw_rows_give_the_outputs_of_the_run_with_and_without_tailorfl(
    folder: Path, tmp_path: Path, by: str, impute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"label": "ill", "task": "binary", "words": ["ward"], "indicator": True, "na_values": ["?"]}
    data = {"name": "table", "path": str(folder), "options": {**options, "impute": impute}, "normalise": by}
    tailorfl.run(QUICK, method="ditto", data=data, model={"name": "mlp", "hidden": [4]}, out=tmp_path / "run")
    run = restore(tmp_path / "run")
    source = run.sim.federation.source
    found = export(tmp_path / "run", tmp_path / "models", everyone=True)
    for client, name in enumerate(SITES):
        rows = torch.nonzero(source.groups["client"] == client)[:, 0]
        with torch.no_grad():
            inside = next(run.models([client])).module(source.x[rows])[:, 0].sigmoid()
        said = predict(found[client].path, folder / f"{name}.csv")
        np.testing.assert_allclose(said["p(yes)"], inside, atol=1e-6)
        pd.testing.assert_frame_equal(predict(tmp_path / "run", folder / f"{name}.csv", client=name), said)
        # without tailorfl: rows as they lie in the file, every cell a text
        facts = json.loads((found[client].path / "model.json").read_text())["inputs"]
        constants = Constants.from_dict(facts["preparation"])
        module = loaded(found[client].path)
        with (folder / f"{name}.csv").open(newline="") as file:
            raw = list(csv.DictReader(file))
        assert torch.equal(module.prepare(raw), constants.inputs(pd.read_csv(folder / f"{name}.csv")))
        assert torch.equal(
            module.prepare(pd.read_csv(folder / f"{name}.csv").to_dict("records")), module.prepare(raw)
        )
        np.testing.assert_allclose(module.predict(module.load(), raw)[:, 1], inside, atol=1e-6)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "model", raising=False)
    exec(compile(found[2].lines, "lines", "exec"), {})  # what the command prints
    monkeypatch.delitem(sys.modules, "model")
    assert facts["features"] == list(source.info["features"])
    assert "clients" not in facts["preparation"]


def test_cells_of_a_file_mean_the_same_with_and_without_tailorfl(tmp_path: Path) -> None:
    """What pandas reads as an empty cell, or as true and false, is that also in rows of csv.DictReader."""
    rng, n = np.random.default_rng(0), 60
    choices = {
        "pain": ["dull", "sharp", "NA"],
        "smoker": ["TRUE", "FALSE", "unsure"],
        "drug": ["true", "false"],
        "stay": ["3", "4.5", "NaN"],
        "ill": ["yes", "no"],
    }
    frame = pd.DataFrame({"site": ["ash", "elm"] * (n // 2)})
    frame = frame.assign(**{name: rng.choice(words, n) for name, words in choices.items()})
    file = tmp_path / "all.csv"
    frame.to_csv(file, index=False)
    options = {"label": "ill", "client": "site", "indicator": True}
    data = {"name": "table", "path": str(file), "options": options, "normalise": "federated"}
    tailorfl.run(QUICK, method="fedavg", data=data, model="logistic", out=tmp_path / "run")
    (one,) = export(tmp_path / "run", tmp_path / "models", clients=["ash"])
    module = loaded(one.path)
    with file.open(newline="") as opened:
        raw = list(csv.DictReader(opened))
    said = predict(one.path, file)["p(yes)"]
    np.testing.assert_allclose(module.predict(module.load(), raw)[:, 1], said, atol=1e-6)


def test_a_new_patient_may_lack_a_number_that_nobody_lacked(folder: Path, tmp_path: Path) -> None:
    options = {"label": "ill", "features": ["ward"]}
    data = {"name": "table", "path": str(folder), "options": options, "normalise": "federated"}
    tailorfl.run(QUICK, method="fedavg", data=data, model="logistic", out=tmp_path / "run")
    (one,) = export(tmp_path / "run", tmp_path / "models", clients=["ash"])
    constants = restore(tmp_path / "run").sim.federation.source.info["preparation"].everyone
    mean = constants.columns["ward"].mean
    new = pd.DataFrame({"ward": [None, mean, 1.0]})
    said = predict(one.path, new)
    assert said.iloc[0, 1:].tolist() == said.iloc[1, 1:].tolist() != said.iloc[2, 1:].tolist()
    module = loaded(one.path)
    raw = torch.tensor([[float("nan")], [mean], [1.0]], dtype=torch.float64)
    np.testing.assert_allclose(module.predict(module.load(), raw)[:, 1], said["p(yes)"], atol=1e-6)


@pytest.mark.parametrize("scaling", ["client", "public"])
def test_two_scalings_are_both_done_to_raw_numbers(scaling: str, tmp_path: Path) -> None:
    """The source `heart` has its own scaling; a second one on top of it is not the only one."""
    try:
        once = heart(scaling=scaling)  # type: ignore[arg-type]
    except DataError as error:
        pytest.skip(f"the Heart data are not here: {error}")
    data = {"name": "heart", "options": {"scaling": scaling}, "normalise": "client", "split": {"train": 1.0}}
    tailorfl.run(QUICK, method="fedavg", data=data, model="logistic", out=tmp_path / "run")
    run = restore(tmp_path / "run")
    source = run.sim.federation.source
    first = once.info["scaling"]
    for client, name in enumerate(run.sim.federation.names):
        rows = torch.nonzero(source.groups["client"] == client)[:, 0]
        row = client if scaling == "client" else -1
        # numbers as they were measured, out of what the source made of them; those that were cut off, at the cut
        raw = once.x[rows].double() * first.deviation[row] + first.mean[row]
        (one,) = export(tmp_path / "run", tmp_path / "models", clients=[name])
        module = loaded(one.path)
        np.testing.assert_allclose(module.prepare(raw), source.x[rows], atol=2e-4)
        with torch.no_grad():
            inside = next(run.models([client])).module(source.x[rows])[:, 0].sigmoid()
        named = pd.DataFrame(raw.numpy(), columns=list(source.info["features"]))
        np.testing.assert_allclose(predict(one.path, named)["p(1)"], inside, atol=1e-4)
