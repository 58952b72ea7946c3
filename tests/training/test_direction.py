"""Directions: updates from gradients anywhere, joint training, and steps with several independent batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import ClientError, TailorflError
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.update import Optimizer
from training.cohorts import (
    ENGINES,
    FLOAT,
    SIZES,
    alone,
    assert_states,
    assert_trained,
    batches,
    engines,
    fit,
    in_turn,
    module_at,
    per_client,
    run,
    setting,
)

SETTINGS = {"momentum": 0.6, "weight_decay": 0.02, "clip": 0.5}
HEAD = ("head.weight", "head.bias")
LOOSE = {"rtol": 1e-3, "atol": 1e-5}


@engines
def test_the_gradient_as_direction_is_plain_training(engine):
    cohort, start = setting(**SETTINGS)
    options = {"prox": (0.3, start), "repeat": 2}
    actual = fit(engine, cohort, start, direction=lambda state, grad: grad(state), **options)
    assert_trained(cohort, actual, start, **options)


@engines
def test_momentum_clipping_and_decay_act_on_the_direction(engine):
    """Descending along twice the gradient of a clipped run is the clipped run where the clip binds."""
    cohort, start = setting(momentum=0.6, weight_decay=0.02, clip=0.01)
    actual = fit(engine, cohort, start, direction=lambda state, grad: grad(state) * 2.0)
    assert_trained(cohort, actual, start, LOOSE)


@engines
def test_a_given_tree_arrives_with_its_structure_even_where_it_is_empty(engine):
    cohort, start = setting()
    deep = torch.tensor([1.0, 2.0, 3.0, 4.0])
    states = per_client(x=TensorDict({"deep": deep}, batch_size=[4]))

    def direction(at, grad, nothing, nested, number):
        assert len(list(nothing.keys())) == 0
        return grad(at) * nested["x"]["deep"] * number

    def local(client, state, received):
        given = (tree.empty(), state, torch.tensor(0.5))
        return client.fit(received, direction=direction, given=given, length=Length(steps=1))

    actual = run(engine, cohort, local, states, start)
    assert_trained(cohort, actual, start, steps=1, lr=[0.1 * 0.5 * (i + 1) for i in range(4)])


@engines
def test_each_of_two_models_has_its_own_proximal_centre(engine):
    cohort, start = setting()
    centres = TensorDict({"a": start, "b": start.apply(lambda t: t + 0.2)}, batch_size=[])

    def direction(state, grad):
        return TensorDict({n: grad(state[n], of=n) for n in ("a", "b")})

    def local(client, _, received):
        models = {"a": received["a"], "b": received["a"]}
        out = client.fit(models, direction=direction, prox=(0.5, dict(received.items())))
        return TensorDict(out, batch_size=[])

    actual = run(engine, cohort, local, received=centres)
    for name, centre in centres.items():
        assert_trained(cohort, actual[name], start, prox=(0.5, centre))


@engines
def test_a_direction_without_any_gradient_is_allowed(engine):
    cohort, start = setting()
    actual = fit(engine, cohort, start, direction=lambda state, grad: state, steps=3)
    for n, t in start.items():
        torch.testing.assert_close(actual[n], (t * 0.9**3).expand_as(actual[n]))


@engines
def test_a_direction_sees_and_moves_only_what_is_trained(engine):
    cohort, start = setting()

    def direction(state, grad):
        assert set(map(str, state.keys())) == set(HEAD)
        return grad(state)

    actual = fit(engine, cohort, start, direction=direction, train=HEAD)
    assert_trained(cohort, actual, start, train=HEAD)


@engines
def test_in_turn_a_model_sees_those_before_it_after_their_step(engine):
    """b goes all the way to the a that it sees: it ends where a's last step ends."""
    cohort, start = setting()
    directions = {
        "a": lambda state, grad: grad(state["a"], of="a") + (state["b"] - state["a"]) * 0.5,
        "b": lambda state, grad: (state["b"] - state["a"]) * (1 / 0.1),
    }

    def local(client, state, received):
        out = client.fit({"a": received, "b": received}, direction=directions, length=Length(repeat=2))
        return TensorDict(out, batch_size=[])

    actual = run(engine, cohort, local, received=start)
    assert_trained(cohort, actual["a"], start, repeat=2)  # b was at a before the step of a
    for n, t in actual["a"].items():
        torch.testing.assert_close(actual["b"][n], t)


@engines
def test_an_error_of_a_direction_names_client_round_and_stage(engine):
    cohort, start = setting()
    message = r"client.*, round 1, stage 'finetune': ZeroDivisionError"
    with pytest.raises(ClientError, match=message):
        fit(engine, cohort, start, direction=lambda state, grad: 1 / 0, purpose="finetune")


def test_directions_that_do_not_fit_the_models_are_refused():
    cohort, start = setting()
    with pytest.raises(TailorflError, match="directions for a, but trains a, b"):
        alone(cohort).fit({"a": start, "b": start}, direction={"a": lambda state, grad: grad(state["a"])})
    with pytest.raises(TailorflError, match="clips the gradients of a `direction`"):
        alone(cohort).fit(start, optimizer=Optimizer(clip_each=True))


NORMED = {"rtol": 2e-3, "atol": 2e-4}
SHARES = (1.0, -0.5, 0.25)
"""How the direction below weights its batches: all different, so that none can stand in for another."""


def weighted(count: int):
    """Σ_j SHARES[j] ∇F(w; B_j), asked for in falling order of j."""

    def direction(state, grad):
        gradients = [grad(state, batch=j) * SHARES[j] for j in reversed(range(count))]
        return sum(gradients[1:], start=gradients[0])

    return direction


def by_hand(
    cohort: Cohort, start: TensorDict, steps: Sequence[Sequence[tuple[Tensor, Tensor]]], repeat: int
) -> tuple[dict[str, Tensor], list[float]]:
    """(state, losses of the batch asked for first) of a torch module that sums the losses of each step's batches.

    The batch asked for first alone moves the statistics of batch norm.
    """
    module, config = module_at(cohort, start), cohort.config
    optimizer = torch.optim.SGD(module.parameters(), lr=config.lr, momentum=config.momentum)
    losses = []
    for step in [step for step in steps for _ in range(repeat)]:
        optimizer.zero_grad()
        buffers: dict[str, Tensor] = {}
        for j in reversed(range(len(step))):
            x, y = step[j]
            loss = cohort.loss(module(x), y, None)
            (loss * SHARES[j]).backward()
            if j == len(step) - 1:
                losses.append(float(loss.detach()))
                buffers = {n: b.clone() for n, b in module.named_buffers()}
        optimizer.step()
        for n, b in module.named_buffers():
            b.copy_(buffers[n])
    return {n: t.detach().clone() for n, t in module.state_dict().items()}, losses


# name: (batches a step, settings of the run, length of the fit)
FITS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "steps": (2, {"momentum": 0.6}, {"steps": 3}),
    "from the second": (2, {"momentum": 0.6}, {"steps": 3, "first": 1}),
    "of three, from the fifth": (3, {"momentum": 0.6}, {"steps": 3, "first": 4}),
    "an epoch": (2, {}, {"epochs": 1}),
    "two epochs": (2, {}, {"epochs": 2}),
    "an epoch of threes": (3, {}, {"epochs": 1}),
    "two epochs of threes": (3, {}, {"epochs": 2}),
    "repeated": (2, {}, {"steps": 2, "repeat": 3}),
    "batch norm": (2, {"norm": "batch", "lr": 0.02}, {"steps": 3}),
    **{f"at most {limit}": (2, {"limit": limit}, {"epochs": 3}) for limit in (0, 1, 3, 6)},
    "steps, at most 3": (2, {"limit": 3}, {"steps": 2}),
}


@in_turn("name", FITS)
def test_a_step_takes_the_next_batches_of_the_endless_sequence(engine, name):
    """Unequal clients: batches of 4 leave rests of 3, 3, 0 and 1, so the batches of a step differ in size too.

    Epochs end with a whole step, a limit counts batches, and the loss is that of the batch asked for first.
    """
    count, settings, length = FITS[name]
    cohort, start = setting(**settings)

    def local(client, _, received):
        asked = Length(batches=count, **length)
        model = client.fit(received, direction=weighted(count), length=asked)
        loss = client.metrics.get("train", torch.tensor(0.0))
        return TensorDict({"model": model, "loss": loss, "steps": client.steps(asked)}, batch_size=[])

    actual = run(engine, cohort, local, received=start)
    for i, size in enumerate(SIZES):
        steps = length.get("steps") or math.ceil(math.ceil(size / 4) * length["epochs"] / count)
        steps = steps if cohort.limit is None else min(steps, cohort.limit // count)
        assert int(actual["steps"][i]) == steps
        taken = batches(cohort, i, steps=steps * count, first=length.get("first", 0))
        together = [taken[k : k + count] for k in range(0, len(taken), count)]
        expected, losses = by_hand(cohort, start, together, length.get("repeat", 1))
        assert_states(actual["model"][i], expected, **(NORMED if "norm" in settings else FLOAT))
        if losses:
            assert float(actual["loss"][i]) == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@engines
def test_dropout_masks_belong_to_the_batch_and_not_to_its_place_in_a_step(engine):
    """The gradient on batch j of step 0 is that of a fit which begins at batch j; equal samples show the masks."""
    cohort, start = setting(dropout=0.5)
    cohort.source.x[:] = cohort.source.x[0]
    cohort.source.y[:] = 0
    moved = []
    for j in range(3):
        several = fit(engine, cohort, start, direction=lambda w, g, j=j: g(w, batch=j), batches=3, steps=1)
        assert_states(several, dict(fit(engine, cohort, start, steps=1, first=j).items()))
        moved.append(several["head.weight"][2])
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert not torch.allclose(moved[a] - start["head.weight"], moved[b] - start["head.weight"], rtol=0.05)


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
    options = {"direction": weighted(3), "batches": 3, "epochs": 2}
    reference = fit(ENGINES["sequential"], cohort, start, **options)
    for engine in ENGINES.values():
        assert_states(fit(engine, cohort, start, **options), dict(reference.items()), rtol=1e-3, atol=1e-5)


@engines
def test_batches_that_a_step_does_not_have_or_nobody_asks_for_are_refused(engine):
    cohort, start = setting()
    for batch in (2, -1):
        with pytest.raises(TailorflError, match=rf"requested batch {batch}, but its steps have 2"):
            fit(engine, cohort, start, direction=lambda w, g, batch=batch: g(w, batch=batch), batches=2)
    for options in ({"batches": 2}, {"batches": 0, "direction": lambda w, g: g(w)}):
        with pytest.raises(TailorflError, match=rf"batches={options['batches']}"):
            fit(engine, cohort, start, **options)
