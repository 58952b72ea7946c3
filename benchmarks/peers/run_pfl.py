"""FedAvg in pfl-research, as its tutorials build it: `SimulatedBackend` and `FederatedAveraging`. Run by compare.py.

What makes it fast: tensors in memory, one dataset object a client that keeps its batches (pfl cuts them once, in a
fixed order), no evaluation but that of the first round (pfl always evaluates there; it is a warm-up round here), no
metrics logged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from peer_work import Job, Work, main
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F


class Network(nn.Sequential):
    """The network with the two functions that pfl asks for."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean log loss of a batch."""
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return what pfl reports of an evaluation."""
        return {"loss": Weighted(F.cross_entropy(self(x), y, reduction="sum").item(), len(y))}


class Marks(TrainingProcessCallback):
    """Notes the boundaries of rounds."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """The first boundary."""
        self.job.mark()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """The boundary after a round."""
        self.job.mark()
        return False, Metrics()


def run(work: Work, path: Path, jobs: Sequence[Job]) -> None:
    """Do the jobs, each from the initial weights."""
    for job in jobs:
        module = Network(OrderedDict(work.network().named_children()))
        model = PyTorchModel(
            module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        )
        users = {i: PyTorchTensorDataset(work.samples(i), user_id=str(i)) for i in range(work.case.clients)}
        data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=job.rounds,
                evaluation_frequency=job.rounds + 1,
                train_cohort_size=work.case.clients,
                val_cohort_size=0,
            ),
            SimulatedBackend(training_data=data, val_data=data),
            model,
            NNTrainHyperParams(
                local_num_epochs=job.epochs, local_learning_rate=job.lr, local_batch_size=job.batch_size
            ),
            NNEvalHyperParams(local_batch_size=None),
            callbacks=[Marks(job)],
            send_metrics_to_platform=False,
        )
        job.weights = module.state_dict()


if __name__ == "__main__":
    main(version("pfl"), run)
