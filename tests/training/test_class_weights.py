"""Objectives that count classes: class weights and the balanced softmax (of every method: `references`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

import tailorfl
from methods.settings import NAMES, make, one_of
from methods.small import TRAIN, assert_close, everything, federation, model, shared, simulation
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import train_config
from tailorfl.runs.job import Job
from tailorfl.settings.loading import load
from tailorfl.settings.train import TrainOverrides
from tailorfl.training.cohort import Cohort, TrainConfig
from tailorfl.training.objective import LOSSES, balanced, class_counts, class_prior
from tailorfl.training.sample_privacy import SampleDP
from training.cohorts import batches, cohort_of, engines, fit, model_of, run

BALANCED = replace(TRAIN, objective="balanced_softmax")
SAMPLE, CLIENT = SampleDP(1.0, 1.0, "poisson"), ClientDP(1.0, 1.0)


def binary() -> Source:
    """Of 27 samples about a fifth is positive."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(27, 4, generator=rng)
    return Source("rare", x, (torch.rand(27, generator=rng) < 0.2).long(), "binary", 1)


def weighed(**options: Any) -> tuple[Cohort, TensorDict]:
    """A cohort of clients with class weights of their own, and a state to start from."""
    data = binary()
    cohort = cohort_of(model_of("logistic", data), data, **options)
    cohort = replace(cohort, class_weights=balanced(class_counts(data, cohort.members)))
    return cohort, cohort.model.init(0)


def losses_of(cohort: Cohort, client: int, state: Any, x: Tensor, y: Tensor) -> Tensor:
    """The losses of samples, weighed by what scikit-learn says of the client's classes."""
    labels = cohort.source.y[torch.from_numpy(cohort.members[client])].numpy()
    there, weights = np.unique(labels), np.ones(2)
    weights[there] = compute_class_weight("balanced", classes=there, y=labels)
    logits = cohort.model(state, x)[:, 0]
    weight = torch.from_numpy(weights).float()[y]
    return F.binary_cross_entropy_with_logits(logits, y.float(), weight, reduction="none")


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_classes_count_what_scikit_learn_says(classes: int) -> None:
    y = np.random.default_rng(0).integers(0, classes, 40)
    counts = torch.from_numpy(np.bincount(y, minlength=classes)).float()
    expected = compute_class_weight("balanced", classes=np.arange(classes), y=y)
    assert balanced(counts).numpy() == pytest.approx(expected, rel=1e-6)


def test_classes_that_do_not_occur_leave_all_weights_finite() -> None:
    weights = balanced(torch.tensor([[6.0, 2.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 0.0]]))
    expected = np.array([[8 / 12, 2.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert weights.numpy() == pytest.approx(expected)


@engines
def test_a_binary_task_descends_the_weighed_loss_and_reports_it(engine: Any) -> None:
    """Batches of 4 of clients with 7, 3, 12 and 5 samples, so some are padded, and some of one class."""
    cohort, start = weighed(lr=0.3)
    trained = fit(engine, cohort, start, epochs=2)

    def local(client: Any, _: Any, received: Any) -> TensorDict:
        summed = client.summed(received, lambda seen: seen.loss.expand(len(seen.y)))
        return TensorDict({"loss": client.loss(received), "sum": summed}, batch_size=[])

    reported = run(engine, cohort, local, received=start)
    for k, rows in enumerate(cohort.members):
        state = {n: start[n] for n in cohort.model.parameters}
        for x, y in batches(cohort, k, epochs=2):
            leaves = {n: t.detach().requires_grad_() for n, t in state.items()}
            losses_of(cohort, k, leaves, x, y).mean().backward()
            state = {n: t - 0.3 * t.grad for n, t in leaves.items()}
        for n, t in state.items():
            torch.testing.assert_close(trained[n][k], t.detach(), atol=1e-5, rtol=0)
        at = torch.from_numpy(rows)
        losses = losses_of(cohort, k, start, cohort.source.x[at], cohort.source.y[at])
        assert float(reported["loss"][k]) == pytest.approx(float(losses.mean()), rel=1e-5)
        assert float(reported["sum"][k]) == pytest.approx(float(losses.sum()), rel=1e-5)


def weighed_run(data: Source, weights: Any, clients: int = 3, **privacy: Any) -> Simulation:
    """A run on three clients, of which the first `clients` train."""
    rows = np.arange(len(data), dtype=np.int64)
    empty = (rows[:0],) * 3
    parts = Federation(data, tuple(np.array_split(rows, 3)), empty, empty, ("a", "b", "c"), clients)
    train = TrainConfig(class_weights=weights, dp=privacy.pop("dp", None))
    method = make("fedavg" if privacy else "local")
    return Simulation(method, parts, model_of("logistic", data), train, weights="uniform", **privacy)


@pytest.mark.parametrize(
    ("weights", "privacy", "message"),
    [
        ("client", {"dp": SAMPLE}, "sample-level privacy does not cover"),
        ("federated", {"dp": SAMPLE}, "sample-level privacy does not cover"),
        ("federated", {"client_dp": CLIENT}, r"client-level\s+privacy does not cover"),
    ],
)
def test_weights_that_privacy_does_not_cover_are_refused(weights: Any, privacy: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        weighed_run(binary(), weights, **privacy)
    weighed_run(binary(), "client", client_dp=CLIENT).step()


def test_tasks_without_classes_and_methods_with_a_loss_of_their_own_are_refused(tmp_path: Path) -> None:
    prices = Source("prices", torch.randn(9, 2), torch.randn(9, 1), "regression", 1)
    with pytest.raises(ConfigError, match=r"class_weights=client .* regression"):
        weighed_run(prices, "client")
    train = {"steps": 1, "class_weights": "client"}
    data = {"clients": 2, "samples": 60}
    with pytest.raises(ConfigError, match=r"this method replaces that loss"):
        tailorfl.run(method="fedrod", data=data, train=train, rounds=1, seeds=1, out=tmp_path / "run")


def test_held_out_clients_do_not_count_in_federated_weights() -> None:
    data = binary()
    sim = weighed_run(data, "federated", clients=2)
    counts = torch.bincount(data.y[torch.from_numpy(np.concatenate(sim.federation.train[:2]))], minlength=2)
    weights = sim.cohort((2,), own=True).class_weights
    assert weights is not None
    assert weights[0].tolist() == pytest.approx((counts.sum() / (2 * counts)).tolist())


# -- the balanced softmax ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "gamma"),
    [([3.0, 1.0, 5.0], 1.0), ([27.0, 9.0, 45.0], 1.0), ([5.0, 2.0, 1.0], 0.5), ([5.0, 1.0, 0.0], 0.0)],
)
def test_the_balanced_softmax_and_its_gradient_are_those_of_shifted_probabilities(
    counts: list[float], gamma: float
) -> None:
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(2)).requires_grad_()
    y, prior = torch.tensor([0, 1]), class_prior(torch.tensor(counts), gamma)
    loss = LOSSES["classification"].shifted(prior)(logits, y, None)
    weighed = logits.detach().exp() * torch.tensor(counts) ** gamma
    shares = weighed / weighed.sum(1, keepdim=True)
    assert float(loss.detach()) == pytest.approx(float(-shares[[0, 1], y].log().mean()), abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, (shares - F.one_hot(y, 3)) / 2)


def test_a_client_of_one_class_learns_nothing() -> None:
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    prior = class_prior(torch.tensor([0.0, 0.0, 7.0, 0.0]), 1.0)
    loss = LOSSES["classification"].shifted(prior)(logits, torch.tensor([2, 2, 2]), None)
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)
    assert float(torch.autograd.grad(loss, logits)[0].abs().max()) < 1e-6


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("gamma", [1.0, 0.4])
def test_fedavg_with_it_is_fedrods_generic_model(engine: str, gamma: float) -> None:
    """FedRoD has the loss in a term of its own; under partial participation, with clients that lack classes."""
    options: dict[str, Any] = {"engine": engine, "fraction": 0.6, "rounds": 3}
    fedavg = shared(simulation("fedavg", train=replace(BALANCED, gamma=gamma), **options))
    assert_close(fedavg, shared(simulation(make("fedrod", gamma=gamma), train=TRAIN, **options)))
    plain = shared(simulation("fedavg", train=TRAIN, **options))
    assert any(not torch.allclose(t, plain[n], atol=1e-3) for n, t in fedavg.items())


@pytest.mark.parametrize("name", one_of(6, [n for n in NAMES if n not in ("fedrod", "fedem")]))
def test_every_method_runs_with_it_and_is_itself_at_gamma_zero(name: str) -> None:
    """But those whose own loss takes the place of the run's."""
    plain = replace(TRAIN, epochs=None, steps=2, momentum=0.0)
    one = replace(plain, objective="balanced_softmax")
    settings = (replace(one, gamma=0.0), plain, one)
    at_zero, without, at_one = (
        everything(simulation(make(name), train=train, rounds=2, engine="vectorized")) for train in settings
    )
    assert_close(at_zero, without)
    assert all(torch.isfinite(t.double()).all() for t in at_one.values())
    moved = any(not torch.allclose(t.double(), without[n].double(), atol=1e-5) for n, t in at_one.items())
    assert moved, f"{name} does not see the objective"


def test_a_balanced_softmax_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="FedRoD uses its own balanced softmax"):
        simulation("fedrod", train=BALANCED)
    with pytest.raises(ConfigError, match="sample-level privacy does not cover"):
        simulation("fedavg", train=replace(BALANCED, dp=SAMPLE))
    base = federation()
    prices = replace(base.source, y=base.source.y[:, None].float(), task="regression", outputs=1)
    with pytest.raises(ConfigError, match=r"objective = balanced_softmax.* regression"):
        Simulation(make("fedavg"), replace(base, source=prices), model("logistic"), BALANCED)
    with pytest.raises(ConfigError, match=r"gamma, .*objective=balanced_softmax"):
        load({"train": {"gamma": 0.5}})


def test_settings_ask_for_it_in_all_methods_or_in_one() -> None:
    methods = ["fedavg", {"name": "fedrod", "train": {"objective": "task"}}]
    config = load({"train": {"objective": "balanced_softmax", "gamma": 0.5}, "methods": methods})
    configs = [train_config(Job(config, method, 0)) for method in config.methods]
    assert [train.balanced for train in configs] == [True, False]
    assert configs[0].gamma == 0.5
    assert TrainOverrides(gamma=0.3)["gamma"] == 0.3


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
