"""Robust rules in runs of whole methods: what they reduce to, on which engine, who may have one, and resuming."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from methods.settings import NAMES, make, one_of
from methods.small import BOTH, assert_close, assert_same, everything, personal, simulation
from tailorfl.core.method import Method
from tailorfl.errors import ConfigError
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.server import RobustConfig
from tailorfl.training import tree

ABLE = [n for n in NAMES if make(n).averages_replies and not make(n).pooled]
MEDIAN = {"rule": "median"}
KRUM = {"rule": "krum", "f": 1}


def run(method: str | Method, rule: dict[str, Any] | None, rounds: int = 2, **settings: Any) -> Simulation:
    given = {"engine": "vectorized", "rounds": rounds, **settings}
    if rule is not None:
        given["robust"] = RobustConfig(**rule)
    return simulation(method, given.pop("model", "mlp"), **given)


@pytest.mark.parametrize("name", one_of(3, ABLE))
def test_a_bound_that_binds_nobody_changes_nothing_to_the_bit(name: str) -> None:
    """By samples too, which norm bounding respects."""
    bound = {"rule": "norm_bound", "bound": math.inf}
    bounded, plain = (run(name, rule, fraction=0.6, model=BOTH) for rule in (bound, None))
    assert_same(everything(bounded), everything(plain))


@pytest.mark.parametrize("name", one_of(3, ABLE, 1))
def test_trimming_nothing_is_the_uniform_mean(name: str) -> None:
    """Whatever the clients are said to count."""
    trimmed = run(name, {"rule": "trimmed_mean", "trim": 0.0}, fraction=0.6, model="batch_norm")
    plain = run(make(name, weights="uniform"), None, fraction=0.6, model="batch_norm")
    assert_close(everything(trimmed), everything(plain), atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("name", one_of(3, ABLE, 2))
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
    sim = run("ditto", KRUM, rounds=1)
    before, personal_before = sim.server.clone(), personal(sim)
    sim.step((0, 2, 3), (0, 2, 3))
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
    assert ("methods that it works with: apfl, " in str(refused.value)) != pooled


def test_client_level_privacy_has_a_bound_of_its_own() -> None:
    with pytest.raises(ConfigError, match="median"):
        run("fedavg", MEDIAN, rounds=0, client_dp=ClientDP(1.0, 0.0))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"rule": "krum", "f": 2}, "needs 2f \\+ 3 = 7 clients a round .*, but there are 5"),
        ({"rule": "multi_krum", "f": 1, "k": 6}, "averages k=6 updates, but there are 5"),
    ],
)
def test_too_few_clients_are_refused_before_the_first_round(rule: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run("fedavg", rule, rounds=0)
    with pytest.raises(ConfigError, match="but there are 3"):
        run("fedavg", KRUM, rounds=0, fraction=0.6)
