"""Batch norm in local training: statistics are torch's own, for one client and for unequal cohorts."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tailorfl.errors import ClientError
from tailorfl.models.functional import Model
from tailorfl.training.ascent import sam
from tailorfl.training.cohort import Cohort
from training.cohorts import (
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
    torch_sgd,
)

# Batch norm over two or three values divides by tiny deviations, so rounding is larger than elsewhere.
LOOSE = {"rtol": 2e-3, "atol": 2e-4}


def setting(name: str = "mlp", sizes: tuple[int, ...] = SIZES, **train: object) -> tuple[Cohort, TensorDict]:
    data = source(sum(sizes), (5,) if name == "mlp" else (1, 8, 8))
    options = {"hidden": (6,)} if name == "mlp" else {}
    model = model_of(name, data, norm="batch", **options)
    return cohort_of(model, data, sizes, **{"lr": 0.02, **train}), model.init(1)


@engines
@pytest.mark.parametrize("name", ["mlp", "cnn2"])
def test_parameters_and_statistics_are_those_of_torch(engine, name):
    """Sizes 7, 3, 12, 5 in batches of 4: last batches of 3, 3, 4, and of one sample, which is left out."""
    cohort, start = setting(name, momentum=0.5)
    found = fit(engine, cohort, start, epochs=2)
    for i in range(len(SIZES)):
        assert_states(
            found[i],
            torch_sgd(cohort, i, start, batches(cohort, i, epochs=2), lr=0.02, momentum=0.5),
            **LOOSE,
        )


@engines
def test_every_step_counts_once(engine):
    cohort, start = setting()
    found = fit(engine, cohort, start, epochs=3, repeat=2)
    expected = [3 * 2 * steps for steps in (2, 1, 3, 1)]
    assert found["norm1.num_batches_tracked"].tolist() == expected
    assert found["norm1.num_batches_tracked"].dtype == torch.int64


@engines
@pytest.mark.parametrize("sizes", [(5, 9), (1, 6), (1, 1), (2, 3, 5, 9, 13)])
def test_a_last_batch_of_one_sample_is_left_out(engine, sizes):
    cohort, start = setting(sizes=sizes)
    found = fit(engine, cohort, start)
    for i, size in enumerate(sizes):
        steps = batches(cohort, i)
        assert all(len(x) > 1 for x, _ in steps)
        assert len(steps) == size // 4 + (size % 4 > 1)
        assert_states(found[i], torch_sgd(cohort, i, start, steps, lr=0.02), **LOOSE)


@engines
def test_a_norm_layer_that_is_not_trained_stays_in_evaluation_mode(engine):
    """Its statistics are constants, and its outputs use them instead of the batch's."""
    cohort, start = setting()
    start["norm1.running_mean"] += 0.3
    start["norm1.running_var"] *= 2.0
    head = ("head.weight", "head.bias")
    found = fit(engine, cohort, start, train=head)
    for n in start.keys():  # noqa: SIM118
        if n not in head:
            assert torch.equal(found[n], start[n].expand_as(found[n])), n
    for i in range(len(SIZES)):
        expected = {n: t.clone() for n, t in start.items()}
        for x, y in batches(cohort, i):
            leaves = {n: expected[n].clone().requires_grad_() for n in head}
            cohort.loss(cohort.model({**expected, **leaves}, x), y, None).backward()
            expected.update({n: (p - 0.02 * p.grad).detach() for n, p in leaves.items()})
        assert_states(found[i], expected)


@engines
def test_training_any_parameter_of_a_norm_layer_makes_its_statistics_move(engine):
    cohort, start = setting()
    found = fit(engine, cohort, start, train=("norm1.bias",))
    assert torch.equal(found["norm1.weight"], start["norm1.weight"].expand_as(found["norm1.weight"]))
    assert not torch.allclose(found["norm1.running_mean"], start["norm1.running_mean"].expand(len(SIZES), -1))


@engines
def test_a_norm_layer_without_parameters_follows_the_training_of_the_rest(engine):
    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, 3))

    data = source(sum(SIZES))
    cohort = cohort_of(Model(factory), data, lr=0.02)
    start = cohort.model.init(0)
    found = fit(engine, cohort, start)
    for i in range(len(SIZES)):
        assert_states(found[i], torch_sgd(cohort, i, start, batches(cohort, i), lr=0.02), **LOOSE)


@engines
def test_only_the_first_pass_of_a_step_updates_statistics(engine):
    """SAM's second pass sees the batch at the ascended weights; the running statistics must not."""
    cohort, start = setting()
    plain, flat = (
        fit(engine, cohort, start, steps=1),
        fit(engine, cohort, start, steps=1, direction=sam(0.5)),
    )
    for n in cohort.model.buffers:
        torch.testing.assert_close(flat[n], plain[n], **LOOSE)
    assert not torch.allclose(flat["fc1.weight"], plain["fc1.weight"])


@engines
def test_two_models_that_train_together_keep_statistics_of_their_own(engine):
    cohort, start = setting()
    other = start.apply(lambda t: t + 0.1 if t.is_floating_point() else t)

    def direction(state, grad):
        return TensorDict({"a": grad(state["a"], of="a"), "b": grad(state["b"], of="b")})

    def local(client, _, received):
        out = client.fit({"a": received["a"], "b": received["b"]}, direction=direction)
        return TensorDict(out, batch_size=[])

    both = TensorDict({"a": start, "b": other}, batch_size=[])
    found = run(engine, cohort, local, received=both)
    for i in range(len(SIZES)):
        for name, begin in (("a", start), ("b", other)):
            assert_states(found[name][i], torch_sgd(cohort, i, begin, batches(cohort, i), lr=0.02), **LOOSE)


def test_batches_of_one_sample_are_an_error_that_names_the_client():
    cohort, start = setting(batch_size=1)
    with pytest.raises(ClientError, match=r"client 0, round 1, stage 'train'.*more than 1 value per channel"):
        alone(cohort).fit(start)


@engines
def test_instance_norm_with_running_statistics_is_torchs_and_leaves_its_inputs_alone(engine):
    def factory() -> nn.Module:
        norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))

    data = source(sum(SIZES), (1, 6, 6))
    cohort = cohort_of(Model(factory), data, lr=0.02)
    start = cohort.model.init(0)
    before = start.clone()
    found = fit(engine, cohort, start)
    assert all(torch.equal(t, start[n]) for n, t in before.items())
    for i in range(len(SIZES)):
        assert_states(found[i], torch_sgd(cohort, i, start, batches(cohort, i), lr=0.02), **LOOSE)
