"""Directions: a method's own update from gradients anywhere, per-client inputs, joint training."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.errors import ClientError, TailorflError
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length
from tailorfl.training.update import Optimizer
from training.cohorts import (
    SIZES,
    alone,
    assert_states,
    batches,
    engines,
    fit,
    run,
    setting,
    spread,
    torch_sgd,
)

SETTINGS = {"momentum": 0.6, "weight_decay": 0.02, "clip": 0.5}


def autograd(cohort: Cohort, state: TensorDict, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of the batch loss by ordinary autograd."""
    leaves = {n: state[n].detach().clone().requires_grad_() for n in cohort.model.parameters}
    cohort.loss(cohort.model(leaves, x), y, None).backward()
    return {n: p.grad for n, p in leaves.items()}


@engines
def test_the_gradient_as_direction_is_plain_training(engine):
    cohort, start = setting(**SETTINGS)
    found = fit(engine, cohort, start, direction=lambda state, grad: grad(state), prox=(0.3, start), repeat=2)
    plain = fit(engine, cohort, start, prox=(0.3, start), repeat=2)
    assert_states(found, dict(plain.items()), rtol=1e-4, atol=1e-6)


@engines
def test_momentum_clipping_and_decay_act_on_the_direction(engine):
    """Descending along twice the gradient of a clipped run is the clipped run where the clip binds."""
    cohort, start = setting(momentum=0.6, weight_decay=0.02, clip=0.01)
    found = fit(engine, cohort, start, direction=lambda state, grad: grad(state) * 2.0)
    for i in range(len(SIZES)):
        expected = torch_sgd(cohort, i, start, batches(cohort, i), momentum=0.6, weight_decay=0.02, clip=0.01)
        assert_states(found[i], expected, rtol=1e-3, atol=1e-5)


@engines
def test_given_inputs_are_each_clients_own(engine):
    """A correction c_i given to the direction acts as a constant gradient (as SCAFFOLD's does)."""
    cohort, start = setting()
    corrections = spread(start.apply(torch.zeros_like), len(SIZES), scale=1.0)
    scale = torch.tensor([1.0, -2.0, 0.0, 0.5])

    def local(client, state, received):
        def direction(at, grad, correction, factor):
            return grad(at) + correction * factor

        return client.fit(received, direction=direction, given=(state["c"], state["factor"]))

    states = TensorDict({"c": corrections, "factor": scale}, batch_size=[len(SIZES)])
    found = run(engine, cohort, local, states, start)
    for i in range(len(SIZES)):
        expected = start.clone()
        for x, y in batches(cohort, i):
            g = autograd(cohort, expected, x, y)
            for n in g:
                expected[n] = expected[n] - 0.1 * (g[n] + scale[i] * corrections[n][i])
        assert_states(found[i], dict(expected.items()))


@engines
def test_a_given_tree_arrives_with_its_structure_even_where_it_is_empty(engine):
    cohort, start = setting()
    inner = TensorDict(
        {"x": TensorDict({"deep": torch.tensor([1.0, 2.0, 3.0, 4.0])}, batch_size=[4])}, batch_size=[4]
    )

    def direction(at, grad, nothing, nested, number):
        assert len(list(nothing.keys())) == 0
        return grad(at) * nested["x"]["deep"] * number

    def local(client, state, received):
        given = (tree.empty(), state, torch.tensor(0.5))
        return client.fit(received, direction=direction, given=given, length=Length(steps=1))

    found = run(engine, cohort, local, inner, start)
    for i in range(len(SIZES)):
        steps = batches(cohort, i, epochs=None, steps=1)
        assert_states(found[i], torch_sgd(cohort, i, start, steps, lr=0.1 * 0.5 * (i + 1)))


@engines
def test_two_models_train_on_the_same_batches_and_may_see_each_other(engine):
    """v follows the gradient at the mixture of v and w, and w its own: checked against a loop by autograd."""
    cohort, start = setting(momentum=0.5)
    starts = spread(start, len(SIZES))

    def direction(state, grad, alpha):
        mixed = state["v"] * alpha + state["w"] * (1 - alpha)
        return TensorDict({"w": grad(state["w"], of="w"), "v": grad(mixed, of="v") * alpha})

    def local(client, state, received):
        out = client.fit({"w": received, "v": state["v"]}, direction=direction, given=(state["alpha"],))
        return TensorDict(out, batch_size=[])

    alphas = torch.tensor([0.2, 0.5, 1.0, 0.0])
    states = TensorDict({"v": starts, "alpha": alphas}, batch_size=[len(SIZES)])
    found = run(engine, cohort, local, states, start)
    for i, alpha in enumerate(alphas.tolist()):
        w, v = start.clone(), starts[i].clone()
        velocity = {"w": w.apply(torch.zeros_like), "v": v.apply(torch.zeros_like)}
        for x, y in batches(cohort, i):
            g_w = TensorDict(autograd(cohort, w, x, y))
            g_v = TensorDict(autograd(cohort, v * alpha + w * (1 - alpha), x, y)) * alpha
            velocity = {"w": velocity["w"] * 0.5 + g_w, "v": velocity["v"] * 0.5 + g_v}
            w, v = w - velocity["w"] * 0.1, v - velocity["v"] * 0.1
        assert_states(found["w"][i], dict(w.items()))
        assert_states(found["v"][i], dict(v.items()))


@engines
def test_each_of_two_models_has_its_own_proximal_centre(engine):
    cohort, start = setting()
    other = start.apply(lambda t: t + 0.2)

    def direction(state, grad):
        return TensorDict({"a": grad(state["a"], of="a"), "b": grad(state["b"], of="b")})

    def local(client, _, received):
        start, other = received["start"], received["other"]
        out = client.fit({"a": start, "b": start}, direction=direction, prox=(0.5, {"a": start, "b": other}))
        return TensorDict(out, batch_size=[])

    both = TensorDict({"start": start, "other": other}, batch_size=[])
    found = run(engine, cohort, local, received=both)
    for i in range(len(SIZES)):
        steps = batches(cohort, i)
        assert_states(found["a"][i], torch_sgd(cohort, i, start, steps, prox=(0.5, start)))
        assert_states(found["b"][i], torch_sgd(cohort, i, start, steps, prox=(0.5, other)))


@engines
def test_a_direction_without_any_gradient_is_allowed(engine):
    cohort, start = setting()
    found = fit(engine, cohort, start, direction=lambda state, grad: state, steps=3)
    for n in start.keys():  # noqa: SIM118
        torch.testing.assert_close(found[n], (start[n] * 0.9**3).expand_as(found[n]))


@engines
def test_a_direction_moves_only_what_is_trained(engine):
    cohort, start = setting()
    head = ("head.weight", "head.bias")
    seen = []

    def direction(state, grad):
        seen.append(set(map(str, state.keys())))
        return grad(state)

    found = fit(engine, cohort, start, direction=direction, train=head)
    assert all(names == set(head) for names in seen)
    for i in range(len(SIZES)):
        assert_states(found[i], torch_sgd(cohort, i, start, batches(cohort, i), train=head))


@engines
def test_an_error_of_a_direction_names_client_round_and_stage(engine):
    cohort, start = setting()

    def broken(state, grad):
        raise ZeroDivisionError("no such thing")

    with pytest.raises(
        ClientError, match=r"client.*, round 1, stage 'finetune': ZeroDivisionError: no such thing"
    ):
        fit(engine, cohort, start, direction=broken, purpose="finetune")


@engines
def test_models_that_train_together_are_clipped_each_by_itself(engine):
    """What one does to the other's norm cannot show: each is the plain clipped training of its own start."""
    cohort, start = setting(**SETTINGS)
    other = start.apply(lambda t: 3.0 * t)

    def together(state, grad):
        return TensorDict({n: grad(state[n], of=n) for n in ("a", "b")})

    def local(client, state, received):
        return TensorDict(client.fit(dict(received.items()), direction=together), batch_size=[])

    found = run(engine, cohort, local, received=TensorDict({"a": start, "b": other}, batch_size=[]))
    for name, begin in (("a", start), ("b", other)):
        for i in range(len(SIZES)):
            expected = torch_sgd(cohort, i, begin, batches(cohort, i), **SETTINGS)
            assert_states(found[name][i], expected, rtol=1e-3, atol=1e-5)


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

    found, plain = run(engine, cohort, local, received=start), fit(engine, cohort, start, repeat=2)
    for n in start.keys():  # noqa: SIM118
        torch.testing.assert_close(found["a"][n], plain[n])  # b was at a before the step of a
        torch.testing.assert_close(found["b"][n], found["a"][n])


def test_directions_that_do_not_fit_the_models_are_refused():
    cohort, start = setting()
    with pytest.raises(TailorflError, match="directions for a, but trains a, b"):
        alone(cohort).fit({"a": start, "b": start}, direction={"a": lambda state, grad: grad(state["a"])})
    with pytest.raises(TailorflError, match="clips what a `direction` asks for"):
        alone(cohort).fit(start, optimizer=Optimizer(clip_each=True))
