"""Trees beside networks, against the predictors of scikit-learn on the data frame with its gaps and words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

import tailorfl
from methods.small import after
from tailorfl.core.method import make_method
from tailorfl.data.build import build
from tailorfl.data.federation import Federation
from tailorfl.data.own import from_table
from tailorfl.data.source import Source
from tailorfl.engines.choice import make_engine
from tailorfl.errors import ConfigError
from tailorfl.export.folder import export
from tailorfl.export.predict import predict
from tailorfl.models.functional import Model
from tailorfl.models.registry import build as build_model
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import checkpoints
from tailorfl.runs.trained_models import restore
from tailorfl.testing import Contract, checks_of
from tailorfl.testing.small import assert_close, assert_same, everything
from tailorfl.training.boosting import ensemble, nodes_of
from tailorfl.training.cohort import TrainConfig

NAMES = ("local_trees", "pooled_trees", "federated_trees")
LEVELS = [f"level {k}" for k in range(40)]
NODE_BYTES = 4 + 4 + 2 + 2 + 2 + 1  # value, threshold, feature, left, right, missing_left
QUICK = {"min_samples_leaf": 1, "max_features": 0.5, "max_leaf_nodes": 4}
CONTRACTS_OF_TREES = [
    Contract(make_method("federated_trees", QUICK), chooses=True, own_rate=True, by_id=True),
    *(
        Contract(
            make_method(name, {**QUICK, "max_iter": 3}),
            chooses=True,
            own_rate=True,
            by_id=True,
            unweighted=True,
        )
        for name in ("local_trees", "pooled_trees")
    ),
]
CHECKS = [check for contract in CONTRACTS_OF_TREES for check in checks_of(contract)]


def table(task: str, rows: int = 240, clients: int = 1, seed: int = 0) -> pd.DataFrame:
    """Random rows with gaps, words of few and of many levels, and a column that client 0 never measured."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(60, 10, rows).round(2),
            "pain": rng.choice(["dull", "sharp", "none at all"], rows),
            "dose": rng.exponential(3, rows).round(3),
            "ward": rng.choice(LEVELS, rows),
            "never": rng.normal(0, 1, rows).round(3),
            "town": [f"town {k % clients}" for k in range(rows)],
        }
    )
    signal = (frame["age"] - 60) / 10 + 2 * (frame["pain"] == "sharp") + rng.normal(0, 0.5, rows)
    signal += 1.5 * frame["ward"].isin(LEVELS[::3])
    for column, share in (("age", 0.15), ("pain", 0.2), ("dose", 0.1), ("ward", 0.1)):
        frame.loc[rng.random(rows) < share, column] = None
    signal += 1.5 * frame["dose"].isna()
    if clients > 1:
        frame.loc[frame["town"] == "town 0", "never"] = None
    edges = signal.quantile([0.4, 0.8] if task == "classification" else [0.5]).to_numpy()
    frame["label"] = signal if task == "regression" else np.digitize(signal, edges).astype(str)
    return frame


def federation(frame: pd.DataFrame, task: str, indicator: bool = True, **data: Any) -> Federation:
    source = from_table(frame, label="label", client="town", task=task, indicator=indicator)  # type: ignore[arg-type]
    data = {"split": {"train": 0.75, "val": 0.0, "test": 0.25}, "normalise": "federated", **data}
    return build(source=source, **data)


def simulation(
    name: str, data: Federation, rounds: int = 0, engine: str = "sequential", **settings: Any
) -> Simulation:
    method = make_method(name, settings.pop("options", {}))
    model = Model(lambda: build_model("logistic", data.source.input_shape, data.source.outputs))
    sim = Simulation(method, data, model, TrainConfig(), engine=make_engine(engine), **settings)
    return after(sim, rounds)


def personal(sim: Simulation, client: int, rows: Any) -> torch.Tensor:
    ((_, models),) = sim.personal_models((client,))
    return sim.model({name: t[0] for name, t in models.items()}, sim.federation.source.x[rows])


def features(frame: pd.DataFrame, train: Any) -> pd.DataFrame:
    """The features as they are, words as categories, without columns of gaps alone, which scikit-learn cannot bin."""
    x = frame.drop(columns=["label", "town"]).dropna(axis=1, how="all")
    x = x[[name for name in x if x[name].iloc[train].notna().any()]]
    words = {name: pd.CategoricalDtype(sorted(x[name].dropna().unique())) for name in ("pain", "ward")}
    return x.astype(words)


def expected(frame: pd.DataFrame, train: Any, test: Any, task: str, **settings: Any) -> np.ndarray:
    """scikit-learn's own probabilities or numbers, of the frame as it is."""
    x = features(frame, train)
    kind = HistGradientBoostingRegressor if task == "regression" else HistGradientBoostingClassifier
    fitted = kind(categorical_features="from_dtype", **settings)
    fitted.fit(x.iloc[train], frame["label"].iloc[train])
    return fitted.predict(x.iloc[test]) if task == "regression" else fitted.predict_proba(x.iloc[test])


@pytest.mark.parametrize("task", ["binary", "classification", "regression"])
@pytest.mark.parametrize(("seed", "indicator"), [(0, True), pytest.param(1, False, marks=pytest.mark.slow)])
def test_local_and_pooled_trees_predict_as_scikit_learn_does(task: str, seed: int, indicator: bool) -> None:
    frame = table(task, clients=2, seed=seed, rows=400)
    data = federation(frame, task, indicator)
    everything_ = np.sort(np.concatenate(list(data.train)))
    for name, client, train in (("local_trees", 0, data.train[0]), ("pooled_trees", 0, everything_)):
        sim = simulation(name, data, rounds=1, options={"max_iter": 30})
        rows = data.test[1]
        outputs = personal(sim, client, rows)
        if task == "binary":
            outputs = torch.cat([-outputs, outputs], 1).sigmoid()
        elif task == "classification":
            outputs = outputs.softmax(1)
        answers = outputs[:, 0] if task == "regression" else outputs
        reference = expected(frame, train, rows, task, max_iter=30)
        np.testing.assert_allclose(answers, reference, atol=1e-6, rtol=1e-6)
        assert sim.model.module.columns.words == 2, "the table has words"


def test_a_word_that_a_client_never_had_is_as_a_missing_one() -> None:
    frame = table("binary", clients=2, rows=400)
    few = frame["pain"].replace("none at all", "sharp").fillna("sharp")
    frame["pain"] = frame["pain"].where(frame["town"] == "town 1", few)
    data = federation(frame, "binary")
    sim = simulation("local_trees", data, rounds=1, options={"max_iter": 20})
    rows = data.test[1]
    new = expected(frame, data.train[0], rows, "binary", max_iter=20)
    np.testing.assert_allclose(personal(sim, 0, rows)[:, 0].sigmoid(), new[:, 1], atol=1e-6)
    state = sim.states.get((0,))
    words = (state["feature"] < sim.model.module.columns.words) & (state["left"] != state["right"])
    assert (words & state["missing_left"]).any()
    assert (frame["pain"].iloc[rows] == "none at all").any()


def test_two_classes_of_a_classification_have_one_tree() -> None:
    frame = table("binary")
    data = federation(frame, "classification")
    sim = simulation("local_trees", data, rounds=1, options={"max_iter": 10})
    rows = data.test[0]
    reference = expected(frame, data.train[0], rows, "classification", max_iter=10)
    np.testing.assert_allclose(personal(sim, 0, rows).softmax(1), reference, atol=1e-6)
    assert sim.model.init(0)["value"].shape == (10, 1, 61)


@pytest.mark.parametrize("task", ["binary", "classification", "regression"])
def test_bagging_of_one_client_is_boosting_at_home(task: str) -> None:
    """Round by round the trees of scikit-learn, though each is grown on top of an ensemble that was received."""
    data = federation(table(task), task)
    at_home = simulation("local_trees", data, rounds=1, options={"max_iter": 12, "l2_regularization": 0.5})
    bagged = simulation("federated_trees", data, rounds=6, options={"max_iter": 2, "l2_regularization": 0.5})
    rows = np.concatenate([data.train[0], data.test[0]])
    torch.testing.assert_close(personal(bagged, 0, rows), personal(at_home, 0, rows), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("scaled", [True, False])
def test_the_server_adds_every_client_s_trees_to_the_mean_baseline(scaled: bool) -> None:
    frame = table("regression", clients=3, rows=300)
    data = federation(frame, "regression")
    sim = simulation("federated_trees", data, weights="samples", options={"scaled": scaled})
    sim.step()
    y, train = data.source.y[:, 0].double().numpy(), data.train[:3]
    sizes = np.array([len(rows) for rows in train])
    mean = sum(y[rows].sum() for rows in train) / sizes.sum()
    test = data.test[0]
    total = np.full(len(test), mean)
    for rows in train:
        alone = HistGradientBoostingRegressor(max_iter=1, categorical_features="from_dtype")
        x = features(frame, rows)
        alone.fit(x.iloc[rows], y[rows])
        total += (alone.predict(x.iloc[test]) - y[rows].mean()) / (3 if scaled else 1)
    np.testing.assert_allclose(personal(sim, 0, test)[:, 0], total, atol=1e-5, rtol=1e-5)


def test_bytes_are_those_of_the_trees_that_travel() -> None:
    """Up the trees of a round and a baseline, down all trees of the rounds before."""
    data = federation(table("classification", clients=3, rows=300), "classification")
    sim = simulation("federated_trees", data, rounds=4, options={"max_leaf_nodes": 8})
    tree_bytes, clients, classes = 15 * (NODE_BYTES + 4 * 2), 3, 3  # 40 levels are two words of 32 bits
    assert sim.traffic.bytes_up == 4 * clients * classes * (tree_bytes + 4)
    ensembles = sum(clients * r * classes * tree_bytes for r in range(4))
    assert sim.traffic.bytes_down == clients * (ensembles + 4 * classes * 4)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_uninterrupted_one_in_both_engines(name: str, tmp_path: Path) -> None:
    data = federation(table("binary", clients=3), "binary", split={"train": 0.8})
    length = {} if name == "federated_trees" else {"max_iter": 5}
    settings = {"options": {"max_features": 0.5, "min_samples_leaf": 5, **length}, "fraction": 0.67}
    whole = simulation(name, data, rounds=4, **settings)
    begun, resumed = simulation(name, data, rounds=2, **settings), simulation(name, data, **settings)
    checkpoints.save(tmp_path, begun.round, *begun.dump())
    loaded = checkpoints.load_latest(tmp_path)
    assert loaded is not None
    resumed.load(loaded[1], loaded[2])
    assert_same(everything(whole), everything(after(resumed, 2)))
    assert whole.traffic == resumed.traffic
    together = simulation(name, data, rounds=4, engine="vectorized", **settings)
    assert_close(everything(whole), everything(together))
    another = everything(simulation(name, data, rounds=4, seed=1, **settings))
    assert any(not torch.equal(t, another[n]) for n, t in everything(whole).items())


def test_exported_trees_answer_as_in_the_run(tmp_path: Path) -> None:
    """Without scikit-learn and without pickle; raw rows with words that no training row has, and gaps."""
    frame = table("binary", clients=2, rows=200)
    (tmp_path / "sites").mkdir()
    for town, rows in frame.groupby("town"):
        rows.drop(columns="town").to_csv(tmp_path / "sites" / f"{town}.csv", index=False)
    tailorfl.run(
        methods=["local_trees", "pooled_trees", {"name": "federated_trees", "max_iter": 2}],
        data={"name": "table", "path": str(tmp_path / "sites"), "normalise": "federated",
              "options": {"label": "label", "task": "binary", "indicator": True}},
        model="logistic", rounds=3, seeds=[0], eval={"every": 1}, out=tmp_path / "run", progress=False,
    )  # fmt: skip
    new = table("binary", rows=30, seed=5).drop(columns=["label", "town"])
    new.loc[:4, "ward"] = "a ward that is new"
    for method in NAMES:
        run = restore(tmp_path / "run", method)
        (exported,) = export(tmp_path / "run", tmp_path / method, clients=["town 1"], method=method)
        assert {path.suffix for path in exported.path.iterdir()} <= {".py", ".json", ".md", ".safetensors"}
        assert "sklearn" not in (exported.path / "model.py").read_text()
        constants = run.sim.federation.source.info["preparation"].everyone
        inside = next(run.models([1])).module(constants.inputs(new))[:, 0].sigmoid()
        answers = predict(exported.path, new)
        np.testing.assert_allclose(answers["p(1)"], inside.detach(), atol=1e-6)
        assert answers["p(1)"].nunique() > 5


def test_other_losses_and_privacy_are_refused(tmp_path: Path) -> None:
    frame = table("regression")
    frame["event"], frame["label"] = 1.0, frame["label"] - frame["label"].min() + 1
    source = from_table(frame, label=["event", "label"], client="town", task="survival")
    for name in NAMES:
        with pytest.raises(ConfigError, match="survival"):
            simulation(name, build(source=source, normalise="federated"))
    frame.to_csv(tmp_path / "all.csv", index=False)
    options = {"label": ["event", "label"], "client": "town", "task": "survival"}
    with pytest.raises(ConfigError, match="survival"):  # before the first line has run
        tailorfl.run(
            methods=["local", "local_trees"], model="cox", out=tmp_path / "run", rounds=1, progress=False,
            data={"name": "table", "path": str(tmp_path / "all.csv"), "options": options, "normalise": "federated"},
        )  # fmt: skip
    assert not list((tmp_path / "run").glob("local*")), "nothing has run"
    data = federation(table("binary", clients=3), "binary")
    with pytest.raises(ConfigError):
        simulation("federated_trees", data, client_dp=ClientDP(1.0, 1.0))


def test_a_node_can_name_every_feature() -> None:
    wide = Source("wide", torch.zeros(2, 2**15), torch.zeros(2, 1), "regression", 1)
    with pytest.raises(ConfigError, match="32767 features"):
        ensemble(wide, 1, 2)
    ensemble(replace(wide, x=wide.x[:, 1:]), 1, 2)


def test_clients_with_one_class_or_one_sample_or_a_missing_class_have_an_answer() -> None:
    frame = table("classification", clients=4, rows=200)
    frame.loc[frame["town"] == "town 1", "label"] = "2"
    frame.loc[(frame["town"] == "town 2") & (frame["label"] == "1"), "label"] = "0"
    data = federation(frame, "classification")
    sim = simulation("local_trees", data, rounds=1, options={"max_iter": 3})
    rows = np.concatenate([data.test[0], data.test[3]])
    one, two = personal(sim, 1, rows).softmax(1), personal(sim, 2, rows).softmax(1)
    n = len(data.train[1])
    np.testing.assert_allclose(one, np.tile([0.5, 0.5, n], (len(rows), 1)) / (n + 1), rtol=1e-5)
    assert float(two[:, 1].max()) < 0.05
    between = expected(frame, data.train[2], rows, "classification", max_iter=3)
    np.testing.assert_allclose(two[:, 2] / (two[:, 0] + two[:, 2]), between[:, 1], atol=1e-6)


def test_float32_thresholds_send_every_float32_as_float64_ones_do() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 1)).astype(np.float32)
    fitted = HistGradientBoostingRegressor(max_iter=1, min_samples_leaf=1, max_leaf_nodes=200)
    fitted.fit(x, rng.normal(size=300))
    predictor = fitted._predictors[0][0]
    ours, theirs = nodes_of(predictor, (), 1)["threshold"], predictor.nodes["num_threshold"]
    inner = predictor.nodes["is_leaf"] == 0
    near = np.concatenate([np.nextafter(x, np.float32(s)) for s in (-9, 9)] + [x])
    near = np.concatenate([near[:, 0], ours[inner], np.nextafter(ours[inner], np.float32(9))])
    assert ((near[:, None] <= ours[inner]) == (near[:, None].astype(np.float64) <= theirs[inner])).all()


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_trees_keep_the_contract_of_methods(check: Any) -> None:
    check()
