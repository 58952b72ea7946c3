"""What a server takes from a client, without any message: bounds, ranges, and who of several is to blame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tailorfl.deploy.checks import (
    LARGEST_NUMBER,
    TIMES,
    change_of,
    check_change,
    check_finite,
    check_number,
    check_sizes,
    largest_changes,
    largest_group,
    read_description,
    records_of,
    unlike_the_others,
)
from tailorfl.deploy.messages import Packet
from tailorfl.deploy.own_files import OwnImages, SampleSummary
from tailorfl.errors import DataError, MessageError
from tailorfl.settings.data import DataConfig
from tailorfl.training import tree


def test_a_change_is_the_norm_of_what_differs() -> None:
    sent = tree.nest([("w", torch.zeros(3, 4)), ("running", torch.zeros(2))])
    reply = {"w": torch.full((3, 4), 2.0), "running": torch.tensor([1.0, 0.0]), "steps": torch.tensor(10**6)}
    assert change_of(reply, sent) == 7.0  # 12 · 4 + 1 = 49
    assert change_of({"new": torch.full((100,), 1.0)}, sent) == 10.0  # what was not sent counts from zero
    assert change_of({"w": torch.full((3, 4), 3e38)}, sent) == pytest.approx(3e38 * math.sqrt(12))
    check_change(7.0, 7.0)
    with pytest.raises(MessageError, match="max_norm"):
        check_change(7.0, 6.99)


@pytest.mark.parametrize("clients", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("lie", [1e-30, 1e30])
def test_less_than_half_of_the_clients_cannot_move_the_bound(clients: int, lie: float) -> None:
    liars = (clients - 1) // 2
    honest = {i: 1.0 + i / 100 for i in range(clients - liars)}
    changes = {**honest, **dict.fromkeys(range(clients - liars, clients), lie)}
    largest = largest_changes(changes, dict.fromkeys(changes, 50))
    assert all(
        TIMES * min(honest.values()) <= bound <= TIMES * max(honest.values()) for bound in largest.values()
    )


def test_a_client_with_more_samples_may_change_more() -> None:
    largest = largest_changes({0: 1.0, 1: 1.0, 2: 40.0}, {0: 10, 1: 10, 2: 500})
    assert largest == {0: TIMES, 1: TIMES, 2: 50 * TIMES}


def test_replies_that_change_nothing_make_no_bound() -> None:
    assert largest_changes({0: 0.0, 1: 0.0}, {0: 5, 1: 5}) == {0: math.inf, 1: math.inf}
    assert largest_changes({0: 0.0, 1: 0.0, 2: 3.0}, {0: 5, 1: 5, 2: 5})[2] == 3.0 * TIMES


OUTSIDE: dict[str, list[Any]] = {
    "accuracy": [1.1, -0.1],
    "auc": [1.1],
    "rouge1": [101.0],
    "r2": [2.0],
    "mse": [-1.0, math.inf],
    "loss": [1e308, math.inf, -2 * LARGEST_NUMBER, "low", True, None],
    "train": [10**400],
}
WITHIN: dict[str, list[float]] = {"accuracy": [1, 0.0], "rouge1": [100.0], "loss": [1e9], "r2": [-50.0]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in OUTSIDE for value in OUTSIDE[name]])
def test_a_metric_outside_its_range(name: str, value: Any) -> None:
    with pytest.raises(MessageError, match=name):
        check_number(name, value)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WITHIN for value in WITHIN[name]])
def test_a_metric_within_its_range(name: str, value: float) -> None:
    check_number(name, value)


@pytest.mark.parametrize(
    "sizes",
    [
        *({"all": size} for size in (10**9, -1, True, 2.0, 1e300, "5")),
        {},
        {"all": 1, "more": 10**9},
        {"all": 1, "more": "5"},
    ],
)
def test_sizes_that_nobody_has(sizes: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="sizes"):
        check_sizes(sizes, ("all",), 10**7)


def test_sizes_count_together() -> None:
    check_sizes({"train": 6, "val": 0, "test": 4}, ("train", "val", "test"), 10)
    with pytest.raises(MessageError, match="max_samples"):
        check_sizes({"train": 6, "val": 1, "test": 4}, ("train", "val", "test"), 10)


def test_a_description_without_a_number_is_of_a_file_of_its_own() -> None:
    packet = Packet("describe", {"sizes": {"all": 5}, "source": {"features": ["age"]}})
    assert read_description(packet, 5)["index"] is None


RECORD = {"client": 1, "round": 2, "set": "val", "model": "global", "samples": 3, "loss": 0.5, "auc": None}
LIES: list[dict[str, Any]] = [
    {"client": 2},
    {"round": 1},
    {"set": "local"},
    {"set": ["val"]},
    {"model": "best"},
    {"model": {}},
    {"samples": 4},
    {"loss": "low"},
    {"auc": [1.0]},
]


def records(*rows: Any) -> list[dict[str, Any]]:
    """What a server keeps of rows that client 1 has sent after two rounds."""
    return records_of(Packet("evaluate", {"records": list(rows)}), 1, 2, {"val": 3})


def test_records_are_of_the_client_and_of_what_was_asked_for() -> None:
    (kept,) = records({**RECORD, "client": True, "round": 2.0})
    assert list(kept) == list(RECORD)
    assert (kept["client"], kept["loss"]) == (1, 0.5)
    assert all(type(kept[name]) is int for name in ("client", "round", "samples"))
    assert math.isnan(kept["auc"])
    for lie in LIES:
        with pytest.raises(MessageError, match=r"record|number"):
            records({**RECORD, **lie})
    for rows in ([RECORD, RECORD], [{**RECORD, "loss": 1}, RECORD], ["a"], [[]]):
        with pytest.raises(MessageError, match="record"):
            records(*rows)


SAMPLES: dict[str, Any] = {
    "task": "regression",
    "outputs": 1,
    "x": [[1, 8, 8], "uint8"],
    "y": [[1], "float32"],
    "mean": None,
    "std": None,
    "augment": "none",
    "credit": False,
    "info": {},
}


@pytest.mark.parametrize(
    "lie",
    [
        {"mean": [1e9]},
        {"std": [1e-9]},
        {"outputs": 10**9},
        {"credit": True},
        {"info": {"vocabulary": 10**9}},
    ],
)
def test_no_client_alone_says_how_samples_of_all_are_scaled(lie: dict[str, Any]) -> None:
    """Nor how many outputs the model has: the first one is no more than the others."""
    data = DataConfig(name="folder")
    liar = SampleSummary(name="a", source=SAMPLES | lie)
    for others in ([liar], []):
        summaries = [*others, *(SampleSummary(name=name, source=SAMPLES) for name in "bc")]
        with pytest.raises(DataError, match=next(iter(lie)) if others else "pixel"):
            OwnImages.common(data, (), [5] * len(summaries), summaries)


def alike(kinds: dict[str, str]) -> Any:
    """A check that lets clients of one kind pass."""

    def check(names: Sequence[str]) -> None:
        if len({kinds[name] for name in names}) > 1 or "bad" in {kinds[name] for name in names}:
            raise DataError(f"{[kinds[name] for name in names]}")

    return check


FITTING: list[tuple[Sequence[str], str]] = [("aaa", "012"), ("baa", "12"), ("aba", "02"), ("abaab", "023")]
FITTING += [("bbaaa", "234"), (("bad", "a"), "1"), (("a", "bad", "a"), "02")]


@pytest.mark.parametrize(("kinds", "wanted"), FITTING)
def test_the_most_clients_that_fit_together(kinds: Sequence[str], wanted: str) -> None:
    names = [str(i) for i in range(len(kinds))]
    fitting, others = largest_group(names, alike(dict(zip(names, kinds, strict=True))))
    assert fitting == list(wanted)
    assert list(others) == [name for name in names if name not in wanted]


def test_nobody_is_the_largest_group_of_nobody() -> None:
    def check(names: Sequence[str]) -> None:
        raise DataError(f"no constants of {names}")

    assert largest_group([], check) == ([], {})


@pytest.mark.parametrize("kinds", ["ab", "abab", "abc", ("bad",)])
def test_where_nobody_can_tell_who_is_right(kinds: Sequence[str]) -> None:
    names = [str(i) for i in range(len(kinds))]
    with pytest.raises(DataError):
        largest_group(names, alike(dict(zip(names, kinds, strict=True))))


def test_constants_are_finite() -> None:
    check_finite(
        {"columns": {"age": {"mean": 3.0, "classes": ["a"]}}, "rows": [1, 2], "given": False, "x": None}
    )
    for value in (math.inf, math.nan, 1e300):
        with pytest.raises(DataError, match="mean"):
            check_finite({"columns": {"age": {"mean": value}}})


def test_records_with_other_metrics_than_most() -> None:
    usual = [{"set": "val", "model": "global", "loss": 1.0, "accuracy": 0.5}]
    odd = [{"set": "val", "model": "global", "loss": 1.0, "zeal": 0.5}]
    assert unlike_the_others({}) == set()
    assert unlike_the_others({0: usual, 1: odd, 2: usual}) == {1}
    assert unlike_the_others({0: usual, 1: [], 2: usual}) == {1}
