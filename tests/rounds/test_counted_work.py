"""What a round would take is known before it: the gradients, messages and replies that it then has."""

from __future__ import annotations

import numpy as np
import pytest

from methods.small import simulation
from tailorfl.rounds.planning import work_of
from tailorfl.training.plan import batch_sizes, batches_of, make_plan


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
