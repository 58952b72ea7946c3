"""FedAvg in tailorfl, with the engine that it chooses. Run by compare.py."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from peer_work import CLASSES, CLIENTS, SAMPLES, SHAPE, Job, Work, main
from torch import nn

from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig


def federation(work: Work) -> Federation:
    """Return the clients' samples as tailorfl holds them."""
    source = Source("random", work.x, work.y, "classification", CLASSES)
    rows = tuple(np.arange(i * SAMPLES, (i + 1) * SAMPLES) for i in range(CLIENTS))
    none = tuple(np.empty(0, dtype=np.int64) for _ in rows)
    return Federation(source, rows, none, none, tuple(str(i) for i in range(CLIENTS)), CLIENTS)


def simulation(work: Work, job: Job) -> Simulation:
    """Return FedAvg from the initial weights; a step is a round."""

    def start() -> nn.Module:
        module = build(work.model, SHAPE, CLASSES)
        module.load_state_dict(work.init)
        return module

    config = TrainConfig(epochs=job.epochs, batch_size=job.batch_size, lr=job.lr)
    return Simulation(make_method("fedavg"), federation(work), Model(start), config)


def run(work: Work, path: Path, jobs: Sequence[Job]) -> None:
    """Do the jobs, each from the initial weights."""
    for job in jobs:
        sim = simulation(work, job)
        job.mark()
        for _ in range(job.rounds):
            sim.step()
            job.mark()
        job.weights = {name: value.clone() for name, value in sim.method.shared(sim.server).items()}


if __name__ == "__main__":
    main(version("tailorfl"), run)
