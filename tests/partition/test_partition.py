"""Laws that every partition obeys, and what `partition` refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.dealing import Ints, dealt
from tailorfl.errors import ConfigError, DataError
from tailorfl.partition import RECIPES, Deal, partition

# What each recipe needs to succeed on `labels()` with 6 clients, and whether it deals every sample.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "class_groups": ({"groups": 3, "classes": 2}, True),
    "classes_prob": ({"classes": 2}, True),
    "dirichlet": ({"alpha": 0.3}, True),
    "dirichlet_perada": ({"alpha": 0.3}, True),
    "domain": ({}, True),
    "fedclup_classes": ({"classes": 2, "virtual": 12}, False),
    "iid": ({}, True),
    "labels_per_client": ({"classes": 2}, True),
    "natural": ({}, True),
    "niid_bench": ({"classes": 2}, True),
    "quantity": ({}, True),
    "shards": ({"classes": 2}, True),
    "sorted_shards": ({"shards": 2}, True),
}


def labels(samples: int, classes: int = 6, seed: int = 0) -> Ints:
    """Shuffled labels, all classes equally frequent."""
    return np.random.default_rng(seed).permutation(np.arange(samples, dtype=np.int64) % classes)


PLAIN = labels(600)


def deal(name: str, seed: int, test: bool = True) -> Deal:
    return dealt(name, labels(600), 6, seed, labels(240, seed=1) if test else None, **CASES[name][0])


def test_every_recipe_is_tested_here() -> None:
    assert sorted([*CASES, "flwr"]) == sorted(RECIPES)  # flwr: test_flower_partitioner.py


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("seed", range(3))
def test_parts_are_disjoint_complete_ascending_and_those_of_the_seed(name: str, seed: int) -> None:
    one, again, other = deal(name, seed), deal(name, seed), deal(name, seed + 1)
    assert (len(one.train), deal(name, seed, test=False).test) == (6, None)
    for clients, equal, samples in (
        ((*one.train, one.server), (*again.train, again.server), 600),
        (tuple(one.test), tuple(again.test), 240),
    ):
        positions = np.concatenate(clients)
        assert len(np.unique(positions)) == len(positions)
        assert set(positions) <= set(range(samples))
        assert (len(positions) == samples) == CASES[name][1]
        assert all(rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in clients)
        assert [rows.tolist() for rows in clients] == [rows.tolist() for rows in equal]
    drawn = [rows.tolist() for rows in one.train] != [rows.tolist() for rows in other.train]
    assert drawn == (name not in ("natural", "domain"))


@pytest.mark.parametrize("name", sorted(set(CASES) - {"natural", "domain"}))
def test_names_of_classes_do_not_matter(name: str) -> None:
    """Labels 0..5 and labels 5, 105, ..., 505 give the same deal: a label is a name and not a number."""
    plain, odd = (dealt(name, strata, 6, 3, **CASES[name][0]) for strata in (PLAIN, 100 * PLAIN + 5))
    assert [rows.tolist() for rows in plain.train] == [rows.tolist() for rows in odd.train]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CASES)),
    samples=st.integers(1, 400),
    clients=st.integers(1, 60),
    classes=st.integers(1, 30),
    alpha=st.sampled_from([1e-9, 1e-4, 0.01, 0.3, 10.0, 1e9]),
    min_size=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_every_partition_ends_with_a_deal_or_a_reason(
    name: str, samples: int, clients: int, classes: int, alpha: float, min_size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    wanted = {"alpha": alpha, "min_size": min_size, "classes": 2, "virtual": max(clients, 10)}
    options = {key: value for key, value in wanted.items() if key in RECIPES[name].options()}
    strata = rng.integers(0, classes, samples)
    try:
        found = partition(name, strata, clients, rng, test=rng.integers(0, classes, samples), options=options)
    except DataError as reason:
        refusal = str(reason)
        assert any(advice in refusal for advice in ("use ", "drop them"))
        return
    assert len(found.train) == clients
    rows = np.concatenate([*found.train, found.server])
    assert len(np.unique(rows)) == len(rows)
    if "min_size" in options:
        assert min(len(positions) for positions in found.train) >= min_size


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dirichlt", {}, "Did you mean 'dirichlet'"),
        ("dirichlet", {"alfa": 0.1}, "Did you mean 'alpha'"),
        ("iid", {"alpha": 0.1}, "unknown option of partition 'iid'"),
        ("dirichlet", {"test": None}, "unknown option"),
        *(
            ("dirichlet", {"alpha": value}, "'alpha' must be a number")
            for value in (0.0, float("nan"), "a", True)
        ),
        ("dirichlet", {"min_size": 2.5}, "'min_size' must be a whole number of at least 0"),
        ("quantity", {"alpha": 1.0, "sigma": 1.0}, "not both"),
        ("quantity", {"sigma": -1.0}, "'sigma' must be a number from 0"),
        ("labels_per_client", {"classes": 0}, "'classes' must be a whole number of at least 1"),
        ("class_groups", {"groups": 0}, "'groups' must be a whole number"),
        ("dirichlet_perada", {"server": 1.0}, "'server' must be a number from 0 to 0.9"),
        ("natural", {"min_size": 0}, "'min_size' must be a whole number of at least 1"),
    ],
)
def test_settings_that_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(name, labels(600), 6, np.random.default_rng(0), options=options)


FEW = "class 0 has 100 samples in the training part, too few"


@pytest.mark.parametrize(
    ("name", "clients", "options", "message"),
    [
        ("iid", 601, {}, "cannot deal 600 samples to 601 clients"),
        ("iid", 0, {}, "cannot deal 600 samples to 0 clients"),
        ("iid", None, {}, "needs the number of clients"),
        ("dirichlet", 61, {}, r"600 samples cannot give each of 61 clients min_size=10 \(610 needed\)"),
        ("labels_per_client", 5, {"classes": 7}, "7 classes: the data have 6"),
        ("labels_per_client", 400, {"classes": 2}, FEW),
        ("class_groups", 3, {}, "3 clients into 4 groups"),
        ("shards", 400, {"classes": 2}, FEW),
        ("shards", 6, {"test": labels(700, classes=7)}, "classes 6 .* test part"),
        ("shards", 6, {"test": labels(6)}, "class 0 has 1 samples in the official test part"),
        ("fedclup_classes", 6, {"virtual": 400}, "use a smaller virtual"),
        ("fedclup_classes", 6, {"virtual": 5}, "of 5 virtual clients"),
        ("dirichlet_perada", 51, {}, "class 0 has only 100; use fewer clients or a smaller reserve"),
        ("dirichlet_perada", 50, {}, "after the reserve only 0 are left"),
        ("natural", 7, {}, "only 6 groups have min_size=1"),
        ("natural", None, {"min_size": 101}, "only 0 groups have min_size=101"),
        ("domain", 7, {}, "a multiple of the 6 domains"),
    ],
)
def test_data_that_cannot_be_dealt_so(name: str, clients: Any, options: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        dealt(name, labels(600), clients, **options)
    with pytest.raises(DataError, match="no samples"):
        dealt(name, labels(0), clients, **options)
