"""FedAMP and HeurFedAMP: their weights in closed form, and what their cloud models are at the ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from methods.reductions import local
from methods.settings import Card, Limit, Row
from methods.small import NEWCOMER, assert_close, personal, simulation
from tailorfl.core.method import make_method
from tailorfl.methods.fedamp import Clouds
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


def test_too_much_attention_is_scaled_to_one_and_leaves_nothing_of_the_own_model() -> None:
    method, state = made("fedamp", alpha=1e4, sigma=25.0), server(apart=0.1)
    xi = method.mixing(state, (0, 3))
    torch.testing.assert_close(xi.sum(1), torch.ones(2, dtype=torch.float64))
    assert float(xi[0, 0]) == pytest.approx(0, abs=1e-12)
    assert float(xi[1, 3]) == pytest.approx(0, abs=1e-12)


def test_without_preference_the_others_count_alike_and_who_never_uploaded_not_at_all() -> None:
    state = server()
    sent = made("heurfedamp", sigma=0.0, self_weight=0.4).broadcast(state, (1, 3)).payloads
    for name, w in tree.tensors(state["models"]).items():
        torch.testing.assert_close(sent[name][0], 0.4 * w[1] + 0.6 * (w[0] + w[2]) / 2)
        torch.testing.assert_close(sent[name][1], 0.4 * w[3] + 0.6 * (w[0] + w[1] + w[2]) / 3)


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
