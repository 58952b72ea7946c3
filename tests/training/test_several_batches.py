"""Steps with several independent batches: which rows they are, how many steps there are, what stays apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import TailorflError
from tailorfl.training.cohort import Cohort
from tailorfl.training.keys import derive
from tailorfl.training.plan import Length, make_plan, steps_of
from tailorfl.training.sample_privacy import SampleDP
from training.cohorts import (
    ENGINES,
    SIZES,
    alone,
    assert_states,
    batches,
    engines,
    fit,
    grouped,
    module_at,
    run,
    setting,
)

LOOSE = {"rtol": 2e-3, "atol": 2e-4}
SHARES = (1.0, -0.5, 0.25)
"""How the direction below weights its batches: all different, so that none can stand in for another."""


def weighted(count: int):
    """Σ_j SHARES[j] ∇F(w; B_j), asked for in falling order of j."""

    def direction(state, grad):
        found = [grad(state, batch=j) * SHARES[j] for j in reversed(range(count))]
        return sum(found[1:], start=found[0])

    return direction


def by_hand(
    cohort: Cohort,
    start: TensorDict,
    steps: Sequence[Sequence[tuple[Tensor, Tensor]]],
    repeat: int = 1,
    momentum: float = 0.0,
    lr: float = 0.1,
) -> tuple[dict[str, Tensor], list[float]]:
    """(state, losses of the batch asked for first) of a torch module that sums the losses of each step's batches.

    The batch asked for first alone moves the statistics of batch norm.
    """
    module = module_at(cohort, start)
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
    losses = []
    for step in steps:
        for _ in range(repeat):
            optimizer.zero_grad()
            kept: dict[str, Tensor] = {}
            for j in reversed(range(len(step))):
                x, y = step[j]
                loss = cohort.loss(module(x), y, None)
                (loss * SHARES[j]).backward()
                if j == len(step) - 1:
                    losses.append(float(loss.detach()))
                    kept = {n: b.clone() for n, b in module.named_buffers()}
            optimizer.step()
            for n, b in module.named_buffers():
                b.copy_(kept[n])
    return {n: t.detach().clone() for n, t in module.state_dict().items()}, losses


def chunks(found: list[tuple[Tensor, Tensor]], count: int) -> list[list[tuple[Tensor, Tensor]]]:
    return [found[k : k + count] for k in range(0, len(found), count)]


@engines
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("first", [0, 1, 4])
def test_step_k_takes_the_batches_from_k_n_on_of_the_endless_sequence(engine, count, first):
    """Unequal clients: batches of 4 leave rests of 3, 3, 0 and 1, so the batches of a step differ in size too."""
    cohort, start = setting(momentum=0.6)
    found = fit(engine, cohort, start, direction=weighted(count), batches=count, steps=3, first=first)
    for i in range(len(SIZES)):
        taken = batches(cohort, i, epochs=None, steps=3 * count, first=first)
        expected, _ = by_hand(cohort, start, chunks(taken, count), momentum=0.6)
        assert_states(found[i], expected)


@engines
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("epochs", [1, 2])
def test_epochs_end_with_a_whole_step(engine, count, epochs):
    cohort, start = setting()
    found = fit(engine, cohort, start, direction=weighted(count), batches=count, epochs=epochs)
    for i, size in enumerate(SIZES):
        steps = math.ceil(math.ceil(size / 4) * epochs / count)
        taken = batches(cohort, i, epochs=None, steps=steps * count)
        assert_states(found[i], by_hand(cohort, start, chunks(taken, count))[0])


@engines
def test_repetitions_see_all_batches_of_their_step_again(engine):
    cohort, start = setting()
    found = fit(engine, cohort, start, direction=weighted(2), batches=2, steps=2, repeat=3)
    for i in range(len(SIZES)):
        taken = batches(cohort, i, epochs=None, steps=4)
        assert_states(found[i], by_hand(cohort, start, chunks(taken, 2), repeat=3)[0])


@engines
def test_batch_norm_takes_whole_batches_and_the_statistics_of_the_first_pass(engine):
    """Rests of 3, 3, 0 and (left out) 1: clients differ in the sizes of the first batch, the second, or none."""
    cohort, start = setting("batch", lr=0.02)
    found = fit(engine, cohort, start, direction=weighted(2), batches=2, steps=3)
    for i in range(len(SIZES)):
        taken = batches(cohort, i, epochs=None, steps=6)
        assert all(len(x) > 1 for x, _ in taken)
        assert_states(found[i], by_hand(cohort, start, chunks(taken, 2), lr=0.02)[0], **LOOSE)


@engines
def test_the_reported_loss_is_that_of_the_batch_asked_for_first(engine):
    cohort, start = setting()

    def local(client, _, received):
        client.fit(received, direction=weighted(2), length=Length(batches=2, steps=3, repeat=2))
        return TensorDict({"loss": client.metrics["train"]}, batch_size=[])

    found = run(engine, cohort, local, received=start)["loss"]
    for i in range(len(SIZES)):
        taken = batches(cohort, i, epochs=None, steps=6)
        losses = by_hand(cohort, start, chunks(taken, 2), repeat=2)[1]
        assert float(found[i]) == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@engines
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_dropout_masks_belong_to_the_batch_and_not_to_its_place_in_a_step(engine, batch):
    """The gradient on batch j of step 0 is that of a fit which begins at batch j."""
    cohort, start = setting(dropout=0.5)
    several = fit(engine, cohort, start, direction=lambda w, g: g(w, batch=batch), batches=3, steps=1)
    single = fit(engine, cohort, start, steps=1, first=batch)
    assert_states(several, dict(single.items()))


@engines
def test_batches_of_a_step_have_masks_of_their_own(engine):
    """With equal samples, equal masks would give equal gradients."""
    cohort, start = setting(dropout=0.5)
    cohort.source.x[:] = cohort.source.x[0]
    cohort.source.y[:] = 0
    moves = [
        fit(engine, cohort.part([2]), start, direction=lambda w, g, j=j: g(w, batch=j), batches=3, steps=1)
        for j in range(3)
    ]
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert not torch.allclose(moves[a]["head.weight"], moves[b]["head.weight"], rtol=0.05)


@engines
def test_every_pass_has_privacy_noise_of_its_own(engine):
    """The clipped gradient is nothing beside the noise; the difference of two draws is √2 as wide as a draw."""
    cohort, start = setting(dp=SampleDP(1e-6, 1e6, "shuffle"))
    cohort = cohort.part([2])  # three full batches, so that all noise is divided by the same number

    def width(direction) -> float:
        moved = fit(engine, cohort, start, direction=direction, batches=2, steps=1)
        return float(torch.cat([(moved[n][0] - start[n]).flatten() for n in cohort.model.parameters]).std())

    one = width(lambda w, g: g(w))
    for a, b in ((0, 0), (0, 1), (1, 1)):
        two = width(lambda w, g, a=a, b=b: g(w, batch=a) - g(w, batch=b))
        assert two / one == pytest.approx(2**0.5, rel=0.15)


def test_private_several_batches_are_equal_across_engines():
    cohort, start = setting(dropout=0.3, dp=SampleDP(0.5, 1.0, "shuffle"))
    reference = fit(ENGINES["sequential"], cohort, start, direction=weighted(3), batches=3, epochs=2)
    for engine in ENGINES.values():
        found = fit(engine, cohort, start, direction=weighted(3), batches=3, epochs=2)
        assert_states(found, dict(reference.items()), rtol=1e-3, atol=1e-5)


@given(
    st.lists(st.integers(0, 13), min_size=1, max_size=5),
    st.integers(0, 6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 2),
    st.none() | st.integers(0, 9),
)
def test_plans_take_whole_steps_of_one_sequence(sizes, batch, epochs, count, min_batch, limit):
    """As many steps as a number of epochs needs, or as `limit` batches allow; and no other rows."""
    members = [1000 * (i + 1) + np.arange(n, dtype=np.int64) for i, n in enumerate(sizes)]
    keys, long = derive(0, np.arange(len(sizes), dtype=np.uint64)), 200
    plan = make_plan(members, keys, batch, epochs=epochs, min_batch=min_batch, limit=limit, batches=count)
    endless = make_plan(members, keys, batch, steps=long, min_batch=min_batch)
    one_by_one = make_plan(members, keys, batch, epochs=epochs, min_batch=min_batch)
    for i, needed in enumerate(one_by_one.steps):
        steps = -(-needed // count)
        steps = steps if limit is None else min(steps, limit // count)
        assert plan.steps[i] == steps * count
        for k in range(steps * count):
            size = plan.count[i, k]
            assert size == endless.count[i, k]
            np.testing.assert_array_equal(plan.rows[i, k, :size], endless.rows[i, k, :size])
    for steps in (0, 3):
        by_steps = make_plan(members, keys, batch, steps=steps, min_batch=min_batch, batches=count)
        usable = steps_of(np.array(sizes), batch, None, steps, min_batch, count)
        np.testing.assert_array_equal(by_steps.steps, usable * count)


@engines
@pytest.mark.parametrize("limit", [None, 0, 1, 3, 6])
def test_a_limit_counts_batches_and_steps_says_so(engine, limit):
    cohort, start = setting(limit=limit)
    cases = {"epochs": {"epochs": 3}, "steps": {"steps": 2}}

    def local(client, *_):
        return TensorDict({n: client.steps(Length(**a, batches=2)) for n, a in cases.items()}, batch_size=[])

    counted = run(engine, cohort, local)
    for name, asked in cases.items():
        found = fit(engine, cohort, start, direction=weighted(2), batches=2, **asked)
        for i, size in enumerate(SIZES):
            steps = 2 if name == "steps" else math.ceil(math.ceil(size / 4) * 3 / 2)
            steps = steps if limit is None else min(steps, limit // 2)
            assert int(counted[name][i]) == steps
            taken = batches(cohort, i, epochs=None, steps=steps * 2)
            assert_states(found[i], by_hand(cohort, start, chunks(taken, 2))[0])


@engines
@pytest.mark.parametrize("batch", [2, -1])
def test_a_batch_that_a_step_does_not_have_is_an_error(engine, batch):
    cohort, start = setting()
    with pytest.raises(TailorflError, match=rf"asked for batch {batch}, but its steps have 2"):
        fit(engine, cohort, start, direction=lambda w, g: g(w, batch=batch), batches=2)


@pytest.mark.parametrize("options", [{"batches": 2}, {"batches": 0, "direction": lambda w, g: g(w)}])
def test_batches_that_nobody_asks_for_are_refused(options):
    cohort, start = setting()
    with pytest.raises(TailorflError, match=rf"batches={options['batches']}"):
        alone(cohort).fit(start, **grouped(**options))
