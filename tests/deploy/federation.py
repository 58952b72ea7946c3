"""A federation in one process: real clients with folders of their own, a real server, and a post to tamper with."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from tailorfl.deploy.client_session import ClientSession, member_of
from tailorfl.deploy.messages import PROTOCOL, Arrival, Letter, Packet
from tailorfl.deploy.serving import host_experiment
from tailorfl.report.experiment import run_experiment
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.one_round import RoundResult
from tailorfl.rounds.participation import ClientOutcome, Trace
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import checkpoints
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.files import encode
from tailorfl.runs.job import Job, Observer
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


def asked(client: ClientSession, question: bytes) -> Packet:
    """What a client answers."""
    return Packet.decoded(client.answer(question))


def lose(question: Packet, answer: bytes) -> bytes:
    """A change for `lying`: the client has done its work, and its answer gets lost."""
    raise LostError


def once_before(round: int, do: Callable[[Packet, bytes, Ask], Any], node: int = 101) -> Meddle:
    """Do something, once, when a client is about to be asked to train in a round."""
    done: list[int] = []

    def meddle(number: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        if number == node and is_training(question, round) and not done:
            done.append(number)
            do(question, body, ask)
        return ask(body)

    return meddle


class InProcessTransport:
    """A post within this process: every node is a function from question to answer, called in a thread of its own."""

    def __init__(self, nodes: Mapping[int, Callable[[bytes], bytes]]) -> None:
        self.members = dict(nodes)
        self._one = threading.Lock()  # members share torch's random numbers and threads
        self._workers = ThreadPoolExecutor(max_workers=max(1, len(self.members)))
        self._pending: dict[str, Future[bytes]] = {}
        self._sent = 0

    def nodes(self) -> dict[int, str]:
        """Return all nodes."""
        return dict.fromkeys(sorted(self.members), "")

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Ask every node in a thread."""
        tickets = []
        for letter in letters:
            self._sent += 1
            ticket = str(self._sent)
            self._pending[ticket] = self._workers.submit(self._asked, letter)
            tickets.append(ticket)
        return tickets

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Return what is there."""
        ready = [t for t in tickets if t in self._pending and self._pending[t].done()]
        return [self._arrival(ticket) for ticket in ready]

    def close(self) -> None:
        """End the threads."""
        self._workers.shutdown(wait=True)

    def _asked(self, letter: Letter) -> bytes:
        with self._one:
            return self.members[letter.node](letter.body)

    def _arrival(self, ticket: str) -> Arrival:
        done = self._pending.pop(ticket)
        error = done.exception()
        return (
            Arrival(ticket, done.result()) if error is None else Arrival(ticket, None, type(error).__name__)
        )


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

    def host(self, config: ExperimentConfig, out: str = "out", **how: Any) -> Deployed:
        """Run an experiment as `tailorfl server` does, or go on with it."""
        result = host_experiment(self, config, self.folder / out, notify=self.notify, **how)
        return Deployed(result, self.folder)

    def join(self, client: ClientSession, node: int = 999) -> None:
        """Let a further client connect."""
        self.people[node] = client
        self.members[node] = client.answer

    def replayed(self, config: ExperimentConfig, **how: Any) -> Deployed:
        """Host an experiment; assert that all are where the simulator gets with the same trace, to the bit."""
        result = self.host(config, **how)
        result.is_replayed()
        return result

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

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class After(Observer):
    """Does something after some rounds."""

    def __init__(self, do: Mapping[int, Callable[[], Any]]) -> None:
        self.do = dict(do)

    def round_done(self, job: Job, done: RoundResult) -> None:
        """Do it, once."""
        self.do.pop(done.round + 1, lambda: None)()


def deployed(
    config: ExperimentConfig,
    folder: Path,
    clients: int | Mapping[int, ClientSession] = 4,
    meddle: Meddle = honest,
    **how: Any,
) -> Deployed:
    """Run an experiment with clients in this process, whose post somebody may meddle with."""
    with Federation(folder, clients, meddle) as federation:
        return federation.host(config, **how)


# -- what came out ------------------------------------------------------------------------------------------


def job_of(config: ExperimentConfig) -> Job:
    """The first job of an experiment."""
    return Job(config, config.methods[0], config.seeds[0])


def newest(folder: Path) -> dict[str, Tensor]:
    """The tensors of the newest checkpoint in a folder."""
    return checkpoints.load(folder, checkpoints.rounds(folder)[-1])[0]


def server_tensors(folder: Path) -> dict[str, Tensor]:
    """The server's state in the newest checkpoint of a job's folder."""
    return {n.removeprefix("server/"): t for n, t in newest(folder).items() if n.startswith("server/")}


def place_of(config: ExperimentConfig, folder: Path, client: int | str) -> Path:
    """Where a client keeps what it has of the first job."""
    return folder / f"state-{client}" / config.name / job_of(config).folder


def private_state(folder: Path, config: ExperimentConfig, client: int | str) -> dict[str, Tensor]:
    """The newest private state on a client's disk."""
    return newest(place_of(config, folder, client))


def simulated(config: ExperimentConfig, rounds: int | None = None, trace: Trace | None = None) -> Simulation:
    """The simulation of the same experiment, after its rounds."""
    job = job_of(config)
    sim = make_simulation(job, make_federation(config, config.data.seed_of(job.seed)))
    for number in range(job.rounds if rounds is None else rounds):
        sim.step(trace=None if trace is None else trace.of(number + 1))
    return sim


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


@dataclass(frozen=True)
class Deployed:
    """What came out of the first job of a deployment.

    Attributes:
        result: of the server.
        folder: where the clients have their folders.
    """

    result: ExperimentResult
    folder: Path

    @cached_property
    def config(self) -> ExperimentConfig:
        """The experiment, as the server has kept it."""
        return self.result.config

    @property
    def _records(self) -> Path:
        return self.result.path / job_of(self.config).folder

    @property
    def store(self) -> RunStore:
        """The server's records."""
        return RunStore.open(self._records, readonly=True)

    @property
    def server_state(self) -> dict[str, Tensor]:
        """The server's newest state."""
        return server_tensors(self._records)

    @property
    def trace(self) -> Trace:
        """What became of every client in every round."""
        return Trace.read(self._records / "trace.jsonl")

    @property
    def fates(self) -> set[str]:
        """What became of anybody in any round."""
        return {answer.fate for one in self.trace for answer in one.answers}

    def fates_of(self, client: int) -> list[str]:
        """What became of a client, round by round."""
        return [answer.fate for one in self.trace for answer in one.answers if answer.client == client]

    def became(self, round: int, client: int) -> ClientOutcome:
        """What became of one client in one round."""
        return next(a for a in self.trace.of(round).answers if a.client == client)

    def played_again(self) -> Deployed:
        """Run the experiment as a simulation of the trace that the deployment has left."""
        update = {"system": SystemConfig(trace=str(self.result.path)), "checkpoint_every": 1}
        return Deployed(
            run_experiment(self.config.model_copy(update=update), self.folder / "again"), self.folder
        )

    def is_simulated(self, names: Sequence[str] | None = None, trace: Trace | None = None) -> Simulation:
        """Assert that it ended with the states of the simulation of its experiment, and return that."""
        sim = simulated(self.config, trace=trace)
        clients = list(map(str, range(sim.federation.num_clients))) if names is None else names
        places = [place_of(self.config, self.folder, name) for name in clients]
        are_equal(sim, self.server_state, places, trace)
        return sim

    def is_replayed(self) -> Simulation:
        """Assert that the server and all clients are where the simulator gets with the same trace, to the bit."""
        return self.is_simulated(trace=self.trace)


def records_are_equal(result: Deployed, again: Deployed) -> None:
    """Assert that two runs have measured the same of the clients' own sets after the last round."""
    columns = ["set", "model", "client", "accuracy"]
    frames = [run.store.clients() for run in (result, again)]
    frames = [f[(f["round"] == f["round"].max()) & f["set"].isin(["val", "local"])] for f in frames]
    frames = [frame.sort_values(columns) for frame in frames]
    rows = [frame[columns].to_numpy().tolist() for frame in frames]
    assert rows[0]
    assert rows[0] == rows[1]
    # on some processors a row's prediction depends on how many rows are predicted at once
    assert frames[0]["loss"].to_numpy() == pytest.approx(frames[1]["loss"].to_numpy(), rel=1e-6)


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
