"""Runs on a Ray cluster of two nodes of this machine and prints what it found as JSON; `test_cluster.py` judges.

A program of its own, since Ray reads its settings when it is imported, and its processes end with this one.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the loopback address alone
    "RAY_AUTH_MODE": "disabled",  # nobody else can reach it, and no token is left behind
    "PYTHONPATH": str(Path(__file__).parents[1]),
}
sys.path.insert(0, os.environ["PYTHONPATH"])

import ray
import torch
from ray.cluster_utils import Cluster as TwoNodes

from methods.settings import make
from methods.small import NEWCOMER, SIZES, TRAIN, everything, personal, simulation
from tailorfl.engines.make import make_engine
from tailorfl.engines.workers.cluster import Cluster
from tailorfl.engines.workers.team import Workers
from tailorfl.errors import TailorflError
from tailorfl.rounds.simulation import Simulation

torch.set_num_threads(1)
LOOPBACK = {"num_cpus": 2, "node_ip_address": "127.0.0.1", "include_dashboard": False}
SETTINGS: dict[str, Any] = {"fraction": 0.6}


def outcome(sim: Simulation) -> dict[str, torch.Tensor]:
    ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 2)
    return {
        **everything(sim),
        **{f"personal/{n}": t for n, t in personal(sim).items()},
        **{f"adapted/{n}": t for n, t in adapted.items()},
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


def team_of(sim: Simulation) -> Cluster:
    assert isinstance(sim.engine, Workers)
    assert isinstance(sim.engine.team, Cluster)
    return sim.engine.team


def main() -> None:
    nodes = TwoNodes(initialize_head=True, head_node_args=LOOPBACK)
    nodes.add_node(num_cpus=2, node_ip_address="127.0.0.1")
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    found: dict[str, Any] = {"nodes": len({n["NodeID"] for n in ray.nodes() if n["Alive"]}), "same": {}}
    found["addresses"] = sorted({n["NodeManagerAddress"] for n in ray.nodes()})

    engine = make_engine("vectorized", 2, 2, "auto")
    for name in ("fedavg", "ditto", "fedfomo"):
        one = simulation(name, "batch_norm", "vectorized", chunk=2, rounds=3, **SETTINGS)
        two = simulation(name, "batch_norm", engine, rounds=3, **SETTINGS)
        found["same"][name] = same(outcome(one), outcome(two)) and one.traffic == two.traffic
    team = team_of(two)
    found["workers"] = team.names

    first = simulation("ditto", "batch_norm", engine, rounds=2, **SETTINGS)
    homes = dict(first.states.home)  # type: ignore[attr-defined]
    found["homes"] = [sorted(set(homes.values())), sorted(homes) == list(first.states.clients)]
    resumed = simulation("ditto", "batch_norm", engine, **SETTINGS)
    resumed.load(*first.dump())
    elsewhere = simulation("ditto", "batch_norm", "vectorized", chunk=2, **SETTINGS)
    elsewhere.load(*first.dump())
    whole = simulation("ditto", "batch_norm", "vectorized", chunk=2, rounds=4, **SETTINGS)
    for sim in (resumed, elsewhere):
        sim.step()
        sim.step()
    found["resumed"] = [same(outcome(whole), outcome(sim)) for sim in (resumed, elsewhere)]

    sim = simulation(make("local"), "mlp", engine, rounds=1)
    before = everything(sim)
    sim.train = replace(TRAIN, lr=1e30, steps=30)
    try:
        sim.step()
    except TailorflError as error:
        found["error"] = [type(error).__name__, str(error)]
    found["unchanged"] = same(before, everything(sim)) and len(sim.states) == len(SIZES)

    sim.train = TRAIN
    ray.kill(team._sites[0])
    try:
        sim.step()
    except TailorflError as error:
        found["lost"] = [type(error).__name__, str(error)]
    print(json.dumps(found), flush=True)
    ray.shutdown()
    nodes.shutdown()


if __name__ == "__main__":
    main()
