"""FedPAC: the weights of its mixtures in closed form and by the conditions of a minimum, and what it measures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.reductions import in_run, pac_is_rep
from methods.settings import Card, Row, make, prototypes
from methods.small import CLASSES, assert_close, simulation
from tailorfl.core.messages import PerClient
from tailorfl.methods.mixtures import least_quadratic, mixing_weights
from tailorfl.testing.contract import whole

CONTRACTS = {
    # Up M_i and class means, class counts and V_i beside the model.
    "fedpac": Row(
        Card(
            lambda s: s.d + prototypes(s),
            lambda s: s.d + 2 * prototypes(s) + CLASSES + 1,
            whole,
            True,
            False,
        ),
        {"lam": 0.5},
        chooses=True,
        at_most=True,
        same=(
            pac_is_rep(lam=0.0, mix=False),
            pac_is_rep(lam=0.0, mix=False, head_epochs=2),
            in_run(pac_is_rep(lam=0.5, mix=False), rounds=1),
            in_run(pac_is_rep(lam=0.0), fraction=0.2),
        ),
    ),
}


def test_two_clients_in_closed_form() -> None:
    """V = (1, 3) and Σ_c ‖M_1[c] − M_2[c]‖² = 4: β_2 of client 1 is V_1/(V_1 + V_2 + 4) = 1/8."""
    moment = torch.tensor([[[1.0, 0.0]], [[1.0, 2.0]]])
    weights = mixing_weights(torch.tensor([1.0, 3.0]), moment)
    torch.testing.assert_close(weights[0], torch.tensor([7 / 8, 1 / 8], dtype=torch.float64))
    torch.testing.assert_close(weights[1], torch.tensor([3 / 8, 5 / 8], dtype=torch.float64))


def test_a_client_without_variance_keeps_its_own_head() -> None:
    """One sample: its own head cannot be improved, and the matrix is singular."""
    weights = mixing_weights(torch.tensor([0.0, 0.5]), torch.tensor([[[0.0]], [[1.0]]]))
    torch.testing.assert_close(weights[0], torch.tensor([1.0, 0.0]).double())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10**6), st.integers(-6, 6))
def test_a_minimum_over_the_simplex_has_its_conditions(size: int, seed: int, scale: int) -> None:
    """Aβ is the same where β > 0 and no smaller where β = 0."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(size, rng.integers(1, size + 2)))
    a = (root @ root.T + np.diag(rng.uniform(0.01, 1, size))) * 10.0**scale
    beta = least_quadratic(a)
    assert (beta >= 0).all()
    assert beta.sum() == pytest.approx(1)
    slope, value = a @ beta, beta @ a @ beta
    assert (slope >= value * (1 - 1e-6)).all()
    assert slope[beta > 0] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_class_without_global_mean_is_held_near_the_clients_own_of_before(engine: str) -> None:
    """Client 0's reply is the same as if that mean had been sent, whatever else stands there."""
    sim = simulation(make("fedpac", lam=5.0), engine=engine, rounds=1)
    received = sim.method.broadcast(sim.server, (0,))

    def reply(prototype: torch.Tensor, present: bool) -> dict[str, torch.Tensor]:
        sent = received.payloads.clone()
        sent["prototypes"][0, 1], sent["present"][0, 1] = prototype, present
        _, found = sim.run((0,), sim.states.get((0,)), PerClient(sent), sim.method.local)
        return dict(found["body"].items())

    x, y = (
        t[torch.from_numpy(sim.federation.train[0])]
        for t in (sim.federation.source.x, sim.federation.source.y)
    )
    body = sim.server["body"]
    z = torch.tanh(x.flatten(1) @ body["fc1.weight"].T + body["fc1.bias"])
    assert (y == 1).any()
    wanted = reply(z[y == 1].mean(0), True)
    assert_close(reply(torch.full((8,), 7.0), False), wanted)
    assert any(
        not torch.allclose(t, wanted[n], atol=1e-3) for n, t in reply(torch.full((8,), 7.0), True).items()
    )


def test_a_newcomer_gets_the_mean_head_and_one_that_never_trained_the_first() -> None:
    sim = simulation(make("fedpac"), rounds=1, fraction=0.4)
    ids = sim.sample(0)
    late, idle = sim.method.welcome(sim.server, (5,)), next(i for i in range(5) if i not in ids)
    mine = sim.method.broadcast(sim.server, (idle, 5))
    for name, mean in sim.server["head"].items():
        assert torch.equal(late.payloads["head", name][0], mean)
        assert torch.equal(mine.payloads["head", name][0], sim.init[name])
        assert torch.equal(mine.payloads["head", name][1], mean)
        assert not torch.equal(mean, sim.init[name])
