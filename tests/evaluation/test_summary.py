"""Statistics over clients: by hand, and their laws."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.evaluation.summary import mean, quantiles, summaries, summarize

values_and_weights = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 500)), min_size=1, max_size=60).map(
    lambda pairs: (np.array([v for v, _ in pairs]), np.array([w for _, w in pairs]))
)


def test_by_hand() -> None:
    found = summarize([0.2, 0.4, 0.9], [10, 10, 20], [0.1, 0.4, 1.0])
    assert found == pytest.approx(
        {
            "mean": 0.5,
            "weighted_mean": 0.6,
            "std": math.sqrt((0.09 + 0.01 + 0.16) / 3),
            "median": 0.4,
            "min": 0.2,
            "max": 0.9,
            "worst5": 0.2,
            "worst10": 0.2,
            "best5": 0.9,
            "best10": 0.9,
            "clients": 3,
            "excluded": 0,
            "share_beating_local": 1 / 3,  # an equal client does not beat its reference
        }
    )


def test_lower_is_better_turns_tails_and_comparison_round() -> None:
    found = summarize([0.2, 0.4, 0.9], [1, 1, 1], [0.1, 0.4, 1.0], higher_is_better=False)
    assert [found[name] for name in ("worst10", "best10", "min", "max")] == [0.9, 0.2, 0.2, 0.9]
    assert found["share_beating_local"] == pytest.approx(1 / 3)


def test_tails_hold_exactly_the_ceiling() -> None:
    for clients in range(1, 401):
        values = np.arange(clients, dtype=float)
        found = summarize(values, np.ones(clients))
        for percent in (5, 10):
            tail = math.ceil(Fraction(percent, 100) * clients)
            assert found[f"worst{percent}"] == pytest.approx(values[:tail].mean())
            assert found[f"best{percent}"] == pytest.approx(values[-tail:].mean())


def test_clients_without_a_value_are_excluded_and_counted() -> None:
    found = summarize([0.5, math.nan, 0.7], [1, 100, 3], [0.4, 0.1, math.nan])
    assert found == {**summarize([0.5, 0.7], [1, 3], [0.4, math.nan]), "excluded": 1.0}
    assert found["clients"] == 2
    assert found["share_beating_local"] == 1.0  # only the first client has both


def test_nothing_to_summarize_is_nan() -> None:
    for found in (summarize([], []), summarize([math.nan], [3], [0.5])):
        assert found.pop("clients") == 0
        assert found.pop("excluded") in (0, 1)
        assert all(math.isnan(value) for value in found.values())
    assert math.isnan(summarize([1.0], [0])["weighted_mean"])
    assert math.isnan(summarize([1.0], [2])["share_beating_local"])


def test_infinite_value_is_not_hidden() -> None:
    found = summarize([1.0, math.inf], [1, 1], higher_is_better=False)
    assert found["mean"] == found["worst5"] == math.inf
    assert math.isnan(found["std"])
    assert found["clients"] == 2


@settings(max_examples=30)
@given(values_and_weights)
def test_weighted_mean_is_the_mean_over_all_samples(data: tuple[np.ndarray, np.ndarray]) -> None:
    values, weights = data
    assert summarize(values, weights)["weighted_mean"] == pytest.approx(np.repeat(values, weights).mean())
    assert summarize(values, np.full(len(values), 7))["weighted_mean"] == pytest.approx(values.mean())


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="one value, weight and reference per client"):
        summarize([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="negative"):
        summarize([1.0], [-1.0])


def test_the_mean_is_over_clients_that_have_the_metric() -> None:
    assert mean([None, 1.0, float("nan"), 4.0]) == 2.5
    assert math.isnan(mean([None]))
    assert math.isnan(mean([]))


def test_records_are_grouped_by_model_and_set_and_each_metric_has_its_direction() -> None:
    kinds = [("global", "local")] * 20 + [("personal", "local")] * 2 + [("personal", "val")]
    records = [
        {"round": 1, "client": k, "set": name, "model": model, "samples": 1, "accuracy": k, "loss": k}
        for k, (model, name) in enumerate(kinds)
    ]
    found = summaries(records)
    assert found["personal"]["local"]["accuracy"]["mean"] == 20.5
    assert found["personal"]["val"]["accuracy"]["mean"] == 22
    of = found["global"]["local"]
    assert [of["accuracy"][f"{end}{n}"] for end in ("worst", "best") for n in (5, 10)] == [0, 0.5, 19, 18.5]
    assert [of["loss"][f"{end}{n}"] for end in ("worst", "best") for n in (5, 10)] == [19, 18.5, 0, 0.5]


def test_quantiles_are_numpys_of_the_clients_that_have_the_metric() -> None:
    values = [0.9, math.nan, 0.1, 0.4, 0.6]
    own = [{"model": "personal", "set": "local", "accuracy": value} for value in values]
    without = {"model": "global", "set": "val", "loss": 1.0}
    assert quantiles([*own, without], "accuracy") == {
        f"personal/local/accuracy/p{q}": pytest.approx(np.nanpercentile(values, q))
        for q in (10, 25, 50, 75, 90)
    }
