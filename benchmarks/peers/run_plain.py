"""FedAvg as the fastest loop that we can write, which tries layouts and updates: the yardstick. Run by compare.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peer_work import SHAPE, Case, Job, Work, main
from torch import nn

from tailorfl.benchmark.plain_loop import LoopClient, fastest, shuffled
from tailorfl.data.source import Source
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import LOSSES


def clients(job: Job, case: Case) -> list[LoopClient]:
    """Return every client with the batches of one round, in a new order."""
    rows = [torch.arange(i * case.samples, (i + 1) * case.samples) for i in range(case.clients)]
    return [
        LoopClient(1 / case.clients, shuffled(mine, job.batch_size, job.epochs * case.samples))
        for mine in rows
    ]


def run(work: Work, path: Path, jobs: Sequence[Job]) -> None:
    """Do the jobs, each from the initial weights."""

    def start() -> nn.Module:
        module = build(work.case.model, SHAPE, work.case.classes)
        module.load_state_dict(work.init)
        return module

    source = Source("random", work.x, work.y, "classification", work.case.classes)
    for job in jobs:
        config = TrainConfig(epochs=job.epochs, batch_size=job.batch_size, lr=job.lr)
        weights = dict(work.init)
        loop = fastest(
            Model(start), source, LOSSES["classification"], config, weights, clients(job, work.case)
        )
        job.mark()
        for _ in range(job.rounds):
            weights = loop.round(weights, clients(job, work.case))
            job.mark()
        job.weights = {name: value.clone() for name, value in weights.items()}


if __name__ == "__main__":
    main(str(torch.__version__), run)
