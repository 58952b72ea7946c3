"""A post that somebody meddles with, and what a federation must be after whatever they did."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from deploy.federating import experiment, members, same, server_state, simulated
from tailorfl.deploy.client_session import ClientSession
from tailorfl.deploy.codec import PROTOCOL, Packet
from tailorfl.deploy.serving import host_experiment
from tailorfl.deploy.transport import InProcessTransport, Letter
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.participation import ClientOutcome, Trace
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.checkpoints import load as load_checkpoint
from tailorfl.runs.checkpoints import rounds
from tailorfl.runs.files import encode
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.training import tree

DATA = {"name": "digits", "clients": 3, "samples": 300}
Ask = Callable[[bytes], bytes]
Meddle = Callable[[int, Packet, bytes, Ask], bytes]
"""Gets the node, the question, its bytes, and what asks the member; returns what arrives as the answer."""


class LostError(Exception):
    """No answer will come."""


def honest(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
    """Change nothing."""
    return ask(body)


class Tampered(InProcessTransport):
    """A post that writes down all that passes, as (node, question, answer), and changes answers as it is told."""

    def __init__(self, nodes: Mapping[int, ClientSession], meddle: Meddle = honest) -> None:
        super().__init__({node: member.answer for node, member in nodes.items()})
        self.meddle = meddle
        self.passed: list[tuple[int, bytes, bytes]] = []

    def _asked(self, letter: Letter) -> bytes:
        def ask(body: bytes) -> bytes:
            answer = self.members[letter.node](body)
            self.passed.append((letter.node, body, answer))
            return answer

        with self._one:
            return self.meddle(letter.node, Packet.decoded(letter.body), letter.body, ask)


def hosted(config: ExperimentConfig, folder: Path, post: InProcessTransport) -> ExperimentResult:
    """Run an experiment as `tailorfl server` does, or go on with it."""
    return host_experiment(post, config, folder / "out")


def hosted_once(config: ExperimentConfig, folder: Path, post: InProcessTransport) -> ExperimentResult:
    """Run an experiment with a post that is not used again."""
    try:
        return hosted(config, folder, post)
    finally:
        post.close()


def run_tampered(config: ExperimentConfig, folder: Path, meddle: Meddle) -> tuple[ExperimentResult, Tampered]:
    """Run an experiment with a post that somebody meddles with."""
    there = members(folder, config.data.clients or 0)
    post = Tampered(there, meddle)
    try:
        return hosted_once(config, folder, post), post
    finally:
        for member in there.values():
            member.close()


def small(method: str = "ditto", **changes: Any) -> ExperimentConfig:
    """Three clients, evaluated after the last round."""
    return experiment(method, **{"eval": {"every": 0}, "data": DATA, "rounds": 3, **changes})


def is_training(asked: Packet, round: int) -> bool:
    """Whether a question is that of a round."""
    return asked.kind == "train" and asked.facts["round"] == round


def job_of(config: ExperimentConfig) -> Job:
    """The only job of an experiment."""
    return Job(config, config.methods[0], config.seeds[0])


def trace_of(result: ExperimentResult) -> Trace:
    """What became of every client in every round."""
    return Trace.read(result.path / job_of(result.config).folder / "trace.jsonl")


def became(result: ExperimentResult, round: int, client: int) -> ClientOutcome:
    """What became of one client in one round."""
    return next(a for a in trace_of(result).of(round).answers if a.client == client)


def is_replayed(config: ExperimentConfig, folder: Path, result: ExperimentResult) -> Simulation:
    """Assert that the server and all clients are where the simulator gets with the same trace, to the bit.

    A client's state is that of the last round in which it was accepted: it must be on its disk.
    """
    trace = trace_of(result)
    sim = simulated(config, trace=trace)
    same(server_state(result), dict(tree.leaves(sim.server)))
    are_states(config, folder, sim, trace)
    return sim


def are_states(config: ExperimentConfig, folder: Path, sim: Simulation, trace: Trace) -> None:
    """Assert that private states on disk are those of a simulation."""
    for client in range(sim.federation.num_clients):
        accepted = [one.round for one in trace if client in one.answered]
        if not accepted:
            continue
        store = next(group.states for group in sim.groups if client in group.clients)
        own = {p: t[0] for p, t in tree.leaves(store.get((client,)))}
        same(state_on_disk(config, folder, client, accepted[-1]), own)


def place_of(config: ExperimentConfig, folder: Path, client: int) -> Path:
    """Where a client keeps what it has of the job."""
    return folder / f"state-{client}" / config.name / job_of(config).folder


def state_on_disk(config: ExperimentConfig, folder: Path, client: int, round: int) -> dict[str, Tensor]:
    """A client's private state after a round."""
    place = place_of(config, folder, client)
    assert round in rounds(place), f"client {client} has lost round {round}, which was accepted"
    return load_checkpoint(place, round)[0]


def packed(packet: Packet, **about: Any) -> bytes:
    """The bytes of a packet, with what is said of it changed, and a digest that is right."""
    order = list(packet.tensors)
    said = {"protocol": PROTOCOL, "kind": packet.kind, "order": order, "same": {}, "facts": packet.facts}
    body = save(dict(packet.tensors), metadata={"tailorfl": encode({**said, **about})})
    return signed(body)


def signed(body: bytes) -> bytes:
    """Bytes behind their digest."""
    return hashlib.sha256(body).digest() + body


def with_facts(answer: bytes, **facts: Any) -> bytes:
    """An answer with other facts."""
    found = Packet.decoded(answer)
    return packed(replace(found, facts={**found.facts, **facts}))


def with_tensor(answer: bytes, change: Callable[[Tensor], Tensor]) -> bytes:
    """An answer whose first tensor is another one."""
    found = Packet.decoded(answer)
    name = next(iter(found.tensors))
    changed = change(found.tensors[name].clone())
    return packed(replace(found, tensors={**found.tensors, name: changed}))


def filled(tensor: Tensor, value: float) -> Tensor:
    """A tensor whose first number is another one."""
    tensor.view(-1)[0] = value
    return tensor


def renamed(answer: bytes, new: str) -> bytes:
    """An answer whose first tensor has another name."""
    found = Packet.decoded(answer)
    (first, tensor), *others = found.tensors.items()
    assert first != new
    return packed(replace(found, tensors={new: tensor, **dict(others)}))


def added(answer: bytes, name: str, numbers: int = 3) -> bytes:
    """An answer with one tensor more."""
    found = Packet.decoded(answer)
    return packed(replace(found, tensors={**found.tensors, name: torch.zeros(numbers)}))
