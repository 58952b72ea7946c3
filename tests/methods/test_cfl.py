"""CFL: when a cluster splits and how, and what its parts do then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from methods.quadratics import one_weight
from methods.reductions import nothing_personal
from methods.settings import Card, Row
from methods.small import personal, simulation
from tailorfl.core.method import make_method
from tailorfl.methods.cfl import CFL
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole

CONTRACTS = {
    "cfl": Row(
        Card(whole, whole, whole, True, False),
        {"eps1": 1e3, "eps2": 0.0, "first_split": 0},
        chooses=True,
        same=(
            nothing_personal("before a split", first_split=20),
            replace(nothing_personal("two clients", first_split=0), data={"sizes": (7, 9)}),
        ),
    ),
}


EAGER = {"eps1": 1e3, "eps2": 0.0, "first_split": 0}


def deployed(sim: Simulation) -> np.ndarray[Any, Any]:
    (found,) = personal(sim).values()
    return found.flatten().numpy()


def test_no_split_before_its_round_nor_with_a_bound_out_of_reach() -> None:
    for options in ({**EAGER, "first_split": 3}, {**EAGER, "eps2": 1e6}, {**EAGER, "eps1": 0.0}):
        sim, plain = (
            one_weight([1.0, -1.0, 2.0, -3.0], "cfl", **options),
            one_weight([1.0, -1.0, 2.0, -3.0], "fedavg"),
        )
        for _ in range(3):
            sim.step()
            plain.step()
        assert sim.server["member"].tolist() == [0, 0, 0, 0]
        np.testing.assert_array_equal(deployed(sim), deployed(plain))


def test_after_a_split_every_part_is_fedavg_of_its_own() -> None:
    sim = one_weight([1.0, -1.0, 2.0, -3.0], "cfl", **EAGER)
    sim.step()
    assert sim.server["member"].tolist() == [0, 1, 0, 1]
    first, second = one_weight([1.0, 2.0], "fedavg"), one_weight([-1.0, -3.0], "fedavg")
    for _ in range(4):
        sim.step()
        first.step()
        second.step()
    first.step()
    second.step()
    np.testing.assert_allclose(deployed(sim)[[0, 2]], deployed(first), atol=1e-6)
    np.testing.assert_allclose(deployed(sim)[[1, 3]], deployed(second), atol=1e-6)


def test_parts_too_near_each_other_stay_together() -> None:
    method = make_method("cfl", {**EAGER, "gamma": 0.5})
    assert isinstance(method, CFL)
    near = torch.tensor([[1.0, 0.1], [1.0, 0.0], [1.0, -0.1]], dtype=torch.float64)
    far = torch.tensor([[1.0, 0.1], [-1.0, 0.0], [1.0, -0.1]], dtype=torch.float64)
    assert not bool(method.parts(near).any())
    assert method.parts(far).tolist() == [False, True, False]


def test_a_cluster_that_was_not_sampled_whole_does_not_split() -> None:
    sim = simulation(make_method("cfl", EAGER), fraction=0.6, rounds=4)
    assert set(sim.server["member"].tolist()) == {0}


def test_a_cluster_goes_on_while_no_clients_update_is_long() -> None:
    """Lengths are of each client's update, not of a coordinate over clients."""
    updates = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    weights = torch.ones(4, dtype=torch.float64)
    for eps2, stands in ((1.2, False), (0.9, True)):
        method = make_method("cfl", {"eps1": 0.1, "eps2": eps2})
        assert isinstance(method, CFL)
        assert method.stands(updates, weights) is stands
