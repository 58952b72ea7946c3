"""pFedHN and PLGU-GHN: the server's gradient is autograd's, the sign is a descent, and others are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from methods.reductions import QUICK_HN, Same
from methods.settings import Card, Row
from methods.small import SIZES, replies_of, simulation
from tailorfl.core.messages import PerClient
from tailorfl.core.method import make_method
from tailorfl.methods.hypernetwork import Hypernetwork
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import Weights
from tailorfl.testing.contract import whole
from tailorfl.training import tree

CONTRACTS = {
    "pfedhn": Row(
        Card(whole, whole, whole, True, False),
        {"hidden": 8, "depth": 1, "embedding": 3, "server_lr": 1e-3},
        chooses=True,
        by_id=True,
        proved="the vjp: test_hypernetwork.py (T08)",
        never="the hypernetwork cannot be turned off",
    ),
    "plgu_ghn": Row(
        Card(whole, whole, whole, True, False),
        {"hidden": 8, "depth": 1, "embedding": 3, "server_lr": 1e-3},
        chooses=True,
        by_id=True,
        same=(
            Same(
                "T08",
                {"rho": 0.0},
                "pfedhn",
                QUICK_HN,
                "personal",
                "personal",
                said=True,
                models=("mlp",),
            ),
        ),
    ),
}


SMALL: dict[str, Any] = {"hidden": 8, "depth": 1, "embedding": 3, "start": "drawn"}
PLAIN = {"server_momentum": 0.0, "server_weight_decay": 0.0, "server_clip": None}


def written(sim: Simulation, clients: tuple[int, ...]) -> dict[str, torch.Tensor]:
    message = sim.method.broadcast(sim.server, clients)
    assert isinstance(message, PerClient)
    return tree.tensors(message.payloads)


def phi(sim: Simulation) -> dict[str, torch.Tensor]:
    return dict(tree.leaves(sim.server["phi"]))


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_the_servers_step_follows_autograd_of_the_inner_product(weights: Weights) -> None:
    """The gradient is that of Σ a_i ⟨stopgrad(Δ_i), h(e_i; φ)⟩ in φ, and of each term alone in e_i."""
    made = make_method("pfedhn", {**SMALL, **PLAIN, "server_lr": 0.1})
    sim = simulation(made, fraction=0.6, weights=weights)
    method, clients = sim.method, sim.sample(0)
    assert isinstance(method, Hypernetwork)
    delta = tree.tensors(replies_of(sim, clients))
    leaves = {n: t.clone().requires_grad_() for n, t in phi(sim).items()}
    e = sim.server["embeddings"].clone().requires_grad_()
    template = tree.tensors(sim.server["template"])
    terms = [
        sum((delta[n][k] * method.write(template, leaves, e[i])[n]).sum() for n in delta)
        for k, i in enumerate(clients)
    ]
    counts = [SIZES[i] if weights == "samples" else 1 for i in clients]
    mean = sum(a / sum(counts) * term for a, term in zip(counts, terms, strict=True))
    g_phi = torch.autograd.grad(mean, list(leaves.values()), retain_graph=True)  # type: ignore[arg-type]
    (g_e,) = torch.autograd.grad(sum(terms), [e])  # type: ignore[arg-type]
    before = sim.server["embeddings"].clone()
    sim.step()
    for (name, old), g in zip(leaves.items(), g_phi, strict=True):
        torch.testing.assert_close(phi(sim)[name], old.detach() - 0.1 * g, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(sim.server["embeddings"], before - 0.1 * g_e, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["pfedhn", "plgu_ghn"])
def test_by_default_all_clients_start_from_the_initial_model_and_come_apart(name: str) -> None:
    """h(e_i; φ) is the run's model whatever e_i is; a plain step of 1 then moves it for all as FedAvg's mean does."""
    options = {"hidden": 8, "depth": 1, "embedding": 3, "server_lr": 0.5}
    sim = simulation(make_method(name, {**options, **PLAIN, **({} if name == "pfedhn" else {"rho": 0.0})}))
    ids = tuple(range(sim.federation.num_clients))
    for tensor_name, tensor in written(sim, ids).items():
        assert torch.equal(tensor, sim.init[tensor_name].expand_as(tensor))
    mean = {
        n: torch.einsum("k,k...->...", shares(), t) for n, t in tree.tensors(replies_of(sim, ids)).items()
    }
    before = phi(sim)
    sim.step()
    for tensor_name, change in mean.items():
        moved = before[f"head_b/{tensor_name}"] - 0.5 * change.flatten()
        torch.testing.assert_close(phi(sim)[f"head_b/{tensor_name}"], moved, atol=1e-6, rtol=1e-5)
    apart = written(sim, (0, 1))
    assert any(not torch.allclose(t[0], t[1], atol=1e-6) for t in apart.values())


def shares() -> torch.Tensor:
    return torch.tensor(SIZES) / sum(SIZES)


def test_a_newcomer_gets_the_model_of_the_mean_embedding() -> None:
    sim = simulation(make_method("pfedhn", SMALL), rounds=2)
    late = sim.federation.num_clients
    mean = sim.server["embeddings"].mean(0, keepdim=True)
    found = written(sim, (late,))
    sim.server["embeddings"] = mean.expand_as(sim.server["embeddings"]).clone()
    for name, tensor in written(sim, (0,)).items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize(("given", "width"), [(None, 1 + len(SIZES) // 4), (1, 1), (7, 7)])
def test_embeddings_grow_with_the_clients_unless_their_length_is_given(given: int | None, width: int) -> None:
    sim = simulation(make_method("pfedhn", {**SMALL, "embedding": given}))
    assert sim.server["embeddings"].shape == (len(SIZES), width)
