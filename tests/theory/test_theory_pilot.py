"""The advisor's pilot against numpy: optima of halves by least squares, what follows, local training by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tailorfl.data.federation import Federation
from tailorfl.data.own import from_tensors
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.theory import pilot
from tailorfl.theory.measures import gain_of_own, gradient_noise
from tailorfl.theory.objective import Objective
from tailorfl.theory.pilot import SPLITS, halve, run_pilot
from tailorfl.theory.spread import client_spread
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import LOSSES

CLIENTS, SAMPLES, DIM = 4, 30, 3


def federation() -> Federation:
    """Clients with a line each; sizes differ."""
    rng = np.random.default_rng(0)
    sizes = [SAMPLES + 4 * i for i in range(CLIENTS)]
    owner = np.repeat(np.arange(CLIENTS), sizes)
    x = rng.normal(size=(len(owner), DIM))
    lines = rng.normal(size=(CLIENTS, DIM)) + 3.0
    y = (x * lines[owner]).sum(1) + 0.3 * rng.normal(size=len(owner))
    source = from_tensors(x, y, owner, "regression")
    none = tuple(np.empty(0, dtype=np.int64) for _ in sizes)
    rows = tuple(np.flatnonzero(owner == i) for i in range(CLIENTS))
    return Federation(source, rows, none, none, tuple(map(str, range(CLIENTS))), CLIENTS)


def objective(data: Federation) -> Objective:
    model = Model(lambda: build("linear", (DIM,), 1))
    return Objective(model, LOSSES["regression"], data.source, model.init(0))


def least_squares(data: Federation, rows: np.ndarray, columns: int) -> np.ndarray:
    """Weights, then the bias where the model has one."""
    x = data.source.x[torch.from_numpy(rows)].double().numpy()
    x = np.concatenate([x, np.ones((len(x), columns - DIM))], 1)
    return np.linalg.lstsq(x, data.source.y[torch.from_numpy(rows)].double().numpy(), rcond=None)[0].reshape(
        -1
    )


def test_the_pilot_of_a_line_is_least_squares() -> None:
    data = federation()
    found = run_pilot(data, objective(data), TrainConfig(), seed=5)
    columns = found.objective.size
    assert (found.mode, found.rank) == ("optimum", columns)
    assert found.seconds > 0

    def in_order(rows: np.ndarray) -> np.ndarray:
        """As `flat` lays the model out: names in their order."""
        solved = least_squares(data, rows, columns)
        parts = {"weight": solved[:DIM], "bias": solved[DIM:]}
        names = {n.rpartition(".")[2] for n in found.objective.model.parameters}
        return np.concatenate([parts[n] for n in sorted(names)])

    centre = in_order(np.concatenate(data.train))
    gram, gaps = np.zeros((CLIENTS, CLIENTS)), np.zeros(CLIENTS)
    strata = data.source.strata.numpy()
    for number in range(SPLITS):
        halves = halve(data.train, strata, 5 * SPLITS + number)
        a, b = (np.stack([in_order(pair[side]) for pair in halves]) for side in (0, 1))
        gram += (a - centre) @ (b - centre).T / SPLITS
        gaps += ((a - b) ** 2).sum(1) / SPLITS
    np.testing.assert_allclose(found.gram, gram, atol=1e-7)
    np.testing.assert_allclose(found.gaps, gaps, rtol=1e-6)
    for model, expected in zip(found.models, (a, b), strict=True):
        np.testing.assert_allclose(model.numpy(), expected, atol=1e-7)
    np.testing.assert_allclose(found.reference.numpy(), (a.mean(0) + b.mean(0)) / 2, atol=1e-7)
    start = found.objective.flat(found.objective.state).numpy()
    assert found.travelled == pytest.approx(((found.reference.numpy() - start) ** 2).sum())
    curved = np.zeros(CLIENTS)
    for number in range(SPLITS):
        for i, pair in enumerate(halve(data.train, strata, 5 * SPLITS + number)):
            x = data.source.x[torch.from_numpy(data.train[i])].double().numpy()
            x = np.concatenate([x, np.ones((len(x), columns - DIM))], 1)
            gap = least_squares(data, pair[0], columns) - least_squares(data, pair[1], columns)
            curved[i] += ((x @ gap) ** 2).mean() / SPLITS
    ratio = found.curved / curved  # the loss is the mean square or half of it
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)


@pytest.mark.parametrize(("held", "taken"), [(0, 2), (3, 3), (100, 4)])
def test_as_many_clients_take_part_as_fit_into_memory_but_two_at_least(
    held: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = federation()
    monkeypatch.setattr(pilot, "SCALARS", 2 * held * objective(data).size)
    assert len(run_pilot(data, objective(data), TrainConfig()).clients) == taken
    assert len(run_pilot(data, objective(data), TrainConfig(), clients=3).clients) == min(taken, 3)


def test_half_of_the_samples_of_every_class_go_to_either_side() -> None:
    strata = np.arange(40) % 3
    rows = (np.arange(0, 21), np.arange(21, 40))
    for own, (first, second) in zip(rows, halve(rows, strata, 0), strict=True):
        assert sorted([*first, *second]) == list(own)
        assert len(first) - len(second) in (0, 1)
        counts = [np.bincount(strata[half], minlength=3) for half in (first, second)]
        assert np.abs(counts[0] - counts[1]).max() <= 1
    others = halve(rows, strata, 1)
    assert any(set(a[0]) != set(b[0]) for a, b in zip(others, halve(rows, strata, 0), strict=True))


def test_a_network_trains_from_the_average_of_its_rounds() -> None:
    """One full-batch step of half the learning rate's effect each: SGD by hand on every half."""
    data = federation()
    model = Model(lambda: build("mlp", (DIM,), 1, hidden=(4,), activation="tanh"))
    start = Objective(model, LOSSES["regression"], data.source, model.init(0))
    train = TrainConfig(epochs=1, batch_size=0, lr=0.05)
    found = run_pilot(data, start, train, rounds=2, seed=1)
    assert (found.mode, found.rank) == ("training", start.size)

    def stepped(theta: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        leaves = {n: t.clone().requires_grad_() for n, t in start.tensors(theta).items()}
        picked = torch.from_numpy(rows)
        loss = LOSSES["regression"](model(leaves, data.source.x[picked]), data.source.y[picked], None)
        grads = torch.autograd.grad(loss, [leaves[n] for n in model.parameters])
        moved = {n: leaves[n].detach() - 0.05 * g for n, g in zip(model.parameters, grads, strict=True)}
        return torch.cat([moved[n].reshape(-1) for n in start.tensors(theta) if n in moved])

    theta = start.flat(start.state)
    sizes = torch.tensor([len(own) for own in data.train], dtype=torch.float32)
    for _ in range(2):
        locals_ = torch.stack([stepped(theta, own) for own in data.train])
        theta = (sizes / sizes.sum()) @ locals_
    halves = halve(data.train, data.source.strata.numpy(), 1)
    a, b = (torch.stack([stepped(theta, pair[side]) for pair in halves]) for side in (0, 1))
    for model_of, expected in zip(found.models, (a, b), strict=True):
        torch.testing.assert_close(model_of, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.reference, (a.mean(0) + b.mean(0)) / 2, atol=1e-5, rtol=1e-4)
    moved = (found.reference - start.flat(start.state)).square().sum()
    assert found.travelled == pytest.approx(float(moved), rel=1e-5)
    gram = ((a - theta).double() @ (b - theta).double().T).numpy()
    np.testing.assert_allclose(found.gram, gram, rtol=1e-2, atol=1e-6)


def test_of_two_clients_the_spread_of_a_weight_is_the_sample_variance() -> None:
    """Σ <a_i − a, b_i − b> / (N − 1) / d, with N = 2."""
    a, b = np.array([[1.0, 2.0], [3.0, 0.0]]), np.array([[1.5, 2.0], [2.5, 1.0]])
    expected = ((a - a.mean(0)) * (b - b.mean(0))).sum() / (2 - 1) / 2
    np.testing.assert_allclose(client_spread(a @ b.T, np.ones(2), 2), [expected] * 2)
    assert expected == 1.0


def test_the_gain_of_ones_own_is_what_the_mean_model_loses_on_the_other_half() -> None:
    """Half the mean square, by least squares of each half in numpy; lines that differ much gain much."""
    data = federation()
    found = run_pilot(data, objective(data), TrainConfig(), seed=5)
    columns = found.objective.size
    x, y = data.source.x.double().numpy(), data.source.y.double().numpy().reshape(-1)
    x = np.concatenate([x, np.ones((len(x), columns - DIM))], 1)
    fitted = [[least_squares(data, rows, columns) for rows in pair] for pair in found.halves]
    means = np.mean(fitted, axis=0)

    def loss(weights: np.ndarray, rows: np.ndarray) -> float:
        return float(0.5 * np.mean((x[rows] @ weights - y[rows]) ** 2))

    expected = [
        np.mean([loss(means[k], pair[1 - k]) - loss(own[k], pair[1 - k]) for k in (0, 1)])
        for pair, own in zip(found.halves, fitted, strict=True)
    ]
    np.testing.assert_allclose(gain_of_own(found), expected, rtol=1e-5)
    assert min(expected) > 0.1


def test_the_noise_of_gradients_is_that_of_plain_torch() -> None:
    """ρ² = √(S at own halves · S at the other ones), means of two, S the unbiased variance of single gradients."""
    data = federation()
    found = run_pilot(data, objective(data), TrainConfig(), seed=5)

    def variance(theta: torch.Tensor, rows: np.ndarray) -> float:
        x = data.source.x[torch.from_numpy(rows)].double()
        y = data.source.y[torch.from_numpy(rows)].double()[:, 0]
        slopes = []
        for one, target in zip(x, y, strict=True):
            w = theta.double().clone().requires_grad_()
            slopes.append(torch.autograd.grad((w @ one - target).square() / 2, w)[0].numpy())
        return float(np.var(slopes, axis=0, ddof=1).sum())

    for k, rho in enumerate(gradient_noise(found)):
        first, second = found.models[0][k], found.models[1][k]
        one, other = found.halves[k]
        inside = (variance(first, one) + variance(second, other)) / 2
        across = (variance(first, other) + variance(second, one)) / 2
        assert rho == pytest.approx(np.sqrt(inside * across), rel=1e-6)


def test_the_noise_of_some_gradients_is_that_of_all_whatever_the_order_of_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first half of each client's rows lies on its line, the second does not."""
    rng, count = np.random.default_rng(0), 200
    x = rng.normal(size=(2 * count, DIM))
    noisy = np.arange(2 * count) % count >= count // 2
    source = from_tensors(
        x, x.sum(1) + noisy * rng.normal(size=2 * count), np.arange(2 * count) // count, "regression"
    )
    none = (np.empty(0, dtype=np.int64),) * 2
    data = Federation(source, (np.arange(count), np.arange(count, 2 * count)), none, none, ("a", "b"), 2)
    found = run_pilot(data, objective(data), TrainConfig())
    everything = gradient_noise(found)
    monkeypatch.setattr("tailorfl.theory.measures.SCALARS", 40 * found.objective.size)
    np.testing.assert_allclose(gradient_noise(found), everything, rtol=0.5)
