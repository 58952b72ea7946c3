"""A federation in one process: real members with folders of their own, a real server, and a post between them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tailorfl.deploy.client_session import ClientSession, member_of
from tailorfl.deploy.connected_clients import ConnectedClients
from tailorfl.deploy.serving import DeployedExperiment, for_deployment
from tailorfl.deploy.transport import InProcessTransport, Transport
from tailorfl.report.experiment import run_experiment
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.participation import Trace
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.checkpoints import load as load_checkpoint
from tailorfl.runs.checkpoints import rounds
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig

TRAIN: dict[str, Any] = {"epochs": 1, "batch_size": 16, "lr": 0.1}


def experiment(method: str | Mapping[str, Any], **changes: Any) -> ExperimentConfig:
    """Four clients with digits, two rounds of a small model."""
    given = {
        "name": "deployed",
        "seeds": [5],
        "data": {
            "name": "digits",
            "clients": 4,
            "samples": 400,
            "partition": "dirichlet",
            "partition_options": {"alpha": 0.5},
        },
        "model": {"name": "mlp", "hidden": [8]},
        "methods": [method],
        "rounds": 2,
        "train": TRAIN,
        # A deployment passes through frozen layers in every pass.
        "engine": {"name": "sequential", "features": "off"},
        "deploy": {"round_seconds": 60.0, "wait_seconds": 20.0},
        **changes,
    }
    return ExperimentConfig.model_validate(given)


def members(folder: Path, clients: int = 4) -> dict[int, ClientSession]:
    """The clients of an experiment, as nodes with numbers of their own."""
    return {100 + i: member_of(state=folder / f"state-{i}", name=str(i)) for i in range(clients)}


def deployed(
    config: ExperimentConfig,
    folder: Path,
    nodes: Mapping[int, ClientSession] | None = None,
    post: Transport | None = None,
    **how: Any,
) -> ExperimentResult:
    """Run an experiment with clients in this process."""
    there = members(folder) if nodes is None and post is None else nodes or {}
    within = (
        InProcessTransport({node: member.answer for node, member in there.items()}) if post is None else post
    )
    config = for_deployment(config)
    deployment = DeployedExperiment(ConnectedClients(within), folder / "out", config)
    try:
        return run_experiment(config, folder / "out", backend=deployment.backend, **how)
    finally:
        if isinstance(within, InProcessTransport):
            within.close()


def simulated(config: ExperimentConfig, rounds: int | None = None, trace: Trace | None = None) -> Simulation:
    """The simulation of the same experiment, after its rounds."""
    job = Job(config, config.methods[0], config.seeds[0])
    sim = make_simulation(job, make_federation(config, config.data.seed_of(job.seed)))
    for number in range(job.rounds if rounds is None else rounds):
        sim.step(trace=None if trace is None else trace.of(number + 1))
    return sim


def server_state(result: ExperimentResult) -> dict[str, Tensor]:
    """The server's state in the newest checkpoint of the first job."""
    config = result.config
    folder = result.path / Job(config, config.methods[0], config.seeds[0]).folder
    tensors, _ = load_checkpoint(folder, rounds(folder)[-1])
    return {n.removeprefix("server/"): t for n, t in tensors.items() if n.startswith("server/")}


def private_state(folder: Path, config: ExperimentConfig, client: int | str) -> dict[str, Tensor]:
    """The newest private state on a client's disk."""
    job = Job(config, config.methods[0], config.seeds[0])
    place = folder / f"state-{client}" / config.name / job.folder
    return load_checkpoint(place, rounds(place)[-1])[0]


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Assert that tensors are the same to the bit."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
