"""One round: what its steps find out, the functions that clients run in it, and what is said about it.

Client functions are objects and not functions inside a function, so that another process can be told which to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.messages import Broadcast, PerClient, Traffic
from tailorfl.core.method import Method
from tailorfl.engines.base import ClientFunction, CohortTask, Stored
from tailorfl.engines.results import Parts
from tailorfl.engines.vectorized import Vectorized
from tailorfl.privacy.ledger import PrivacyRecord
from tailorfl.rounds.groups import Group
from tailorfl.rounds.method_errors import explained, pair, whole_model
from tailorfl.rounds.participation import RoundTrace
from tailorfl.rounds.updates import Trained
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort

WORK = "gradients of samples"
"""The entry in which the function of a round returns the number of gradients that a client computed."""


@dataclass
class RoundState:
    """A round on its way; each step and each hook fills in what it finds out."""

    number: int
    """Rounds before this one."""
    sampled: tuple[int, ...]
    """The clients whose replies count, in rising order."""
    training: tuple[int, ...]
    """The clients that are asked to train, in rising order."""
    trace: RoundTrace | None = None
    """The outcome of each client that was asked; None where all of them answer, as in a plain simulation."""
    drawn: bool = False
    """True if the run drew the clients; false if they were named, or are those of a recorded round."""
    message: Broadcast = field(default_factory=tree.empty)
    """The message to the clients `training`."""
    parts: list[Trained] = field(default_factory=list)
    """Of each architecture the clients that answered; one of which nobody did has no part."""
    rejected: tuple[int, ...] = ()
    """The clients that answered with an update that is not finite."""
    refused: tuple[int, ...] = ()
    """Those of them that the trace names."""
    accepted: list[Trained] = field(default_factory=list)
    """The parts of the clients whose new private states are kept."""
    counted: list[Trained] = field(default_factory=list)
    """The parts of the sampled clients whose replies the server gets."""
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def gradients(self) -> int:
        """Gradients of single samples that the clients computed."""
        return sum(part.gradients for part in self.parts)

    @property
    def answered(self) -> set[int]:
        """The clients that answered."""
        return {i for part in self.parts for i in part.ids}


@dataclass(frozen=True)
class RoundResult:
    """The result of a round."""

    round: int
    clients: tuple[int, ...]
    """Sampled clients."""
    rejected: tuple[int, ...]
    """Clients whose update was not finite; their state is as before the round."""
    losses: dict[str, float]
    """Means over the accepted clients of what they report: training losses by stage, and what a method adds."""
    seconds: float
    traffic: Traffic
    gradients: int = 0
    """Gradients of single samples that the clients computed, all together."""
    server_seconds: float = 0.0
    """Part of `seconds` that the server's aggregation took."""
    trace: RoundTrace | None = None
    """The outcome of each client that was asked; None where all of them answer, as in a plain simulation."""

    @property
    def absent(self) -> tuple[int, ...]:
        """Clients that were asked and took no part: nothing of theirs changed, counted or was sent."""
        return () if self.trace is None else self.trace.absent

    @property
    def clients_per_second(self) -> float:
        """Sampled clients over seconds."""
        return len(self.clients) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class TrainingFunction:
    """The client function of a round: returns (new state, reply, what the client reports and WORK)."""

    method: Method

    @property
    def about(self) -> str:
        """Names it in messages."""
        return f"{self.method.title}, 'local'"

    def __call__(self, client: Client, state: TensorDict, received: TensorDict) -> Parts:
        """Train a client for a round."""
        new, reply = _local(self.method, client, state, received)
        return new, reply, TensorDict({**client.metrics, WORK: client.gradients}, batch_size=[])


@dataclass(frozen=True)
class DeploymentFunction:
    """The client function whose result is (the model that a client deploys,).

    `steps` is None for a client of the federation; for one that never trained, 0 says that it deploys at once and
    any other number that it trains before.
    """

    method: Method
    steps: int | None

    @property
    def about(self) -> str:
        """Names it in messages."""
        return f"{self.method.title}, 'personal'"

    def __call__(self, client: Client, state: TensorDict, received: TensorDict) -> Parts:
        """Return the model that a client deploys."""
        if self.steps is not None:
            state = self.method.newcomer(state, received)
            if self.steps > 0:
                state, _ = _local(self.method, client, state, received)
        with explained(self.method, client, "personal", state=state, received=received):
            model = whole_model(self.method, client, self.method.personal(client, state, received))
        return (model,)


def _local(
    method: Method, client: Client, state: TensorDict, received: TensorDict
) -> tuple[TensorDict, TensorDict]:
    """Return (new state, reply) of a client that trains."""
    with explained(method, client, "local", state=state, received=received):
        return pair(method, client, method.local(client, state, received), state)


def counted(
    group: Group, cohort: Cohort, message: TensorDict | PerClient, function: ClientFunction
) -> tuple[PrivacyRecord, Parts]:
    """Return what private training would use where clients of a group ran a function, and what came out of it.

    No sample is looked at and no model moves.
    """
    record = PrivacyRecord()
    visit = CohortTask.of(function, replace(cohort, record=record, counting=True), message)
    with torch.no_grad():
        return record, Vectorized().map(visit, Stored(group.states))


def means_of(metrics: Sequence[TensorDict]) -> dict[str, float]:
    """Return the mean over clients of every metric, whatever architecture a client has; nothing without clients."""
    if not metrics:
        return {}
    leaves = [dict(tree.leaves(part)) for part in metrics]
    return {name: float(torch.cat([part[name] for part in leaves]).double().mean()) for name in leaves[0]}
