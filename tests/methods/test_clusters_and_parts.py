"""HypCluster, FedBABU, FedAlt and FedSim: their reductions and what they promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from methods.quadratics import CLIENTS, DIM, WEIGHT, quadratic_simulation
from methods.reductions import HALF, ONE, SHARED_HEAD, Same, drawn, local, nothing_personal
from methods.settings import Card, Limit, Row
from methods.small import simulation
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.make import make_engine
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.cohort import TrainConfig

CONTRACTS = {
    "fedalt": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        {"head_epochs": 2},
        Limit("pooled", 1, {"personal_part": "none", "head_epochs": 0}),
        same=(
            replace(nothing_personal(**SHARED_HEAD, head_epochs=0, body_epochs=1), other_train=ONE),
            replace(local(personal_part="all", head_epochs=1, body_epochs=1), other_train=ONE),
        ),
        remarks=(({"body_epochs": 0}, "never trains what clients share", "test_reduction_remarks.py"),),
    ),
    "fedsim": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        limit=Limit("pooled", 1, {"personal_part": "none"}),
        same=(
            nothing_personal(**SHARED_HEAD),
            local(personal_part="all"),
            replace(
                nothing_personal(personal_part="none", server_lr=0.5, lam=0.3),
                other_options=HALF,
                exact=False,
            ),
        ),
        remarks=(({"personal_part": "all", "lam": 0.5}, "with its penalty", "test_reduction_remarks.py"),),
    ),
    "fedbabu": Row(
        # The head is part of the model that trains and never moves.
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, True, lambda s: -s.head),
        {"ft_epochs": 1},
        same=(
            Same("E_ft = 0", {"ft_epochs": 0}, "fedbabu", {"ft_epochs": 0}, "personal", "global", said=True),
            Same(
                "T04",
                {"personal_part": "none", "ft_epochs": 2},
                "fedavg_ft",
                {"ft_epochs": 2},
                "personal",
                "personal",
                said=True,
            ),
            drawn("global", personal_part="all"),
        ),
        proved="the frozen head: test_split_methods.py and test_clusters_and_parts.py",
    ),
    "hypcluster": Row(
        Card(lambda s: 2 * s.d, whole, whole, True, False),
        limit=Limit("pooled", 1, {"clusters": 1}),
        chooses=True,
        same=(Same("T01", {"clusters": 1}, "fedavg", {}, "personal", "global", said=True),),
    ),
}


def run(sim: Simulation, rounds: int = 4) -> Simulation:
    for _ in range(rounds):
        sim.step()
    return sim


def deployed(sim: Simulation) -> dict[str, torch.Tensor]:
    [(_, models)] = sim.personal_models(range(sim.federation.num_clients))
    return dict(models.items())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_one_cluster_is_fedavg(engine: str) -> None:
    one = run(simulation(make_method("hypcluster", {"clusters": 1}), engine=engine))
    other = run(simulation(make_method("fedavg"), engine=engine))
    assert same(deployed(one), deployed(other))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_two_populations_are_told_apart(engine: str) -> None:
    """Clients of two linear models w and −w: each cluster finds one of them, every client the right one."""
    rng = np.random.default_rng(0)
    truth = torch.tensor([2.0, -1.0, 0.5])
    x = torch.from_numpy(rng.normal(size=(CLIENTS * 20, DIM)).astype(np.float32))
    sign = torch.tensor([1.0, -1.0] * (CLIENTS // 2)).repeat_interleave(20)
    source = Source("two", x, ((x @ truth) * sign)[:, None], "regression", 1)
    rows = tuple(np.arange(20 * i, 20 * i + 20) for i in range(CLIENTS))
    none = tuple(np.empty(0, dtype=np.int64) for _ in rows)
    data = Federation(source, rows, none, none, tuple("abcdef"), CLIENTS)
    sim = Simulation(
        make_method("hypcluster", {"clusters": 2}), data, Model(lambda: build("linear", (DIM,), 1)),
        TrainConfig(epochs=2, batch_size=5, lr=0.05), engine=make_engine(engine), seed=3,
    )  # fmt: skip
    # Starts that a coin cannot confuse; which cluster gets which population is left open.
    sim.server["0"][WEIGHT], sim.server["1"][WEIGHT] = truth[None] * 0.1, truth[None] * -0.1
    found = deployed(run(sim, 60))[WEIGHT][:, 0]
    for client in range(CLIENTS):
        torch.testing.assert_close(found[client], truth * (-1.0) ** client, atol=1e-3, rtol=1e-3)


def test_a_cluster_nobody_chose_stays_as_it_is() -> None:
    sim = simulation(make_method("hypcluster", {"clusters": 2}))
    # Confident and wrong: its loss is far above any other.
    lost = {n: t * 1e3 for n, t in sim.server["1"].items()}
    for name, tensor in lost.items():
        sim.server["1"][name] = tensor
    run(sim, 2)
    assert all(torch.equal(sim.server["1"][n], t) for n, t in lost.items())


def test_fedbabus_head_never_moves_in_training() -> None:
    sim = run(simulation(make_method("fedbabu", {"ft_epochs": 1})))
    shared = sim.global_model()
    assert shared is not None
    for name in sim.split.personal:
        assert torch.equal(shared[name], sim.init[name])
    assert any(not torch.equal(shared[n], sim.init[n]) for n in sim.split.shared)


@pytest.mark.parametrize(
    ("scope", "moves"), [("head", "personal"), ("body", "shared"), ("full", "trainable")]
)
def test_fedbabus_deployment_tunes_what_it_says(scope: str, moves: str) -> None:
    sim = run(simulation(make_method("fedbabu", {"ft_epochs": 2, "ft_scope": scope})))
    shared, models = sim.global_model(), deployed(sim)
    assert shared is not None
    changed = {n for n, t in models.items() if not torch.equal(t, shared[n].expand_as(t))}
    assert changed == set(getattr(sim.split, moves))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("fedper", {}), ("fedsim", {})),
        (("fedrep", {"head_epochs": 2}), ("fedalt", {"head_epochs": 2})),
        (("fedsim", {"personal_part": "none"}), ("fedavg", {})),
    ],
)
def test_reductions(one: tuple[str, dict[str, Any]], other: tuple[str, dict[str, Any]]) -> None:
    a, b = (run(simulation(make_method(name, options))) for name, options in (one, other))
    assert same(deployed(a), deployed(b))


def test_the_order_of_fedalt_matters() -> None:
    """v first, then u with the new v; with all of the model personal, v alone is trained."""
    alternating = run(simulation(make_method("fedalt")))
    together = run(simulation(make_method("fedsim")))
    assert not same(deployed(alternating), deployed(together))
    alone = run(simulation(make_method("fedalt", {"personal_part": "all"})))
    local = run(simulation(make_method("local")))
    assert same(deployed(alone), deployed(local))


def test_quadratics_know_no_clusters() -> None:
    """On one population, one cluster of two may stay empty, and the other is FedAvg."""
    sim = run(quadratic_simulation(make_method("hypcluster", {"clusters": 1}), 1), 60)
    other = run(quadratic_simulation("fedavg", 1), 60)
    torch.testing.assert_close(sim.server["0"][WEIGHT], other.server["w"][WEIGHT])
