"""FedAvg in blazefl, from its `contrib.fedavg`: the server's handler and the trainer in one process. Run by compare.py.

What makes it fast: its base trainer (one module, no pool of processes, whose start it would pay each round), a
DataLoader over a TensorDataset as its interface asks, no evaluation, no progress bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from blazefl.contrib import fedavg
from peer_work import Job, Work, main
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fedavg.tqdm = lambda iterable, **_: iterable


class Models:
    """Gives the network of the work."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def select_model(self, name: str) -> nn.Module:
        """Return a network with the initial weights."""
        return self.work.network()


class Data:
    """Gives the clients' loaders."""

    def __init__(self, work: Work) -> None:
        self.sets = [TensorDataset(*work.samples(i)) for i in range(work.case.clients)]

    def get_dataloader(
        self, type_: str, cid: int, batch_size: int, generator: torch.Generator | None = None
    ) -> DataLoader:
        """Return the loader of a client."""
        return DataLoader(self.sets[cid], batch_size=batch_size, shuffle=True, generator=generator)


def run(work: Work, path: Path, jobs: Sequence[Job]) -> None:
    """Do the jobs, each from the initial weights."""
    clients = work.case.clients
    for job in jobs:
        models, data = Models(work), Data(work)
        handler = fedavg.FedAvgBaseServerHandler(
            models, "", data, job.rounds, clients, 1.0, "cpu", job.batch_size, seed=0
        )
        trainer = fedavg.FedAvgBaseClientTrainer(
            models, "", data, "cpu", clients, job.epochs, job.batch_size, job.lr, seed=0
        )
        job.mark()
        while not handler.if_stop():
            trainer.local_process(handler.downlink_package(), handler.sample_clients())
            for package in trainer.uplink_package():
                handler.load(package)
            job.mark()
        job.weights = handler.model.state_dict()


if __name__ == "__main__":
    main(version("blazefl"), run)
