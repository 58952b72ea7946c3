"""A federation in one process: real clients with folders of their own, a real server, and a post to tamper with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from tailorfl.deploy.client_session import ClientSession, member_of
from tailorfl.deploy.codec import PROTOCOL, Packet
from tailorfl.deploy.serving import host_experiment
from tailorfl.deploy.transport import InProcessTransport, Letter
from tailorfl.report.experiment import run_experiment
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.participation import ClientOutcome, Trace
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import checkpoints
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.files import encode
from tailorfl.runs.job import Job
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.system import SystemConfig
from tailorfl.training import tree

TRAIN: dict[str, Any] = {"epochs": 1, "batch_size": 16, "lr": 0.1}
PRIVATE = {**TRAIN, "dp": {"clip": 1.0, "noise": 1.0}}
Ask = Callable[[bytes], bytes]
Meddle = Callable[[int, Packet, bytes, Ask], bytes]
"""Gets the node, the question, its bytes, and what asks the client; returns what arrives as the answer."""


def experiment(method: str | Mapping[str, Any], **changes: Any) -> ExperimentConfig:
    """Four clients with digits, two rounds of a small model."""
    dealing = {"partition": "dirichlet", "partition_options": {"alpha": 0.5}}
    settings = {
        "name": "deployed",
        "seeds": [5],
        "data": {"name": "digits", "clients": 4, "samples": 400, **dealing},
        "model": {"name": "mlp", "hidden": [8]},
        "methods": [method],
        "rounds": 2,
        "train": TRAIN,
        # A deployment passes through frozen layers in every pass.
        "engine": {"name": "sequential", "features": "off"},
        **changes,
    }
    deploy = {"round_seconds": 60.0, "wait_seconds": 20.0, **changes.get("deploy", {})}
    return ExperimentConfig.model_validate({**settings, "deploy": deploy})


def small(method: str | Mapping[str, Any] = "ditto", **changes: Any) -> ExperimentConfig:
    """Three clients, evaluated after the last round."""
    data = {"name": "digits", "clients": 3, "samples": 300}
    return experiment(method, **{"eval": {"every": 0}, "data": data, "rounds": 3, **changes})


class LostError(Exception):
    """No answer will come."""


def honest(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
    """Change nothing."""
    return ask(body)


def lying(
    change: Callable[[Packet, bytes], bytes], kind: str = "train", round: int = 0, node: int = 101
) -> Meddle:
    """A change of one client's answers of a kind, of one round or of all."""

    def meddle(number: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        answer, is_meant = ask(body), number == node and question.kind == kind
        return change(question, answer) if is_meant and round in (0, question.facts.get("round")) else answer

    return meddle


class Federation(InProcessTransport):
    """A server and clients, by default with the shares of an experiment's data.

    Attributes:
        people: node -> its client.
        away: nodes that cannot be reached.
        passed: all that has passed, as (node, question, answer).
        said: sentences of the server.
        on: words of such a sentence -> what is done when it is said first.
    """

    def __init__(
        self, folder: Path, clients: int | Mapping[int, ClientSession] = 3, meddle: Meddle = honest
    ) -> None:
        self.folder, self.meddle = folder, meddle
        shares = {100 + i: self.client(str(i)) for i in range(clients if isinstance(clients, int) else 0)}
        self.people: dict[int, ClientSession] = shares or dict(clients)  # type: ignore[call-overload]
        super().__init__({node: client.answer for node, client in self.people.items()})
        self.away, self.said = set[int](), list[str]()
        self.on: dict[str, Callable[[], Any]] = {}
        self.passed: list[tuple[int, bytes, bytes]] = []

    def client(self, name: str, **how: Any) -> ClientSession:
        """A client with its folder."""
        return member_of(state=self.folder / f"state-{name}", name=name, **how)

    def nodes(self) -> dict[int, str]:
        """Return the nodes that can be reached."""
        return {node: name for node, name in super().nodes().items() if node not in self.away}

    def _asked(self, letter: Letter) -> bytes:
        def ask(body: bytes) -> bytes:
            answer = self.members[letter.node](body)
            self.passed.append((letter.node, body, answer))
            return answer

        with self._one:
            return self.meddle(letter.node, Packet.decoded(letter.body), letter.body, ask)

    def notify(self, sentence: str) -> None:
        """Note what the server says, and do what is to be done when it says that."""
        self.said.append(sentence)
        for words in [words for words in self.on if words in sentence]:
            self.on.pop(words)()

    def host(self, config: ExperimentConfig, out: str = "out", **how: Any) -> ExperimentResult:
        """Run an experiment as `tailorfl server` does, or go on with it."""
        return host_experiment(self, config, self.folder / out, notify=self.notify, **how)

    def join(self, client: ClientSession, node: int = 999) -> None:
        """Let a further client connect."""
        self.people[node] = client
        self.members[node] = client.answer

    def restart(self, node: int) -> None:
        """Put a new process in the place of a client: nothing of the old one is left but its folder."""
        self.people[node].close()
        self.join(self.client(str(node - 100)), node)

    def of_kind(self, kind: str, node: int | None = None) -> list[tuple[int, bytes, bytes]]:
        """Return what has passed of a kind of question, of all nodes or of one."""
        return [x for x in self.passed if node in (None, x[0]) and Packet.decoded(x[1]).kind == kind]

    def close(self) -> None:
        """End the threads, and let go of all folders."""
        super().close()
        for client in self.people.values():
            client.close()


def deployed(
    config: ExperimentConfig, folder: Path, clients: int | Mapping[int, ClientSession] = 4, **how: Any
) -> ExperimentResult:
    """Run an experiment with clients in this process."""
    federation = Federation(folder, clients)
    try:
        return federation.host(config, **how)
    finally:
        federation.close()


def tampered(config: ExperimentConfig, folder: Path, meddle: Meddle) -> ExperimentResult:
    """Run an experiment of three clients with a post that somebody meddles with."""
    federation = Federation(folder, meddle=meddle)
    try:
        return federation.host(config)
    finally:
        federation.close()


# -- what came out ------------------------------------------------------------------------------------------


def job_of(config: ExperimentConfig) -> Job:
    """The first job of an experiment."""
    return Job(config, config.methods[0], config.seeds[0])


def store_of(result: ExperimentResult) -> RunStore:
    """The server's records of the first job."""
    return RunStore.open(result.path / job_of(result.config).folder, readonly=True)


def trace_of(result: ExperimentResult) -> Trace:
    """What became of every client in every round."""
    return Trace.read(result.path / job_of(result.config).folder / "trace.jsonl")


def fates(result: ExperimentResult) -> set[str]:
    """What became of anybody in any round."""
    return {answer.fate for one in trace_of(result) for answer in one.answers}


def became(result: ExperimentResult, round: int, client: int) -> ClientOutcome:
    """What became of one client in one round."""
    return next(a for a in trace_of(result).of(round).answers if a.client == client)


def simulated(config: ExperimentConfig, rounds: int | None = None, trace: Trace | None = None) -> Simulation:
    """The simulation of the same experiment, after its rounds."""
    job = job_of(config)
    sim = make_simulation(job, make_federation(config, config.data.seed_of(job.seed)))
    for number in range(job.rounds if rounds is None else rounds):
        sim.step(trace=None if trace is None else trace.of(number + 1))
    return sim


def played_again(config: ExperimentConfig, folder: Path) -> ExperimentResult:
    """Run an experiment as a simulation of the trace that its deployment in `folder`/out has left."""
    trace = SystemConfig(trace=str(folder / "out"))
    again = config.model_copy(update={"system": trace, "checkpoint_every": 1})
    return run_experiment(again, folder / "again")


def newest(folder: Path) -> dict[str, Tensor]:
    """The tensors of the newest checkpoint in a folder."""
    return checkpoints.load(folder, checkpoints.rounds(folder)[-1])[0]


def server_state(result: ExperimentResult, job: Job | None = None) -> dict[str, Tensor]:
    """The server's state in the newest checkpoint of a job."""
    tensors = newest(result.path / (job or job_of(result.config)).folder)
    return {n.removeprefix("server/"): t for n, t in tensors.items() if n.startswith("server/")}


def place_of(config: ExperimentConfig, folder: Path, client: int | str) -> Path:
    """Where a client keeps what it has of the first job."""
    return folder / f"state-{client}" / config.name / job_of(config).folder


def private_state(folder: Path, config: ExperimentConfig, client: int | str) -> dict[str, Tensor]:
    """The newest private state on a client's disk."""
    return newest(place_of(config, folder, client))


def same(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert that tensors are the same to the bit."""
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


def are_equal(
    sim: Simulation,
    server: Mapping[str, Tensor],
    places: Sequence[Path],
    trace: Sequence[Any] | Trace | None = None,
) -> None:
    """Assert that server and clients have the states of a simulation, to the bit.

    Args:
        sim: the simulation after its last round.
        server: the server's state.
        places: where each client keeps what it has of the job.
        trace: with it a client's state is that of the last round in which it was accepted, which must be on its disk;
            without it the newest.
    """
    same(server, dict(tree.leaves(sim.server)))
    for client, place in enumerate(places):
        store = next(group.states for group in sim.groups if client in group.clients)
        accepted = [one.round for one in trace or () if client in one.answered]
        if client not in store.clients or (trace is not None and not accepted):
            continue
        state = newest(place) if trace is None else checkpoints.load(place, accepted[-1])[0]
        same(state, {p: t[0] for p, t in tree.leaves(store.get((client,)))})


def is_simulated(
    result: ExperimentResult, folder: Path, names: Sequence[str] | None = None, trace: Trace | None = None
) -> Simulation:
    """Assert that a deployment ended with the states of the simulation of its experiment, and return that."""
    config, sim = result.config, simulated(result.config, trace=trace)
    clients = list(map(str, range(sim.federation.num_clients))) if names is None else names
    are_equal(sim, server_state(result), [place_of(config, folder, name) for name in clients], trace)
    return sim


def is_replayed(result: ExperimentResult, folder: Path) -> Simulation:
    """Assert that the server and all clients are where the simulator gets with the same trace, to the bit."""
    return is_simulated(result, folder, trace=trace_of(result))


def records_are_equal(result: ExperimentResult, again: ExperimentResult) -> None:
    """Assert that two runs have measured the same of the clients' own sets after the last round."""
    columns = ["set", "model", "client", "accuracy", "loss"]
    frames = [store_of(r).clients() for r in (result, again)]
    frames = [f[(f["round"] == f["round"].max()) & f["set"].isin(["val", "local"])] for f in frames]
    rows = [frame[columns].sort_values(columns).to_numpy().tolist() for frame in frames]
    assert rows[0]
    assert rows[0] == rows[1]


# -- other packets ------------------------------------------------------------------------------------------


def refusal(reason: str = "not with us") -> bytes:
    """The answer of a client that refuses."""
    return packed(Packet("failure", {"reason": reason, "code": "refused"}))


def packed(packet: Packet, **about: Any) -> bytes:
    """The bytes of a packet, with what is said of it changed, and a digest that is right."""
    order = list(packet.tensors)
    said = {"protocol": PROTOCOL, "kind": packet.kind, "order": order, "same": {}, "facts": packet.facts}
    return signed(save(dict(packet.tensors), metadata={"tailorfl": encode({**said, **about})}))


def signed(body: bytes) -> bytes:
    """Bytes behind their digest."""
    return hashlib.sha256(body).digest() + body


def with_facts(answer: bytes, **facts: Any) -> bytes:
    """An answer with other facts."""
    packet = Packet.decoded(answer)
    return packed(replace(packet, facts={**packet.facts, **facts}))


def with_tensor(answer: bytes, change: Callable[[Tensor], Tensor]) -> bytes:
    """An answer whose first tensor is another one."""
    packet = Packet.decoded(answer)
    name = next(iter(packet.tensors))
    return packed(replace(packet, tensors={**packet.tensors, name: change(packet.tensors[name].clone())}))


def filled(value: float) -> Callable[[Tensor], Tensor]:
    """A change of the first number of a tensor."""

    def fill(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return fill


def is_training(question: Packet, round: int) -> bool:
    """Whether a question is that of a round."""
    return question.kind == "train" and question.facts["round"] == round
