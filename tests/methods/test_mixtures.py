"""Mixtures of clients' models: FedAMP, pFedGraph, FedALA, FedFomo, APPLE and hypernetworks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from methods.reductions import (
    QUICK_HN,
    REFERENCE,
    fedavg,
    in_run,
    local,
    nothing_personal,
    of_mlp,
    personally,
    unnormed,
)
from methods.settings import Card, Limit, Row
from methods.small import NEWCOMER, SIZES, assert_close, personal, replies_of, simulation
from tailorfl.core.messages import PerClient
from tailorfl.core.method import make_method
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import twice, whole
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
    "pfedgraph": Row(
        Card(twice, whole, whole, True, False),
        {"lam": 0.1},
        same=(
            in_run(local(line="one round"), rounds=1),
            in_run(local(line="one client a round", lam=0.0), fraction=0.2),
        ),
    ),
    "fedala": Row(
        Card(whole, whole, whole, True, True),
        {"first_passes": 2},
        still={"eta": 0.0},
        same=(
            fedavg("η_W = 0", eta=0.0, said=True),
            nothing_personal("η_W = 0", eta=0.0),
            in_run(fedavg("one round"), rounds=1),
            unnormed(local(line="W = 0", said=False, mixed_part="all", start=0.0, eta=0.0)),
        ),
    ),
    "pfedhn": Row(
        Card(whole, whole, whole, True, False),
        QUICK_HN,
        chooses=True,
        by_id=True,
        proved=REFERENCE,
        never="the hypernetwork cannot be turned off",
    ),
    "plgu_ghn": Row(
        Card(whole, whole, whole, True, False),
        QUICK_HN,
        chooses=True,
        by_id=True,
        same=(in_run(of_mlp(personally("T08", "pfedhn", QUICK_HN, rho=0.0))),),
    ),
}


SMALL: dict[str, Any] = {**QUICK_HN, "start": "drawn"}
PLAIN_STEP = {"server_momentum": 0.0, "server_weight_decay": 0.0, "server_clip": None}


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp", "pfedgraph"])
def test_a_newcomer_is_sent_the_mean_of_the_uploads(name: str) -> None:
    """Of the last cohort, or of all that ever came."""
    sim = simulation(name, fraction=0.4)
    ((_, first),) = sim.newcomer_models((NEWCOMER,), 0)
    assert_close({n: t[0] for n, t in first.items()}, dict(sim.init.items()), atol=1e-7)
    sim.step()
    ((_, found),) = sim.newcomer_models((NEWCOMER,), 0)
    trained = personal(sim, sim.sample(0))
    assert_close({n: t[0] for n, t in found.items()}, {n: t.mean(0) for n, t in trained.items()}, atol=1e-6)


def test_the_approximate_variant_sends_a_model_alone() -> None:
    sim = simulation(make_method("pfedgraph", {"variant": "approximate"}), rounds=2)
    assert sim.traffic.down_unicast == sim.traffic.up == 2 * len(SIZES) * sim.model.scalars


def written(sim: Simulation, clients: tuple[int, ...]) -> dict[str, torch.Tensor]:
    message = sim.method.broadcast(sim.server, clients)
    assert isinstance(message, PerClient)
    return tree.tensors(message.payloads)


@pytest.mark.parametrize("name", ["pfedhn", "plgu_ghn"])
def test_by_default_all_clients_start_from_the_initial_model_and_come_apart(name: str) -> None:
    """h(e_i; φ) is the run's model whatever e_i is; a plain step of 1 then moves it for all as FedAvg's mean does."""
    still = {} if name == "pfedhn" else {"rho": 0.0}
    sim = simulation(make_method(name, {**QUICK_HN, "server_lr": 0.5, **PLAIN_STEP, **still}))
    ids, shares = tuple(range(sim.federation.num_clients)), torch.tensor(SIZES) / sum(SIZES)
    for tensor_name, tensor in written(sim, ids).items():
        assert torch.equal(tensor, sim.init[tensor_name].expand_as(tensor))
    changes, before = tree.tensors(replies_of(sim, ids)), sim.server["phi"].clone()
    sim.step()
    for tensor_name, change in changes.items():
        mean = torch.tensordot(shares, change, dims=1).flatten()
        moved = before["head_b", tensor_name] - 0.5 * mean
        torch.testing.assert_close(sim.server["phi", "head_b", tensor_name], moved, atol=1e-6, rtol=1e-5)
    apart = written(sim, (0, 1))
    assert any(not torch.allclose(t[0], t[1], atol=1e-6) for t in apart.values())


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


def test_too_much_attention_is_scaled_to_one_and_leaves_nothing_of_the_own_model() -> None:
    rng = torch.Generator().manual_seed(0)
    models = TensorDict({"a": 1 + 0.1 * torch.randn(4, 3, 2, generator=rng, dtype=torch.float64)})
    server = TensorDict({"models": models, "uploaded": torch.tensor([True, True, True, False])})
    xi = make_method("fedamp", {"alpha": 1e4, "sigma": 25.0}).mixing(server, (0, 3))  # type: ignore[attr-defined]
    torch.testing.assert_close(xi.sum(1), torch.ones(2, dtype=torch.float64))
    assert float(xi[0, 0]) == pytest.approx(0, abs=1e-12)
    assert float(xi[1, 3]) == pytest.approx(0, abs=1e-12)
