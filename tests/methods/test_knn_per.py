"""kNN-Per: what a deployed model answers, against votes counted by hand and means of scikit-learn."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsRegressor
from torch import Tensor

from methods.reductions import fedavg, nothing_personal
from methods.settings import Card, Row, make
from methods.small import NEWCOMER, SIZES, TRAIN, federation, simulation
from tailorfl.core.answers import Memory, Shown, Voting, best_weight, chosen
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.engines.choice import make_engine
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.methods.knn_per import KNNPer
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole

CONTRACTS = {
    # Its weights are FedAvg's: what is its own is how a deployed model answers.
    "knn_per": Row(
        Card(whole, whole, whole, True, True),
        chooses=True,
        same=(
            fedavg("λ = 0", lam=0.0, said=True),
            nothing_personal("λ = 0", lam=0.0),
            fedavg("empty memory", capacity=0, said=True),
            nothing_personal("empty memory", capacity=0),
        ),
    ),
}


SETS = ("val", "local", "global", "heldout")


def knn(**options: Any) -> KNNPer:
    method = make_method("knn_per", options)
    assert isinstance(method, KNNPer)
    return method


def memory(z: Tensor, y: Tensor, classes: int = 3) -> Memory:
    nothing = Shown(torch.zeros(0, classes), torch.zeros(0, 0))
    return Memory(Shown(torch.zeros(len(y), classes), z), y, nothing, y[:0])


def vote(features: Tensor, z: Tensor, y: Tensor, **options: Any) -> Tensor:
    """The vote of a memory of samples of three classes."""
    voting = knn(lam=1.0, **options).answering(memory(z, y))
    assert isinstance(voting, Voting)
    return voting.vote(features)


def draws(rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [0.3, 1.0, 1e9])
def test_votes_are_those_of_the_nearest_by_their_distance(scale: float) -> None:
    """In the limit of a wide kernel a plain vote."""
    z, y, asked = draws(15, 4, 3), torch.arange(15) % 3, draws(6, 4, 4)
    p = vote(asked, z, y, neighbours=5, scale=scale)
    for row, found in zip(asked, p, strict=True):
        square = ((row - z) ** 2).sum(1)
        near = square.argsort()[:5]
        kernel = torch.exp(-square[near] / (4 * scale))
        wanted = torch.stack([kernel[y[near] == c].sum() for c in range(3)]) / kernel.sum()
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        if scale == 1e9:
            plain = torch.bincount(y[near], minlength=3) / 5
            torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(p.sum(1), torch.ones(6))
    torch.testing.assert_close(vote(asked + 2.5, z + 2.5, y, neighbours=5, scale=scale), p, atol=1e-4, rtol=0)


def test_votes_of_far_samples_are_finite() -> None:
    p = vote(torch.full((1, 2), 1e4), draws(5, 2, 1), torch.tensor([0, 1, 2, 0, 1]), neighbours=3)
    assert torch.isfinite(p).all()
    torch.testing.assert_close(p.sum(1), torch.ones(1))


def test_answers_mix_probabilities() -> None:
    z, y, asked = draws(15, 4, 3), torch.arange(15) % 3, Shown(draws(6, 3, 5), draws(6, 4, 4))
    method = knn(lam=0.3, neighbours=4)
    wanted = 0.3 * vote(asked.features, z, y, neighbours=4) + 0.7 * asked.outputs.softmax(1)
    found = method.answering(memory(z, y))(*asked).exp()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found.sum(1), torch.ones(6))
    assert knn(capacity=0).answering(memory(z, y))(*asked) is asked.outputs
    assert knn(lam=0.0).answering(memory(z, y))(*asked) is asked.outputs


def test_votes_may_be_mixed_with_logits_as_in_the_authors_code() -> None:
    z, y, asked = draws(15, 4, 3), torch.arange(15) % 3, Shown(draws(6, 3, 5), draws(6, 4, 4))
    method = knn(lam=0.3, neighbours=4, mix="logits")
    votes = vote(asked.features, z, y, neighbours=4)
    torch.testing.assert_close(method.answering(memory(z, y))(*asked), 0.3 * votes + 0.7 * asked.outputs)
    assert knn(capacity=0, mix="logits").answering(memory(z, y))(*asked) is asked.outputs
    assert knn(lam=0.0, mix="logits").answering(memory(z, y))(*asked) is asked.outputs
    only = knn(lam=1.0, neighbours=4, mix="logits").answering(memory(z, y))(*asked)
    torch.testing.assert_close(only, knn(lam=1.0, neighbours=4).answering(memory(z, y))(*asked).exp())


@pytest.mark.parametrize(("gap", "lam"), [(0.03, 0.1), (1.0, 0.6)])
def test_the_weight_of_votes_beside_logits_is_chosen_among_such_mixtures(gap: float, lam: float) -> None:
    """The vote for class 1 turns a sample whose logits say class 0 by `gap` where λ > (1 − λ)·gap."""
    z, y, logits = torch.tensor([[0.0], [10.0]]), torch.tensor([0, 1]), torch.tensor([[9.0, 0.0], [gap, 0.0]])
    voting = knn(neighbours=1, mix="logits").answering(Memory(Shown(logits, z), y, Shown(logits, z), y))
    answer = voting(torch.tensor([[0.0, 1.0]]), z[:1])
    torch.testing.assert_close(answer, torch.tensor([[lam, 1 - lam]]))


def test_the_weight_is_the_smallest_of_those_that_validate_best() -> None:
    own = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    # The second sample turns where 0.2 λ + 0.8 (1 − λ) < ½: above λ = ½.
    assert best_weight(p, own, torch.tensor([0, 1])) == pytest.approx(0.6)
    assert best_weight(p, own, torch.tensor([0, 0])) == 0.0


def test_a_memory_is_a_fixed_part_of_the_samples() -> None:
    assert sorted(chosen(9, None).tolist()) == list(range(9))
    assert torch.equal(chosen(9, 4), chosen(9, 4))
    assert len(set(chosen(9, 4).tolist())) == 4
    assert len(chosen(3, 10)) == 3


def by_hand(sim: Simulation, client: int, rows: Tensor, lam: float) -> float:
    """Accuracy of an MLP's answers, its features and votes computed here."""
    w, data = sim.server["w"], sim.federation

    def seen(rows: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(data.source.x[rows].flatten(1) @ w["fc1.weight"].T + w["fc1.bias"])
        return z, z @ w["head.weight"].T + w["head.bias"]

    own = torch.from_numpy(data.train[client])
    (z, _), y = seen(own), data.source.y[own]
    right = 0
    for feature, logits, label in zip(*seen(rows), data.source.y[rows], strict=True):
        square = ((feature - z) ** 2).sum(1)
        near = square.argsort()[:3]
        kernel = torch.exp(-square[near] / z.shape[1])
        p = torch.stack([kernel[y[near] == c].sum() for c in range(4)]) / kernel.sum()
        right += int((lam * p + (1 - lam) * logits.softmax(0)).argmax() == label)
    return right / len(rows)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_what_is_evaluated_are_the_answers_with_each_clients_own_memory(engine: str) -> None:
    """Of training clients and a held-out one, on own samples and common ones; the global model answers by itself."""
    sim = simulation(make("knn_per", neighbours=3, lam=0.7), engine=engine, rounds=2)
    records = evaluate(sim, Protocol(sets=SETS, adapt_steps=(0,)))
    data = federation()
    common = torch.from_numpy(data.global_test())
    for client in (*range(len(SIZES)), NEWCOMER):
        mine = {(r["model"], r["set"]): r["accuracy"] for r in records if r["client"] == client}
        own = torch.from_numpy(data.test[client])
        name = "heldout" if client == NEWCOMER else "local"
        assert mine["personal", name] == pytest.approx(by_hand(sim, client, own, 0.7))
        if client != NEWCOMER:
            assert mine["personal", "global"] == pytest.approx(by_hand(sim, client, common, 0.7))
    of_global = [r["accuracy"] for r in records if (r["model"], r["set"]) == ("global", "global")]
    assert of_global[0] == pytest.approx(by_hand(sim, 0, common, 0.0))


def numbers(rows: int, seed: int) -> Tensor:
    return draws(rows, 2, seed)


@cache
def regression(task: str = "regression") -> Federation:
    """The tiny federation with two numbers to predict in place of classes."""
    base = federation()
    y = numbers(len(base.source), 6)
    y = y.abs().round() if task == "counts" else y
    return replace(base, source=replace(base.source, y=y, task=task, outputs=2))


def linear(data: Federation, engine: str = "sequential", **options: Any) -> Simulation:
    """A run of kNN-Per on a linear model with two outputs, whose features are the inputs."""
    of_inputs = Model(lambda: build("linear", (1, 8, 8), 2, bias=True))
    return Simulation(
        make("knn_per", **options), data, of_inputs, replace(TRAIN, lr=1e-3), engine=make_engine(engine)
    )


def neighbours_mean(asked: Tensor, z: Tensor, y: Tensor, k: int, scale: float) -> Tensor:
    """The mean of the k nearest, weighted by the kernel of squared distances, by scikit-learn in float64."""
    width = z.shape[1]
    nearest = KNeighborsRegressor(
        n_neighbors=min(k, len(z)), weights=lambda distance: np.exp(-(distance**2) / (width * scale))
    ).fit(z.double().numpy(), y.double().numpy())
    return torch.from_numpy(nearest.predict(asked.double().numpy()))


@pytest.mark.parametrize("scale", [0.3, 1.0, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_regression_the_neighbours_mean_is_mixed_with_the_outputs(
    scale: float, dtype: torch.dtype
) -> None:
    z, y, asked = draws(15, 4, 3).to(dtype), numbers(15, 7).to(dtype), draws(6, 4, 4).to(dtype)
    outputs = numbers(6, 5).to(dtype)
    shown = Memory(Shown(torch.zeros(15, 2, dtype=dtype), z), y, Shown(outputs[:0], z[:0]), y[:0])
    wanted = neighbours_mean(asked, z, y, 5, scale)
    close = {"atol": 1e-5 if dtype == torch.float32 else 1e-12, "rtol": 0.0, "check_dtype": False}
    for lam in (0.3, 1.0):
        answers = knn(lam=lam, neighbours=5, scale=scale).answering(shown)(outputs, asked)
        assert answers.dtype == dtype
        torch.testing.assert_close(answers, lam * wanted + (1 - lam) * outputs, **close)
    only = knn(lam=1.0, neighbours=1).answering(shown)
    torch.testing.assert_close(only(outputs[:3], z[:3]), y[:3])


@pytest.mark.parametrize(("targets", "lam"), [([1.0, 1.0], 0.3), ([0.0, 0.0], 0.0), ([9.0, 9.0], 1.0)])
def test_in_regression_the_weight_has_the_least_squared_error(targets: list[float], lam: float) -> None:
    """The mean says 4 and 2, the model 0: (4λ − t)² + (2λ − t)² is least at λ = 0.3 for t = 1 (6t/20)."""
    means, outputs = torch.tensor([[4.0], [2.0]]), torch.zeros(2, 1)
    assert best_weight(means, outputs, torch.tensor(targets)[:, None]) == lam


def least(vote: Tensor, outputs: Tensor, y: Tensor) -> float:
    """λ of 0, 0.1, ..., 1 with the least squared error, the smallest of equals; one half without samples."""
    if not len(y):
        return 0.5
    errors = [float((((k * vote + (10 - k) * outputs) / 10 - y) ** 2).sum()) for k in range(11)]
    return errors.index(min(errors)) / 10


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("validated", [True, False])
def test_squared_errors_of_a_regression_are_those_of_answers_from_training_samples(
    engine: str, validated: bool
) -> None:
    """The memory holds training samples alone; λ is chosen by validation samples, and is ½ without."""
    data = regression()
    if not validated:
        data = replace(data, val=tuple(rows[:0] for rows in data.val))
    sim = linear(data, engine, neighbours=4, scale=0.5)
    sim.step()
    records = evaluate(sim, Protocol(sets=("local", "heldout"), adapt_steps=(0,)))
    w, x, y = sim.server["w"], data.source.x.flatten(1), data.source.y
    weights = set()
    for client in (*range(len(SIZES)), NEWCOMER):
        train, val, test = (torch.from_numpy(part[client]) for part in (data.train, data.val, data.test))
        vote = {len(r): neighbours_mean(x[r], x[train], y[train], 4, 0.5) for r in (val, test) if len(r)}
        own = {len(r): x[r].double() @ w["head.weight"].double().T + w["head.bias"] for r in (val, test)}
        lam = least(vote.get(len(val), y[val]), own[len(val)], y[val])
        weights.add(lam)
        wanted = ((lam * vote[len(test)] + (1 - lam) * own[len(test)] - y[test]) ** 2).mean()
        found = [r["mse"] for r in records if r["client"] == client and r["model"] == "personal"]
        assert found == pytest.approx([float(wanted)], rel=1e-5)
    assert weights == {0.5} if not validated else len(weights) > 2
