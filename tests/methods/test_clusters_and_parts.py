"""HypCluster, FedBABU, FedAlt and FedSim: their reductions and what they promise."""

from __future__ import annotations

from dataclasses import replace

import torch

from methods.reductions import HALF, ONE, SHARED_HEAD, Same, drawn, local, nothing_personal
from methods.settings import Card, Limit, Row
from methods.small import simulation
from tailorfl.core.method import make_method
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole

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


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def test_a_cluster_nobody_chose_stays_as_it_is() -> None:
    sim = simulation(make_method("hypcluster", {"clusters": 2}))
    # Confident and wrong: its loss is far above any other.
    lost = {n: t * 1e3 for n, t in sim.server["1"].items()}
    for name, tensor in lost.items():
        sim.server["1"][name] = tensor
    run(sim, 2)
    assert all(torch.equal(sim.server["1"][n], t) for n, t in lost.items())
