"""`Client.fit` is torch's SGD or AdamW on the planned batches, for one client and for a cohort."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.core.client import Client
from tailorfl.errors import ConfigError, TailorflError
from tailorfl.models.functional import Model
from tailorfl.runs.build import check
from tailorfl.settings.loading import load
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.plan import Length
from tailorfl.training.update import PLAIN, Optimizer
from training.cohorts import (
    FLOAT,
    SIZES,
    alone,
    assert_states,
    assert_trained,
    batches,
    cohort_of,
    engines,
    fit,
    in_turn,
    per_client,
    run,
    setting,
    source,
    spread,
    torch_fit,
)

CLOSE = {"rtol": 1e-3, "atol": 2e-5}
"""AdamW divides by the root of a mean square, which magnifies the rounding of small gradients."""
ALL = {"momentum": 0.8, "weight_decay": 0.02, "clip": 0.5}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "lr": 3e-3}
HEAD = ("head.weight", "head.bias")

# name: (settings of the run, options of the fit)
FITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"epochs": 2}),
    "momentum": ({"momentum": 0.9}, {"epochs": 2}),
    "weight decay": ({"weight_decay": 0.05}, {"epochs": 2}),
    "clipped": ({"clip": 0.3}, {"epochs": 2}),
    "all": (ALL, {"epochs": 2}),
    "settings of the run": ({**ALL, "lr": 0.2, "steps": 3, "batch_size": 2}, {}),
    "settings of the fit": (
        {"momentum": 0.5, "weight_decay": 0.1, "lr": 0.2, "steps": 3, "batch_size": 2},
        {"momentum": 0.0, "weight_decay": 0.0, "lr": 0.05, "epochs": 1, "batch_size": 0},
    ),
    "another purpose": ({}, {"steps": 7, "purpose": "finetune"}),
    "repeated": ({"momentum": 0.5}, {"repeat": 3}),
    "falling rate": ({"schedule": "linear", "momentum": 0.8, "weight_decay": 0.05}, {"epochs": 3}),
    "convolutions": ({"name": "cnn2", **ALL}, {}),
    "group norm": ({"name": "cnn2", "norm": "group", **ALL}, {}),
    "epochs, at most 0": ({"limit": 0}, {"epochs": 2}),
    "epochs, at most 2": ({"limit": 2}, {"epochs": 2}),
    "epochs, at most 100": ({"limit": 100}, {"epochs": 2}),
    "steps, at most 2": ({"limit": 2}, {"steps": 5}),
    "adamw": (ADAMW, {"epochs": 6}),
    "adamw, decay": ({**ADAMW, "weight_decay": 0.1}, {"epochs": 6}),
    "adamw, falling rate": ({**ADAMW, "schedule": "linear"}, {"epochs": 6}),
    "adamw, both": ({**ADAMW, "schedule": "linear", "weight_decay": 0.1}, {"epochs": 6}),
    "adamw, repeated": ({**ADAMW, "schedule": "linear"}, {"repeat": 3}),
    "adamw, at most 2": ({**ADAMW, "schedule": "linear", "limit": 2}, {"epochs": 1}),
}


@in_turn("name", FITS)
def test_fit_is_torchs_optimizer_on_the_planned_batches(engine, name):
    """Clients of 7, 3, 12 and 5 samples end at different steps, and each decays over its own."""
    settings, options = FITS[name]
    cohort, start = setting(hidden=(8, 6), **settings)
    close = CLOSE if cohort.config.optimizer == "adamw" else None
    assert_trained(cohort, fit(engine, cohort, start, **options), start, close, **options)


@engines
@pytest.mark.parametrize("strength", ["number", "tensor"])
@pytest.mark.parametrize(
    "settings",
    [{}, ALL, {**ADAMW, "clip": 0.2, "weight_decay": 0.1, "schedule": "linear"}],
    ids=["plain", "all", "adamw"],
)
def test_the_proximal_term_is_the_gradient_of_its_penalty(engine, strength, settings):
    cohort, start = setting(**settings)
    states = per_client(v=spread(start, len(SIZES)), lam=[0.5, 2.0, 0.0, 1.0])

    def local(client, state, received):
        lam = 0.7 if strength == "number" else state["lam"]
        return client.fit(state["v"], prox=(lam, received), length=Length(epochs=2))

    actual = run(engine, cohort, local, states, start)
    lams = [0.7] * len(SIZES) if strength == "number" else states["lam"].tolist()
    prox = [(lam, start) for lam in lams]
    close = CLOSE if cohort.config.optimizer == "adamw" else None
    assert_trained(cohort, actual, states["v"], close, prox=prox, epochs=2)


@engines
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.5, "weight_decay": 0.1, "clip": 0.4},
        {**ADAMW, "weight_decay": 0.1, "schedule": "linear"},
    ],
    ids=["sgd", "adamw"],
)
def test_a_learning_rate_may_be_a_tensor_of_each_clients_own(engine, settings):
    cohort, start = setting(**settings)
    rates = [0.1, 0.02, 0.3, 0.05] if "momentum" in settings else [3e-3, 1e-3, 5e-3, 2e-3]

    def local(client, state, received):
        return client.fit(received, length=Length(epochs=2), optimizer=Optimizer(lr=state["rate"]))

    actual = run(engine, cohort, local, per_client(rate=rates), start)
    assert_trained(cohort, actual, start, CLOSE if "optimizer" in settings else None, lr=rates, epochs=2)


@engines
@pytest.mark.parametrize("schedule", ["constant", "linear"])
@pytest.mark.parametrize("steps", [[3, 1, 0, 6], [2, 2, 2, 2]], ids=str)
def test_steps_may_differ_by_client(engine, schedule, steps):
    """A client of 0 steps stays where it is."""
    cohort, start = setting(momentum=0.5, schedule=schedule)

    def local(client, state, received):
        return client.fit(received, length=Length(steps=state["steps"]))

    actual = run(engine, cohort, local, per_client(steps=steps), start)
    assert_trained(cohort, actual, start, steps=steps)
    for i, number in enumerate(steps):
        assert (number == 0) == all(torch.equal(actual[n][i], t) for n, t in start.items())


class Double(nn.Linear):
    """A model of float64."""

    def __init__(self) -> None:
        super().__init__(5, 3, dtype=torch.float64)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.double())


@engines
def test_a_falling_rate_is_as_precise_as_the_model(engine):
    cohort = cohort_of(Model(Double), source(sum(SIZES)), schedule="linear")
    start = cohort.model.init(0)
    exact = {"rtol": 1e-12, "atol": 1e-12}
    assert_trained(cohort, fit(engine, cohort, start, epochs=2), start, exact, epochs=2)


@engines
def test_a_share_of_a_pass_is_rounded_up_to_whole_steps(engine):
    """7, 3, 12 and 5 samples in batches of 4 are 2, 1, 3 and 2 of them a pass."""
    cohort, start = setting()
    for epochs, steps in (
        (0.5, [1, 1, 2, 1]),
        (1.5, [3, 2, 5, 3]),
        (0.01, [1, 1, 1, 1]),
        (2.0, [4, 2, 6, 4]),
    ):
        assert_trained(cohort, fit(engine, cohort, start, epochs=epochs), start, steps=steps)
    client = alone(cohort, 2)
    assert float(client.steps(Length(epochs=0.5))) == 2
    with pytest.raises(TailorflError, match="steps=Tensor"):
        client.steps(Length(steps=torch.tensor(2)))


@engines
def test_parameters_that_are_not_trained_stay_bit_identical(engine):
    cohort, start = setting(momentum=0.9, weight_decay=0.1, clip=0.5)
    starts = spread(start, len(SIZES))
    actual = run(engine, cohort, lambda c, state, _: c.fit(state, train=HEAD, prox=(1.0, state)), starts)
    assert {n for n, t in starts.items() if not torch.equal(actual[n], t)} == set(HEAD)
    assert_trained(cohort, actual, starts, train=HEAD, prox=[(1.0, state) for state in starts])


@engines
def test_training_nothing_returns_the_start(engine):
    cohort, start = setting(sizes=(5, 0, 1))
    for options in ({"train": ()}, {"epochs": 0}, {"steps": 0}):
        actual = fit(engine, cohort, start, **options)
        assert all(torch.equal(actual[n], t.expand(3, *t.shape)) for n, t in start.items())
    actual = fit(engine, cohort, start, epochs=3)
    assert all(torch.equal(actual[n][1], t) for n, t in start.items())
    assert_trained(cohort, actual, start, epochs=3)


@engines
def test_pieces_of_a_fit_take_batches_of_one_sequence_and_a_fresh_optimizer(engine):
    def by_pieces(client, _, w):
        w = client.fit(w, length=Length(steps=3))
        w = client.fit(w, length=Length(steps=1, first=3))
        return client.fit(w, length=Length(steps=3, first=4))

    cohort, start = setting()
    whole = fit(engine, cohort, start, steps=7)
    assert_states(run(engine, cohort, by_pieces, received=start), dict(whole.items()), **FLOAT)
    cohort, _ = setting(**ADAMW, schedule="linear")
    actual = run(engine, cohort, by_pieces, received=start)
    for i in range(len(SIZES)):
        state = start
        for first, steps in ((0, 3), (3, 1), (4, 3)):
            state = TensorDict(torch_fit(cohort, i, state, steps=steps, first=first))
        assert_states(actual[i], dict(state.items()), **CLOSE)


@engines
def test_plain_steps_are_plain_under_every_rule(engine):
    cohort, start = setting(**ADAMW, schedule="linear", weight_decay=0.3)
    assert_trained(cohort, fit(engine, cohort, start, **PLAIN), start, **PLAIN)


@engines
def test_a_state_may_have_its_names_in_any_order(engine):
    cohort, start = setting()
    backwards = TensorDict({n: start[n] for n in reversed(list(start.keys()))}, batch_size=[])
    actual, expected = fit(engine, cohort, backwards), fit(engine, cohort, start)
    assert list(actual.keys()) == list(backwards.keys())
    assert all(torch.equal(t, actual[n]) for n, t in expected.items())


class Scaled(nn.Module):
    """A layer times a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 5] -> [batch, 3]."""
        return self.head(x) * self.scale


@engines
def test_a_buffer_of_the_model_travels_along_even_if_it_is_named_to_be_trained(engine):
    cohort = cohort_of(Model(Scaled), source(sum(SIZES)))
    start = cohort.model.init(0)
    actual = fit(engine, cohort, start, train=tuple(start.keys()))
    assert torch.equal(actual["scale"], torch.full((len(SIZES),), 2.0))
    assert_trained(cohort, actual, start)


@engines
def test_the_metric_is_the_mean_training_loss_over_the_steps(engine):
    cohort, start = setting()

    def local(client, _, w):
        client.fit(w, length=Length(epochs=2), optimizer=Optimizer(lr=0.0))
        client.fit(w, length=Length(epochs=1, repeat=2), optimizer=Optimizer(lr=0.0), purpose="other")
        return TensorDict(dict(client.metrics), batch_size=[])

    metrics = run(engine, cohort, local, received=start)
    for purpose, epochs in (("train", 2), ("other", 1)):
        for i in range(len(SIZES)):
            steps = batches(cohort, i, purpose=purpose, epochs=epochs)
            losses = [float(cohort.loss(cohort.model(start, x), y, None)) for x, y in steps]
            assert float(metrics[purpose][i]) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_a_mapped_client_may_stand_at_any_place_in_its_cohort():
    """Inside, clients are ordered by falling number of steps; what comes back is in the order of the call."""
    cohort, start = setting(momentum=0.5)
    starts, order = spread(start, len(SIZES)), torch.tensor([1, 3, 0, 2])
    lams = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert [SIZES[i] for i in order] == sorted(SIZES)

    def local(position, state, lam):
        client, state = Client(cohort, position), TensorDict(state, batch_size=[])
        out = client.fit(state, prox=(lam, start), direction=lambda at, grad, l: grad(at) * l, given=(lam,))
        return dict(out.items())

    actual = torch.func.vmap(local)(order, {n: t[order] for n, t in starts.items()}, lams)
    for k, i in enumerate(order.tolist()):
        lam = float(lams[k])
        expected = alone(cohort, i).fit(
            starts[i], prox=(lam, start), direction=lambda at, grad, lam=lam: grad(at) * lam
        )
        assert_states(TensorDict({n: t[k] for n, t in actual.items()}, batch_size=[]), dict(expected.items()))


def test_settings_that_no_optimizer_has_are_refused():
    cohort, start = setting(**ADAMW)
    with pytest.raises(ConfigError, match=r"momentum = 0.9 .*adamw"):
        alone(cohort).fit(start, optimizer=Optimizer(momentum=0.9))
    for settings, message in (
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum = 0.9 .*adamw"),
        ({"optimizer": "adam"}, "Did you mean 'adamw'"),
        ({"schedule": "cosine"}, "constant, linear"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainConfig(**settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"adamw|linear"):
            load(None, {"train": settings})
    config = load(None, ["train.momentum=0.9", "method=fedavg", "method.train.optimizer=adamw"])
    with pytest.raises(ConfigError, match=r"momentum = 0.9 .*adamw"):
        check(config)
    check(load(config, ["method.train.momentum=0"]))
