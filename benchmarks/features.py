"""Seconds of a round with what frozen layers give out computed once, and computed in every pass.

The model and the data of recipe perada_cifar (CIFAR-10, 4,400 images of 20 clients, 8 a round; ResNet-18 of half the
width; 1,000 images of Tiny-ImageNet for distillation), on a backbone as it is drawn, without augmentation: what is
changed at random is not the same twice. Either the head trains, or with it the adapters and norms of the last stage, or
of its last block, without dropout. Process seconds of one thread, one round after another in turns:

    python benchmarks/features.py --repeat 7 --json benchmarks/results/features.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tailorfl.benchmark.clock import processor
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig

HEAD = {"name": "resnet18", "width": 32, "dropout": 0.3, "trainable": "head"}
STAGE = {
    "name": "resnet18",
    "width": 32,
    "adapters": True,
    "trainable": ["layer4.*adapter*", "layer4.*.bn*", "fc.*"],
}
BLOCK = {**STAGE, "trainable": ["layer4.1.adapter*", "layer4.1.bn*", "fc.*"]}
PERADA = {"name": "perada", "distil": {"steps": 10, "batch_size": 64, "lr": 0.0001}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "head, FedAvg": (HEAD, {"name": "fedavg"}),
    "head, PerAda": (HEAD, PERADA),
    "adapters of the last block, FedAvg": (BLOCK, {"name": "fedavg"}),
    "adapters of the last block, PerAda": (BLOCK, PERADA),
    "adapters of the last stage, FedAvg": (STAGE, {"name": "fedavg"}),
    "adapters of the last stage, PerAda": (STAGE, PERADA),
}


def experiment(model: dict[str, Any], method: dict[str, Any], engine: str, features: str) -> ExperimentConfig:
    """Return the settings of a case."""
    return ExperimentConfig.model_validate(
        {
            "data": {
                "name": "cifar10",
                "samples": 4400,
                "partition": "dirichlet_perada",
                "partition_options": {"alpha": 0.1},
                "clients": 20,
                "public": "tinyimagenet",
                "public_samples": 1000,
            },
            "model": model,
            "methods": [method],
            "weights": "uniform",
            "train": {"epochs": 1, "batch_size": 32, "lr": 0.03},
            "fraction": 0.4,
            "engine": {"name": engine, "features": features},
        }
    )


def main() -> None:
    """Measure and print a line a case and engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--engines", nargs="*", default=["sequential", "vectorized"])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    federation = make_federation(experiment(*CASES["head, FedAvg"], "sequential", "off"), 0)
    rows = []
    for case in given.cases:
        for engine in given.engines:
            sims, begun = {}, time.process_time()
            for place in ("off", "auto"):
                begun = time.process_time()
                config = experiment(*CASES[case], engine, place)
                sims[place] = make_simulation(Job(config, config.methods[0], 0), federation)
            rows.append(measured(case, engine, sims, time.process_time() - begun, given.repeat))
            print(
                " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in rows[-1].items())
            )
    if given.json is not None:
        found = {"processor": processor(), "torch": torch.__version__, "rounds": rows}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def measured(
    case: str, engine: str, sims: dict[str, Simulation], looking: float, repeat: int
) -> dict[str, Any]:
    """Return the medians of a round and of an evaluation, both ways, and what computing once takes."""
    features = sims["auto"].features
    assert features is not None, sims["auto"].features_note
    begin = time.process_time()
    for table in features.tables:
        table.ensure(torch.arange(len(table.source)))
    once = time.process_time() - begin
    for sim in sims.values():
        sim.step()
    taken: dict[str, list[float]] = {name: [] for name in sims}
    for _ in range(repeat):
        for name, sim in sims.items():
            begin = time.process_time()
            sim.step()
            taken[name].append(time.process_time() - begin)
    evaluation = {}
    for name, sim in sims.items():
        begin = time.process_time()
        evaluate(sim, Protocol(("local", "global"), max_samples=500))
        evaluation[name] = time.process_time() - begin
    ratios = np.array(taken["off"]) / np.array(taken["auto"])
    return {
        "case": case,
        "engine": engine,
        "every pass s": float(np.median(taken["off"])),
        "once s": float(np.median(taken["auto"])),
        "times as fast": float(np.median(ratios)),
        "least": float(ratios.min()),
        "evaluation, every pass s": evaluation["off"],
        "evaluation, once s": evaluation["auto"],
        "computing once s": once,
        "looking for the cut s": looking,
        "MB": features.bytes / 1e6,
        "share of a forward pass": features.share,
    }


if __name__ == "__main__":
    main()
