"""Layers that training treats apart: statistics of norms are torch's own, and masks of dropout follow keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.errors import ClientError
from tailorfl.models.functional import Model
from tailorfl.training.ascent import sam
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP, private_gradient
from training.cohorts import (
    ENGINES,
    FLOAT,
    SIZES,
    alone,
    assert_states,
    assert_trained,
    autograd,
    batches,
    cohort_of,
    engines,
    fit,
    run,
    setting,
    source,
)

# Batch norm over two or three values divides by tiny deviations, so rounding is larger than elsewhere.
LOOSE = {"rtol": 2e-3, "atol": 2e-4}
ADAMW = {"optimizer": "adamw", "lr": 3e-3, "schedule": "linear", "weight_decay": 0.1}


@engines
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (SIZES, {"momentum": 0.5}),
        (SIZES, {"momentum": 0.5, "name": "cnn2"}),
        ((5, 9), {}),
        ((1, 6), {}),
        ((1, 1), {}),
        ((2, 3, 5, 9, 13), {}),
    ],
)
def test_parameters_and_statistics_are_those_of_torch(engine, sizes, options):
    """Last batches have other sizes; one of a single sample is left out."""
    cohort, start = setting("batch", sizes=sizes, lr=0.02, **options)
    assert_trained(cohort, fit(engine, cohort, start, epochs=2), start, LOOSE, epochs=2)
    for i, size in enumerate(sizes):
        steps = batches(cohort, i, epochs=1)
        assert all(len(x) > 1 for x, _ in steps)
        assert len(steps) == size // 4 + (size % 4 > 1)


class Normed(nn.Module):
    """Batch norm behind layers without a bias, whose gradient would be nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 5] -> [batch, 3]."""
        return self.head(torch.tanh(self.norm(self.first(x))))


def without_parameters() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, 3))


def instance_norm() -> nn.Module:
    norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


@engines
@pytest.mark.parametrize(
    ("network", "shape", "settings", "tolerance"),
    [
        (Normed, (5,), ADAMW, {"rtol": 5e-3, "atol": 5e-4}),
        (without_parameters, (5,), {"lr": 0.02}, LOOSE),
        (instance_norm, (1, 6, 6), {"lr": 0.02}, LOOSE),
    ],
)
def test_other_norms_and_rules_are_torchs_too_and_leave_the_start_alone(
    engine, network, shape, settings, tolerance
):
    cohort = cohort_of(Model(network), source(sum(SIZES), shape), **settings)
    start = cohort.model.init(1)
    before = start.clone()
    actual = fit(engine, cohort, start, epochs=4)
    assert all(torch.equal(t, start[n]) for n, t in before.items())
    assert_trained(cohort, actual, start, tolerance, epochs=4)


class Remembering(nn.Linear):
    """A layer, not a norm, that changes buffers of its own as it trains."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("largest", torch.tensor(0.0))

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.passes.add_(1)
                self.largest.copy_(torch.maximum(self.largest, self.weight.abs().max()))
        return super().forward(input)


@engines
def test_buffers_that_a_forward_pass_changes_are_each_clients_own_and_leave_the_start_alone(engine):
    cohort = cohort_of(Model(Remembering), source(sum(SIZES)))
    start = cohort.model.init(1)
    before = start.clone()
    actual = fit(engine, cohort, start, epochs=2)
    assert all(torch.equal(t, start[n]) for n, t in before.items())
    assert_trained(cohort, actual, start, epochs=2)


@engines
def test_every_step_counts_once(engine):
    cohort, start = setting("batch", lr=0.02)
    counted = fit(engine, cohort, start, epochs=3, repeat=2)["norm1.num_batches_tracked"]
    assert counted.tolist() == [3 * 2 * steps for steps in (2, 1, 3, 1)]
    assert counted.dtype == torch.int64


@engines
def test_a_norm_layer_that_is_not_trained_stays_in_evaluation_mode(engine):
    """Its statistics are constants, and its outputs use them instead of the batch's."""
    cohort, start = setting("batch", lr=0.02)
    start["norm1.running_mean"] += 0.3
    start["norm1.running_var"] *= 2.0
    head = ("head.weight", "head.bias")
    actual = fit(engine, cohort, start, train=head)
    assert all(torch.equal(t, start[n].expand_as(t)) for n, t in actual.items() if n not in head)
    for i in range(len(SIZES)):
        expected = start.clone()
        for x, y in batches(cohort, i):
            gradient = autograd(cohort, expected, x, y)
            expected.update({n: expected[n] - 0.02 * gradient[n] for n in head})
        assert_states(actual[i], dict(expected.items()))


@engines
def test_training_any_parameter_of_a_norm_layer_makes_its_statistics_move(engine):
    cohort, start = setting("batch", lr=0.02)
    actual = fit(engine, cohort, start, train=("norm1.bias",))
    assert torch.equal(actual["norm1.weight"], start["norm1.weight"].expand_as(actual["norm1.weight"]))
    assert not torch.allclose(
        actual["norm1.running_mean"], start["norm1.running_mean"].expand(len(SIZES), -1)
    )


@engines
def test_only_the_first_pass_of_a_step_updates_statistics(engine):
    """SAM's second pass sees the batch at the ascended weights; the running statistics must not."""
    cohort, start = setting("batch", lr=0.02)
    plain = fit(engine, cohort, start, steps=1)
    flat = fit(engine, cohort, start, steps=1, direction=sam(0.5))
    for n in cohort.model.buffers:
        torch.testing.assert_close(flat[n], plain[n], **LOOSE)
    assert not torch.allclose(flat["fc1.weight"], plain["fc1.weight"])


@engines
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"norm": "batch", "lr": 0.02}, LOOSE),
        ({"momentum": 0.6, "weight_decay": 0.02, "clip": 0.5}, {"rtol": 1e-3, "atol": 1e-5}),
    ],
)
def test_two_models_that_train_together_keep_statistics_and_clips_of_their_own(engine, settings, tolerance):
    """Each is the plain training of its own start."""
    cohort, start = setting(**settings)
    other = start.apply(lambda t: 3.0 * t + 0.1 if t.is_floating_point() else t)

    def direction(state, grad):
        return TensorDict({n: grad(state[n], of=n) for n in ("a", "b")})

    def local(client, _, received):
        return TensorDict(client.fit(dict(received.items()), direction=direction), batch_size=[])

    both = TensorDict({"a": start, "b": other}, batch_size=[])
    actual = run(engine, cohort, local, received=both)
    for name, begin in both.items():
        assert_trained(cohort, actual[name], begin, tolerance)


def test_batches_of_one_sample_are_an_error_that_names_the_client():
    cohort, start = setting("batch", batch_size=1)
    with pytest.raises(ClientError, match=r"client 0, round 1, stage 'train'.*more than 1 value per channel"):
        alone(cohort).fit(start)


PRIVATE = {"rtol": 1e-3, "atol": 1e-5}

# (settings of the run, options of the fit, tolerance)
FITS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, float]]] = {
    "plain": ({}, {}, FLOAT),
    "repeat": ({}, {"repeat": 2}, FLOAT),
    "sam": ({}, {"direction": sam(0.1)}, FLOAT),
    "steps": ({}, {"steps": 5, "first": 2}, FLOAT),
    "convolutions": ({"name": "cnn2"}, {}, FLOAT),
    "convolutions, repeat": ({"name": "cnn2"}, {"repeat": 2}, FLOAT),
    "convolutions, sam": ({"name": "cnn2"}, {"direction": sam(0.1)}, FLOAT),
    # Clients with batches of different sizes take the same step one group after the other.
    "batch norm": ({"norm": "batch", "lr": 0.02}, {"epochs": 2}, LOOSE),
    "clipped": ({"dp": SampleDP(0.5, 0.0, "shuffle")}, {}, PRIVATE),
    "private": ({"dp": SampleDP(0.5, 1.0, "shuffle")}, {}, PRIVATE),
}


def dropout_setting(**options: Any) -> tuple[Cohort, TensorDict]:
    return setting(dropout=0.4, hidden=(16, 12), **options)


@pytest.mark.parametrize(
    ("settings", "options", "tolerance"),
    [
        pytest.param(*fit, id=name, marks=[pytest.mark.slow] if name.startswith("convolutions, ") else [])
        for name, fit in FITS.items()
    ],
)
def test_masks_are_equal_across_engines_and_chunk_sizes(settings, options, tolerance):
    cohort, start = dropout_setting(**settings)
    reference = fit(ENGINES["sequential"], cohort, start, **options)
    for engine in ENGINES.values():
        assert_states(fit(engine, cohort, start, **options), dict(reference.items()), **tolerance)


@engines
def test_masks_do_not_depend_on_who_trains_along(engine):
    cohort, start = dropout_setting()
    together, fewer = fit(engine, cohort, start), fit(engine, cohort.part([1, 2]), start)
    assert_states(fewer, dict(together[[1, 2]].items()), **FLOAT)


@engines
def test_a_fit_by_pieces_has_the_masks_of_the_whole(engine):
    cohort, start = dropout_setting()
    whole = fit(engine, cohort, start, steps=5)

    def by_pieces(client, _, w):
        return client.fit(client.fit(w, length=Length(steps=2)), length=Length(steps=3, first=2))

    assert_states(run(engine, cohort, by_pieces, received=start), dict(whole.items()), **FLOAT)


def test_every_step_and_repetition_has_new_masks():
    """With equal samples, steps of equal masks would have equal gradients."""
    cohort, start = dropout_setting()
    cohort.source.x[:] = cohort.source.x[0]
    cohort.source.y[:] = 0

    def moves(**options):
        moved = fit(ENGINES["sequential"], cohort.part([2]), start, lr=1e-4, **options)
        return (moved - start)["head.weight"]

    one = moves(steps=1)
    for other in (moves(steps=2) - one, moves(steps=1, repeat=2) - one, moves(steps=1, first=1)):
        assert not torch.allclose(other, one, rtol=0.05)


def test_every_sample_of_a_private_gradient_has_a_dropout_key_of_its_own():
    """Otherwise one mask would serve the whole batch. Samples are unit vectors: the gradient shows keys."""

    def loss(values, x, y, weight, key):
        return (values["w"] * x[0]).sum() * ((key >> 8) & 0xFFFF).float(), {}

    x, dp = torch.eye(8), SampleDP(1e9, 0.0, "shuffle")
    values, keys = {"w": torch.zeros(8)}, (torch.tensor(1), torch.tensor(2))
    gradient, _ = private_gradient(loss, values, x, x[0], None, dp, *keys)
    assert len(set(gradient["w"].tolist())) == 8


@engines
def test_evaluation_drops_nothing(engine):
    cohort, start = dropout_setting()

    def local(client, _, received):
        return TensorDict({"loss": client.loss(received)}, batch_size=[])

    losses = run(engine, cohort, local, received=start)["loss"]
    for i, rows in enumerate(cohort.members):
        x, y = cohort.source.x[rows], cohort.source.y[rows]
        expected = float(cohort.loss(cohort.model(start, x), y, None))
        assert float(losses[i]) == pytest.approx(expected, rel=1e-5)
