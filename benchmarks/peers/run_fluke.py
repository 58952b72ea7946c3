"""FedAvg and Ditto in fluke, as its `CentralizedFL.run` does them. Run by compare.py.

What makes it fast: tensors in memory, its FastDataLoader, no evaluation, no log. Its rich progress bars stay: it has no
switch for them; they write to no terminal here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torchmetrics  # noqa: F401 - looks for packages of its own, before those below are stood in for
from peer_work import LAM, PERSONAL, Job, Work, main
from torch import nn

UNUSED = (
    "torchvision torchvision.datasets torchvision.datasets.utils torchvision.transforms torchvision.models datasets "
    "wandb clearml opacus matplotlib matplotlib.pyplot seaborn torch.utils.tensorboard"
)
"""Packages of data sets, plots and loggers that fluke imports and these rounds never call."""
sys.modules |= {name: MagicMock() for name in UNUSED.split()}

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms import CentralizedFL  # noqa: E402
from fluke.algorithms.ditto import Ditto  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402


class Data:
    """The clients' loaders, where fluke expects a splitter of data sets."""

    def __init__(self, work: Work, job: Job) -> None:
        self.loaders = [
            FastDataLoader(
                *work.samples(i), num_labels=work.case.classes, batch_size=job.batch_size, shuffle=True
            )
            for i in range(work.case.clients)
        ]

    def assign(self, clients: int, batch_size: int) -> tuple[tuple[list[FastDataLoader], list[None]], None]:
        """Return training and test loaders of the clients, and the server's."""
        return (self.loaders, [None] * clients), None


class Marks:
    """Notes the boundaries of rounds; fluke calls what an observer has."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def end_round(self, round: int) -> None:
        """Note the end of a round."""
        self.job.mark()

    def __getattr__(self, event: str) -> Callable[..., None]:
        """Return what takes no notice of the other events."""
        if event.startswith("__"):
            raise AttributeError(event)
        return lambda *_, **__: None


def algorithm(work: Work, job: Job) -> CentralizedFL:
    """Return the method with everybody's data and weights."""
    client = {
        "batch_size": job.batch_size,
        "local_epochs": job.epochs,
        "loss": nn.CrossEntropyLoss,
        "optimizer": DDict(name="SGD", lr=job.lr),
        "scheduler": DDict(name="StepLR", step_size=1, gamma=1),
    }
    cls: type[CentralizedFL] = FedAVG
    if work.case.method == "ditto":
        cls = Ditto
        client |= {"model": work.network(), "tau": job.epochs, "lam": LAM}
    settings = DDict(client=DDict(client), server=DDict(weighted=True), model=work.network())
    return cls(work.case.clients, Data(work, job), settings)


def run(work: Work, path: Path, jobs: Sequence[Job]) -> None:
    """Do the jobs, each from the initial weights."""
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    for job in jobs:
        federation = algorithm(work, job)
        federation.attach(Marks(job))
        job.mark()
        federation.run(job.rounds, 1.0, finalize=False)
        job.weights = {name: value.clone() for name, value in federation.server.model.state_dict().items()}
        if work.case.method == "ditto":
            state = federation.clients[0].personalized_model.state_dict()
            job.weights |= {PERSONAL + name: value.clone() for name, value in state.items()}


if __name__ == "__main__":
    torch.manual_seed(0)
    main(version("fluke-fl"), run)
