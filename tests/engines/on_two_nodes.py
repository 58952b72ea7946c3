"""Runs on a Ray cluster of two nodes of this machine and prints what it saw as JSON; `test_workers.py` judges.

A program of its own, since Ray reads its settings when it is imported, and its processes end with this one.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the loopback address alone
    "RAY_AUTH_MODE": "disabled",  # nobody else can reach it, and no token is left behind
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
}
sys.path.insert(0, str(Path(__file__).parents[1]))

import ray
import torch
from ray.cluster_utils import Cluster as TwoNodes

from engines.networks import outcome
from methods.settings import make
from methods.small import SIZES, TRAIN, everything, federation, simulation
from tailorfl.engines.choice import make_engine
from tailorfl.engines.pool import PooledEngine
from tailorfl.engines.ray_pool import RayPool
from tailorfl.errors import TailorflError
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.sample_privacy import SampleDP

torch.set_num_threads(1)
LOOPBACK = {"num_cpus": 2, "node_ip_address": "127.0.0.1", "include_dashboard": False}
METHODS = ("fedavg", "ditto", "fedrep", "scaffold", "plgu_lf", "fedfomo")
SETTINGS: dict[str, Any] = {"fraction": 0.6}
ROUNDS = 6


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


def pool_of(sim: Simulation) -> RayPool:
    assert isinstance(sim.engine, PooledEngine)
    assert isinstance(sim.engine.pool, RayPool)
    return sim.engine.pool


def pid_of(name: str) -> int:
    return int(name.rpartition(" ")[2])


def main() -> None:
    nodes = TwoNodes(initialize_head=True, head_node_args=LOOPBACK)
    second = nodes.add_node(num_cpus=2, node_ip_address="127.0.0.1")
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    seen: dict[str, Any] = {"nodes": len({n["NodeID"] for n in ray.nodes() if n["Alive"]}), "same": {}}
    seen["addresses"] = sorted({n["NodeManagerAddress"] for n in ray.nodes()})

    engine = make_engine("vectorized", 2, 2, "auto")
    # Sampled cohorts of three of five clients in chunks of two: chunks move between workers.
    for name in METHODS:
        one = simulation(name, "batch_norm", "vectorized", chunk=2, rounds=ROUNDS, **SETTINGS)
        two = simulation(name, "batch_norm", engine, rounds=ROUNDS, **SETTINGS)
        seen["same"][name] = same(outcome(one), outcome(two)) and one.traffic == two.traffic
    many: dict[str, Any] = {"data": federation((4, 5, 6, 7) * 5), "rounds": ROUNDS, **SETTINGS}
    one = simulation("ditto", "mlp", "vectorized", chunk=5, **many)
    two = simulation("ditto", "mlp", make_engine("vectorized", 5, 2, "auto"), **many)
    seen["same"]["ditto, 20 clients"] = same(everything(one), everything(two))
    pool_of(two).close()
    pool = pool_of(simulation("fedavg", "mlp", engine, rounds=1))
    seen["workers"] = pool.names
    private = replace(TRAIN, momentum=0.0, weight_decay=0.0, dp=SampleDP(0.5, 0.8, "shuffle"))
    one = simulation("ditto", "mlp", "vectorized", chunk=2, rounds=2, train=private)
    two = simulation("ditto", "mlp", engine, rounds=2, train=private)
    seen["ledger"] = one.ledger == two.ledger and bool(one.ledger) and same(outcome(one), outcome(two))

    whole = simulation("ditto", "batch_norm", "vectorized", chunk=2, rounds=4, **SETTINGS)
    first = simulation("ditto", "batch_norm", engine, rounds=2, state_folder=Path(mkdtemp()), **SETTINGS)
    resumed = simulation("ditto", "batch_norm", engine, **SETTINGS)
    resumed.load(*first.dump())
    elsewhere = simulation("ditto", "batch_norm", "vectorized", chunk=2, **SETTINGS)
    elsewhere.load(*first.dump())
    for sim in (resumed, elsewhere):
        sim.step()
        sim.step()
    seen["resumed"] = [same(outcome(whole), outcome(sim)) for sim in (resumed, elsewhere)]

    sim = simulation(make("local"), "mlp", engine, rounds=1)
    before = everything(sim)
    sim.train = replace(TRAIN, lr=1e30, steps=30)
    try:
        sim.step()
    except TailorflError as error:
        seen["error"] = [type(error).__name__, str(error)]
    seen["unchanged"] = same(before, everything(sim)) and len(sim.states) == len(SIZES)

    # A worker is killed, then the second node: the rounds go on with the workers that are left.
    four = make_engine("vectorized", 2, 4, "auto", start_seconds=60)
    one = simulation("ditto", "batch_norm", "vectorized", chunk=2, rounds=4, **SETTINGS)
    pool.close()
    two = simulation("ditto", "batch_norm", four, rounds=1, **SETTINGS)
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tailorfl").addHandler(handler)
    os.kill(pid_of(pool_of(two).names[0]), signal.SIGKILL)
    two.step()
    nodes.remove_node(second)
    two.step()
    two.step()
    seen["went_on"] = same(outcome(one), outcome(two))
    seen["words"] = words
    for name in pool_of(two).names:
        try:
            os.kill(pid_of(name), signal.SIGKILL)
        except ProcessLookupError:
            continue
    before = everything(two)
    try:
        two.step()
    except TailorflError as error:
        seen["lost"] = [type(error).__name__, str(error)]
    seen["kept"] = same(before, everything(two))
    print(json.dumps(seen), flush=True)
    ray.shutdown()
    nodes.shutdown()


if __name__ == "__main__":
    main()
