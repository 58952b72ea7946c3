"""Poisson batches and passes of shuffled ones under sample-level privacy: what they hold, yield and are counted as.

References: binomial laws, autograd and Opacus for a step, the closed form of the Gaussian mechanism for a pass.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import binom, norm
from tensordict import TensorDict
from torch import Tensor

from tailorfl.models.dropout import fold_key
from tailorfl.privacy.accounting import epsilon
from tailorfl.privacy.ledger import PrivacyLedger, PrivacyRecord, Use
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length, make_plan
from tailorfl.training.sample_privacy import SampleDP, normal
from training.cohorts import (
    ENGINES,
    SIZES,
    alone,
    assert_states,
    cohort_of,
    engines,
    fit,
    model_of,
    module_at,
    run,
    source,
)
from training.divergence import epsilon_of

opacus = pytest.mark.skipif(
    find_spec("opacus") is None, reason="compares with opacus: pip install 'tailorfl[privacy]'"
)
BATCH = 2


def setting(dp: SampleDP, **given: Any) -> tuple[Cohort, TensorDict]:
    data = source(sum(SIZES))
    model = model_of("mlp", data, hidden=(8,))
    return cohort_of(model, data, **{"dp": dp, "batch_size": BATCH, **given}), model.init(1)


def members_of(*sizes: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]


# -- which samples -------------------------------------------------------------------------------------------


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
    found = whole.ordered(order)
    assert found.steps.tolist() == whole.steps[order].tolist() == [12, 7, 3, 1, 0]
    assert ((found.count > 0).sum(1) < found.steps).any()
    assert (found.rows == whole.rows[order]).all()


def test_a_batch_as_large_as_the_client_is_all_of_it() -> None:
    for batch in (0, 5, 9):
        plan = make_plan(members_of(5), np.array([1], dtype=np.uint64), batch, steps=3, poisson=True)
        assert plan.count.tolist() == [[5, 5, 5]]
        assert plan.rows[0, 1].tolist() == [0, 1, 2, 3, 4]


def test_blocks_of_draws_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (members_of(9, 4), np.array([1, 2], dtype=np.uint64), 2)
    whole = make_plan(*given, epochs=3, poisson=True)
    monkeypatch.setattr("tailorfl.training.plan.DRAWS_AT_ONCE", 20)
    again = make_plan(*given, epochs=3, poisson=True)
    assert (whole.rows == again.rows).all()
    assert (whole.count == again.count).all()


# -- what comes out ------------------------------------------------------------------------------------------


def noise_of(cohort: Cohort, position: int, step: int, shapes: list[torch.Size]) -> list[Tensor]:
    key = torch.from_numpy(cohort.keys((position,), "train/noise").astype(np.int64))[0] + step
    key = fold_key(fold_key(key, 0), 0)
    return [normal(key, number, shape) for number, shape in enumerate(shapes)]


@opacus
@pytest.mark.filterwarnings("ignore")
def test_private_training_on_poisson_batches_is_that_of_opacus() -> None:
    """Which divides by the expected size, whatever the batch holds."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    own = (0.3, 0.7, 1.1, 1.5)
    cohort, start = setting(SampleDP(0.4, 1.5, "poisson", own), lr=0.2)
    empty = 0
    for position, n in enumerate(SIZES):
        module = GradSampleModule(module_at(cohort, start))
        optimizer = DPOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.2), noise_multiplier=0.0, max_grad_norm=0.4,
            expected_batch_size=min(BATCH, n),
        )  # fmt: skip
        plan = cohort.plan((position,), "train", BATCH, 3, None, 0, 1, True)
        for step in range(plan.steps[0]):
            rows = torch.from_numpy(plan.rows[0, step, : plan.count[0, step]])
            empty += len(rows) == 0
            optimizer.zero_grad()
            if len(rows):
                cohort.loss(module(cohort.source.take(rows)), cohort.source.y[rows], None).backward()
                optimizer.clip_and_accumulate()
            else:
                for p in optimizer.params:
                    p.summed_grad = torch.zeros_like(p)
            drawn = noise_of(cohort, position, step, [p.shape for p in optimizer.params])
            for p, z in zip(optimizer.params, drawn, strict=True):
                p.grad = (p.summed_grad + z * own[position] * 0.4) / optimizer.expected_batch_size
            optimizer.original_optimizer.step()
        theirs = {k.removeprefix("_module."): t.detach() for k, t in module.state_dict().items()}
        assert_states(
            alone(cohort, position).fit(start, length=Length(epochs=3)), theirs, rtol=1e-5, atol=1e-5
        )
    assert empty > 0


@engines
def test_every_client_has_the_noise_that_is_its_own(engine: Any) -> None:
    own = tuple(0.5 * (i + 1) for i in range(len(SIZES)))
    start = setting(SampleDP(0.5, 1.0, "shuffle"))[1]
    one, each, none = (
        fit(engine, setting(dp)[0], start, steps=1)
        for dp in (
            SampleDP(0.5, 1.0, "poisson"),
            SampleDP(0.5, max(own), "poisson", own),
            SampleDP(0.5, 0.0, "poisson"),
        )
    )
    for name in start.keys():  # noqa: SIM118
        for i in range(len(SIZES)):
            expected = none[name][i] + own[i] * (one[name][i] - none[name][i])
            torch.testing.assert_close(each[name][i], expected, rtol=1e-4, atol=1e-6)


@engines
def test_a_batch_of_one_is_divided_by_one_whatever_it_holds(engine: Any) -> None:
    """Without noise and clip a step is along the sum of the gradients of whoever was drawn, none, one or several."""
    cohort, start = setting(SampleDP(1e6, 0.0, "poisson"), batch_size=1, lr=0.2)
    found = fit(engine, cohort, start, steps=4)
    drawn = Counter[int]()
    for i in range(len(SIZES)):
        module = module_at(cohort, start)
        plan = cohort.plan((i,), "train", 1, None, 4, 0, 1, True)
        for rows, count in zip(plan.rows[0], plan.count[0], strict=True):
            drawn[int(count)] += 1
            at = torch.from_numpy(rows[:count])
            if count:
                module.zero_grad()
                losses = [
                    cohort.loss(module(cohort.source.take(k[None])), cohort.source.y[k[None]], None)
                    for k in at
                ]
                torch.stack(losses).sum().backward()
                with torch.no_grad():
                    for p in module.parameters():
                        p -= 0.2 * p.grad
        mine = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        assert_states(found[i], mine, rtol=1e-4, atol=1e-5)
    assert {0, 1} < set(drawn)


# -- what is counted -----------------------------------------------------------------------------------------


def uses(function: Any, sampling: Any, counting: bool = False, engine: str = "vectorized") -> dict[int, Any]:
    cohort, start = setting(SampleDP(0.5, 0.8, sampling))
    record = PrivacyRecord()
    run(ENGINES[engine], replace(cohort, record=record, counting=counting), function, received=start)
    return record.uses


@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_of_shuffled_batches_passes_count_and_of_poisson_ones_batches(engine: str, counting: bool) -> None:
    def both(client: Any, _: Any, w: TensorDict) -> TensorDict:
        return client.fit(client.fit(w, length=Length(epochs=3)), length=Length(steps=5, first=1))

    shuffled, drawn = (uses(both, s, counting, engine) for s in ("shuffle", "poisson"))
    for i, n in enumerate(SIZES):
        length = math.ceil(n / BATCH)
        touched = len({k // length for k in range(1, 6)})
        assert shuffled[i] == Counter({Use(1.0, 0.8): 3 + touched})
        assert drawn[i] == Counter({Use(min(1.0, BATCH / n), 0.8): 3 * length + 5})


@pytest.mark.parametrize("counting", [False, True])
def test_a_single_sample_is_in_every_batch(counting: bool) -> None:
    cohort, start = setting(SampleDP(0.5, 0.8, "poisson"), batch_size=1, sizes=(1, 2, 5))
    cohort = replace(cohort, record=PrivacyRecord(), counting=counting)
    run(ENGINES["vectorized"], cohort, lambda c, _, w: c.fit(w, length=Length(steps=3)), received=start)
    assert cohort.record is not None
    assert cohort.record.uses == {i: Counter({Use(1 / n, 0.8): 3}) for i, n in enumerate((1, 2, 5))}


def test_of_a_pass_the_batch_with_most_gradients_counts() -> None:
    """A sample may be in that one: Per-FedAvg's pattern, one gradient of the first batch and three of the second."""

    def direction(w: TensorDict, grad: Any) -> TensorDict:
        g = grad(w, batch=0)
        return g + grad(w, batch=1) - grad(w - g, batch=1) + grad(w, batch=1)

    found = uses(lambda c, _, w: c.fit(w, direction=direction, length=Length(batches=2, steps=3)), "shuffle")
    for i, n in enumerate(SIZES):
        length, taken = math.ceil(n / BATCH), [1, 3] * 3
        passes = {k // length for k in range(6)}
        expected = Counter(max(taken[k] for k in range(6) if k // length == p) for p in passes)
        assert found[i] == Counter({Use(1.0, 0.8, r): times for r, times in expected.items()})


def gaussian(mu: float, delta: float) -> float:
    """ε of N(μ, 1) against N(0, 1): Balle and Wang, ICML 2018, theorem 8."""

    def gap(eps: float) -> float:
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu) - delta

    return float(brentq(gap, 0.0, 200.0))


@opacus
@pytest.mark.parametrize(("sigma", "passes", "delta"), [(2.0, 5, 1e-5), (0.9, 1, 1e-3), (5.0, 40, 1e-6)])
def test_passes_of_shuffled_batches_cost_what_gaussian_mechanisms_do(
    sigma: float, passes: int, delta: float
) -> None:
    ledger = PrivacyLedger()
    ledger.book("training", {0: Counter({Use(1.0, sigma): passes})})
    exact = gaussian(math.sqrt(passes) / sigma, delta)
    assert exact == pytest.approx(
        epsilon_of([(1.0, math.sqrt(passes) / sigma)], [(1.0, 0.0)], delta), rel=1e-3
    )
    assert epsilon(ledger.entries(0), delta) == pytest.approx(exact, rel=0.02)
