"""FedAvg as a plain loop, the common yardstick. Run by compare.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peer_work import CLIENTS, Job, Work, main, train_client
from torch import nn


def one_round(module: nn.Module, work: Work, job: Job) -> None:
    """Replaces the module's weights by the mean of what the clients make of them."""
    parameters = list(module.parameters())
    start = [p.detach().clone() for p in parameters]
    total = [torch.zeros_like(p) for p in start]
    for client in range(CLIENTS):
        with torch.no_grad():
            torch._foreach_copy_(parameters, start)
        train_client(module, parameters, *work.samples(client), job)
        with torch.no_grad():
            torch._foreach_add_(total, parameters, alpha=1 / CLIENTS)
    with torch.no_grad():
        torch._foreach_copy_(parameters, total)


def run(work: Work, path: Path, jobs: Sequence[Job]) -> None:
    """Does the jobs, each from the initial weights."""
    for job in jobs:
        module = work.network()
        job.mark()
        for _ in range(job.rounds):
            one_round(module, work, job)
            job.mark()
        job.weights = module.state_dict()


if __name__ == "__main__":
    main(str(torch.__version__), run)
