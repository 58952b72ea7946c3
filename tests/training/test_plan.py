"""Keys are pure functions, and batch plans follow them: every pass is a permutation, and runs pad little."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.training import plan as module
from tailorfl.training.batches import by_falling_steps
from tailorfl.training.keys import bits, derive, generator, torch_seed
from tailorfl.training.operations import CohortLayout
from tailorfl.training.plan import MOST_PADDING, BatchPlan, batches_per_pass, make_plan, runs, steps_of
from training.cohorts import ENGINES, assert_trained, fit, setting


def test_bits_are_splitmix64():
    """The first outputs of the published generator for the seeds 1234567 and 0."""
    words = bits(np.array(1234567, dtype=np.uint64), 5)
    assert words[:2].tolist() == [6457827717110365317, 3203168211198807973]
    assert words[2:].tolist() == [9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert int(bits(np.array(0, dtype=np.uint64), 1)[0]) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("shape", [(24,), (4, 6), (2, 3, 4), (24, 1)])
def test_a_key_does_not_depend_on_the_array_it_is_made_in(shape):
    ids = np.arange(24, dtype=np.uint64).reshape(shape)
    keys = derive(7, "client", 3, "train", ids)
    assert keys.shape == shape
    assert keys.dtype == np.uint64
    for i in range(24):
        assert int(keys.reshape(-1)[i]) == int(derive(7, "client", 3, "train", i))
    words = bits(keys, 5)
    assert words.shape == (*shape, 5)
    np.testing.assert_array_equal(words.reshape(24, 5)[11], bits(keys.reshape(-1)[11], 5))


def test_keys_of_different_purposes_rounds_clients_and_seeds_are_all_different():
    ids = np.arange(500, dtype=np.uint64)
    parts = product(range(5), range(10), ("train", "finetune", "train/noise"))
    keys = [derive(seed, "client", round, purpose, ids) for seed, round, purpose in parts]
    assert len(np.unique(np.concatenate(keys))) == 5 * 10 * 3 * 500


def test_the_order_and_the_type_of_parts_matter():
    variants = [(1, 2, 3), (1, 3, 2), (2, 1, 3), (1, "2", 3), (1, "23"), (1, 23)]
    assert len({int(derive(*parts)) for parts in variants}) == len(variants)
    # Numbers are taken modulo 2^64.
    assert int(derive(0, -1)) == int(derive(0, 2**64 - 1))
    assert int(derive(2**64 + 5, "x")) == int(derive(5, "x"))


def test_bits_of_neighbouring_keys_are_fair_and_uncorrelated():
    words = bits(derive(0, np.arange(2000, dtype=np.uint64)), 4)
    ones = np.stack([(words >> np.uint64(b)) & np.uint64(1) for b in range(64)]).astype(np.float64)
    # 8000 coins for each of the 64 bits: five standard deviations are 0.028.
    assert np.abs(ones.mean(axis=(1, 2)) - 0.5).max() < 0.03
    uniform = words.astype(np.float64) / 2.0**64
    assert abs(np.corrcoef(uniform[:-1, 0], uniform[1:, 0])[0, 1]) < 0.12
    assert np.abs(np.corrcoef(uniform.T) - np.eye(4)).max() < 0.12


def test_generators_and_seeds_follow_the_key_alone():
    assert generator(1, "sample", 4).random() == generator(1, "sample", 4).random()
    assert generator(1, "sample", 4).random() != generator(1, "sample", 5).random()
    seeds = {torch_seed(s, "init") for s in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= s < 2**63 for s in seeds)


def test_every_process_derives_the_same_keys():
    """Python's own hash of a string differs from process to process; keys must not."""
    assert int(derive(3, "client", 2, "train", 17)) == 11359801007451059849


SIZES = st.lists(st.integers(0, 13), min_size=1, max_size=5)
BATCH = st.integers(0, 6)
MIN_BATCH = st.integers(1, 2)
LENGTH = st.sampled_from([{"epochs": 1}, {"epochs": 3}, {"steps": 0}, {"steps": 5}])


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


@given(SIZES, BATCH, st.integers(1, 3), MIN_BATCH)
def test_every_epoch_visits_every_sample_once_in_full_batches(sizes, batch, epochs, min_batch):
    """But for the last of a pass, which is left out where it is too small; batch 0 is all samples at once."""
    plan = plan_of(sizes, batch, epochs=epochs, min_batch=min_batch)
    for i, member in enumerate(members_of(sizes)):
        size = batch or max(len(member), 1)
        rest = len(member) % size
        one_pass = [size] * (len(member) // size) + ([rest] if rest >= min_batch else [])
        one_pass = [number for number in one_pass if number >= (1 if batch else min_batch)]
        steps = sequence(plan, i)
        assert [len(step) for step in steps] == one_pass * epochs
        for e in range(epochs):
            seen = [row for step in steps[e * len(one_pass) : (e + 1) * len(one_pass)] for row in step]
            assert len(set(seen)) == len(seen)
            assert set(seen) <= set(member.tolist())


@given(SIZES, BATCH, st.integers(0, 12), MIN_BATCH)
def test_steps_cycle_through_the_epochs_of_the_same_key(sizes, batch, steps, min_batch):
    by_steps = plan_of(sizes, batch, steps=steps, min_batch=min_batch)
    by_epochs = plan_of(sizes, batch, epochs=steps, min_batch=min_batch)
    for i in range(len(sizes)):
        assert sequence(by_steps, i) == sequence(by_epochs, i)[:steps]
    usable = batches_per_pass(np.array(sizes), batch, min_batch) > 0
    np.testing.assert_array_equal(by_steps.steps, np.where(usable, steps, 0))


def test_a_share_of_a_pass_is_as_many_steps_as_in_decimal_numbers():
    """0.07 of 100 batches are 7.000000000000001 in floating point."""
    shares, size = range(1, 301), np.array([100])
    steps = [int(steps_of(size, 1, share / 100, None, 1, 1)[0]) for share in shares]
    assert steps == list(shares)
    assert [int(steps_of(size, 7, share / 100, None, 1, 2)[0]) for share in (1, 50, 100)] == [1, 4, 8]


@given(SIZES, BATCH, LENGTH, MIN_BATCH, st.integers(1, 4), st.none() | st.integers(0, 9))
def test_plans_take_whole_steps_of_one_sequence(sizes, batch, length, min_batch, count, limit):
    """As many as the length needs, or as `limit` batches allow; how many is known without a plan."""
    plan = plan_of(sizes, batch, min_batch=min_batch, batches=count, limit=limit, **length)
    endless = plan_of(sizes, batch, steps=80, min_batch=min_batch)
    one_by_one = plan_of(sizes, batch, min_batch=min_batch, **length)
    for i, needed in enumerate(one_by_one.steps):
        steps = needed if "steps" in length else -(-needed // count)
        steps = steps if limit is None else min(steps, limit // count)
        assert sequence(plan, i) == sequence(endless, i)[: steps * count]
        assert plan.steps[i] == steps * count
    if limit is None:
        request = {"epochs": None, "steps": None, **length}
        counted = steps_of(np.array(sizes), batch, **request, min_batch=min_batch, batches=count)
        np.testing.assert_array_equal(plan.steps, counted * count)


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


def falling(sizes: Sequence[int], batch: int, epochs: int = 1) -> BatchPlan:
    """The plan of clients with so many samples, ordered by falling steps as the training loop has it."""
    return plan_of(sorted(sizes, reverse=True), batch, epochs=epochs)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 12))
def test_every_active_client_is_in_one_run_and_little_is_padded(sizes, batch):
    plan = falling(sizes, batch)
    computed = 0
    for at, of_step in enumerate(runs(plan)):
        active = int((plan.count[:, at] > 0).sum())
        assert [k for a, b in of_step for k in range(a, b)] == list(range(active))
        computed += sum((b - a) * int(plan.count[a:b, at].max()) for a, b in of_step)
    assert computed <= (1 + MOST_PADDING) * plan.count.sum()


def test_runs_are_cut_where_it_saves_most():
    """Batches of 10, 10, 2, 2 and 2 samples: padding to 10 would compute 50 samples for 26."""
    assert runs(falling([10, 10, 2, 2, 2], 10)) == [[(0, 2), (2, 5)]]
    assert runs(falling([25] * 8, 10, 2)) == [[(0, 8)]] * 6


@pytest.mark.parametrize("extra", [{}, {"momentum": 0.9}, {"clip": 0.5}, {"weight_decay": 0.1}])
def test_a_cohort_in_runs_trains_as_torch_does(extra):
    sizes = (11, 9, 1, 3, 21, 2, 10)
    cohort, start = setting(sizes=sizes, batch_size=10, **extra)
    assert any(len(cut) > 1 for cut in runs(falling(sizes, 10)))
    trained = fit(ENGINES["vectorized"], cohort, start, epochs=2)
    assert_trained(cohort, trained, start, epochs=2)


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
    falls = by_falling_steps(plan_of(sizes, 4, epochs=1))
    assert (None if falls is None else falls.tolist()) == order
    if falls is not None:
        layout = CohortLayout(len(sizes), torch.from_numpy(falls))
        assert layout.results({"n": torch.tensor(order)})["n"].tolist() == list(range(len(sizes)))
