"""Sample-level privacy: every sample is clipped, the noise has the stated size and is never used twice."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.errors import ModelError
from tailorfl.training.cohort import Cohort
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP, box_muller, normal, private_gradient
from training.cohorts import (
    SIZES,
    alone,
    assert_states,
    batches,
    cohort_of,
    engines,
    fit,
    grouped,
    model_of,
    regression,
    run,
    setting,
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
    found, loss = private_gradient(
        linear_loss, values, x, y, None, SampleDP(clip, 0.0, "shuffle"), key(1), key(2)
    )
    whole = torch.cat([x, y[:, None]], dim=1)
    clipped = whole * (clip / whole.norm(dim=1, keepdim=True)).clamp(max=1.0)
    torch.testing.assert_close(torch.cat([found["a"], found["b"][None]]), clipped.mean(0))
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
    assert torch.equal(normal(key(1), 2, shape), normal(key(1), 2, shape))
    drawn = [normal(key(k), n, shape) for k in range(3) for n in range(3)]
    assert len({tuple(d.flatten().tolist()) for d in drawn}) == 9
    keys = torch.arange(4)
    mapped = torch.func.vmap(lambda k: normal(k, 2, shape))(keys)
    assert all(torch.equal(mapped[i], normal(keys[i], 2, shape)) for i in range(4))
    assert normal(key(1), 0, torch.Size(())).shape == ()


@engines
def test_a_private_step_is_the_formula_by_hand(engine):
    """Clipping each sample by autograd, without noise; the proximal pull is added outside the clip."""
    cohort, start = setting(dp=SampleDP(0.3, 0.0, "shuffle"))
    centre = start.apply(lambda t: t + 1.0)
    found = fit(engine, cohort, start, steps=1, prox=(0.7, centre))
    for i in range(len(SIZES)):
        (x, y) = batches(cohort, i, epochs=None, steps=1)[0]
        total = {n: torch.zeros_like(t) for n, t in start.items()}
        for k in range(len(x)):
            leaves = {n: t.clone().requires_grad_() for n, t in start.items()}
            cohort.loss(cohort.model(leaves, x[k : k + 1]), y[k : k + 1], None).backward()
            length = torch.cat([p.grad.flatten() for p in leaves.values()]).norm()
            for n, p in leaves.items():
                total[n] += p.grad * min(1.0, 0.3 / float(length))
        expected = {n: start[n] - 0.1 * (total[n] / len(x) + 0.7 * (start[n] - centre[n])) for n in total}
        assert_states(found[i], expected)


def pure_noise(cohort: Cohort, position: int, **options: object) -> Tensor:
    """What the noise did to a model whose data gradient is zero, for one client."""
    client = alone(cohort, position)
    start = cohort.model.init(0).apply(torch.zeros_like)
    out = client.fit(start, **grouped(**options))
    return out["head.weight"].flatten()


def flat_problem(sizes: tuple[int, ...] = (4, 4), **train: object) -> Cohort:
    data = regression(torch.zeros(sum(sizes), 6), torch.zeros(sum(sizes)))
    return cohort_of(
        model_of("linear", data), data, sizes, **{"dp": SampleDP(1.0, 1.0, "shuffle"), "lr": 1.0, **train}
    )


def test_clients_rounds_steps_and_purposes_have_noise_of_their_own():
    cohort = flat_problem(batch_size=2)
    later = flat_problem(batch_size=2, round=1)
    one = pure_noise(cohort, 0, steps=1)
    others = [
        pure_noise(cohort, 1, steps=1),
        pure_noise(later, 0, steps=1),
        pure_noise(cohort, 0, steps=1, purpose="finetune"),
        pure_noise(cohort, 0, steps=1, first=1),
        pure_noise(cohort, 0, steps=2) - one,
        pure_noise(cohort, 0, steps=1, repeat=2) - one,
    ]
    for other in others:
        assert float((other - one).abs().min()) > 1e-4
    assert torch.equal(pure_noise(cohort, 0, steps=1), one)


@engines
def test_two_trainings_of_one_client_never_share_noise(engine):
    """Both see the same batches; with the same noise, their difference would show the data without any."""
    cohort = flat_problem()

    def local(client, _, received):
        return TensorDict(
            {
                "a": client.fit(received, length=Length(steps=1)),
                "b": client.fit(received, length=Length(steps=1)),
            },
            batch_size=[],
        )

    start = cohort.model.init(0).apply(torch.zeros_like)
    found = run(engine, cohort, local, received=start)
    assert float((found["a"]["head.weight"] - found["b"]["head.weight"]).abs().min()) > 1e-4


def test_two_gradients_of_one_step_never_share_noise():
    cohort = flat_problem()
    zero = cohort.model.init(0).apply(torch.zeros_like)
    both = alone(cohort).fit(
        {"a": zero, "b": zero},
        direction=lambda s, g: TensorDict({"a": g(s["a"], of="a"), "b": g(s["b"], of="b")}), length=Length(steps=1),
    )  # fmt: skip
    assert float((both["a"]["head.weight"] - both["b"]["head.weight"]).abs().min()) > 1e-4
    twice = alone(cohort).fit(zero, direction=lambda s, g: g(s) - g(s), length=Length(steps=1))
    assert float(twice["head.weight"].abs().min()) > 1e-4


def test_a_loss_that_compares_samples_is_refused():
    rng = torch.Generator().manual_seed(0)
    data = Source(
        "s", torch.randn(6, 3, generator=rng), torch.rand(6, 2, generator=rng).round(), "survival", 1
    )
    cohort = cohort_of(model_of("cox", data), data, (6,), dp=SampleDP(1.0, 1.0, "shuffle"))
    with pytest.raises(ModelError, match="Cox loss"):
        alone(cohort).fit(cohort.model.init(0))
