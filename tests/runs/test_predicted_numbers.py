"""Regression and survival of own tables from the file to the table of results, against plain numpy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import tailorfl
from tailorfl.data.build import build
from tailorfl.data.own import from_tensors
from tailorfl.errors import ConfigError, DataError
from tailorfl.report.document import write_report

SITES = {"north": 1.0, "south": 2.0, "east": -1.0, "west": 0.5}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Four sites whose doses act differently; a fixed test part."""
    rng = np.random.default_rng(0)
    site = np.repeat([*SITES], 50)
    age, dose = rng.normal(size=200), rng.normal(size=200)
    effect = np.array([SITES[s] for s in site])
    pain = 2 + 0.3 * age + effect * dose + rng.normal(0, 0.4, 200)
    event, time = rng.exponential(np.exp(-effect * dose)), rng.exponential(2, 200)
    frame = pd.DataFrame({"site": site, "age": age, "dose": dose, "pain": pain}).assign(
        event=(event <= time).astype(int), time=np.minimum(event, time)
    )
    frame["part"] = np.where(np.arange(200) % 5 == 0, "test", "train")
    frame.to_csv(tmp_path / "patients.csv", index=False)
    return tmp_path / "patients.csv"


def run(table: Path, label: Any, task: str, **settings: Any) -> tailorfl.ExperimentResult:
    options = {"label": label, "client": "site", "features": ["age", "dose"], "task": task, "split": "part"}
    data = {"name": "table", "path": str(table), "options": options, "split": {"train": 1.0}}
    return tailorfl.run(data=data, rounds=1, seeds=1, out=table.parent / "run", **settings)


def least_squares(train: pd.DataFrame, test: pd.DataFrame) -> float:
    """The mean squared test error of the least-squares fit with an intercept."""
    x, y = (np.column_stack([f["age"], f["dose"], np.ones(len(f))]) for f in (train, test))
    weights = np.linalg.lstsq(x, train["pain"].to_numpy(), rcond=None)[0]
    return float(np.square(y @ weights - test["pain"].to_numpy()).mean())


@pytest.mark.slow
def test_a_regression_is_least_squares_and_small_is_good(table: Path) -> None:
    result = run(
        table,
        "pain",
        "regression",
        model={"name": "linear", "bias": True},
        methods=["local", "centralized"],
        train={"epochs": None, "steps": 400, "batch_size": 0, "lr": 0.3},
    )
    frame = pd.read_csv(table)
    parts = {s: [f for _, f in mine.groupby("part")] for s, mine in frame.groupby("site")}  # test, train
    alone = {s: least_squares(train, test) for s, (test, train) in parts.items()}
    pooled = frame[frame["part"] == "train"]
    together = {s: least_squares(pooled, test) for s, (test, _) in parts.items()}
    assert result.metric == "mse"
    rows = result.table
    assert rows.loc["local", "mean"] == pytest.approx(np.mean([*alone.values()]), rel=1e-4)
    assert rows.loc["centralized", "mean"] == pytest.approx(np.mean([*together.values()]), rel=1e-4)
    # of four clients the worst tenth is one: the largest error
    assert rows.loc["local", "worst10"] == pytest.approx(max(alone.values()), rel=1e-4)
    assert rows.loc["local", "best10"] == pytest.approx(min(alone.values()), rel=1e-4)
    better = np.mean([together[s] < alone[s] for s in SITES])
    assert rows.loc["centralized", "share_beating_local"] == pytest.approx(better)
    assert "| mse |" in write_report(result)[0].read_text()


def concordance(event: Any, time: Any, risk: Any) -> float:
    """Harrell's index by all pairs."""
    pairs = agree = 0.0
    for i in range(len(time)):
        for j in range(len(time)):
            if event[i] and time[i] < time[j]:
                pairs += 1
                agree += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return agree / pairs if pairs else math.nan


def test_survival_is_coxs_regression_and_large_is_good(table: Path) -> None:
    train_settings = {"epochs": None, "steps": 300, "batch_size": 0, "lr": 0.5}
    result = run(table, ["event", "time"], "survival", model="cox", methods=["local"], train=train_settings)
    frame = pd.read_csv(table)
    found = []
    for _, mine in frame.groupby("site"):
        test, train = mine[mine["part"] == "test"], mine[mine["part"] == "train"]
        x, weights = train[["age", "dose"]].to_numpy(), np.zeros(2)
        event, time = train["event"].to_numpy(), train["time"].to_numpy()
        for _ in range(2000):  # of the partial likelihood, the mean over events
            risk = np.exp(x @ weights)
            slope = np.zeros(2)
            for i in np.flatnonzero(event):
                at_risk = time >= time[i]
                slope += x[i] - (risk[at_risk, None] * x[at_risk]).sum(axis=0) / risk[at_risk].sum()
            weights = weights + 0.5 * slope / event.sum()
            if np.abs(slope).max() < 1e-6:
                break
        scores = test[["age", "dose"]].to_numpy() @ weights
        found.append(concordance(test["event"].to_numpy(), test["time"].to_numpy(), scores))
    assert result.metric == "c_index"
    assert result.table.loc["local", "mean"] == pytest.approx(np.nanmean(found), abs=0.02)
    assert result.table.loc["local", "worst10"] == pytest.approx(np.nanmin(found), abs=0.04)


def test_partitions_of_classes_deal_bins_of_a_target() -> None:
    y = torch.randn(600, generator=torch.Generator().manual_seed(0))
    source = from_tensors(torch.zeros(600, 2), y, task="regression")
    federation = build(
        source=source, partition="labels_per_client", partition_options={"classes": 1, "bins": 3}, clients=3
    )
    target = y.double().numpy()
    bins = np.searchsorted(np.quantile(target, [1 / 3, 2 / 3]), target, side="right")
    held = [set(bins[rows].tolist()) for rows in federation.train]
    assert sorted(map(tuple, held)) == [(0,), (1,), (2,)]
    skewed = build(source=source, partition="dirichlet", partition_options={"alpha": 0.05}, clients=5)
    means = [float(y[rows].mean()) for rows in skewed.train]
    assert max(means) - min(means) > 0.8
    with pytest.raises(ConfigError, match="'bins' must be a whole number"):
        build(source=source, partition="shards", partition_options={"bins": 1}, clients=2)
    with pytest.raises(ConfigError, match="unknown option of partition 'dirichlet' 'bins'"):
        build("digits", partition="dirichlet", partition_options={"bins": 4})


@pytest.mark.parametrize("method", ["fedproto", "fedpac", "gpfl"])
def test_methods_of_classes_say_that_numbers_have_none(method: str, table: Path) -> None:
    with pytest.raises((ConfigError, DataError), match="regression"):
        run(table, "pain", "regression", method=method)
