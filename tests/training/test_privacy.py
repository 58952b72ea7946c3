"""Sample-level privacy: every sample is clipped, the noise has the stated size and is never used twice."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.data.source import Source
from tailorfl.errors import ModelError
from tailorfl.models.dropout import fold_key
from tailorfl.models.functional import Model
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP, box_muller, normal, private_gradient
from training.cohorts import (
    SIZES,
    alone,
    assert_states,
    autograd,
    batches,
    cohort_of,
    engines,
    fit,
    grouped,
    model_of,
    module_at,
    regression,
    run,
    setting,
    source,
)

needs_opacus = pytest.mark.skipif(
    find_spec("opacus") is None, reason="compares with opacus: pip install 'tailorfl[privacy]'"
)


def key(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int64)


def linear_loss(values, x, y, weight, mask):
    """⟨w, x⟩ per sample, whose gradient is the sample itself."""
    terms = x @ values["a"] + values["b"] * y
    return (terms.mean() if weight is None else (terms * weight).sum() / weight.sum()), {}


def samples(count: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x, y = 3.0 * torch.randn(count, 4, generator=rng), torch.randn(count, generator=rng)
    return {"a": torch.zeros(4), "b": torch.zeros(())}, x, y


@pytest.mark.parametrize("clip", [0.5, 4.0, 100.0])
def test_every_sample_is_clipped_over_all_parameters_together(clip):
    values, x, y = samples(9)
    dp = SampleDP(clip, 0.0, "shuffle")
    gradient, loss = private_gradient(linear_loss, values, x, y, None, dp, key(1), key(2))
    whole = torch.cat([x, y[:, None]], dim=1)
    clipped = whole * (clip / whole.norm(dim=1, keepdim=True)).clamp(max=1.0)
    torch.testing.assert_close(torch.cat([gradient["a"], gradient["b"][None]]), clipped.mean(0))
    assert float(loss) == pytest.approx(0.0, abs=1e-6)


def test_padded_samples_count_neither_in_the_sum_nor_in_its_size():
    values, x, y = samples(6)
    weight = torch.tensor([1.0] * 6 + [0.0] * 3)
    padded_x, padded_y = torch.cat([x, 1e6 * torch.ones(3, 4)]), torch.cat([y, torch.ones(3)])
    dp = SampleDP(0.5, 1.3, "shuffle")
    plain, loss = private_gradient(linear_loss, values, x, y, None, dp, key(4), key(2))
    padded, same = private_gradient(linear_loss, values, padded_x, padded_y, weight, dp, key(4), key(2))
    for name in plain:
        torch.testing.assert_close(padded[name], plain[name])
    torch.testing.assert_close(same, loss)


def test_the_noise_has_the_stated_deviation():
    """Added to the sum before division: standard deviation σC/B in every coordinate, mean 0, uncorrelated."""
    values, x, y = samples(5)
    dp, clean = SampleDP(0.8, 1.5, "shuffle"), SampleDP(0.8, 0.0, "shuffle")
    exact, _ = private_gradient(linear_loss, values, x, y, None, clean, key(0), key(0))

    def draw(number):
        noisy, _ = private_gradient(linear_loss, values, x, y, None, dp, number, key(0))
        return torch.cat([noisy["a"] - exact["a"], (noisy["b"] - exact["b"])[None]])

    noise = torch.func.vmap(draw)(torch.stack([key(number) for number in range(2000)])) / (1.5 * 0.8 / 5)
    # 2000 draws: deviations of the mean 0.022, of the variance 0.032, of a correlation 0.022; five of each.
    assert noise.mean(0).abs().max() < 0.11
    assert (noise.var(0) - 1).abs().max() < 0.16
    assert (torch.corrcoef(noise.T) - torch.eye(5)).abs().max() < 0.11


def test_normal_numbers_are_standard_normal():
    z = normal(key(3), 0, torch.Size((40_000,))).double()
    moments = [float(z.pow(k).mean()) for k in (1, 2, 3, 4)]
    assert moments == pytest.approx([0.0, 1.0, 0.0, 3.0], abs=0.15)
    # Kolmogorov-Smirnov distance to the normal law; its 99.9 % quantile is 1.95/√n.
    ordered = torch.sort(z).values
    law = 0.5 * (1 + torch.erf(ordered / math.sqrt(2)))
    assert float((law - torch.arange(1, 40_001) / 40_000).abs().max()) < 1.95 / math.sqrt(40_000)


def test_normal_numbers_have_the_tails_of_the_law():
    """24 bits would end at 5.9, and give whoever sees a number beyond it a certainty that no ε allows."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert 8.5 < float(box_muller(zero, zero)) < 8.6  # the largest there is
    assert float(box_muller(zero - 1, zero)) == 0.0
    assert float(box_muller(zero, torch.tensor([-(2**63)]))) == pytest.approx(-8.57, abs=0.01)
    # One bit of the last of 53 makes another number: between two neighbours of 24 bits there are 2^29 others.
    near = box_muller(torch.tensor([1 << 40, (1 << 40) + (1 << 11)]), torch.zeros(2, dtype=torch.int64))
    assert near[0] != near[1]
    # Far out, where the density falls by half each 0.15: counted against the law, within five deviations.
    z = normal(key(4), 0, torch.Size((2_000_000,))).abs()
    for bound in (3.0, 4.0, 4.5):
        expected = 2_000_000 * math.erfc(bound / math.sqrt(2))
        assert int((z > bound).sum()) == pytest.approx(expected, abs=5 * math.sqrt(expected))


def test_normal_numbers_are_functions_of_key_and_number():
    shape = torch.Size((3, 5))
    drawn = [normal(key(k), n, shape) for k in range(3) for n in range(3)]
    assert len({tuple(d.flatten().tolist()) for d in drawn}) == 9
    mapped = torch.func.vmap(lambda k: normal(k, 2, shape))(torch.arange(3))
    assert all(torch.equal(mapped[k], drawn[3 * k + 2]) for k in range(3))
    assert normal(key(1), 0, torch.Size(())).shape == ()


@engines
def test_a_private_step_is_the_formula_by_hand(engine):
    """Clipping each sample by autograd, without noise; the proximal pull is added outside the clip."""
    cohort, start = setting(dp=SampleDP(0.3, 0.0, "shuffle"))
    centre = start.apply(lambda t: t + 1.0)
    actual = fit(engine, cohort, start, steps=1, prox=(0.7, centre))
    for i in range(len(SIZES)):
        (x, y) = batches(cohort, i, steps=1)[0]
        total = start.apply(torch.zeros_like)
        for k in range(len(x)):
            gradient = TensorDict(autograd(cohort, start, x[k : k + 1], y[k : k + 1]))
            length = torch.cat([t.flatten() for t in gradient.values()]).norm()
            total = total + gradient * min(1.0, 0.3 / float(length))
        expected = start - (total / len(x) + (start - centre) * 0.7) * 0.1
        assert_states(actual[i], dict(expected.items()))


@engines
@pytest.mark.parametrize("batch", [4, 1])
def test_private_gradients_of_trained_slopes_are_the_plain_ones(engine: Any, batch: int) -> None:
    """As many clients as samples a batch, so that an exchange of the two has no wrong shape."""
    model = Model(lambda: nn.Sequential(nn.Linear(5, 6), nn.PReLU(6), nn.Linear(6, 3)))
    start, sizes = model.init(0), (4, 4, 4, 4)
    plain, private = (
        fit(engine, cohort_of(model, source(16), sizes, batch_size=batch, dp=dp), start, epochs=2)
        for dp in (None, SampleDP(math.inf, 0.0, "shuffle"))
    )
    assert_states(private, dict(plain.items()))


@engines
def test_every_client_has_the_noise_that_is_its_own(engine: Any) -> None:
    own = tuple(0.5 * (i + 1) for i in range(len(SIZES)))
    noises = (
        SampleDP(0.5, 1.0, "poisson"),
        SampleDP(0.5, max(own), "poisson", own),
        SampleDP(0.5, 0.0, "poisson"),
    )
    start = setting()[1]
    one, each, none = (fit(engine, setting(dp=dp, batch_size=2)[0], start, steps=1) for dp in noises)
    for i in range(len(SIZES)):
        expected = none[i] + (one[i] - none[i]) * own[i]
        assert_states(each[i], dict(expected.items()), rtol=1e-4, atol=1e-6)


def by_opacus(cohort: Cohort, position: int, start: TensorDict, epochs: int) -> tuple[dict[str, Tensor], int]:
    """The model after opacus' DP-SGD on the client's batches, with our noise, and how many batches were empty.

    A sum is divided by the size of a shuffled batch, and by what is expected of a Poisson batch.
    """
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    config, dp = cohort.config, cohort.config.dp
    assert dp is not None
    poisson, size, empty = dp.sampling == "poisson", config.batch_size, 0
    plan = cohort.plan((position,), "train", size, epochs, None, 0, 1, poisson)
    module = GradSampleModule(module_at(cohort, start))
    sgd = torch.optim.SGD(
        module.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    optimizer = DPOptimizer(sgd, noise_multiplier=0.0, max_grad_norm=dp.clip, expected_batch_size=size)
    noise = torch.from_numpy(cohort.keys((position,), "train/noise").astype(np.int64))[0]
    for step in range(plan.steps[0]):
        rows = torch.from_numpy(plan.rows[0, step, : plan.count[0, step]])
        optimizer.zero_grad()
        if len(rows):
            cohort.loss(module(cohort.source.take(rows)), cohort.source.y[rows], None).backward()
            optimizer.clip_and_accumulate()
        else:
            empty += 1
            for p in optimizer.params:
                p.summed_grad = torch.zeros_like(p)
        divisor = min(size, cohort.sizes[position]) if poisson else len(rows)
        of_step = fold_key(fold_key(noise + step, 0), 0)
        for number, p in enumerate(optimizer.params):
            z = normal(of_step, number, p.shape)
            p.grad = (p.summed_grad + z * dp.noise_of(position) * dp.clip) / divisor
        optimizer.original_optimizer.step()
    state = module.state_dict().items()
    return {n.removeprefix("_module."): t.detach().clone() for n, t in state}, empty


@needs_opacus
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "dp", "batch"),
    [
        pytest.param("mlp", SampleDP(0.2, 0.0, "shuffle"), 4, marks=pytest.mark.slow),
        ("mlp", SampleDP(0.2, 0.8, "shuffle"), 4),
        ("mlp", SampleDP(1e3, 0.0, "shuffle"), 4),
        ("lenet", SampleDP(0.2, 0.8, "shuffle"), 4),
        pytest.param("lenet", SampleDP(1e3, 8e-4, "shuffle"), 4, marks=pytest.mark.slow),
        ("mlp", SampleDP(0.4, 1.5, "poisson", (0.3, 1.1)), 2),
    ],
)
def test_private_training_is_that_of_opacus(name: str, dp: SampleDP, batch: int) -> None:
    sizes = (11, 6)
    data = source(sum(sizes), (1, 28, 28) if name == "lenet" else (5,))
    model = model_of(name, data, **({"hidden": (8,)} if name == "mlp" else {}))
    rule = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}
    cohort, start = cohort_of(model, data, sizes, dp=dp, batch_size=batch, **rule), model.init(3)
    empty = 0
    for position in range(len(sizes)):
        ours = alone(cohort, position).fit(start, length=Length(epochs=3))
        theirs, without_samples = by_opacus(cohort, position, start, epochs=3)
        assert_states(ours, theirs, rtol=1e-5, atol=1e-5)
        assert any(float((t - start[n]).abs().max()) > 1e-3 for n, t in ours.items())
        empty += without_samples
    assert (empty > 0) == (dp.sampling == "poisson")


def pure_noise(cohort: Cohort, position: int, **options: object) -> Tensor:
    """What the noise did to a model whose data gradient is zero, for one client."""
    start = cohort.model.init(0).apply(torch.zeros_like)
    return alone(cohort, position).fit(start, **grouped(**options))["head.weight"].flatten()


def flat_problem(**options: Any) -> Cohort:
    """Two clients of a linear model whose gradient is zero."""
    data = regression(torch.zeros(8, 6), torch.zeros(8))
    return cohort_of(
        model_of("linear", data), data, (4, 4), dp=SampleDP(1.0, 1.0, "shuffle"), lr=1.0, **options
    )


def test_clients_rounds_steps_and_purposes_have_noise_of_their_own():
    cohort, later = flat_problem(batch_size=2), flat_problem(batch_size=2, round=1)
    one = pure_noise(cohort, 0, steps=1)
    others = [
        pure_noise(cohort, 1, steps=1),
        pure_noise(later, 0, steps=1),
        pure_noise(cohort, 0, steps=1, purpose="finetune"),
        pure_noise(cohort, 0, steps=1, first=1),
        pure_noise(cohort, 0, steps=2) - one,
        pure_noise(cohort, 0, steps=1, repeat=2) - one,
    ]
    assert min(float((other - one).abs().min()) for other in others) > 1e-4
    assert torch.equal(pure_noise(cohort, 0, steps=1), one)


@engines
def test_gradients_of_one_batch_never_share_noise(engine):
    """Of two trainings, of two models, or twice in a step: their difference would show the data without any noise."""
    cohort = flat_problem()
    step = Length(steps=1)

    def joint(state, grad):
        return TensorDict({n: grad(state[n], of=n) for n in ("a", "b")})

    def local(client, _, zero):
        first, second = client.fit(zero, length=step), client.fit(zero, length=step)
        both = client.fit({"a": zero, "b": zero}, direction=joint, length=step)
        twice = client.fit(zero, direction=lambda s, g: g(s) - g(s), length=step)
        apart = {"trainings": first - second, "models": both["a"] - both["b"], "gradients": twice}
        return TensorDict(apart, batch_size=[])

    start = cohort.model.init(0).apply(torch.zeros_like)
    for apart in run(engine, cohort, local, received=start).values():
        assert float(apart["head.weight"].abs().min()) > 1e-4


def test_a_loss_that_compares_samples_is_refused():
    rng = torch.Generator().manual_seed(0)
    times = torch.rand(6, 2, generator=rng).round()
    data = Source("s", torch.randn(6, 3, generator=rng), times, "survival", 1)
    cohort = cohort_of(model_of("cox", data), data, (6,), dp=SampleDP(1.0, 1.0, "shuffle"))
    with pytest.raises(ModelError, match="Cox loss"):
        alone(cohort).fit(cohort.model.init(0))
