"""FedAvg in Flower's simulation: `run_simulation`, its FedAvg strategy, one CPU a client. Run by compare.py.

Ray starts as many processes as there are cores. What makes it fast: data and module made once a process, local
training with the plain loop's code, no evaluation, no log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import flower_client
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer_work import Job, Work, main


class Marked(FedAvg):
    """Flower's FedAvg that notes the boundaries of rounds."""

    def __init__(self, job: Job, clients: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        self.job, self.clients = job, clients

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The mean, and the boundary after a round."""
        replies = list(replies)
        if len(replies) != self.clients or any(reply.has_error() for reply in replies):
            errors = [reply.error for reply in replies if reply.has_error()]
            raise RuntimeError(
                f"round {server_round}: {len(replies)} of {self.clients} clients replied, {len(errors)} with errors"
                + (f" such as {errors[0]}" if errors else "")
            )
        result = super().aggregate_train(server_round, replies)
        self.job.mark()
        return result


def run(work: Work, path: Path, jobs: Sequence[Job]) -> None:
    """Do the jobs in one simulation, each from the initial weights."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        for job in jobs:
            config = {"work": str(path), "epochs": job.epochs, "batch-size": job.batch_size, "lr": job.lr}
            job.mark()
            result = Marked(job, work.case.clients).start(
                grid, ArrayRecord(work.init), num_rounds=job.rounds, train_config=ConfigRecord(config)
            )
            job.weights = result.arrays.to_torch_state_dict()

    run_simulation(
        server,
        flower_client.app,
        num_supernodes=work.case.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    main(version("flwr"), run)
