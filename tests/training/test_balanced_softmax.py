"""The balanced softmax as the objective of every method: its values, its gradient, and where it reaches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from methods.settings import NAMES, make, one_of
from methods.small import TRAIN, assert_close, everything, federation, model, shared, simulation
from tailorfl.errors import ConfigError
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import train_config
from tailorfl.runs.job import Job
from tailorfl.settings.loading import load
from tailorfl.settings.train import TrainOverrides
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import LOSSES, class_prior
from tailorfl.training.sample_privacy import SampleDP

BALANCED = replace(TRAIN, objective="balanced_softmax")
CE = LOSSES["classification"]


def loss(g: torch.Tensor, y: list[int], counts: list[float], gamma: float = 1.0) -> torch.Tensor:
    return CE.shifted(class_prior(torch.tensor(counts), gamma))(g, torch.tensor(y), None)


@pytest.mark.parametrize(("label", "wanted"), [(0, 0.2876821), (1, 1.3862944)])
@pytest.mark.parametrize("times", [1.0, 9.0])
def test_its_value_for_two_classes_and_for_a_multiple_of_their_counts(
    label: int, wanted: float, times: float
) -> None:
    found = loss(torch.zeros(1, 2), [label], [3.0 * times, 1.0 * times])
    assert float(found) == pytest.approx(wanted, abs=1e-6)


def test_without_gamma_or_with_equal_counts_it_is_the_cross_entropy() -> None:
    g, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), [0, 2, 1, 1, 0]
    plain = F.cross_entropy(g, torch.tensor(y))
    torch.testing.assert_close(loss(g, y, [5.0, 1.0, 0.0], 0.0), plain)
    torch.testing.assert_close(loss(g, y, [4.0, 4.0, 4.0]), plain)


def test_a_client_of_one_class_learns_nothing() -> None:
    g = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = loss(g, [2, 2, 2], [0.0, 0.0, 7.0, 0.0])
    assert float(found.detach()) == pytest.approx(0.0, abs=1e-6)
    assert float(torch.autograd.grad(found, g)[0].abs().max()) < 1e-6


def test_its_gradient_is_that_of_shifted_probabilities() -> None:
    g = torch.randn(2, 3, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found = torch.autograd.grad(loss(g, [0, 2], [5.0, 2.0, 1.0], 0.5), g)[0]
    shifted = (g + 0.5 * torch.tensor([5.0, 2.0, 1.0]).log()).softmax(1)
    wanted = (shifted - F.one_hot(torch.tensor([0, 2]), 3)) / 2
    torch.testing.assert_close(found, wanted.detach())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("gamma", [1.0, 0.4])
def test_fedavg_with_it_is_fedrods_generic_model(engine: str, gamma: float) -> None:
    """FedRoD has the loss in a term of its own; under partial participation, with clients that lack classes."""
    given: dict[str, Any] = {"engine": engine, "fraction": 0.6, "rounds": 3}
    a = simulation("fedavg", train=replace(BALANCED, gamma=gamma), **given)
    b = simulation(make("fedrod", gamma=gamma), train=TRAIN, **given)
    assert_close(shared(a), shared(b))
    plain = simulation("fedavg", train=TRAIN, **given)
    assert any(not torch.allclose(t, shared(plain)[n], atol=1e-3) for n, t in shared(a).items())


OWN = ("fedrod", "fedem")
"""Methods whose own loss takes the place of the run's."""


@pytest.mark.parametrize("name", one_of(3, [n for n in NAMES if n not in OWN]))
def test_every_method_runs_with_it_and_is_itself_at_gamma_zero(name: str) -> None:
    """FedBN is the one that a model without norms turns into another method; nothing here depends on that."""
    train = replace(TRAIN, epochs=None, steps=2, momentum=0.0)
    zero, plain, one = (
        everything(simulation(make(name), train=t, rounds=2, engine="vectorized"))
        for t in (
            replace(train, objective="balanced_softmax", gamma=0.0),
            train,
            replace(train, objective="balanced_softmax"),
        )
    )
    assert_close(zero, plain)
    assert all(torch.isfinite(t.double()).all() for t in one.values())
    moved = any(not torch.allclose(t.double(), plain[n].double(), atol=1e-5) for n, t in one.items())
    assert moved, f"{name} does not see the objective"


def test_where_it_does_not_fit_that_is_said() -> None:
    with pytest.raises(ConfigError, match="FedRoD has a balanced softmax of its own"):
        simulation("fedrod", train=BALANCED)
    with pytest.raises(ConfigError, match="sample-level privacy does not cover"):
        simulation("fedavg", train=replace(BALANCED, dp=SampleDP(1.0, 1.0, "shuffle")))
    base = federation()
    regression = replace(
        base, source=replace(base.source, y=base.source.y[:, None].float(), task="regression", outputs=1)
    )
    with pytest.raises(ConfigError, match="a task of regression does not have"):
        Simulation(make("fedavg"), regression, model("logistic"), BALANCED)


def test_settings_say_it_for_all_or_for_one_line() -> None:
    config = load(
        {
            "train": {"objective": "balanced_softmax", "gamma": 0.5},
            "methods": ["fedavg", {"name": "fedrod", "train": {"objective": "task"}}],
        },
    )
    jobs = [Job(config, method, 0) for method in config.methods]
    assert [train_config(job).balanced for job in jobs] == [True, False]
    assert train_config(jobs[0]).gamma == 0.5
    assert TrainOverrides(gamma=0.3)["gamma"] == 0.3
    with pytest.raises(ConfigError, match="gamma, which belongs to objective=balanced_softmax"):
        load({"train": {"gamma": 0.5}})
    assert TrainConfig().objective == "task"


def test_classes_may_be_weighed_beside_it() -> None:
    """Both, in one step of all data: Σ_b u_{y_b} CE(g + log n, y) over the weights, by plain torch."""
    step = {"epochs": None, "steps": 1, "batch_size": 0, "momentum": 0.0, "weight_decay": 0.0}
    both = replace(BALANCED, class_weights="client", **step)
    sim = simulation("fedavg", "logistic", train=both, data=federation((9,)), engine="vectorized")
    rows = torch.from_numpy(sim.federation.train[0])
    x, y = sim.federation.source.x[rows].flatten(1), sim.federation.source.y[rows]
    counts = torch.bincount(y, minlength=4).float()
    w, b = (sim.init[n].clone().requires_grad_() for n in ("head.weight", "head.bias"))
    present = counts > 0
    classes = torch.where(present, len(y) / (present.sum() * counts.clamp(min=1)), 0.0)
    loss = F.cross_entropy(x @ w.T + b + counts.clamp(min=1e-12).log(), y, weight=classes)
    slopes = torch.autograd.grad(loss, [w, b])
    sim.step()
    for name, start, slope in zip(("head.weight", "head.bias"), (w, b), slopes, strict=True):
        torch.testing.assert_close(shared(sim)[name], start.detach() - TRAIN.lr * slope, atol=1e-6, rtol=1e-5)
