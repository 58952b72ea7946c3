"""FedAMP and HeurFedAMP: their weights in closed form, and what their cloud models are at the ends."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from methods.reductions import local
from methods.settings import Card, Limit, Row
from methods.small import NEWCOMER, SIZES, assert_close, assert_same, personal, simulation
from tailorfl.core.method import make_method
from tailorfl.methods.fedamp import Clouds, attention, preference
from tailorfl.testing.contract import whole
from tailorfl.training import tree

CONTRACTS = {
    "fedamp": Row(
        Card(whole, whole, whole, True, False),
        {"lam": 0.5, "alpha": 0.5, "sigma": 2.0},
        Limit("local", 1, {"lam": 0.0}),
        unweighted=True,
        same=(local(lam=0.0),),
    ),
    "heurfedamp": Row(
        Card(whole, whole, whole, True, False),
        {"lam": 0.5, "sigma": 2.0},
        Limit("local", 1, {"lam": 0.0}),
        unweighted=True,
        same=(local(lam=0.0),),
    ),
}


ALL = tuple(range(len(SIZES)))


def made(name: str, **options: Any) -> Clouds:
    method = make_method(name, options)
    assert isinstance(method, Clouds)
    return method


def server(seed: int = 0, apart: float = 1.0, clients: int = 4) -> TensorDict:
    """A server to which all but the last of its clients have uploaded; float64."""
    rng = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(clients, *shape, generator=rng, dtype=torch.float64) for shape in ((3, 2), (2,)))
    uploaded = torch.arange(clients) < clients - 1
    models = TensorDict({"a": 1 + apart * a, "b": 1 + apart * b})
    return TensorDict({"models": models, "rest": TensorDict({}), "uploaded": uploaded})


def test_attention_of_two_distances_in_numbers() -> None:
    xi = attention(torch.tensor([[1.0, 4.0]]), torch.ones(1, 2, dtype=torch.bool), 0.5, 2.0)
    torch.testing.assert_close(xi, torch.tensor([[0.1516327, 0.0338338]]))
    assert float(1 - xi.sum()) == pytest.approx(0.8145335, abs=1e-6)


def test_preference_of_two_cosines_in_numbers() -> None:
    xi = preference(torch.tensor([[0.5, -0.5]]), torch.ones(1, 2, dtype=torch.bool), 0.3, 10.0)
    torch.testing.assert_close(xi, torch.tensor([[0.6999682, 0.0000318]]), atol=1e-7, rtol=1e-5)


def test_too_much_attention_is_scaled_to_one_and_leaves_nothing_of_the_own_model() -> None:
    method, state = made("fedamp", alpha=1e4, sigma=25.0), server(apart=0.1)
    xi = method.mixing(state, (0, 3))
    torch.testing.assert_close(xi.sum(1), torch.ones(2, dtype=torch.float64))
    assert float(xi[0, 0]) == pytest.approx(0, abs=1e-12)
    assert float(xi[1, 3]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("client", [0, 2])
def test_a_cloud_model_is_a_gradient_step_on_the_sum_of_attention(client: int) -> None:
    """u_i = w_i − (α/2) ∇_{w_i} Σ_{i<j} (1 − e^{−‖w_i − w_j‖²/σ}), by autograd."""
    alpha, sigma, state = 0.3, 8.0, server()
    rows = [torch.cat([state["models"][n][i].flatten() for n in ("a", "b")]) for i in range(3)]
    w = [row.clone().requires_grad_() for row in rows]
    cost = sum(1 - torch.exp(-(w[i] - w[j]).square().sum() / sigma) for i, j in combinations(range(3), 2))
    (slope,) = torch.autograd.grad(cost, [w[client]])  # type: ignore[arg-type]
    sent = made("fedamp", alpha=alpha, sigma=sigma).broadcast(state, (client,)).payloads[0]
    found = torch.cat([sent[n].flatten() for n in ("a", "b")])
    torch.testing.assert_close(found, rows[client] - alpha / 2 * slope)
    assert float(slope.norm()) > 1e-3


@pytest.mark.parametrize(
    "method",
    [made("fedamp", alpha=7.0, sigma=3.0), made("heurfedamp"), made("heurfedamp", cosine_of="updates")],
    ids=["fedamp", "models", "updates"],
)
def test_of_equal_models_every_cloud_model_is_the_same(method: Clouds) -> None:
    state = server(apart=0.0)
    if method.name == "heurfedamp":
        state["origin"] = TensorDict({n: t[0] * 0 for n, t in tree.tensors(state["models"]).items()})
    sent = method.broadcast(state, (0, 1, 3)).payloads
    for name, tensor in tree.tensors(state["models"]).items():
        torch.testing.assert_close(sent[name], tensor[:3])


def test_a_client_that_counts_alone_is_sent_its_own_model() -> None:
    state = server()
    sent = made("heurfedamp", self_weight=1.0).broadcast(state, (1, 3)).payloads
    for name, tensor in tree.tensors(state["models"]).items():
        assert torch.equal(sent[name], tensor[[1, 3]])


def test_without_preference_the_others_count_alike_and_who_never_uploaded_not_at_all() -> None:
    state = server()
    sent = made("heurfedamp", sigma=0.0, self_weight=0.4).broadcast(state, (1, 3)).payloads
    for name, w in tree.tensors(state["models"]).items():
        torch.testing.assert_close(sent[name][0], 0.4 * w[1] + 0.6 * (w[0] + w[2]) / 2)
        torch.testing.assert_close(sent[name][1], 0.4 * w[3] + 0.6 * (w[0] + w[1] + w[2]) / 3)


def test_a_client_of_n_counts_an_nth_unless_told() -> None:
    xi = made("heurfedamp").mixing(server(clients=5), ALL)
    torch.testing.assert_close(xi.diagonal(), torch.full((5,), 0.2, dtype=torch.float64))


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_a_newcomer_is_sent_the_mean_of_the_uploads(name: str) -> None:
    sim = simulation(name)
    before = dict(sim.init.items())
    ((_, first),) = sim.newcomer_models((NEWCOMER,), 0)
    assert_close({n: t[0] for n, t in first.items()}, before, atol=1e-7)
    sim = simulation(name, fraction=0.4, rounds=1)
    ids = sim.sample(0)
    ((_, found),) = sim.newcomer_models((NEWCOMER,), 0)
    trained = personal(sim, ids)
    assert_close({n: t[0] for n, t in found.items()}, {n: t.mean(0) for n, t in trained.items()}, atol=1e-6)


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_a_client_that_has_not_trained_is_still_what_it_was(name: str) -> None:
    sim = simulation(name, fraction=0.4, rounds=1)
    idle = tuple(i for i in ALL if i not in sim.sample(0))
    models = personal(sim, idle)
    assert_same(models, {n: sim.init[n].expand_as(t).clone() for n, t in models.items()})


def test_training_starts_at_the_own_model_or_at_the_cloud_model() -> None:
    """Without a pull the cloud model matters to the second alone."""
    own, cloud = (
        simulation(made("heurfedamp", lam=0.0, self_weight=0.1, start=start), rounds=2)
        for start in ("own", "cloud")
    )
    assert_same(personal(own), personal(simulation("local", rounds=2)))
    assert any(not torch.allclose(t, personal(own)[n], atol=1e-3) for n, t in personal(cloud).items())
