"""`Client.fit` is torch.optim.SGD on the planned batches, for one client and for a cohort."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.models.functional import Model
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length
from tailorfl.training.update import Optimizer
from training.cohorts import (
    ENGINES,
    FLOAT,
    SIZES,
    alone,
    assert_states,
    batches,
    cohort_of,
    engines,
    fit,
    model_of,
    run,
    source,
    spread,
    torch_sgd,
)

MODELS = {
    "mlp": ((5,), {"hidden": (8, 6)}),
    "cnn2": ((1, 8, 8), {}),
    "group norm": ((1, 8, 8), {"norm": "group"}),
}
SETTINGS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.05},
    "clipped": {"clip": 0.3},
    "all": {"momentum": 0.8, "weight_decay": 0.02, "clip": 0.5},
}


def setting(name: str = "mlp", sizes: tuple[int, ...] = SIZES, **train: object) -> tuple[Cohort, TensorDict]:
    shape, options = MODELS[name]
    data = source(sum(sizes), shape)
    model = model_of("mlp" if name == "mlp" else "cnn2", data, **options)
    return cohort_of(model, data, sizes, **train), model.init(1)


@engines
@pytest.mark.parametrize("extra", SETTINGS.values(), ids=SETTINGS.keys())
def test_fit_is_torch_sgd_on_the_planned_batches(engine, extra):
    cohort, start = setting("mlp", **extra)
    found = fit(engine, cohort, start, epochs=2)
    for i in range(len(SIZES)):
        assert_states(found[i], torch_sgd(cohort, i, start, batches(cohort, i, epochs=2), **extra))


@pytest.mark.parametrize("name", ["cnn2", "group norm"])
@pytest.mark.parametrize(
    "engine", [ENGINES["sequential"], ENGINES["chunks of 3"]], ids=["sequential", "chunks"]
)
def test_fit_is_torch_sgd_for_convolutions(engine, name):
    extra = SETTINGS["all"]
    cohort, start = setting(name, **extra)
    found = fit(engine, cohort, start)
    for i in range(len(SIZES)):
        assert_states(found[i], torch_sgd(cohort, i, start, batches(cohort, i), **extra))


@engines
@pytest.mark.parametrize("strength", ["number", "tensor"])
@pytest.mark.parametrize("extra", [{}, SETTINGS["all"]], ids=["plain", "all"])
def test_the_proximal_term_is_the_gradient_of_its_penalty(engine, strength, extra):
    cohort, start = setting(**extra)
    starts = spread(start, len(SIZES))
    lams = torch.tensor([0.5, 2.0, 0.0, 1.0])

    def local(client, state, received):
        lam = 0.7 if strength == "number" else state["lam"]
        return client.fit(state["v"], prox=(lam, received))

    states = TensorDict({"v": starts, "lam": lams}, batch_size=[len(SIZES)])
    found = run(engine, cohort, local, states, start)
    for i in range(len(SIZES)):
        lam = 0.7 if strength == "number" else float(lams[i])
        assert_states(
            found[i], torch_sgd(cohort, i, starts[i], batches(cohort, i), prox=(lam, start), **extra)
        )


@engines
def test_parameters_that_are_not_trained_stay_bit_identical(engine):
    cohort, start = setting(momentum=0.9, weight_decay=0.1, clip=0.5)
    starts = spread(start, len(SIZES))
    head = ("head.weight", "head.bias")
    found = run(engine, cohort, lambda c, state, _: c.fit(state, train=head, prox=(1.0, state)), starts)
    for n in start.keys():  # noqa: SIM118
        same = torch.equal(found[n], starts[n])
        assert same == (n not in head), n
    for i in range(len(SIZES)):
        expected = torch_sgd(
            cohort, i, starts[i], batches(cohort, i), train=head, momentum=0.9, weight_decay=0.1, clip=0.5,
            prox=(1.0, starts[i]),
        )  # fmt: skip
        assert_states(found[i], expected)


@engines
def test_training_nothing_returns_the_start(engine):
    cohort, start = setting()
    for options in ({"train": ()}, {"epochs": 0}, {"steps": 0}):
        found = fit(engine, cohort, start, **options)
        assert all(torch.equal(found[n], t.expand(len(SIZES), *t.shape)) for n, t in start.items())


@engines
def test_steps_first_and_purpose_choose_batches_of_one_sequence(engine):
    cohort, start = setting()
    whole = fit(engine, cohort, start, steps=7)

    def by_pieces(client, _, w):
        w = client.fit(w, length=Length(steps=3))
        w = client.fit(w, length=Length(steps=1, first=3))
        return client.fit(w, length=Length(steps=3, first=4))

    pieces = run(engine, cohort, by_pieces, received=start)
    assert_states(pieces, dict(whole.items()), **FLOAT)
    other = fit(engine, cohort, start, steps=7, purpose="finetune")
    assert not torch.allclose(other["fc1.weight"], whole["fc1.weight"])
    for i in range(len(SIZES)):
        expected = torch_sgd(cohort, i, start, batches(cohort, i, epochs=None, steps=7, purpose="finetune"))
        assert_states(other[i], expected)


@engines
def test_repeat_takes_several_steps_on_each_batch(engine):
    cohort, start = setting(momentum=0.5)
    found = fit(engine, cohort, start, repeat=3)
    for i in range(len(SIZES)):
        steps = [batch for batch in batches(cohort, i) for _ in range(3)]
        assert_states(found[i], torch_sgd(cohort, i, start, steps, momentum=0.5))


@engines
@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 5}], ids=["epochs", "steps"])
@pytest.mark.parametrize("limit", [0, 2, 5, 100])
def test_a_limit_lets_each_client_take_its_own_first_steps(engine, length, limit):
    cohort, start = setting()
    data, sizes = cohort.source, SIZES
    limited = cohort_of(cohort.model, data, sizes, limit=limit)
    found = fit(engine, limited, start, **length)
    for i in range(len(sizes)):
        steps = batches(cohort, i, **{"epochs": None, "steps": None, **length})
        assert_states(found[i], torch_sgd(cohort, i, start, steps[:limit]))


@engines
def test_settings_of_the_run_hold_unless_one_fit_overrides_them(engine):
    cohort, start = setting(steps=3, lr=0.2, momentum=0.5, batch_size=2, weight_decay=0.1)
    by_default = fit(engine, cohort, start)
    overridden = fit(engine, cohort, start, epochs=1, lr=0.05, momentum=0.0, weight_decay=0.0, batch_size=0)
    for i, size in enumerate(SIZES):
        steps = batches(cohort, i, batch=2, epochs=None, steps=3)
        assert_states(
            by_default[i], torch_sgd(cohort, i, start, steps, lr=0.2, momentum=0.5, weight_decay=0.1)
        )
        full = batches(cohort, i, batch=0)
        assert [len(x) for x, _ in full] == [size]
        assert_states(overridden[i], torch_sgd(cohort, i, start, full, lr=0.05))


@engines
def test_clients_without_samples_are_left_as_they_are(engine):
    cohort, start = setting(sizes=(5, 0, 1))
    starts = spread(start, 3)
    found = run(engine, cohort, lambda c, state, _: c.fit(state, length=Length(epochs=3)), starts)
    assert all(torch.equal(found[n][1], starts[n][1]) for n in start.keys())  # noqa: SIM118
    for i in (0, 2):
        assert_states(found[i], torch_sgd(cohort, i, starts[i], batches(cohort, i, epochs=3)))


@engines
def test_a_state_may_have_its_names_in_any_order(engine):
    cohort, start = setting()
    backwards = TensorDict({n: start[n] for n in reversed(list(start.keys()))}, batch_size=[])
    found, expected = fit(engine, cohort, backwards), fit(engine, cohort, start)
    assert list(found.keys()) == list(backwards.keys())
    assert all(torch.equal(t, found[n]) for n, t in expected.items())


@engines
def test_a_buffer_of_the_model_travels_along_even_if_it_is_named_to_be_trained(engine):
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(5, 3)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x):
            return self.head(x) * self.scale

    data = source(sum(SIZES))
    cohort = cohort_of(Model(Scaled), data)
    start = cohort.model.init(0)
    found = fit(engine, cohort, start, train=tuple(start.keys()))
    assert torch.equal(found["scale"], torch.full((len(SIZES),), 2.0))
    for i in range(len(SIZES)):
        assert_states(found[i], torch_sgd(cohort, i, start, batches(cohort, i)))


@engines
def test_the_metric_is_the_mean_training_loss_over_the_steps(engine):
    cohort, start = setting()

    def local(client, _, w):
        client.fit(w, length=Length(epochs=2), optimizer=Optimizer(lr=0.0))
        client.fit(w, length=Length(epochs=1, repeat=2), optimizer=Optimizer(lr=0.0), purpose="other")
        return TensorDict(dict(client.metrics), batch_size=[])

    found = run(engine, cohort, local, received=start)
    for purpose, epochs in (("train", 2), ("other", 1)):
        for i in range(len(SIZES)):
            steps = batches(cohort, i, purpose=purpose, epochs=epochs)
            losses = [float(cohort.loss(cohort.model(start, x), y, None)) for x, y in steps]
            assert float(found[purpose][i]) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_a_mapped_client_may_stand_at_any_place_in_its_cohort():
    """Inside, clients are ordered by falling number of steps; what comes back is in the order of the call."""
    cohort, start = setting(momentum=0.5)
    starts, order = spread(start, len(SIZES)), torch.tensor([1, 3, 0, 2])
    lams = torch.tensor([0.1, 0.2, 0.3, 0.4])

    def local(position, state, lam):
        client = Client(cohort, position)
        given = TensorDict(state, batch_size=[])
        out = client.fit(given, prox=(lam, start), direction=lambda at, grad, l: grad(at) * l, given=(lam,))
        return dict(out.items())

    assert [SIZES[i] for i in order] == sorted(SIZES)
    found = torch.func.vmap(local)(order, {n: t[order] for n, t in starts.items()}, lams)
    for k, i in enumerate(order.tolist()):
        lam = float(lams[k])
        expected = alone(cohort, i).fit(
            starts[i], prox=(lam, start), direction=lambda at, grad, lam=lam: grad(at) * lam
        )
        assert_states(TensorDict({n: t[k] for n, t in found.items()}, batch_size=[]), dict(expected.items()))


@engines
def test_a_learning_rate_may_be_a_tensor_of_each_clients_own(engine):
    """Momentum, clipping and batches that end at different steps included."""
    cohort, start = setting(momentum=0.5, weight_decay=0.1, clip=0.4)
    rates = torch.tensor([0.1, 0.02, 0.3, 0.05])
    states = TensorDict({"rate": rates}, batch_size=[len(SIZES)])
    found = run(
        engine,
        cohort,
        lambda client, state, w: client.fit(w, optimizer=Optimizer(lr=state["rate"])),
        states,
        start,
    )
    for i, rate in enumerate(rates.tolist()):
        assert_states(found[i], dict(alone(cohort, i).fit(start, optimizer=Optimizer(lr=rate)).items()))
