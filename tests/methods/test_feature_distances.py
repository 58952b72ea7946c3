"""The pull of features: its distances in closed form, its gradient against autograd, both engines alike."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tailorfl.errors import ModelError, TailorflError
from tailorfl.methods.feature_distances import distance_of, feature_pull
from tailorfl.training.sample_privacy import SampleDP
from training.cohorts import ENGINES, cohort_of, fit, model_of, run, source

DISTANCES = ("mean_l2", "batch_l2", "cosine", "pearson", "sdr")


def term(z, fixed, weight=None, distance="mean_l2", **options):
    return distance_of(z, fixed, weight, distance, **options)


def features(samples: int = 6, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(samples, width, generator=rng), torch.randn(samples, width, generator=rng)


def test_distances_are_their_formulas() -> None:
    z, fixed = features(10)
    close = torch.testing.assert_close
    norms = torch.linalg.vector_norm(z - fixed, dim=1)
    close(term(z, fixed, distance="mean_l2"), norms.mean())
    runs = torch.stack([torch.linalg.norm((z - fixed)[:8]), torch.linalg.norm((z - fixed)[8:])])
    close(term(z, fixed, distance="batch_l2"), runs.mean())
    close(term(z, fixed, distance="batch_l2", micro_batch=1), norms.mean())
    close(term(z, fixed, distance="cosine"), (1 - F.cosine_similarity(z, fixed)).mean())
    each = torch.stack([1 - torch.corrcoef(torch.stack([a, b]))[0, 1] for a, b in zip(z, fixed, strict=True)])
    close(term(z, fixed, distance="pearson"), each.mean())
    inner = torch.stack([z[b] @ (fixed[b] - fixed.mean(0)).abs() for b in range(10)])
    close(term(z, fixed, distance="sdr"), inner.abs().mean())


@pytest.mark.parametrize("distance", DISTANCES)
def test_padding_does_not_count(distance: str) -> None:
    z, fixed = features(6)
    weight = torch.ones(9)
    weight[6:] = 0
    wide = [torch.cat([t, torch.full((3, 5), 7.0)]) for t in (z, fixed)]
    torch.testing.assert_close(term(*wide, weight, distance), term(z, fixed, distance=distance))


@pytest.mark.parametrize("distance", ["mean_l2", "batch_l2", "cosine", "pearson"])
def test_equal_features_are_at_distance_0_with_gradient_0(distance: str) -> None:
    z, _ = features()
    z.requires_grad_()
    value = term(z, z.detach().clone(), distance=distance)
    (gradient,) = torch.autograd.grad(value, z)
    assert float(value.detach().abs()) < 1e-6
    assert float(gradient.abs().max()) < 1e-6


def test_of_a_single_sample_the_fedsdr_penalty_is_0() -> None:
    z, fixed = features(1)
    assert float(term(z, fixed, distance="sdr")) == 0.0


def test_privacy_by_sample_needs_a_distance_by_sample() -> None:
    data = source(27)
    model = model_of("mlp", data, hidden=(6,))
    cohort = cohort_of(model, data, dp=SampleDP(1.0, 0.0, "shuffle"))
    start, engine = model.init(0), ENGINES["sequential"]
    for distance in ("batch_l2", "sdr"):
        with pytest.raises(ModelError, match="compares the samples of a batch"):
            fit(engine, cohort, start, term=feature_pull(1.0, distance, start))  # type: ignore[arg-type]
    loose = cohort_of(model, data, dp=SampleDP(1e9, 0.0, "shuffle"))
    private = fit(engine, loose, start, term=feature_pull(1.0, "mean_l2", model.init(1)))
    plain = fit(engine, cohort_of(model, data), start, term=feature_pull(1.0, "mean_l2", model.init(1)))
    for name in start.keys():  # noqa: SIM118
        torch.testing.assert_close(private[name], plain[name], atol=2e-6, rtol=2e-5)


def test_a_pull_of_two_models_is_an_error() -> None:
    data = source(27)
    model = model_of("mlp", data, hidden=(6,))
    start = model.init(0)
    with pytest.raises(TailorflError, match="one model at a time"):
        run(
            ENGINES["sequential"], cohort_of(model, data),
            lambda client, state, received: client.fit(
                {"a": received, "b": received}, term=feature_pull(1.0, "mean_l2", received),
                direction=lambda s, g: s,
            )["a"],
            received=start,
        )  # fmt: skip
