"""FedAvg, Ditto and APFL in tailorfl, with the engine that it chooses. Run by compare.py."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from peer_work import ALPHA, LAM, PERSONAL, SHAPE, Job, Work, main
from torch import nn

from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {"dense": ("mlp", {"hidden": [200, 200]})}
OPTIONS: dict[str, dict[str, Any]] = {"ditto": {"lam": LAM}, "apfl": {"alpha": ALPHA, "adaptive": True}}


def federation(work: Work) -> Federation:
    """Return the clients' samples as tailorfl holds them."""
    case = work.case
    source = Source("random", work.x, work.y, "classification", case.classes)
    rows = tuple(np.arange(i * case.samples, (i + 1) * case.samples) for i in range(case.clients))
    none = tuple(np.empty(0, dtype=np.int64) for _ in rows)
    return Federation(source, rows, none, none, tuple(str(i) for i in range(case.clients)), case.clients)


def simulation(work: Work, job: Job) -> Simulation:
    """Return the method from the initial weights; a step is a round."""
    case = work.case

    def start() -> nn.Module:
        model, options = NETWORKS.get(case.model, (case.model, {}))
        module = build(model, SHAPE, case.classes, **options)
        module.load_state_dict(work.init)
        return module

    config = TrainConfig(epochs=job.epochs, batch_size=job.batch_size, lr=job.lr)
    return Simulation(
        make_method(case.method, OPTIONS.get(case.method)), federation(work), Model(start), config
    )


def run(work: Work, path: Path, jobs: Sequence[Job]) -> None:
    """Do the jobs, each from the initial weights."""
    for job in jobs:
        sim = simulation(work, job)
        job.mark()
        for _ in range(job.rounds):
            sim.step()
            job.mark()
        job.weights = {name: value.clone() for name, value in sim.method.shared(sim.server).items()}
        if work.case.method == "ditto":
            job.weights |= {PERSONAL + name: value[0].clone() for name, value in sim.states.get([0]).items()}


if __name__ == "__main__":
    main(version("tailorfl"), run)
