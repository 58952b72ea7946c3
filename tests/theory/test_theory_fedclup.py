"""FedCLUP on random quadratics is never slower, and never noisier, than the theorems say."""

from __future__ import annotations

import math

import coupled_quadratics
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.errors import ConfigError
from tailorfl.theory.fedclup import fewest_steps, moreau_constants, round_rate, schedule, stochastic_eta

problems = st.fixed_dictionaries(
    {
        "mu": st.floats(0.1, 5),
        "kappa": st.floats(1, 50),
        "lam": st.floats(-2, 2).map(lambda power: 10.0**power),
        "seed": st.integers(0, 10_000),
    }
)


def test_published_vector() -> None:
    plan = schedule(mu=1, smoothness=10, lam=1)
    assert plan.gamma == pytest.approx(0.55)
    assert plan.eta == pytest.approx(0.090909, abs=1e-6)
    assert plan.rate == pytest.approx(0.8625)
    assert (plan.steps, plan.fewest_steps) == (66, 35)
    assert plan.rounds(1e-6) == 94
    assert plan.gradients(1e-6) == 94 * 66


@settings(deadline=None)
@given(problems, st.floats(0.01, 0.999))
def test_exact_rounds_contract_for_every_allowed_gamma(values: dict[str, float], share: float) -> None:
    mu, L, lam = values["mu"], values["mu"] * values["kappa"], values["lam"]
    problem = coupled_quadratics.draw(int(values["seed"]), mu, L, lam)
    gamma = share * (1 / lam + 1 / L)
    mean_hessian = lam * (np.eye(3) - lam * problem.local_inverse.mean(0))
    worst = np.linalg.norm(np.eye(3) - gamma * mean_hessian, 2) ** 2
    assert worst <= round_rate(mu, L, lam, gamma) + 1e-9


def step_sizes(mu: float, L: float, lam: float) -> dict[str, tuple[float, float]]:
    """(gamma, eta) of every rule that Theorem 2 allows, and gammas near both ends."""
    edge, eta = 1 / lam + 1 / L, 1 / (lam + L)
    gammas = {"theory": edge / 2, "mean": 1 / lam, "small": 0.01 * edge, "large": 0.97 * edge}
    etas = {"deterministic": eta, "stochastic": stochastic_eta(mu, L, lam), "a third": eta / 3}
    return {f"{a}, {b}": (gammas[a], etas[b]) for a in gammas for b in etas}


@settings(deadline=None, max_examples=40)
@given(problems)
def test_rounds_of_the_fewest_local_steps_contract_as_predicted(values: dict[str, float]) -> None:
    """The spectral radius of a whole round, warm-started local steps and server step, on (w, v)."""
    mu, L, lam = values["mu"], values["mu"] * values["kappa"], values["lam"]
    problem = coupled_quadratics.draw(int(values["seed"]), mu, L, lam)
    clients, dim = problem.c.shape
    answer = lam * problem.local_inverse
    for name, (gamma, eta) in step_sizes(mu, L, lam).items():
        local = np.eye(dim) - eta * (problem.H + lam * np.eye(dim))
        remaining = np.linalg.matrix_power(local, fewest_steps(mu, L, lam, gamma, eta))  # of v_i - v_i*(w)
        round_map = np.zeros(((clients + 1) * dim, (clients + 1) * dim))
        for k in range(clients):
            rows = slice((k + 1) * dim, (k + 2) * dim)
            round_map[rows, :dim] = (np.eye(dim) - remaining[k]) @ answer[k]
            round_map[rows, rows] = remaining[k]
        mean_of_clients = round_map[dim:].reshape(clients, dim, -1).mean(0)
        round_map[:dim, :dim] = (1 - gamma * lam) * np.eye(dim)
        round_map[:dim] += gamma * lam * mean_of_clients
        radius = np.abs(np.linalg.eigvals(round_map)).max()
        assert radius**2 <= round_rate(mu, L, lam, gamma) + 1e-9, name


@settings(deadline=None, max_examples=40)
@given(problems)
def test_every_round_of_the_fewest_local_steps_keeps_the_rate(values: dict[str, float]) -> None:
    """What the derivation in docs/theory.md contracts, from a start far from the optimum, client by client."""
    mu, L, lam = values["mu"], values["mu"] * values["kappa"], values["lam"]
    problem = coupled_quadratics.draw(int(values["seed"]), mu, L, lam)
    best, _ = problem.optimum()
    constants = moreau_constants(mu, L, lam)
    for name, (gamma, eta) in step_sizes(mu, L, lam).items():
        steps, rate = fewest_steps(mu, L, lam, gamma, eta), round_rate(mu, L, lam, gamma)
        q = (1 - eta * (lam + mu)) ** steps
        ahead, noise = 1 - gamma * constants.global_smoothness, gamma * lam**2 / constants.global_convexity
        share = 2 * q * noise / (rate - 2 * q)
        if steps > 400:
            continue  # such rounds take long and are no different
        w = best + np.random.default_rng(2).standard_normal(3)
        v, potential = problem.prox(w), math.inf
        for _ in range(6):
            for _ in range(steps):
                v = v - eta * (np.einsum("kij,kj->ki", problem.H, v - problem.c) + lam * (v - w))
            missed = ((v - problem.prox(w)) ** 2).sum(1).mean()
            new = w - gamma * lam * (w - v.mean(0))
            now = ((new - best) ** 2).sum() + ahead * ((new - w) ** 2).sum() + share * missed
            assert now <= rate * potential * (1 + 1e-9) + 1e-18, name
            w, potential = new, now


@pytest.mark.parametrize(
    ("lam", "gamma", "eta", "steps"),
    [
        (1.0, 1.0, "deterministic", 69),  # gamma of the plain mean, 1/lam
        (0.1, 10.0, "deterministic", 169),
        (1.0, 0.55, "deterministic", 35),  # Corollary 2
        (0.1, 5.05, "deterministic", 33),
        (10.0, 0.1, "stochastic", 248),
    ],
)
def test_local_steps_follow_the_step_sizes_in_use(lam: float, gamma: float, eta: str, steps: int) -> None:
    """For mu = 1, L = 10."""
    size = 1 / (lam + 10) if eta == "deterministic" else stochastic_eta(1, 10, lam)
    assert fewest_steps(1, 10, lam, gamma, size) == steps


@settings(deadline=None)
@given(problems, st.floats(0.01, 0.99), st.floats(0.01, 1))
def test_the_fewest_steps_are_the_first_that_meet_the_condition(
    values: dict[str, float], share: float, slower: float
) -> None:
    mu, L, lam = values["mu"], values["mu"] * values["kappa"], values["lam"]
    gamma, eta = share * (1 / lam + 1 / L), slower / (lam + L)
    steps = fewest_steps(mu, L, lam, gamma, eta)

    def met(count: int, slack: float) -> bool:
        left = (2 + 64 * (lam / mu) ** 2) * max(1 - eta * (lam + mu), 1e-300) ** count
        return bool(left <= (1 - gamma * lam * L / (lam + L)) ** 4 * slack)

    assert met(steps, 1 + 1e-9)
    assert steps == 1 or not met(steps - 1, 1 - 1e-9)


@pytest.mark.parametrize(
    ("gamma", "eta", "message"),
    [
        (1.1, 1 / 11, r"gamma must be below 1/lam \+ 1/smoothness = 1.1"),
        (2.5, 1 / 11, "gamma must be below"),
        (0.55, 0.1, r"eta must be at most 1/\(lam \+ smoothness\) = 0.0909091"),
    ],
)
def test_no_number_of_steps_is_enough_for_steps_that_are_too_large(
    gamma: float, eta: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fewest_steps(1, 10, 1, gamma, eta)
    assert fewest_steps(1, 10, 1, 1.0999, 1 / 11) > 69


def test_small_lam_needs_few_rounds_and_large_lam_those_of_the_pooled_problem() -> None:
    assert schedule(1, 10, 1e-9).rate == pytest.approx(3 / 4)
    assert schedule(1, 10, 1e9).rate == pytest.approx(1 - 1 / 40)
    assert schedule(3, 3, 1).fewest_steps == 1
    rounds = [schedule(1, 10, lam).rounds(1e-3) for lam in (0.01, 0.1, 1, 10, 100)]
    assert rounds == sorted(rounds)


def test_rounds_are_enough_and_not_too_many() -> None:
    plan = schedule(1, 10, 1)
    assert plan.rate ** plan.rounds(1e-4) <= 1e-4 < plan.rate ** (plan.rounds(1e-4) - 1)
    with pytest.raises(ConfigError, match=r"gamma must be below 1/lam \+ 1/smoothness = 1.1"):
        round_rate(1, 10, 1, 1.1)


@settings(deadline=None)
@given(mu=st.floats(0.1, 10), kappa=st.floats(1, 100), lam=st.floats(0.01, 100))
def test_careful_step_balances_clients_and_server(mu: float, kappa: float, lam: float) -> None:
    """The first argument of the minimum makes both rates equal: mu_l eta = gamma mu_g / 2."""
    L = mu * kappa
    constants, eta = moreau_constants(mu, L, lam), stochastic_eta(mu, L, lam)
    server = schedule(mu, L, lam).gamma * constants.global_convexity / 2
    assert eta <= 1 / (lam + L) * (1 + 1e-12)
    assert stochastic_eta(1, 10, 1) == pytest.approx(11 / 160)
    assert constants.local_convexity * eta == pytest.approx(
        min(server, constants.local_convexity / (lam + L))
    )
