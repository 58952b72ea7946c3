"""Robust aggregation: rules against numpy, and runs of whole methods: reductions, engines, who may have one."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from methods.settings import NAMES, make, one_of
from methods.small import (
    BOTH,
    assert_close,
    assert_same,
    everything,
    federation,
    personal,
    replaced,
    simulation,
)
from tailorfl.core.method import Method
from tailorfl.errors import ConfigError
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.one_round import ClientUpdates
from tailorfl.rounds.robust import RULES as REGISTERED
from tailorfl.rounds.robust import RuleInput, find_rule, krum, median, trimmed_mean
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.system import RobustConfig
from tailorfl.training import tree

Floats = NDArray[np.float64]
RULES: list[dict[str, Any]] = [
    {"rule": "median"},
    {"rule": "trimmed_mean", "trim": 0.3},
    {"rule": "krum", "f": 2},
    {"rule": "multi_krum", "f": 2, "k": 4},
    {"rule": "multi_krum", "f": 2},
    {"rule": "norm_bound", "bound": 1.5},
    {"rule": "norm_bound"},
]
ANCHOR = TensorDict({"a": torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2)}, batch_size=[])
BUFFERS = ("running_mean",)


def stack(clients: int = 9, seed: int = 0) -> TensorDict:
    """Replies of a parameter with an anchor, one that is a change itself, running statistics and a counter."""
    rng = torch.Generator().manual_seed(seed)
    drawn = {
        "a": torch.randn(clients, 3, 2, generator=rng, dtype=torch.float64),
        "b/c": 3 * torch.randn(clients, generator=rng, dtype=torch.float64),
        "running_mean": torch.randn(clients, 4, generator=rng, dtype=torch.float64),
        "count": torch.full((clients,), 7),
    }
    return tree.nest(drawn.items(), [clients])


def updates(replies: TensorDict, anchor: TensorDict = ANCHOR) -> Floats:
    """[clients, 7], by hand."""
    a = (replies["a"] - anchor["a"]).reshape(len(replies["count"]), -1)
    return torch.cat([a, replies["b", "c"][:, None]], dim=1).numpy()


def ruled(
    replies: TensorDict, rule: dict[str, Any], anchor: TensorDict = ANCHOR, refused: int = 0, round: int = 5
) -> Any:
    settings = RobustConfig(**rule)
    found = find_rule(settings)
    assert found is not None
    updates = ClientUpdates.of(replies, anchor, BUFFERS)
    return found.function(RuleInput(updates, settings, refused, 3, round, ""))


def moved(replies: TensorDict, rule: dict[str, Any]) -> Floats:
    """What a server that takes the mean moves by, [7]."""
    found: Floats = updates(ruled(replies, rule)).mean(0)
    return found


def brute_krum(u: Floats, f: int, k: int) -> list[int]:
    """From the definition: the least sum over all sets of m − f − 2 others."""
    m = len(u)
    scores = []
    for i in range(m):
        others = [j for j in range(m) if j != i]
        sets = itertools.combinations(others, m - f - 2)
        scores.append(min(sum(float(((u[i] - u[j]) ** 2).sum()) for j in chosen) for chosen in sets))
    return sorted(sorted(range(m), key=lambda i: (scores[i], i))[:k])


def reference(u: Floats, rule: dict[str, Any]) -> Floats:
    m, kind = len(u), rule["rule"]
    if kind == "median":
        return np.array([np.median(column) for column in u.T])
    if kind == "trimmed_mean":
        b = int(rule["trim"] * m)
        return np.array([np.mean(sorted(column)[b : m - b]) for column in u.T])
    if kind in ("krum", "multi_krum"):
        k = 1 if kind == "krum" else rule.get("k", m - rule["f"])
        found: Floats = u[brute_krum(u, rule["f"], k)].mean(0)
        return found
    sizes = [math.sqrt(float((row**2).sum())) for row in u]
    bound = rule.get("bound", np.median(sizes))
    shortened: Floats = np.array([row * min(1, bound / s) for row, s in zip(u, sizes, strict=True)])
    return np.asarray(shortened.mean(0))


def test_every_rule_is_tested_here() -> None:
    assert {rule["rule"] for rule in RULES} == set(REGISTERED)


@pytest.mark.parametrize(
    ("rule", "message"),
    [({"rule": "krumm"}, "krumm.*'krum'"), ({"rule": "median", "trim": 0.3}, "trim.*trimmed_mean")],
)
def test_unknown_rules_and_options_of_other_rules_are_refused(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_rule(RobustConfig(**rule))


@pytest.mark.parametrize("clients", [9, 12])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_are_those_of_their_definitions(rule: dict[str, Any], clients: int) -> None:
    for seed in range(3):
        replies = stack(clients, seed)
        np.testing.assert_allclose(
            moved(replies, rule), reference(updates(replies), rule), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_running_statistics_and_counters_are_sent_as_they_are(rule: dict[str, Any]) -> None:
    replies = stack()
    found = ruled(replies, rule)
    for name in ("running_mean", "count"):
        assert torch.equal(found[name], replies[name])
    assert list(dict(tree.leaves(found))) == list(dict(tree.leaves(replies)))


def test_vectors_of_the_cards() -> None:
    assert median(torch.tensor([1.0, 2.0, 3.0, 100.0])) == 2.5
    assert median(torch.tensor([5.0, 100.0, 1.0])) == 5
    assert trimmed_mean(torch.tensor([0.0, 1.0, 2.0, 100.0]), 0.25) == 1.5
    assert krum({"x": torch.tensor([0.0, 1.0, 2.0, 10.0])}, 0, 1) == [1]
    assert krum({"x": torch.tensor([0.0, 1.0, 2.0, 10.0])}, 0, 2) == [0, 1]  # scores 5, 2, 5, 145
    assert krum({"x": torch.tensor([1.0, 1.0, 1.0])}, 0, 1) == [0]


def test_a_share_of_clients_that_is_a_whole_number_is_not_rounded_down() -> None:
    """0.29 · 100 is 28.999999999999996 as a float."""
    values = torch.arange(100.0)
    values[:29] = -1e9
    assert trimmed_mean(values, 0.29) == values[29:71].mean()
    assert trimmed_mean(values[:2], 0.5 - 1e-12) == values[:2].mean()  # somebody is left


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_clients_may_have_received_different_things(rule: dict[str, Any]) -> None:
    """Each reply is measured from what its own client got, and the result stands on the mean of those."""
    replies, same = stack(), stack()
    each = TensorDict({"a": ANCHOR["a"] + torch.arange(9.0).reshape(9, 1, 1)}, batch_size=[9])
    replies["a"] += torch.arange(9.0).reshape(9, 1, 1)
    found = ruled(replies, rule, each)
    np.testing.assert_allclose(updates(found, each).mean(0), moved(same, rule), rtol=1e-9, atol=1e-12)


# -- Krum with fewer clients ---------------------------------------------------------------------------------


def test_krum_needs_two_f_and_three_and_counts_whom_the_server_refused() -> None:
    replies = stack(6)
    assert ruled(replies, {"rule": "krum", "f": 2}) is None
    found = ruled(replies, {"rule": "multi_krum", "f": 2}, refused=1)
    np.testing.assert_allclose(
        updates(found).mean(0), reference(updates(replies), {"rule": "multi_krum", "f": 1})
    )
    assert ruled(stack(2), {"rule": "krum", "f": 0}) is None


# -- norm bounding -------------------------------------------------------------------------------------------


def test_without_a_bound_replies_stay_as_they_are_to_the_bit() -> None:
    found = ruled(stack(), {"rule": "norm_bound", "bound": math.inf})
    assert_same(dict(tree.leaves(found)), dict(tree.leaves(stack())))


def test_weak_privacy_adds_one_noise_to_all_replies() -> None:
    clients = 4
    wide = TensorDict({"a": torch.zeros(clients, 200, 50)}, batch_size=[clients])
    rule = {"rule": "norm_bound", "bound": 1.0, "noise": 0.25}
    found = ruled(wide, rule, tree.empty())["a"]
    assert torch.equal(found, found[:1].expand_as(found))
    assert float(found[0].std()) == pytest.approx(0.25, rel=0.03)
    assert abs(float(found[0].mean())) < 0.01
    again = ruled(wide, rule, tree.empty(), round=6)["a"]
    assert not torch.equal(again, found)


# -- runs of whole methods ------------------------------------------------------------------------------------------

ABLE = [n for n in NAMES if make(n).averages_replies and not make(n).pooled]
MEDIAN = {"rule": "median"}
KRUM = {"rule": "krum", "f": 1}


def run(method: str | Method, rule: dict[str, Any] | None, rounds: int = 2, **settings: Any) -> Simulation:
    given = {"engine": "vectorized", "rounds": rounds, **settings}
    if rule is not None:
        given["robust"] = RobustConfig(**rule)
    return simulation(method, given.pop("model", "mlp"), **given)


@pytest.mark.parametrize("name", one_of(6, ABLE))
def test_a_bound_that_binds_nobody_changes_nothing_to_the_bit(name: str) -> None:
    """By samples too, which norm bounding respects."""
    bound = {"rule": "norm_bound", "bound": math.inf}
    bounded, plain = (run(name, rule, fraction=0.6, model=BOTH) for rule in (bound, None))
    assert_same(everything(bounded), everything(plain))


@pytest.mark.parametrize("name", one_of(6, ABLE, 1))
def test_trimming_nothing_is_the_uniform_mean(name: str) -> None:
    """Whatever the clients are said to count."""
    trimmed = run(name, {"rule": "trimmed_mean", "trim": 0.0}, fraction=0.6, model="batch_norm")
    plain = run(make(name, weights="uniform"), None, fraction=0.6, model="batch_norm")
    assert_close(everything(trimmed), everything(plain), atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("name", one_of(6, ABLE, 2))
def test_norm_bounding_is_client_level_privacy_without_noise(name: str) -> None:
    made = make(name, weights="uniform")
    if made.unprotected("client"):
        pytest.skip("does what client-level privacy refuses")
    bounded = run(made, {"rule": "norm_bound", "bound": 0.2}, fraction=0.6)
    private = run(made, None, fraction=0.6, client_dp=ClientDP(0.2, 0.0))
    assert_close(everything(bounded), everything(private), atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("rule", [MEDIAN, KRUM, {"rule": "norm_bound", "noise": 0.01}], ids=str)
@pytest.mark.parametrize("name", ["ditto", "scaffold"])
def test_engines_agree_and_runs_repeat(name: str, rule: dict[str, Any]) -> None:
    one, same, other = (run(name, rule, engine=e) for e in ("vectorized", "vectorized", "sequential"))
    assert_same(everything(one), everything(same))
    assert_close(everything(one), everything(other), atol=5e-5, rtol=1e-3)


def test_a_round_with_too_few_clients_for_krum_leaves_the_server_as_it_is() -> None:
    """Client 4 diverges, but its reply was not wanted: it is not the hostile one among the three."""
    sim = run("ditto", KRUM, rounds=1, data=replaced(federation(), 4, lambda x: x * math.inf))
    before, personal_before = sim.server.clone(), personal(sim)
    sim.step((0, 2, 3), (0, 2, 3, 4))
    assert_same(dict(tree.leaves(sim.server)), dict(tree.leaves(before)))
    assert sim.round == 2
    moved = [not torch.equal(t[0], personal_before[n][0]) for n, t in personal(sim).items()]
    assert any(moved)


# -- who may have one ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ABLE])
def test_methods_whose_server_needs_more_than_a_mean_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.robust=median") as refused:
        run(name, MEDIAN, rounds=0)
    pooled = make(name).pooled
    assert ("pooled data" in str(refused.value)) == pooled
    assert ("methods that support this: apfl, " in str(refused.value)) != pooled


def test_client_level_privacy_has_a_bound_of_its_own() -> None:
    with pytest.raises(ConfigError, match="median"):
        run("fedavg", MEDIAN, rounds=0, client_dp=ClientDP(1.0, 0.0))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"rule": "krum", "f": 2}, "needs 2f \\+ 3 = 7 clients per round .*, but there are 5"),
        ({"rule": "multi_krum", "f": 1, "k": 6}, "averages k=6 updates, but there are 5"),
    ],
)
def test_too_few_clients_are_refused_before_the_first_round(rule: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run("fedavg", rule, rounds=0)
    with pytest.raises(ConfigError, match="but there are 3"):
        run("fedavg", KRUM, rounds=0, fraction=0.6)
