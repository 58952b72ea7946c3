"""Theorem 4.2 against linear algebra and simulation, and every printed cost of the CIFAR-10 table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.perfed_ckt_formulas import transfer_mse, transmission_cost
from tailorfl.errors import ConfigError
from tailorfl.theory.perfed_ckt import best_transfer

BETA, SIGMA2, NU, V2 = 3.0, 2.0, 1.7, (0.5, 1.0, 2.0, 4.0, 0.2)
positive = st.floats(0.05, 20)
spreads = st.lists(positive, min_size=2, max_size=8)


def test_published_vector() -> None:
    found = best_transfer(BETA, SIGMA2, NU, V2)
    assert found.lam[1] == pytest.approx(1.17647, abs=1e-5)
    assert found.alpha == pytest.approx([0.26783, 0.18748, 0.11718, 0.06696, 0.36055], abs=1e-5)
    assert found.mse[1] == pytest.approx(0.45, abs=1e-5)
    assert found.local_mse == pytest.approx(2 / 3)


def test_predicted_error_is_the_simulated_one() -> None:
    """Draws models and labels, fits everybody by least squares and transfers to client 1."""
    rng, trials, dim, client = np.random.default_rng(0), 200_000, 2, 1
    X = np.sqrt(BETA) * np.linalg.qr(rng.standard_normal((4, dim)))[0]
    true = rng.uniform(-10, 10, (trials, 1, dim))
    true = true + np.sqrt(V2)[:, None] * rng.standard_normal((trials, 5, dim))
    y = true @ X.T + np.sqrt(SIGMA2) * rng.standard_normal((trials, 5, 4))
    estimates = y @ X / BETA
    found = best_transfer(BETA, SIGMA2, NU, V2)
    own = found.own_weight[client]
    transferred = own * estimates[:, client] + (1 - own) * np.einsum("i,tid->td", found.alpha, estimates)
    error = ((transferred - true[:, client]) ** 2).mean()
    alone = ((estimates[:, client] - true[:, client]) ** 2).mean()
    assert error == pytest.approx(0.45, abs=0.005)
    assert alone == pytest.approx(2 / 3, abs=0.007)


@settings(deadline=None)
@given(positive, positive, positive, spreads)
def test_transfer_is_the_best_linear_unbiased_prediction(
    beta: float, sigma2: float, nu: float, v2: list[float]
) -> None:
    """Among all weights of the estimates that sum to 1 none has a smaller error, for any client."""
    found, spread = best_transfer(beta, sigma2, nu, v2), np.array(v2)
    clients = len(v2)
    # Minimise b' S b - 2 b' s_k with sum b = 1: the error of sum_i b_i w^_i as a prediction of w_k.
    system = np.zeros((clients + 1, clients + 1))
    system[:clients, :clients] = np.diag(spread + sigma2 / beta)
    system[:clients, -1] = system[-1, :clients] = 1
    for k in range(clients):
        right = np.append(np.eye(clients)[k] * spread, 1)
        best = np.linalg.solve(system, right)[:clients]
        own = found.own_weight[k]
        assert own * np.eye(clients)[k] + (1 - own) * found.alpha == pytest.approx(best, abs=1e-9)
        assert transfer_mse(beta, sigma2, nu, v2, k, found.lam[k], found.alpha) == pytest.approx(found.mse[k])
        assert found.mse[k] <= found.local_mse * (1 + 1e-12)


@settings(deadline=None)
@given(positive, positive, positive, spreads)
def test_corrected_normaliser(beta: float, sigma2: float, nu: float, v2: list[float]) -> None:
    found, noise = best_transfer(beta, sigma2, nu, v2), sigma2 + beta * np.array(v2)
    assert found.alpha.sum() == pytest.approx(1)
    assert found.normaliser == pytest.approx(np.full(len(v2), found.normaliser[0]))
    assert found.normaliser / noise == pytest.approx(found.alpha)
    assert found.own_weight == pytest.approx(1 / (1 + found.lam * nu / beta))


def test_regression_on_orthogonal_data_mixes_as_theorem_says() -> None:
    """Of least squares with the pull: ‖X(w − ŵ_k)‖² + λ‖P(w − Σ α_i ŵ_i)‖²."""
    rng = np.random.default_rng(3)
    X = np.sqrt(BETA) * np.linalg.qr(rng.standard_normal((6, 2)))[0]
    P = np.sqrt(NU) * np.linalg.qr(rng.standard_normal((3, 2)))[0]
    estimates, found = rng.standard_normal((5, 2)), best_transfer(BETA, SIGMA2, NU, V2)
    for k in range(5):
        own = found.own_weight[k]
        expected = own * estimates[k] + (1 - own) * found.alpha @ estimates
        rows = np.concatenate([X, np.sqrt(found.lam[k]) * P])
        targets = np.concatenate([X @ estimates[k], np.sqrt(found.lam[k]) * P @ (found.alpha @ estimates)])
        assert np.linalg.lstsq(rows, targets, rcond=None)[0] == pytest.approx(expected)


# (method, clusters, cost with 10 clients, with 15), in units of 1e7 scalars as printed.
PRINTED = [
    ("fedavg", 1, 2150, 3120),
    ("fedfomo", 1, 3900, 5850),
    ("hypcluster", 2, 2340, 3320),
    ("hypcluster", 3, 2540, 3510),
    ("hypcluster", 5, 2930, 3900),
    ("hypcluster", 6, 3120, 4100),
    ("perfed_ckt", 1, 4.4, 6.4),
    ("perfed_ckt", 2, 4.8, 6.8),
    ("perfed_ckt", 3, 5.2, 7.2),
    ("perfed_ckt", 4, 5.6, 7.6),
]


@pytest.mark.parametrize(("method", "clusters", "ten", "fifteen"), PRINTED)
def test_every_printed_cost(method: str, clusters: int, ten: float, fifteen: float) -> None:
    for clients, printed in ((10, ten), (15, fifteen)):
        total = transmission_cost(method, clients, 200, clusters).total / 1e7
        assert float(f"{total:.3g}") == pytest.approx(printed)


def test_cost_by_direction() -> None:
    found = transmission_cost("hypcluster", 4, 3, clusters=2, model_scalars=100)
    assert (found.up, found.down, found.total) == (1200, 600, 1800)
    assert transmission_cost("perfed_ckt", 4, 3, 2, prediction_scalars=7).total == 3 * 6 * 7
    assert transmission_cost("hypcluster", 4, 3, 1) == transmission_cost("fedavg", 4, 3)


@pytest.mark.parametrize(
    ("function", "values", "message"),
    [
        (transmission_cost, ("fedav", 10, 200), "Did you mean 'fedavg'"),
        (best_transfer, (1, 1, 1, [1.0]), "at least two clients"),
        (best_transfer, (1, 1, 1, [1.0, 0.0]), "v2 must be a positive number, but is 0"),
        (transfer_mse, (BETA, SIGMA2, NU, V2, 5, 1.0, np.full(5, 0.2)), "client must be one of 0 to 4"),
        (transfer_mse, (BETA, SIGMA2, NU, V2, 0, 1.0, np.full(5, 0.3)), "alpha must be 5 numbers that sum to 1"),
    ],
)  # fmt: skip
def test_impossible_values(function: Callable[..., object], values: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        function(*values)
