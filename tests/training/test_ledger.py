"""Poisson batches and passes of shuffled ones, and the ledger: every noisy gradient is in it, once, in every engine."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from tensordict import TensorDict

from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, TailorflError
from tailorfl.methods.perfed_ckt import towards
from tailorfl.privacy import EVERYONE, PrivacyLedger, PrivacyRecord, Use
from tailorfl.training.ascent import sam
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length, make_plan
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.update import Optimizer
from training.cohorts import (
    ENGINES,
    SIZES,
    alone,
    assert_states,
    autograd,
    engines,
    fit,
    grouped,
    in_turn,
    per_client,
    run,
    setting,
    source,
)

NOISE = 0.7
STEPS = [math.ceil(n / 4) for n in SIZES]
"""Batches of 4 that an epoch has, by client."""


def recorded(counting: bool = False, **options: Any) -> tuple[Cohort, TensorDict, PrivacyRecord]:
    """A cohort whose private gradients are recorded, its initial state, and the record."""
    private = {"dp": SampleDP(0.5, NOISE, "poisson"), "public": source(6, seed=1)}
    cohort, start = setting(**{**private, **options})
    record = PrivacyRecord()
    return replace(cohort, record=record, counting=counting), start, record


def assert_recorded(record: PrivacyRecord, kinds: dict[int, int | list[int]], batch: int = 4) -> None:
    """The uses of every client are those of {gradients: batches, of each client or of all}."""
    expected = {}
    for i, n in enumerate(SIZES):
        rate = min(1.0, batch / n) if batch else 1.0
        counts = {r: count[i] if isinstance(count, list) else count for r, count in kinds.items()}
        expected[i] = Counter({Use(rate, NOISE, r): count for r, count in counts.items() if count})
    uses = {client: of_client for client, of_client in record.uses.items() if of_client}
    assert uses == {client: of_client for client, of_client in expected.items() if of_client}


def train(**options: Any) -> Any:
    return lambda client, _, received: client.fit(received, **grouped(**options))


def both(state: TensorDict, grad: Any) -> TensorDict:
    return TensorDict({"a": grad(state["a"], of="a"), "b": grad(state["b"], of="b")}, batch_size=[])


def beside(w: TensorDict, grad: Any, c: TensorDict) -> TensorDict:
    """A gradient of some parameters, with the client's own tensors of just these."""
    return grad(w) + (w.select(*c.keys()) - c) * 0.0


def hessian(w: TensorDict, grad: Any, c: TensorDict) -> TensorDict:
    """Per-FedAvg's pattern: one gradient of two batches, two of the third; with something of the client's."""
    g = grad(w - grad(w, batch=0) * 0.1, batch=1)
    return g - (grad(w + g * 0.1, batch=2) - grad(w - g * 0.1, batch=2)) + c * 0.0


def several(client: Any, _: Any, received: TensorDict) -> TensorDict:
    """pFedMe's pattern: one batch after another, three steps on each, in fits of their own."""
    for r in range(5):
        received = client.fit(received, length=Length(steps=1, repeat=3, first=r))
    return received


def hessian_fit(client: Any, _: Any, received: TensorDict) -> TensorDict:
    length = Length(batches=3, steps=2, repeat=2)
    return client.fit(received, direction=hessian, given=(client.parameters(received),), length=length)


def head_fit(client: Any, _: Any, received: TensorDict) -> TensorDict:
    head = received.select("head.weight")
    return client.fit(
        received, train=tuple(head.keys()), direction=beside, given=(head,), length=Length(steps=2)
    )


def pulled_fit(strength: Any, **options: Any) -> Any:
    return lambda client, _, received: client.fit(received, prox=(strength, received), **options)


TWICE = [2 * steps for steps in STEPS]
FUNCTIONS: dict[str, tuple[Any, dict[int, int | list[int]]]] = {
    "an epoch": (train(), {1: STEPS}),
    "two epochs": (train(epochs=2), {1: TWICE}),
    "steps": (train(steps=5), {1: 5}),
    "batches of 5": (train(batch_size=5, steps=3), {1: 3}),
    "all data at once": (train(batch_size=0, steps=3), {1: 3}),
    "a pull": (pulled_fit(0.5, optimizer=Optimizer(lr=torch.tensor(0.1))), {1: STEPS}),
    "a tensor's pull": (pulled_fit(torch.tensor(0.5)), {1: STEPS}),
    "public data": (train(term=towards(1.0, torch.full((6, 3), 1 / 3), 2)), {1: STEPS}),
    "sharpness-aware": (train(direction=sam(0.1)), {2: STEPS}),
    "repeated": (train(repeat=3), {3: STEPS}),
    "two models": (lambda c, _, w: c.fit({"a": w, "b": w}, direction=both)["a"], {2: STEPS}),
    "three batches a step": (hessian_fit, {2: 4, 4: 2}),
    "a part, with something of the client's": (head_fit, {1: 2}),
    "two trainings": (lambda c, _, w: c.fit(c.fit(w), purpose="train"), {1: TWICE}),
    "in pieces": (several, {3: 5}),
    "a gradient": (lambda c, _, w: c.gradient(w), {1: 1}),
    "nothing": (train(epochs=0), {}),
}
BATCH_SIZES = {"batches of 5": 5, "all data at once": 0}


@in_turn("name", FUNCTIONS)
@pytest.mark.parametrize("counting", [False, True])
def test_every_released_gradient_is_recorded(engine: Any, name: str, counting: bool) -> None:
    """Counting records the same and trains nothing, without a look at a sample: they are not numbers."""
    function, kinds = FUNCTIONS[name]
    cohort, start, record = recorded(counting=counting)
    s = cohort.source
    blind = Source(s.name, torch.full_like(s.x, math.nan), s.y, s.task, s.outputs)
    trained = run(engine, replace(cohort, source=blind) if counting else cohort, function, received=start)
    assert_recorded(record, kinds, BATCH_SIZES.get(name, 4))
    for path, tensor in trained.items() if counting else ():
        unmoved = start[path].expand_as(tensor)
        assert torch.equal(tensor, torch.zeros_like(unmoved) if name == "a gradient" else unmoved)


@in_turn("limit", [0, 1, 2, 9])
@pytest.mark.parametrize("counting", [False, True])
def test_a_limit_cuts_what_is_recorded(engine: Any, limit: int, counting: bool) -> None:
    cohort, start, record = recorded(limit=limit, counting=counting)
    run(engine, cohort, train(), received=start)
    assert_recorded(record, {1: [min(steps, limit) for steps in STEPS]})


@engines
@pytest.mark.parametrize("counting", [False, True])
def test_nothing_is_recorded_without_privacy(engine: Any, counting: bool) -> None:
    cohort, start, record = recorded(dp=None, counting=counting)
    run(engine, cohort, train(), received=start)
    assert record.uses == {}


@engines
def test_steps_that_differ_by_client_are_recorded(engine: Any) -> None:
    cohort, start, record = recorded()
    steps = [3, 1, 0, 6]

    def local(client: Any, state: TensorDict, received: TensorDict) -> TensorDict:
        return client.fit(received, length=Length(steps=state["steps"]))

    run(engine, cohort, local, per_client(steps=steps), start)
    assert_recorded(record, {1: steps})


def test_with_noise_every_training_has_batches_of_its_own() -> None:
    """Two gradients of one batch would cost more than those of two batches."""
    cohort, start, _ = recorded()
    seen: list[str] = []
    original = Cohort.plan

    def watching(self: Cohort, positions: Any, purpose: str, *rest: Any) -> Any:
        seen.append(purpose)
        return original(self, positions, purpose, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cohort, "plan", watching)
        for dp in (SampleDP(0.5, NOISE, "poisson"), SampleDP(0.5, 0.0, "shuffle"), None):
            alone(replace(cohort, config=replace(cohort.config, dp=dp), plans={})).fit(start)
            client = alone(replace(cohort, config=replace(cohort.config, dp=dp), plans={}))
            client.fit(client.fit(start))
    assert seen == ["train", "train", "train/fit 1", *["train"] * 6]
    first, second = (cohort.plan((0,), name, 4, 1, None, 0).rows for name in ("train", "train/fit 1"))
    assert not np.array_equal(first, second)


def test_a_look_without_noise_is_refused() -> None:
    cohort, start, _ = recorded()
    for part in ("train", "val"):
        with pytest.raises(TailorflError, match=f"{part} samples without noise"):
            alone(cohort).loss(start, part)


def test_gradients_of_one_batch_are_one_release_of_less_noise() -> None:
    assert Use(0.1, 2.0).entry(7) == (0.1, 2.0, 7)
    q, sigma, steps = Use(0.1, 2.0, 4).entry(7)
    assert (q, steps) == (0.1, 7)
    assert sigma == pytest.approx(1.0)


def test_a_record_tells_batches_apart_by_their_gradients() -> None:
    record = PrivacyRecord()
    record.add(3, 0.5, 1.0, np.array([2, 2, 0, 1]))
    record.add(3, 0.5, 1.0, np.array([2]))
    record.add(4, 0.5, 1.0, np.array([0]))
    assert record.uses == {3: Counter({Use(0.5, 1.0, 2): 3, Use(0.5, 1.0, 1): 1}), 4: Counter()}
    record.forget()
    assert record.uses == {}


def filled() -> PrivacyLedger:
    ledger = PrivacyLedger()
    ledger.book(
        "training", {0: Counter({Use(0.1, 1.0): 5, Use(0.1, 1.0, 2): 1}), 2: Counter({Use(0.3, 1.0): 2})}
    )
    ledger.book("training", {0: Counter({Use(0.1, 1.0): 3})})
    ledger.settle("deployment", {0: Counter({Use(0.1, 1.0): 4})})
    return ledger


def test_rounds_add_up_and_one_model_is_deployed() -> None:
    ledger = filled()
    ledger.settle("deployment", {0: Counter({Use(0.1, 1.0): 2})})
    assert ledger.clients == (0, 2)
    assert Counter(ledger.entries(0)) == Counter([(0.1, 1.0, 8), (0.1, 1 / math.sqrt(2), 1), (0.1, 1.0, 2)])
    assert ledger.entries(2) == ((0.3, 1.0, 2),)
    assert ledger.entries(1) == ()


def test_of_adaptations_the_longest_stays() -> None:
    ledger = PrivacyLedger()
    for steps in (0, 10, 3):
        ledger.settle("newcomer", {7: Counter({Use(0.1, 1.0): steps})}, keep_larger=True)
    assert ledger.entries(7) == ((0.1, 1.0, 10),)


def test_what_concerns_everyone_is_part_of_each() -> None:
    ledger = filled()
    ledger.book("updates", {EVERYONE: Counter({Use(0.5, 1.0): 3})})
    assert ledger.clients == (0, 2)
    assert ledger.entries(1) == ledger.entries(EVERYONE) == ((0.5, 1.0, 3),)
    assert set(ledger.entries(2)) == {(0.3, 1.0, 2), (0.5, 1.0, 3)}


def test_a_dump_is_plain_and_whole() -> None:
    ledger = filled()
    again = PrivacyLedger.restore(json.loads(json.dumps(ledger.dump())))
    assert again == ledger
    again.book("training", {0: Counter({Use(0.1, 1.0): 1})})
    assert again != ledger
    assert not PrivacyLedger()
    assert PrivacyLedger.restore(PrivacyLedger().dump()) == PrivacyLedger()


@pytest.mark.parametrize("old", [[["training", 0, 0.1, 1.0, 1, 7]], [], {"rules": 1, "uses": []}])
def test_a_ledger_of_earlier_rules_is_refused(old: Any) -> None:
    """Its batches were counted as Poisson samples, which they were not."""
    with pytest.raises(ConfigError, match=r"of an earlier version.*--overwrite"):
        PrivacyLedger.restore(old)


BATCH = 2
SHUFFLED, POISSON = SampleDP(0.5, NOISE, "shuffle"), SampleDP(0.5, NOISE, "poisson")


def members_of(*sizes: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def test_every_sample_is_in_a_batch_by_itself() -> None:
    """With q = B/n, independently of the others and of other batches: sizes are binomial, and some batches empty."""
    n, steps, q = 11, 6000, 2 / 11
    plan = make_plan(members_of(n), np.array([5], dtype=np.uint64), 2, steps=steps, poisson=True)
    there = np.zeros((steps, n))
    for step, (rows, count) in enumerate(zip(plan.rows[0], plan.count[0], strict=True)):
        assert len(set(rows[:count].tolist())) == count
        there[step, rows[:count]] = 1
    error = math.sqrt(q * (1 - q) / steps)
    assert (np.abs(there.mean(0) - q) < 4.5 * error).all()
    together = np.corrcoef(np.column_stack([there[:-1], there[1:]]).T) - np.eye(2 * n)
    assert np.abs(together).max() < 5 / math.sqrt(steps)
    sizes = Counter(plan.count[0].tolist())
    expected = [binom.pmf(k, n, q) for k in range(6)]
    assert [sizes[k] / steps for k in range(6)] == pytest.approx(expected, abs=4.5 * 0.5 / math.sqrt(steps))
    assert plan.steps.tolist() == [steps]


def test_poisson_batches_are_as_many_as_those_of_passes_and_the_same_in_every_cohort_and_piece() -> None:
    members, keys = members_of(7, 1, 12, 0, 3), np.arange(5, dtype=np.uint64)
    whole = make_plan(members, keys, 3, epochs=2, poisson=True)
    assert whole.steps.tolist() == make_plan(members, keys, 3, epochs=2).steps.tolist() == [6, 2, 8, 0, 2]
    assert (whole.count == 0)[:, :2].any()
    for i in range(5):
        one = make_plan(members[i : i + 1], keys[i : i + 1], 3, epochs=2, poisson=True)
        pieces = [
            make_plan(members[i : i + 1], keys[i : i + 1], 3, steps=1, first=r, poisson=True)
            for r in range(whole.steps[i])
        ]
        for found in (one.of(0), whole.of(i)):
            assert found.steps.tolist() == [whole.steps[i]]
            for step in range(whole.steps[i]):
                size = found.count[0, step]
                mine = found.rows[0, step, :size].tolist()
                assert mine == pieces[step].rows[0, 0, : pieces[step].count[0, 0]].tolist()
                assert set(found.rows[0, step].tolist()) <= set(members[i].tolist())


def test_a_plan_in_another_order_keeps_the_steps_of_empty_batches() -> None:
    members, keys = members_of(7, 1, 12, 0, 3), np.arange(5, dtype=np.uint64)
    whole = make_plan(members, keys, 1, epochs=1, poisson=True)
    order = np.array([2, 0, 4, 1, 3])
    ordered = whole.ordered(order)
    assert ordered.steps.tolist() == whole.steps[order].tolist() == [12, 7, 3, 1, 0]
    assert ((ordered.count > 0).sum(1) < ordered.steps).any()
    assert (ordered.rows == whole.rows[order]).all()


@pytest.mark.parametrize("batch", [0, 5, 9])
def test_a_batch_as_large_as_the_client_is_all_of_it(batch: int) -> None:
    plan = make_plan(members_of(5), np.array([1], dtype=np.uint64), batch, steps=3, poisson=True)
    assert plan.count.tolist() == [[5, 5, 5]]
    assert plan.rows[0, 1].tolist() == [0, 1, 2, 3, 4]


def test_blocks_of_draws_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    request = (members_of(9, 4), np.array([1, 2], dtype=np.uint64), 2)
    whole = make_plan(*request, epochs=3, poisson=True)
    monkeypatch.setattr("tailorfl.training.plan.DRAWS_AT_ONCE", 20)
    again = make_plan(*request, epochs=3, poisson=True)
    assert (whole.rows == again.rows).all()
    assert (whole.count == again.count).all()


@engines
def test_a_batch_of_one_is_divided_by_one_whatever_it_holds(engine: Any) -> None:
    """Without noise and clip a step is along the sum of the gradients of whoever was drawn, none, one or several."""
    cohort, start = setting(dp=SampleDP(1e6, 0.0, "poisson"), batch_size=1, lr=0.2)
    actual = fit(engine, cohort, start, steps=4)
    drawn = Counter[int]()
    for i in range(len(SIZES)):
        expected = start.clone()
        plan = cohort.plan((i,), "train", 1, None, 4, 0, 1, True)
        for rows, count in zip(plan.rows[0], plan.count[0], strict=True):
            drawn[int(count)] += 1
            at = torch.from_numpy(rows[:count])
            if count:
                x, y = cohort.source.take(at), cohort.source.y[at]
                expected = expected - TensorDict(autograd(cohort, expected, x, y)) * (0.2 * int(count))
        assert_states(actual[i], dict(expected.items()), rtol=1e-4, atol=1e-5)
    assert {0, 1} < set(drawn)


def uses(function: Any, engine: Any = ENGINES["vectorized"], **options: Any) -> dict[int, Any]:
    """What a training is recorded to have used."""
    cohort, start, record = recorded(**{"batch_size": BATCH, **options})
    run(engine, cohort, function, received=start)
    return record.uses


@engines
@pytest.mark.parametrize("counting", [False, True])
def test_of_shuffled_batches_passes_count_and_of_poisson_ones_batches(engine: Any, counting: bool) -> None:
    def both(client: Any, _: Any, w: TensorDict) -> TensorDict:
        return client.fit(client.fit(w, length=Length(epochs=3)), length=Length(steps=5, first=1))

    shuffled, drawn = (uses(both, engine, counting=counting, dp=dp) for dp in (SHUFFLED, POISSON))
    for i, n in enumerate(SIZES):
        length = math.ceil(n / BATCH)
        touched = len({k // length for k in range(1, 6)})
        assert shuffled[i] == Counter({Use(1.0, NOISE): 3 + touched})
        assert drawn[i] == Counter({Use(min(1.0, BATCH / n), NOISE): 3 * length + 5})


@pytest.mark.parametrize("counting", [False, True])
def test_a_single_sample_is_in_every_batch(counting: bool) -> None:
    def steps(client: Any, _: Any, w: TensorDict) -> TensorDict:
        return client.fit(w, length=Length(steps=3))

    recorded = uses(steps, counting=counting, dp=POISSON, batch_size=1, sizes=(1, 2, 5))
    assert recorded == {i: Counter({Use(1 / n, NOISE): 3}) for i, n in enumerate((1, 2, 5))}


def test_of_a_pass_the_batch_with_most_gradients_counts() -> None:
    """A sample may be in that one: Per-FedAvg's pattern, one gradient of the first batch and three of the second."""

    def direction(w: TensorDict, grad: Any) -> TensorDict:
        g = grad(w, batch=0)
        return g + grad(w, batch=1) - grad(w - g, batch=1) + grad(w, batch=1)

    def steps(client: Any, _: Any, w: TensorDict) -> TensorDict:
        return client.fit(w, direction=direction, length=Length(batches=2, steps=3))

    recorded = uses(steps, dp=SHUFFLED)
    for i, n in enumerate(SIZES):
        length, taken = math.ceil(n / BATCH), [1, 3] * 3
        passes = {k // length for k in range(6)}
        expected = Counter(max(taken[k] for k in range(6) if k // length == p) for p in passes)
        assert recorded[i] == Counter({Use(1.0, NOISE, r): times for r, times in expected.items()})
