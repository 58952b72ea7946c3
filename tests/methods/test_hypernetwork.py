"""pFedHN and PLGU-GHN: what a hypernetwork writes for clients that begin, and for those that come later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from methods.reductions import QUICK_HN, Same
from methods.settings import Card, Row
from methods.small import SIZES, replies_of, simulation
from tailorfl.core.messages import PerClient
from tailorfl.core.method import make_method
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree

CONTRACTS = {
    "pfedhn": Row(
        Card(whole, whole, whole, True, False),
        {"hidden": 8, "depth": 1, "embedding": 3, "server_lr": 1e-3},
        chooses=True,
        by_id=True,
        proved="the gradient of its server: references/test_references.py (T08)",
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
