"""Cyclic weight transfer and cyclic sampling: whose turn it is, and where the model has been."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from methods.reductions import Same
from methods.settings import Card, Row, make
from methods.small import SIZES, federation, replaced, simulation
from tailorfl.errors import ConfigError, DivergenceError
from tailorfl.rounds.sampling import sample_clients
from tailorfl.runs.cost_estimate import estimate
from tailorfl.settings.loading import load
from tailorfl.testing.contract import whole

CONTRACTS = {
    "cyclic": Row(
        Card(whole, whole, whole, False, True),
        by_id=True,
        in_turn=True,
        unweighted=True,
        same=(Same("one client", {}, "centralized", said=True, data={"sizes": (11,)}),),
    ),
}


N = len(SIZES)


@pytest.mark.parametrize("order", ["drawn", "fixed"])
def test_everyone_is_visited_once_in_a_cycle(order: str) -> None:
    """Whatever the run samples; orders differ from cycle to cycle and from seed to seed, or are 0..N-1."""
    sim = simulation(make("cyclic", order=order), fraction=0.4, sampling="bernoulli")
    turns = [sim.sample(t) for t in range(6 * N)]
    assert all(len(turn) == 1 for turn in turns)
    cycles = [tuple(i for (i,) in turns[N * c : N * (c + 1)]) for c in range(6)]
    assert all(sorted(cycle) == list(range(N)) for cycle in cycles)
    assert (len(set(cycles)) == 1) == (order == "fixed")
    other = simulation(make("cyclic", order=order), seed=1)
    assert ([other.sample(t) for t in range(6 * N)] == turns) == (order == "fixed")


def test_a_run_may_sample_in_turns_whatever_its_method() -> None:
    sim = simulation("ditto", sampling="cyclic")
    assert sim.sample(3) == simulation("cyclic").sample(3)
    assert sim.step().clients == sim.sample(0)
    with pytest.raises(ConfigError, match=r"one client a round, so fraction=0\.5 says nothing"):
        simulation("ditto", sampling="cyclic", fraction=0.5)
    sizes = np.array([3, 1, 2])
    assert [sample_clients(0, t, sizes, 1.0, "cyclic_fixed") for t in range(4)] == [(0,), (1,), (2,), (0,)]


def test_a_dry_run_counts_one_client_a_round() -> None:
    settings = {"data": {"clients": 4, "samples": 200}, "methods": "fedavg", "rounds": 2, "seeds": 1}
    assert estimate(load({**settings, "sampling": "cyclic"})).clients_per_round == 1
    assert estimate(load(settings)).clients_per_round == 4


def test_a_visit_that_diverges_ends_the_run() -> None:
    """Nobody else is in the round, so there is nothing to go on with."""
    bad = replaced(federation(), 0, lambda x: x * torch.inf)
    sim = simulation(make("cyclic", order="fixed"), data=bad)
    with pytest.raises(DivergenceError):
        sim.step()
