"""FedAvg as the fastest loop that we can write, which tries layouts and updates: the yardstick. Run by compare.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peer_work import CLASSES, CLIENTS, SAMPLES, SHAPE, Job, Work, main
from torch import nn

from tailorfl.benchmark.plain_loop import LoopClient, fastest, shuffled
from tailorfl.data.source import Source
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import LOSSES


def clients(job: Job) -> list[LoopClient]:
    """Return every client with the batches of one round, in a new order."""
    rows = [torch.arange(i * SAMPLES, (i + 1) * SAMPLES) for i in range(CLIENTS)]
    return [LoopClient(1 / CLIENTS, shuffled(mine, job.batch_size, job.epochs * SAMPLES)) for mine in rows]


def run(work: Work, path: Path, jobs: Sequence[Job]) -> None:
    """Do the jobs, each from the initial weights."""

    def start() -> nn.Module:
        module = build(work.model, SHAPE, CLASSES)
        module.load_state_dict(work.init)
        return module

    source = Source("random", work.x, work.y, "classification", CLASSES)
    for job in jobs:
        config = TrainConfig(epochs=job.epochs, batch_size=job.batch_size, lr=job.lr)
        weights = dict(work.init)
        loop = fastest(Model(start), source, LOSSES["classification"], config, weights, clients(job))
        job.mark()
        for _ in range(job.rounds):
            weights = loop.round(weights, clients(job))
            job.mark()
        job.weights = {name: value.clone() for name, value in weights.items()}


if __name__ == "__main__":
    main(str(torch.__version__), run)
