"""The ledger: every batch from which a noisy gradient was released is in it, once, in every engine."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, TailorflError
from tailorfl.methods.perfed_ckt import towards
from tailorfl.privacy.ledger import EVERYONE, PrivacyLedger, PrivacyRecord, Use
from tailorfl.training.ascent import sam
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.update import Optimizer
from training.cohorts import SIZES, alone, cohort_of, engines, grouped, model_of, run, source

NOISE = 0.7
STEPS = [math.ceil(n / 4) for n in SIZES]
"""Batches of 4 that an epoch has, by client."""


def recorded(**settings: Any) -> tuple[Cohort, TensorDict, PrivacyRecord]:
    data = source(sum(SIZES))
    model, record = model_of("mlp", data, hidden=(8,)), PrivacyRecord()
    cohort = cohort_of(
        model, data, **{"dp": SampleDP(0.5, NOISE, "poisson"), "public": source(6, seed=1), **settings}
    )
    return replace(cohort, record=record), model.init(1), record


def expected(kinds: Callable[[int], dict[int, int]], batch: int = 4) -> dict[int, Counter[Use]]:
    """Uses of every client from {gradients: batches} of each."""
    out = {}
    for i, n in enumerate(SIZES):
        rate = min(1.0, batch / n) if batch else 1.0
        out[i] = Counter({Use(rate, NOISE, r): count for r, count in kinds(i).items() if count})
    return out


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


FUNCTIONS: dict[str, tuple[Any, Callable[[int], dict[int, int]], int]] = {
    "an epoch": (train(), lambda i: {1: STEPS[i]}, 4),
    "two epochs": (train(epochs=2), lambda i: {1: 2 * STEPS[i]}, 4),
    "steps": (train(steps=5), lambda i: {1: 5}, 4),
    "other batches": (train(batch_size=5, steps=3), lambda i: {1: 3}, 5),
    "all data at once": (train(batch_size=0, steps=3), lambda i: {1: 3}, 0),
    "a pull": (lambda c, _, w: c.fit(w, prox=(0.5, w), optimizer=Optimizer(lr=torch.tensor(0.1))),
        lambda i: {1: STEPS[i]}, 4),
    "a tensor's pull": (
        lambda c, _, w: c.fit(w, prox=(torch.tensor(0.5), w)), lambda i: {1: STEPS[i]}, 4,
    ),
    "public data": (
        train(term=towards(1.0, torch.full((6, 3), 1 / 3), 2)), lambda i: {1: STEPS[i]}, 4,
    ),
    "sharpness-aware": (train(direction=sam(0.1)), lambda i: {2: STEPS[i]}, 4),
    "repeated": (train(repeat=3), lambda i: {3: STEPS[i]}, 4),
    "two models": (
        lambda c, _, w: c.fit({"a": w, "b": w}, direction=both)["a"], lambda i: {2: STEPS[i]}, 4,
    ),
    "three batches a step": (
        lambda c, _, w: c.fit(w, direction=hessian, given=(c.parameters(w),),
            length=Length(batches=3, steps=2, repeat=2)),
        lambda i: {2: 4, 4: 2}, 4,
    ),
    "a part, with something of the client's": (
        lambda c, _, w: c.fit(w, train=("head.weight",), direction=beside, given=(w.select("head.weight"),),
            length=Length(steps=2)),
        lambda i: {1: 2}, 4,
    ),
    "two trainings": (lambda c, _, w: c.fit(c.fit(w), purpose="train"), lambda i: {1: 2 * STEPS[i]}, 4),
    "in pieces": (several, lambda i: {3: 5}, 4),
    "a gradient": (lambda c, _, w: c.gradient(w), lambda i: {1: 1}, 4),
    "nothing": (train(epochs=0), lambda i: {}, 4),
}  # fmt: skip
every_function = pytest.mark.parametrize(
    ("function", "kinds", "batch"), FUNCTIONS.values(), ids=FUNCTIONS.keys()
)


@engines
@every_function
def test_every_released_gradient_is_recorded(engine: Any, function: Any, kinds: Any, batch: int) -> None:
    cohort, start, record = recorded()
    run(engine, cohort, function, received=start)
    assert {c: u for c, u in record.uses.items() if u} == {
        c: u for c, u in expected(kinds, batch).items() if u
    }


@engines
@every_function
def test_counting_records_the_same_and_trains_nothing(
    engine: Any, function: Any, kinds: Any, batch: int
) -> None:
    """Without a look at a sample: they are not numbers."""
    cohort, start, record = recorded()
    s = cohort.source
    blind = Source(s.name, torch.full_like(s.x, math.nan), s.y, s.task, s.outputs)
    found = run(engine, replace(cohort, source=blind, counting=True), function, received=start)
    assert {c: u for c, u in record.uses.items() if u} == {
        c: u for c, u in expected(kinds, batch).items() if u
    }
    for name, tensor in found.items():
        unmoved = start[name].expand_as(tensor)
        assert torch.equal(
            tensor, torch.zeros_like(unmoved) if function is FUNCTIONS["a gradient"][0] else unmoved
        )


@engines
@pytest.mark.parametrize("limit", [0, 1, 2, 9])
def test_a_limit_cuts_what_is_recorded(engine: Any, limit: int) -> None:
    for counting in (False, True):
        cohort, start, record = recorded(limit=limit)
        run(engine, replace(cohort, counting=counting), train(), received=start)
        assert {c: u.total() for c, u in record.uses.items() if u} == {
            i: min(steps, limit) for i, steps in enumerate(STEPS) if limit
        }


@engines
def test_nothing_is_recorded_without_privacy(engine: Any) -> None:
    for counting in (False, True):
        cohort, start, record = recorded(dp=None)
        run(engine, replace(cohort, counting=counting), train(), received=start)
        assert record.uses == {}


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
    with pytest.raises(ConfigError, match=r"rules of an earlier version.*Start the run anew"):
        PrivacyLedger.restore(old)
