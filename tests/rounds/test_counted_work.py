"""What a round would take is known before it: the gradients, messages and replies that it then has."""

from __future__ import annotations

import numpy as np
import pytest

from methods.settings import NAMES
from methods.small import simulation
from tailorfl.rounds.planning import work_of
from tailorfl.training.plan import batch_sizes, batches_of, make_plan


@pytest.mark.parametrize("name", NAMES)
def test_the_work_of_a_round_is_the_one_it_has(name: str) -> None:
    """Of every method, in its second round; totals are measured on training itself."""
    sim = simulation(name, rounds=1)
    before = (sim.gradients, sim.traffic.bytes_down, sim.traffic.bytes_up)
    asked = sim.trainees(sim.sample(1))
    work, uses = work_of(sim, sim.method.broadcast(sim.server, asked), asked, 1)
    done = sim.step(sampled=asked)
    assert sum(one.gradients for one in work.values()) == sim.gradients - before[0] == done.gradients
    assert uses == {}
    if not sim.method.pooled and not sim.method.reaches_all:
        assert sum(one.down for one in work.values()) == pytest.approx(sim.traffic.bytes_down - before[1])
        assert sum(one.up for one in work.values()) == pytest.approx(sim.traffic.bytes_up - before[2])


def test_each_client_has_the_gradients_of_its_own_samples() -> None:
    sim = simulation("fedavg")
    work, _ = work_of(sim, sim.method.broadcast(sim.server, (0, 2, 4)), (0, 2, 4), 0)
    assert {i: one.gradients for i, one in work.items()} == {0: 15, 2: 7, 4: 3}


@pytest.mark.parametrize("min_batch", [1, 2])
@pytest.mark.parametrize(
    ("batch", "epochs", "steps"), [(4, 2, None), (4, None, 7), (0, 3, None), (5, 0.5, None)]
)
@pytest.mark.parametrize("first", [0, 3])
def test_sizes_of_batches_are_those_of_the_plan(
    batch: int, epochs: float | None, steps: int | None, first: int, min_batch: int
) -> None:
    sizes = np.array([15, 1, 8, 0, 9, 5])
    members = [np.arange(n) for n in sizes]
    keys = np.arange(6, dtype=np.uint64)
    plan = make_plan(members, keys, batch, epochs=epochs, steps=steps, first=first, min_batch=min_batch)
    wanted = batches_of(sizes, batch, epochs, steps, min_batch)
    found = batch_sizes(sizes, batch, wanted, first, min_batch)
    assert np.array_equal(found, plan.count)
