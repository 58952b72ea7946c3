"""Which metric comes first: not accuracy, where always guessing one class looks good."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tailorfl
from tailorfl.data.own import from_tensors
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.evaluation.leading import check_target, dominated, leading


def source(*shares: float, task: str = "binary", rows: int = 100) -> Source:
    """Clients of so many rows, of which these shares are of class 1."""
    y = np.concatenate([np.arange(rows) < share * rows for share in shares]).astype(np.int64)
    x = np.random.default_rng(0).normal(size=(len(y), 2)).astype(np.float32)
    owners = np.repeat([f"site-{k}" for k in range(len(shares))], rows)
    return from_tensors(x, y, clients=owners, task=task)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["binary", "classification"])
@pytest.mark.parametrize(
    ("shares", "first"),
    [
        ((0.5, 0.5), "accuracy"),
        ((0.5, 0.79), "accuracy"),
        ((0.5, 0.8), "balanced_accuracy"),  # one imbalanced hospital
        ((0.5, 0.05), "balanced_accuracy"),
        ((0.85, 0.75), "balanced_accuracy"),
    ],
)
def test_where_one_class_of_two_dominates_balanced_accuracy_comes_first(
    task: str, shares: tuple[float, ...], first: str
) -> None:
    data = source(*shares, task=task)
    assert leading(data) == first
    assert bool(dominated(data)) is (first != "accuracy")
    assert leading(data, "accuracy") == "accuracy"


def test_the_client_is_named_and_few_samples_say_nothing() -> None:
    assert dominated(source(0.5, 0.93)) == "93% of the samples of client 'site-1' have the same class"
    assert leading(source(0.5, 1.0, rows=19)) == "accuracy"
    assert leading(source(0.5, 1.0, rows=20)) == "balanced_accuracy"


@pytest.mark.parametrize(
    ("counts", "first"),
    [
        ([10] * 10, "accuracy"),
        ([50, *[5] * 10], "balanced_accuracy"),
        ([45, 5, *[5] * 10], "accuracy"),
        ([60, 20, 20], "accuracy"),  # twice an equal share of a third would be 67
        ([70, 15, 15], "balanced_accuracy"),
    ],
)
def test_of_several_classes_one_dominates_with_half_of_all_and_twice_its_share(
    counts: list[int], first: str
) -> None:
    x = np.zeros((sum(counts), 1), dtype=np.float32)
    assert leading(from_tensors(x, np.repeat(np.arange(len(counts)), counts))) == first


def test_a_metric_that_the_task_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval.metric.*Did you mean 'auc'"):
        leading(source(0.5), "aucc")
    with pytest.raises(ConfigError, match="classification task"):
        leading(source(0.5, task="classification"), "c_index")


def test_a_target_that_no_share_reaches_is_refused() -> None:
    for target, metric in ((0.0, "accuracy"), (1.0, "auc"), (95.0, "mse"), (None, "accuracy")):
        check_target(target, metric)
    for target in (-0.01, 1.01):
        with pytest.raises(ConfigError, match=f"accuracy.*{target}"):
            check_target(target, "accuracy")


@pytest.mark.parametrize(
    ("wanted", "first"),
    [
        (None, "balanced_accuracy"),
        pytest.param("auc", "auc", marks=pytest.mark.slow),
        ("accuracy", "accuracy"),
    ],
)
def test_the_table_the_summary_and_the_choice_by_validation_go_by_it(
    wanted: str | None, first: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Constant predictions have a balanced accuracy of one half, whatever the share of the classes."""
    result = tailorfl.run(
        source=source(0.9, 0.9, 0.9),
        model="logistic",
        methods=["local"],
        train={"lr": 1e-9},
        eval={"metric": wanted, "select": "val", "every": 1},
        rounds=2,
        seeds=1,
        out=tmp_path / "run",
    )
    assert result.metric == first
    assert result.jobs[0][0]["selection"]["metric"] == first
    assert result.columns[0].title == first.replace("_", " ")
    beside = [column.key for column in result.columns if column.key == "accuracy"]
    assert beside == ([] if first == "accuracy" else ["accuracy"])
    own = result.clients.query("set == 'local' and model == 'personal' and round == 2")
    assert result.table.loc["local", "mean"] == pytest.approx(own[first].mean())
    if first != "accuracy":
        assert result.table.loc["local", "accuracy"] == pytest.approx(own["accuracy"].mean())
    assert ("balanced accuracy" in caplog.text) is (wanted is None)
