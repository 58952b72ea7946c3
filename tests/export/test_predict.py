"""Predictions for files of new data, by a run and by an export, are the model's for what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.neighbors import KNeighborsRegressor
from typer.testing import CliRunner

import tailorfl
from cli import commands
from export.exporting import QUICK, pictures, table
from tailorfl.cli.main import app
from tailorfl.data.own import from_table
from tailorfl.errors import ConfigError, DataError
from tailorfl.export.folder import export
from tailorfl.export.predict import predict
from tailorfl.runs.trained_models import restore


def patients(path: Path, task: str) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"town": np.repeat(["ash", "elm"], 40), "age": rng.normal(60, 9, 80).round()})
    frame["dose"] = rng.normal(5, 2, 80).round(2)
    high = frame["age"] + 3 * frame["dose"] > 75
    if task in ("classification", "binary"):
        frame["label"] = np.where(high, "yes", "no")
    elif task == "regression":
        frame["label"] = 1000 * frame["dose"] + frame["age"]
    else:
        frame["label"], frame["time"] = high.astype(int), rng.exponential(100, 80).round(1) + 1
    frame.to_csv(path, index=False)
    return frame


def commanded(words: list[str], folder: Path, **reading: Any) -> pd.DataFrame:
    """What `tailorfl predict` writes."""
    done = CliRunner().invoke(app, ["predict", *words, "-o", str(folder / "found.csv")])
    assert done.exit_code == 0, done.output
    return pd.read_csv(folder / "found.csv", **reading)


@pytest.mark.parametrize("task", ["classification", "binary", "regression", "survival"])
def test_a_table_is_scaled_as_in_training_and_keeps_its_order(task: str, tmp_path: Path) -> None:
    frame = patients(tmp_path / "all.csv", task)
    label = ["label", "time"] if task == "survival" else "label"
    data = table(tmp_path / "all.csv", label, task, normalise="client")
    model = "cox" if task == "survival" else {"name": "mlp", "hidden": [3]}
    tailorfl.run(QUICK, method="local", data=data, model=model, train={"lr": 1e-3}, out=tmp_path / "run")
    new = frame[frame["town"] == "elm"].sample(frac=1, random_state=3).head(9)
    new[["dose", "town", "age"]].to_csv(tmp_path / "new.csv", index=False)  # other order, one column too many
    found = predict(tmp_path / "run", tmp_path / "new.csv", client="elm")
    run = restore(tmp_path / "run")
    module = next(run.models([1])).module
    with torch.no_grad():
        outputs = module(run.sim.federation.source.x[torch.tensor(new.index.tolist())]).double().numpy()
    if task == "classification":
        shares = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
        np.testing.assert_allclose(found[["p(no)", "p(yes)"]], shares, atol=1e-6)
        assert found["predicted"].tolist() == [("no", "yes")[k] for k in outputs.argmax(1)]
    elif task == "binary":
        np.testing.assert_allclose(found["p(yes)"], 1 / (1 + np.exp(-outputs[:, 0])), atol=1e-6)
    else:
        column = "risk" if task == "survival" else "predicted"
        np.testing.assert_allclose(found[column], outputs[:, 0], atol=1e-4)
    (one,) = export(tmp_path / "run", tmp_path, clients=["elm"])
    pd.testing.assert_frame_equal(predict(one.path, tmp_path / "new.csv"), found)


def test_a_mean_of_neighbours_is_predicted_in_the_unit_of_the_target(tmp_path: Path) -> None:
    """kNN-Per with λ = 1, beside scikit-learn's neighbours among the site's own training rows, as they were scaled."""
    patients(tmp_path / "all.csv", "regression")
    data = table(tmp_path / "all.csv", "label", "regression", normalise="client")
    method = {"name": "knn_per", "lam": 1.0, "neighbours": 4, "scale": 0.5}
    model = {"name": "linear", "bias": True}
    tailorfl.run(QUICK, method=method, data=data, model=model, train={"lr": 1e-6}, out=tmp_path / "run")
    frame = pd.read_csv(tmp_path / "all.csv")
    federation = restore(tmp_path / "run").sim.federation
    own, columns = frame.iloc[federation.train[1]], ["age", "dose"]
    assert set(own["town"]) == {"elm"}
    mean, deviation = own[columns].mean(), own[columns].std(ddof=1)
    nearest = KNeighborsRegressor(4, weights=lambda distance: np.exp(-(distance**2) / (2 * 0.5)))
    nearest.fit(((own[columns] - mean) / deviation).to_numpy(), own["label"].to_numpy())
    new = frame[frame["town"] == "ash"].head(7)
    new[columns].to_csv(tmp_path / "new.csv", index=False)
    wanted = nearest.predict(((new[columns] - mean) / deviation).to_numpy())
    (one,) = export(tmp_path / "run", tmp_path, clients=["elm"])
    for place, client in ((tmp_path / "run", "elm"), (one.path, None)):
        found = predict(place, tmp_path / "new.csv", client=client)
        np.testing.assert_allclose(found["predicted"], wanted, rtol=1e-5)


def test_what_a_table_lacks_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    patients(tmp_path / "all.csv", "binary")
    data = table(tmp_path / "all.csv", "label", "binary")
    tailorfl.run(QUICK, method="local", data=data, model="logistic", train={"lr": 1e-4}, out=tmp_path / "run")
    with pytest.raises(DataError, match="lacks dose, which the model reads; it has: age"):
        predict(tmp_path / "run", pd.DataFrame({"age": [1.0]}), client="ash")
    with pytest.raises(DataError, match=r"column 'age' is not a number in 1 of 1 rows"):
        predict(tmp_path / "run", pd.DataFrame({"age": ["old"], "dose": [1]}), client="ash")
    with pytest.raises(ConfigError, match="--client NAME"):
        predict(tmp_path / "run", tmp_path / "all.csv")
    with pytest.raises(ConfigError, match="local has no global model"):
        export(tmp_path / "run", tmp_path / "models", clients=["ash"], shared=True)
    assert not (tmp_path / "models").exists()
    for name, value in (("seed", "0"), ("data", [1.0])):
        with pytest.raises(ConfigError, match=f"^{name} "):
            predict(tmp_path / "run", **{"data": tmp_path / "all.csv", "client": "ash", name: value})
    with pytest.raises(ConfigError, match=r"'.*misspelt' is not a result folder"):
        predict(tmp_path / "misspelt", tmp_path / "all.csv")
    predict(tmp_path / "run", pd.DataFrame({"age": [1.0], "ward": ["x"], "dose": [1]}), client="ash")
    assert "ignores the columns ward" in caplog.text
    pd.DataFrame({"age": [1.0], "dose": [1.0], "w\x1b[2J": [0]}).to_csv(tmp_path / "new.csv", index=False)
    words = ["predict", tmp_path / "run", "--client", "ash", "--data", tmp_path / "new.csv", "-o"]
    output = commands.invoke(*words, tmp_path / "absent" / "new.csv", code=1).output
    assert "warning: table 'new.csv'" in output
    assert "\x1b" not in output
    assert "absent/new.csv': No such file or directory" in output
    before = (tmp_path / "new.csv").read_bytes()
    commands.invoke(*words, tmp_path / "new.csv", code=2)
    assert (tmp_path / "new.csv").read_bytes() == before, "the patients' file is not replaced"
    (one,) = export(tmp_path / "run", tmp_path, clients=["ash"])
    with pytest.raises(ConfigError, match="is the model of ash, not of elm"):
        predict(one.path, tmp_path / "all.csv", client="elm")


def test_new_files_are_read_as_those_of_training_and_keep_their_ids(tmp_path: Path) -> None:
    """Semicolons, decimal commas and numbers of patients with zeros before them; six digits are written."""
    frame = patients(tmp_path / "plain.csv", "binary").assign(
        number=[f"{k:05}" for k in range(80)], day="1.2.2024"
    )
    written = {"sep": ";", "decimal": ",", "index": False}
    frame.to_csv(tmp_path / "all.csv", **written)
    options = {"exclude": ["number", "day"]}
    data = table(tmp_path / "all.csv", "label", "binary", options=options, normalise="federated")
    tailorfl.run(QUICK, method="local", data=data, model="logistic", out=tmp_path / "run")
    new = frame.drop(columns=["label", "day"]).assign(ward=[f"{k % 7:02}" for k in range(80)])
    new.to_csv(tmp_path / "new.csv", **written)
    (one,) = export(tmp_path / "run", tmp_path, clients=["elm"])
    for words in ([str(one.path)], [str(tmp_path / "run"), "--client", "elm"]):
        found = commanded([*words, "--data", str(tmp_path / "new.csv"), "--id", "ward"], tmp_path, dtype=str)
        assert found["number"].tolist() == new["number"].tolist()
        assert found["ward"].tolist() == new["ward"].tolist()
        exact = predict(one.path, new, ids=["ward"])  # the same table in memory
        assert exact["number"].tolist() == new["number"].tolist()
        assert [float(f"{p:.6g}") for p in exact["p(yes)"]] == found["p(yes)"].astype(float).tolist()
        assert max(len(p.partition("e")[0].replace(".", "").lstrip("0")) for p in found["p(yes)"]) <= 6
    beside = predict(one.path, tmp_path / "new.csv", ids=["dose"])  # an input too, with its decimal comma
    assert beside["dose"].tolist() == new["dose"].tolist()
    np.testing.assert_allclose(beside["p(yes)"], exact["p(yes)"])
    with pytest.raises(DataError, match=r"no column 'wards'. Did you mean 'ward'"):
        predict(one.path, new, ids=["wards"])
    own = predict(one.path, new.assign(row=new.index + 500), ids=["row"])
    assert list(own.columns).count("row") == 1
    assert own["row"].tolist() == list(range(500, 580))
    with pytest.raises(DataError, match="'predicted'"):
        predict(one.path, new.assign(predicted="no"), ids=["predicted"])


def test_which_model_predicts(tmp_path: Path) -> None:
    model = {"name": "logistic", "larger": [{"name": "mlp", "hidden": [5]}]}
    data = {"samples": 200, "clients": 4, "public": "digits", "public_samples": 20}
    method = {"name": "feddf", "distil": {"steps": 1}}
    run, new = tmp_path / "run", pd.DataFrame(np.random.default_rng(0).random((3, 64)))
    tailorfl.run(QUICK, method=method, data=data, model=model, out=run)
    for one in export(run, tmp_path / "out", shared=True):
        given = predict(one.path, new)
        pd.testing.assert_frame_equal(given, predict(run, new, client=one.path.name))
        for chosen in ({"method": "FedDF"}, {"seed": 0}, {"steps": 1}):
            with pytest.raises(ConfigError, match=next(iter(chosen))):
                predict(one.path, new, **chosen)
    for wrong in ("global", "global-cnn"):
        with pytest.raises(ConfigError, match="global-logistic, global-mlp"):
            predict(run, new, client=wrong)
    with pytest.raises(ConfigError, match="steps"):
        predict(run, new, client="client-0", steps=-1)


@pytest.mark.parametrize("normalise", ["none", "federated"])
def test_forced_marks_travel_into_the_export(normalise: str, tmp_path: Path) -> None:
    rows = [f"{k},{k * 7 % 10}00;{k % 2};{'ash' if k % 3 else 'elm'}" for k in range(1, 31)]
    (tmp_path / "all.csv").write_text("\n".join(["cost;label;town", *rows]))
    options = {"label": "label", "client": "town", "decimal": ".", "sep": ";"}  # 1,700 are seventeen hundred
    data = {"name": "table", "path": str(tmp_path / "all.csv"), "options": options, "normalise": normalise}
    settings = {**QUICK, "method": "fedavg", "model": "logistic", "train": {"lr": 1e-6}}
    tailorfl.run(settings, data=data, out=tmp_path / "run")
    (one,) = export(tmp_path / "run", tmp_path, shared=True)
    (tmp_path / "new.csv").write_text("cost\n2,300\n2,700\n")
    with pytest.raises(DataError, match="cost"):  # with a comma as separator there are two columns
        predict(one.path, pd.DataFrame({"costs": [1.0]}))
    wanted = predict(one.path, pd.DataFrame({"cost": [2300.0, 2700.0]}))
    pd.testing.assert_frame_equal(predict(one.path, tmp_path / "new.csv"), wanted)
    source = from_table(tmp_path / "all.csv", **options)  # so that no setting says how it was read
    tailorfl.run(settings, source=source, data={"normalise": normalise}, out=tmp_path / "own")
    again = predict(tmp_path / "own", tmp_path / "new.csv", client="global", source=source)
    pd.testing.assert_frame_equal(again, wanted)


def test_images_are_read_by_their_names(tmp_path: Path) -> None:
    data = pictures(tmp_path / "images", {"dark": 50, "light": 190}, (6, 6), 10)
    tailorfl.run({**QUICK, "rounds": 8}, method="fedavg", data=data, model="logistic", out=tmp_path / "run")
    words = [str(tmp_path / "run"), "--client", "south", "--data", str(tmp_path / "images" / "south")]
    (tmp_path / "images" / "south" / "dark" / "._0.png").write_bytes(b"a file that macOS adds")
    found = commanded(words, tmp_path)
    assert sorted(found["file"]) == found["file"].tolist()
    assert set(found["file"]) == {f"{label}/{k}.png" for label in ("dark", "light") for k in range(10)}
    assert found["predicted"].tolist() == [name.partition("/")[0] for name in found["file"]]
    np.testing.assert_allclose(found["p(dark)"] + found["p(light)"], 1, atol=1e-6)
    Image.new("L", (5, 6)).save(tmp_path / "other.png")
    with pytest.raises(DataError, match="grey images of 6 x 6 pixels"):
        predict(tmp_path / "run", tmp_path / "other.png", client="south")


@pytest.mark.slow
def test_choices_among_options_are_read_from_json_lines(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    lines = [
        json.dumps({"instruction": f"Pain {k}? OPTIONS:\n- yes\n- no", "output": "yes" if k % 3 else "no"})
        for k in range(12)
    ]
    (tmp_path / "notes").mkdir()
    for clinic in ("ash", "elm"):
        (tmp_path / "notes" / f"{clinic}.jsonl").write_text("\n".join(lines))
    data = {"name": "instructions", "path": str(tmp_path / "notes"), "options": {"options": 2, "length": 20}}
    model = {"name": "bert", "head": "choice", "vocabulary": 259}
    tailorfl.run(QUICK, method="local", data=data, model=model, out=tmp_path / "run")
    found = predict(tmp_path / "run", tmp_path / "notes" / "elm.jsonl", client="elm")
    assert found["row"].tolist() == list(range(12))
    run = restore(tmp_path / "run")
    rows = (run.sim.federation.source.groups["client"] == 1).nonzero()[:, 0]
    with torch.no_grad():
        wanted = next(run.models([1])).module(run.sim.federation.source.x[rows]).softmax(1)
    np.testing.assert_allclose(found[["p(0)", "p(1)"]], wanted, atol=1e-6)
