"""Which clients take part.

The same for every method, a function of (seed, round), with the stated probabilities.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from methods.settings import NAMES, row
from methods.small import SIZES, simulation
from tailorfl.errors import ConfigError
from tailorfl.rounds.sampling import sample_clients

ROUNDS = 4000
N = len(SIZES)


def inclusion(**settings: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(share of rounds in which each client is sampled, its standard error)."""
    sim = simulation("fedavg", **settings)
    found = np.zeros(N)
    for r in range(ROUNDS):
        found[list(sim.sample(r))] += 1 / ROUNDS
    return found, np.sqrt(np.maximum(found * (1 - found), 1e-4) / ROUNDS)


def test_every_method_sees_the_same_cohorts() -> None:
    expected = [simulation("fedavg", fraction=0.4, seed=3).sample(r) for r in range(20)]
    for name in NAMES:
        sim = simulation(name, fraction=0.4, seed=3)
        if not sim.method.pooled and not row(name).promises.get("in_turn"):
            assert [sim.sample(r) for r in range(20)] == expected
    assert [simulation("fedavg", fraction=0.4, seed=4).sample(r) for r in range(20)] != expected


@pytest.mark.parametrize(("fraction", "size"), [(1.0, 5), (0.5, 3), (0.4, 2), (0.1, 1), (0.01, 1), (0.7, 4)])
def test_uniform_samples_have_a_fixed_size_without_repetition(fraction: float, size: int) -> None:
    """m = max(1, round(fraction·N)), halves upwards; in rising order."""
    sim = simulation("fedavg", fraction=fraction)
    for r in range(50):
        ids = sim.sample(r)
        assert len(ids) == len(set(ids)) == size
        assert list(ids) == sorted(ids)


def test_uniform_sampling_is_uniform_over_clients_and_pairs() -> None:
    found, error = inclusion(fraction=0.4)
    assert (np.abs(found - 0.4) < 4.5 * error).all()
    sim = simulation("fedavg", fraction=0.4)
    pairs: dict[tuple[int, ...], int] = {}
    for r in range(ROUNDS):
        pairs[sim.sample(r)] = pairs.get(sim.sample(r), 0) + 1
    share = np.array(list(pairs.values())) / ROUNDS
    assert len(pairs) == 10
    assert (np.abs(share - 0.1) < 4.5 * np.sqrt(0.09 / ROUNDS)).all()


def test_proportional_sampling_draws_by_size_without_replacement() -> None:
    """P(i in S) = p_i + Σ_{j≠i} p_j p_i / (1 − p_j) for two draws one after the other."""
    p = np.array(SIZES) / sum(SIZES)
    second = np.array([sum(p[j] * p[i] / (1 - p[j]) for j in range(N) if j != i) for i in range(N)])
    found, error = inclusion(fraction=0.4, sampling="proportional")
    assert (np.abs(found - (p + second)) < 4.5 * error).all()
    assert found[0] > 0.7 > found[1] * 5


def test_bernoulli_sampling_tosses_for_each_client_and_repeats_if_none() -> None:
    """P(i in S) = q / (1 − (1−q)^N), and sizes vary."""
    q = 0.2
    found, error = inclusion(fraction=q, sampling="bernoulli")
    assert (np.abs(found - q / (1 - (1 - q) ** N)) < 4.5 * error).all()
    sim = simulation("fedavg", fraction=q, sampling="bernoulli")
    assert {len(sim.sample(r)) for r in range(300)} >= {1, 2, 3}


@pytest.mark.parametrize("sampling", ["uniform", "proportional", "bernoulli"])
@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, float("nan")])
def test_fractions_outside_0_1_are_refused(sampling: str, fraction: float) -> None:
    """Bernoulli sampling of nobody would otherwise repeat for ever."""
    with pytest.raises(ConfigError, match="fraction"):
        simulation("fedavg", fraction=fraction, sampling=sampling)


def test_a_fraction_of_nearly_nothing_ends_with_one_client_drawn_at_random() -> None:
    sizes = np.full(5, 3)
    drawn = [sample_clients(0, r, sizes, 1e-12, "bernoulli") for r in range(40)]
    assert all(len(ids) == 1 for ids in drawn)
    assert {ids[0] for ids in drawn} == set(range(5))
