"""Robust rules in runs of whole methods: what they reduce to, on which engine, who may have one, and resuming."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from methods.settings import NAMES, make, one_of
from methods.small import BOTH, SIZES, assert_close, assert_same, everything, personal, simulation
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


def test_a_bound_respects_weights_by_samples_as_a_plain_mean_does() -> None:
    sim = run("fedavg", {"rule": "norm_bound", "bound": 0.1}, rounds=0)
    start = {n: t.clone() for n, t in sim.server["w"].items()}
    replies = sim.run(range(5), sim.states.get(range(5)), sim.server["w"], sim.local)[1]
    changes = {n: replies[n] - t for n, t in start.items()}
    sizes = torch.stack([c.reshape(5, -1).square().sum(1) for c in changes.values()]).sum(0).sqrt()
    assert (sizes > 0.1).any()
    weights = torch.tensor(SIZES) / sum(SIZES) * (0.1 / sizes).clamp(max=1)
    sim.step()
    for name, tensor in sim.server["w"].items():
        wanted = start[name] + torch.tensordot(weights, changes[name], dims=1)
        torch.testing.assert_close(tensor, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rule", [MEDIAN, KRUM, {"rule": "norm_bound", "noise": 0.01}], ids=str)
@pytest.mark.parametrize("name", ["fedavg", "ditto", "scaffold", "l2gd", "moon"])
def test_engines_agree_and_runs_repeat(name: str, rule: dict[str, Any]) -> None:
    one, same, other = (run(name, rule, engine=e) for e in ("vectorized", "vectorized", "sequential"))
    assert_same(everything(one), everything(same))
    assert_close(everything(one), everything(other), atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("rule", [MEDIAN, {"rule": "norm_bound", "bound": 0.2, "noise": 0.05}], ids=str)
def test_an_interrupted_run_goes_on_to_the_same_bits(rule: dict[str, Any]) -> None:
    whole, first = run("ditto", rule, rounds=3, fraction=0.6), run("ditto", rule, rounds=1, fraction=0.6)
    tensors, facts = first.dump()
    resumed = run("ditto", rule, rounds=0, fraction=0.6)
    resumed.load(tensors, facts)
    for _ in range(2):
        resumed.step()
    assert_same(everything(resumed), everything(whole))
    assert_same(personal(resumed), personal(whole))


def test_the_server_gets_the_median_of_what_clients_trained() -> None:
    """By hand, of a round of four clients."""
    sim = run("fedavg", MEDIAN, rounds=0)
    start = sim.server["w"].clone()
    replies = sim.run(range(5), sim.states.get(range(5)), start, sim.local)[1]
    sim.step((0, 1, 3, 4), (0, 1, 3, 4))
    for name, tensor in sim.server["w"].items():
        ranked = replies[name][[0, 1, 3, 4]].sort(0).values
        torch.testing.assert_close(tensor, (ranked[1] + ranked[2]) / 2)


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
    with pytest.raises(ConfigError, match="is norm_bound already"):
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
