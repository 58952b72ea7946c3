"""Batch plans: every pass is a permutation, and a client's plan depends on its key alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailorfl.training import plan as module
from tailorfl.training.keys import bits, derive
from tailorfl.training.plan import BatchPlan, batches_per_pass, make_plan, steps_of

SIZES = st.lists(st.integers(0, 13), min_size=1, max_size=5)
BATCH = st.integers(0, 6)
MIN_BATCH = st.integers(1, 2)


def members_of(sizes: Sequence[int]) -> list[np.ndarray]:
    """Rows 1000·i ... of client i, so that nobody's rows can be mistaken for another's."""
    return [1000 * (i + 1) + np.arange(n, dtype=np.int64) for i, n in enumerate(sizes)]


def keys_of(sizes: Sequence[int]) -> np.ndarray:
    return derive(0, np.arange(len(sizes), dtype=np.uint64))


def plan_of(sizes: Sequence[int], batch: int, **options: int | None) -> BatchPlan:
    return make_plan(members_of(sizes), keys_of(sizes), batch, **options)  # type: ignore[arg-type]


def sequence(plan: BatchPlan, client: int) -> list[list[int]]:
    """The real rows of every step of one client."""
    return [
        rows[:count].tolist()
        for rows, count in zip(plan.rows[client], plan.count[client], strict=True)
        if count
    ]


@given(SIZES, BATCH, st.integers(1, 3))
def test_every_epoch_visits_every_sample_once(sizes, batch, epochs):
    plan = plan_of(sizes, batch, epochs=epochs)
    for i, member in enumerate(members_of(sizes)):
        seen = [row for step in sequence(plan, i) for row in step]
        assert len(seen) == epochs * len(member)
        for e in range(epochs):
            assert sorted(seen[e * len(member) : (e + 1) * len(member)]) == member.tolist()


@given(SIZES, st.integers(1, 6), MIN_BATCH)
def test_batches_are_full_but_for_the_last_of_a_pass(sizes, batch, min_batch):
    plan = plan_of(sizes, batch, epochs=2, min_batch=min_batch)
    for i, size in enumerate(sizes):
        rest = size % batch
        one_pass = [batch] * (size // batch) + ([rest] if rest >= min_batch else [])
        assert [len(step) for step in sequence(plan, i)] == one_pass * 2


@given(SIZES, MIN_BATCH)
def test_batch_zero_is_all_samples_at_once(sizes, min_batch):
    plan = plan_of(sizes, 0, epochs=2, min_batch=min_batch)
    for i, size in enumerate(sizes):
        assert [len(step) for step in sequence(plan, i)] == ([size] * 2 if size >= min_batch else [])


@given(SIZES, BATCH, st.integers(0, 12), MIN_BATCH)
def test_steps_cycle_through_the_epochs_of_the_same_key(sizes, batch, steps, min_batch):
    by_steps = plan_of(sizes, batch, steps=steps, min_batch=min_batch)
    by_epochs = plan_of(sizes, batch, epochs=steps, min_batch=min_batch)
    for i in range(len(sizes)):
        assert sequence(by_steps, i) == sequence(by_epochs, i)[:steps]
    usable = batches_per_pass(np.array(sizes), batch, min_batch) > 0
    np.testing.assert_array_equal(by_steps.steps, np.where(usable, steps, 0))


@given(SIZES, BATCH, st.integers(0, 7), MIN_BATCH)
def test_a_limit_cuts_the_plan_of_every_client_by_itself(sizes, batch, limit, min_batch):
    for length in ({"epochs": 2}, {"steps": 5}):
        whole = plan_of(sizes, batch, min_batch=min_batch, **length)
        cut = plan_of(sizes, batch, min_batch=min_batch, limit=limit, **length)
        for i in range(len(sizes)):
            assert sequence(cut, i) == sequence(whole, i)[:limit]


@given(SIZES, BATCH, st.integers(0, 9), st.integers(2, 3))
def test_a_limit_leaves_whole_steps_of_several_batches(sizes, batch, limit, batches):
    whole = plan_of(sizes, batch, epochs=2, batches=batches)
    cut = plan_of(sizes, batch, epochs=2, batches=batches, limit=limit)
    for i in range(len(sizes)):
        assert sequence(cut, i) == sequence(whole, i)[: limit - limit % batches]


@given(
    SIZES,
    BATCH,
    st.sampled_from(["epochs", "steps"]),
    st.integers(0, 3),
    MIN_BATCH,
    st.sampled_from([None, 2]),
)
def test_the_plan_of_a_client_does_not_depend_on_its_cohort(sizes, batch, unit, first, min_batch, limit):
    options = {unit: 3, "first": first, "min_batch": min_batch, "limit": limit}
    together = plan_of(sizes, batch, **options)
    members, keys = members_of(sizes), keys_of(sizes)
    for i in range(len(sizes)):
        by_itself = make_plan([members[i]], keys[i : i + 1], batch, **options)
        assert sequence(together, i) == sequence(by_itself, 0)
        assert together.steps[i] == by_itself.steps[0]


@given(SIZES, BATCH, MIN_BATCH)
def test_padding_repeats_rows_of_the_same_client(sizes, batch, min_batch):
    plan = plan_of(sizes, batch, epochs=2, min_batch=min_batch)
    for i, member in enumerate(members_of(sizes)):
        active = plan.rows[i][plan.count[i] > 0]
        assert np.isin(active, member).all()
        steps = int(plan.steps[i])
        assert (plan.count[i][:steps] > 0).all()
        assert (plan.count[i][steps:] == 0).all()


@given(SIZES, BATCH, st.sampled_from([{"epochs": 2}, {"steps": 7}]), MIN_BATCH)
def test_the_number_of_steps_is_known_without_a_plan(sizes, batch, length, min_batch):
    plan = plan_of(sizes, batch, min_batch=min_batch, **length)
    asked = {"epochs": None, "steps": None, **length}
    np.testing.assert_array_equal(
        plan.steps, steps_of(np.array(sizes), batch, **asked, min_batch=min_batch, batches=1)
    )


@pytest.mark.parametrize("batch", [0, 1, 4, 100])
def test_clients_without_a_usable_batch_take_no_step(batch):
    plan = plan_of([0, 1, 5], batch, epochs=3, min_batch=2)
    assert plan.steps[0] == 0
    if batch != 1:
        assert plan.steps[1] == 0
    lonely = plan_of([1], batch, epochs=3, min_batch=2)
    assert lonely.steps[0] == plan.steps[1]
    assert plan_of([0], batch, steps=5).steps.tolist() == [0]


@given(SIZES, st.integers(1, 9), st.integers(0, 60), st.integers(1, 30))
def test_batches_are_slices_of_orders_that_are_drawn_pass_by_pass(sizes, batch, first, steps):
    """Written out: an order sorts a client's samples by words drawn from its key and the pass."""
    keys, rows = keys_of(sizes), members_of(sizes)
    plan = make_plan(rows, keys, batch, steps=steps, first=first)
    for i, mine in enumerate(rows):
        per_pass = -(-len(mine) // batch)
        for step in range(steps if per_pass else 0):
            number, place = divmod(first + step, per_pass)
            words = bits(derive(keys[i : i + 1], np.array([number], np.uint64)), len(mine))[0]
            order = mine[sorted(range(len(mine)), key=words.__getitem__)]
            expected = order[place * batch : (place + 1) * batch]
            assert plan.rows[i, step, : plan.count[i, step]].tolist() == expected.tolist()


def test_only_orders_that_are_needed_are_drawn(monkeypatch):
    """A client of 100 samples is in its 150th pass where one of 5,000 is in its 4th: one of each is drawn."""
    drawn = []
    monkeypatch.setattr(
        module, "bits", lambda keys, count: drawn.append(len(keys) * count) or bits(keys, count)
    )
    rows = members_of([100, 5000])
    make_plan(rows, keys_of([100, 5000]), 64, steps=1, first=300)
    assert sum(drawn) == 5100
