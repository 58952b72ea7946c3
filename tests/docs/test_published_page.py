"""The page of published numbers: its table is made from kept numbers and recipes, and its verdicts follow from both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import tailorfl
from tailorfl.evaluation.comparisons import noise
from tailorfl.report.published import beside
from tailorfl.settings.loading import load


@pytest.fixture
def made(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("published_table")


def test_the_table_is_that_of_the_kept_numbers(made: ModuleType) -> None:
    page = made.PAGE.read_text(encoding="utf-8")
    assert made.insert(page, made.table()) == page, "run: python docs/published_table.py --write"


def test_every_published_number_of_a_recipe_has_its_row(made: ModuleType) -> None:
    rows = {row[:3]: row for row in made.rows({})}
    assert rows["`heart`", "FedAdam", "client 3"] == (
        "`heart`", "FedAdam", "client 3", "0.6670", "–", "0", "–", "–", "not run"
    )  # fmt: skip
    assert rows["`niid_bench` two labels", "FedAvg", "best_on_test"][3] == "0.9686 ± 0.0030"
    assert rows["`fedavg_mnist` cnn iid", "FedAvg", "mean"][3] == "–"  # kept aside


def test_a_row_has_mean_difference_noise_and_verdict(made: ModuleType) -> None:
    values = {0: 0.96, 1: 0.97, 2: 0.965}
    numbers = {
        ("niid_bench", "two labels", "FedAvg", "best_on_test"): values,
        ("niid_bench", "iid", "FedAvg", "best_on_test"): {0: 0.9},
        ("fedavg_mnist", "cnn iid", "FedAvg", "mean"): {0: 0.98},
        ("school", "", "FedAvg", "mean"): {0: 0.026, 1: 0.027},
    }
    rows = {row[:3]: row[3:] for row in made.rows(numbers)}
    spread = noise(list(values.values()), 0.003, 3)
    found = rows["`niid_bench` two labels", "FedAvg", "best_on_test"]
    assert found == ("0.9686 ± 0.0030", "0.9650 ± 0.0124", "3", "-0.0036", f"{spread:.4f}", "reproduced")
    assert rows["`niid_bench` iid", "FedAvg", "best_on_test"][1:4] == ("0.9000", "1", "-0.0909")
    assert rows["`niid_bench` iid", "FedAvg", "best_on_test"][5] == "off by -0.0909"
    aside = rows["`fedavg_mnist` cnn iid", "FedAvg", "mean"]
    assert aside[1:] == ("0.9800", "1", "–", "–", "not published here")
    assert ("`school`", "FedAvg", "std") not in rows  # run, and not kept
    assert rows["`school`", "FedAvg+FT", "std"][-1] == "not run"


def test_numbers_of_a_result_are_kept_and_read_again(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "name": "tiny", "methods": ["fedavg"], "seeds": [3, 5], "rounds": 1, "model": "logistic",
        "data": {"clients": 3, "samples": 240}, "eval": {"every": 1},
    }  # fmt: skip
    ours = {"mean": {"value": 0.5, "std": 0.1}, "clients": [0.4, 0.5, 0.6], "best_on_test": 0.7}
    published = {"fedavg": ours}
    result = tailorfl.run(**settings, published=published, out=tmp_path / "tiny", progress=False)
    numbers = made.numbers_of(result)
    assert set(numbers) == {("tiny", "", "fedavg", name) for name in beside(result, published)["quantity"]}
    means = {r.seed: r.values["mean"] for r in result.seed_results()}
    assert numbers["tiny", "", "fedavg", "mean"] == numbers["tiny", "", "fedavg", "best_on_test"] == means
    monkeypatch.setattr(made, "NUMBERS", tmp_path / "kept" / "numbers.csv")
    made.keep({key: {3: 9.0, 4: 0.5} for key in numbers})
    monkeypatch.setattr(sys, "argv", ["published_table.py", "--keep", str(tmp_path / "tiny")])
    made.main()  # seeds 3 and 5 of the folder, beside seed 4 that was there
    both = made.kept()
    assert {values.pop(4) for values in both.values()} == {0.5}
    assert {key: pytest.approx(values, rel=1e-6) for key, values in numbers.items()} == both
    made.keep(numbers)
    assert {key: pytest.approx(values, rel=1e-6) for key, values in numbers.items()} == made.kept()
    bare = tailorfl.run(**settings, out=tmp_path / "bare", progress=False)
    assert made.numbers_of(bare) == {("tiny", "", "fedavg", "mean"): means}


@pytest.mark.parametrize(
    ("name", "clients", "expected"),
    [
        ("fedavg_mnist", 100, (5, 10, 0.01, 0.5, 0.0, 0.1, 50)),
        ("niid_bench", 10, (10, 64, 0.01, 0.9, 1e-5, 1.0, 50)),
        ("lg_fedavg_mnist", 100, (1, 10, 0.05, 0.5, 0.0, 0.1, 1000)),
    ],
)
def test_settings_are_those_of_the_released_code(
    name: str, clients: int, expected: tuple[float, ...]
) -> None:
    config = load(name)
    train = config.train
    settings = (train.epochs, train.batch_size, train.lr, train.momentum, train.weight_decay)
    assert (*settings, config.fraction, config.rounds) == expected
    assert config.data.clients == clients
    assert len(config.seeds) >= 3
    assert config.data.split is not None
    assert config.eval.metric == "accuracy"
