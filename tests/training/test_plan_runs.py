"""Which clients are computed together at a step: few samples are computed in vain, and none is left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.training.batches import by_falling_steps
from tailorfl.training.operations import CohortLayout
from tailorfl.training.plan import MOST_PADDING, BatchPlan, make_plan, runs
from training.cohorts import ENGINES, FLOAT, cohort_of, fit, model_of, source


def plan_of(sizes: list[int], batch: int, epochs: int) -> BatchPlan:
    """The plan of clients with so many samples, ordered by falling steps as the training loop has it."""
    sizes = sorted(sizes, reverse=True)
    members = [np.arange(size, dtype=np.int64) for size in sizes]
    return make_plan(members, np.arange(len(sizes), dtype=np.uint64), batch, epochs=epochs)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 12))
def test_every_active_client_is_in_one_run_and_little_is_padded(sizes, batch):
    plan = plan_of(sizes, batch, 1)
    computed = 0
    for at, found in enumerate(runs(plan)):
        active = int((plan.count[:, at] > 0).sum())
        assert [k for a, b in found for k in range(a, b)] == list(range(active))
        computed += sum((b - a) * int(plan.count[a:b, at].max()) for a, b in found)
    assert computed <= (1 + MOST_PADDING) * plan.count.sum()


def test_equal_clients_run_together():
    assert runs(plan_of([25] * 8, 10, 2)) == [[(0, 8)]] * 6


def test_the_cut_is_where_it_saves_most():
    """Batches of 10, 10, 2, 2 and 2 samples: padding to 10 would compute 50 samples for 26."""
    assert runs(plan_of([10, 10, 2, 2, 2], 10, 1)) == [[(0, 2), (2, 5)]]


@pytest.mark.parametrize("extra", [{}, {"momentum": 0.9}, {"clip": 0.5}, {"weight_decay": 0.1}])
def test_a_cohort_in_runs_trains_as_the_loop_does(extra):
    sizes = (11, 9, 1, 3, 21, 2, 10)
    data = source(sum(sizes), (5,))
    model = model_of("mlp", data)
    cohort = cohort_of(model, data, sizes, batch_size=10, **extra)
    assert any(len(cut) > 1 for cut in runs(plan_of(list(sizes), 10, 1)))
    expected, found = (fit(ENGINES[e], cohort, model.init(1), epochs=2) for e in ("sequential", "vectorized"))
    for name in model.parameters:
        torch.testing.assert_close(found[name], expected[name], **FLOAT)


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ([9, 7, 3], None),
        ([9, 9, 9], None),
        ([3, 9, 7], [1, 2, 0]),
        ([8, 9, 3], [1, 0, 2]),  # three steps each, and the second has more samples
        ([3, 4, 9, 10], [3, 2, 1, 0]),
        ([9, 3, 4], [0, 2, 1]),
    ],
)
def test_clients_are_ordered_by_falling_steps_then_samples(sizes: list[int], order: list[int] | None) -> None:
    """In batches of four; the way back undoes the order."""
    members = [np.arange(size, dtype=np.int64) for size in sizes]
    found = by_falling_steps(make_plan(members, np.arange(len(sizes), dtype=np.uint64), 4, epochs=1))
    if order is None:
        assert found is None
    else:
        assert found is not None
        assert found.tolist() == order
        back = CohortLayout(len(sizes), torch.from_numpy(found)).results({"n": torch.tensor(order)})["n"]
        assert back.tolist() == list(range(len(sizes)))
