"""One round: the results of its steps, replies and the updates in them, and the functions that clients run in it.

An update is reply − anchor, of model parameters. Rules that use updates, and attacks that change them, leave everything
else as it was sent: running statistics, and integers such as counters.

Client functions are objects instead of closures, so that they can be sent to other processes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.messages import Broadcast, PerClient, Traffic
from tailorfl.core.method import Method
from tailorfl.engines.base import ClientFunction, CohortTask, Parts, Stored
from tailorfl.engines.in_process import Vectorized
from tailorfl.privacy import PrivacyRecord, Uses
from tailorfl.rounds.groups import Group, message_for
from tailorfl.rounds.method_errors import explained, pair, whole_model
from tailorfl.rounds.participation import RoundTrace
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort
from tailorfl.training.keys import Keys
from tailorfl.training.sample_privacy import normal


@dataclass(frozen=True)
class Trained:
    """The part of a round that belongs to the clients of one architecture."""

    group: Group
    ids: tuple[int, ...]
    replies: TensorDict
    metrics: TensorDict
    finite: Tensor
    """Clients whose update is finite, bool [clients]; the new states are staged in the group's store."""
    message: TensorDict | PerClient
    """The message that the clients received."""
    method: Method
    server: TensorDict
    """The state of the server from which the message was made."""
    uses: Mapping[int, Uses]
    """Uses of private data by client."""
    gradients: int = 0
    """Number of gradients of single samples that all clients together computed."""

    def among(self, clients: Collection[int]) -> Trained:
        """Return the part of those clients that are in `clients`."""
        return self.at([k for k, i in enumerate(self.ids) if i in clients])

    def at(self, positions: Sequence[int]) -> Trained:
        """Return the part of the clients at `positions`."""
        if len(positions) == len(self.ids):
            return self
        index = torch.tensor(positions, dtype=torch.int64)
        return replace(
            self,
            ids=tuple(self.ids[k] for k in positions),
            replies=self.replies[index],
            metrics=self.metrics[index],
            finite=self.finite[index],
            message=message_for(self.message, self.group, positions),
        )

    @property
    def anchor(self) -> TensorDict:
        """The origin of the replies' updates (`Method.anchor`): entries of one reply, or [clients, ...]."""
        received = self.message
        if isinstance(received, PerClient):
            received = received.payloads[received.rows]
        return self.method.anchor(self.server, received)

    @property
    def updates(self) -> ClientUpdates:
        """The replies, split into anchors and updates."""
        return ClientUpdates.of(self.replies, self.anchor, self.group.model.buffers)


@dataclass(frozen=True)
class ClientUpdates:
    """The replies of some clients of one architecture, split into anchors and updates."""

    replies: TensorDict
    """[clients, ...]"""
    changes: Mapping[str, Tensor]
    """Reply − anchor by path, [clients, ...] each, for every floating entry except running statistics."""
    origins: Mapping[str, Tensor]
    """The anchor of every entry that has one, [clients or 1, ...]; a scalar 0 for floating entries without one."""

    @classmethod
    def of(cls, replies: TensorDict, anchor: TensorDict, buffers: Collection[str]) -> ClientUpdates:
        """Return the updates of replies [clients, ...]; `buffers` are the names of running statistics."""
        anchors, changes, origins = dict(tree.leaves(anchor)), {}, {}
        for path, tensor in tree.leaves(replies):
            origin = _matching(anchors.get(path), tensor)
            if origin is not None:
                origins[path] = origin
            if tensor.is_floating_point() and path.rpartition("/")[2] not in buffers:
                origins.setdefault(path, torch.zeros((), dtype=tensor.dtype))
                changes[path] = tensor - origins[path]
        return cls(replies, changes, origins)

    def norms(self) -> Tensor:
        """Return the norm of each client's update over all entries together, [clients] float64."""
        squares = [u.double().square().reshape(len(u), math.prod(u.shape[1:])) for u in self.changes.values()]
        return torch.stack([square.sum(1) for square in squares]).sum(0).sqrt()

    def with_changes(self, changes: Mapping[str, Tensor]) -> TensorDict:
        """Return the replies with updates replaced by `changes`, by path, [clients or 1, ...] each."""
        leaves = [
            (path, (self.origins[path] + changes[path]).expand_as(t) if path in changes else t)
            for path, t in tree.leaves(self.replies)
        ]
        return tree.nest(leaves, self.replies.batch_size)


def _matching(origin: Tensor | None, reply: Tensor) -> Tensor | None:
    """Return the origin of replies [clients, ...] at a path: one for all [1, ...], or [clients, ...].

    None if there is no anchor of their shape.
    """
    if origin is None:
        return None
    if origin.shape == reply.shape[1:]:
        return origin[None]
    return origin if origin.shape == reply.shape else None


def noise_like(key: Keys, number: int, like: Tensor) -> Tensor:
    """Return standard normal noise in the shape and dtype of a tensor, a function of (key, number)."""
    return normal(torch.tensor(int(key.astype(np.int64))), number, like.shape).to(like.dtype)


WORK = "gradients of samples"
"""The metric in which the client function of a round returns the number of gradients that a client computed."""


@dataclass
class RoundState:
    """A round in progress; steps and hooks fill it in."""

    number: int
    """Rounds before this one."""
    sampled: tuple[int, ...]
    """The clients whose replies count, in rising order."""
    training: tuple[int, ...]
    """The clients that are asked to train, in rising order."""
    trace: RoundTrace | None = None
    """The outcome of each client that was asked; None if all of them answer, as in a plain simulation."""
    drawn: bool = False
    """True if the run drew the clients; false if they were named, or come from a recorded round."""
    message: Broadcast = field(default_factory=tree.empty)
    """The message to the clients `training`."""
    parts: list[Trained] = field(default_factory=list)
    """One part for each architecture with clients that answered."""
    rejected: tuple[int, ...] = ()
    """The clients that answered with an update that is not finite."""
    refused: tuple[int, ...] = ()
    """Those of the rejected clients that the trace names."""
    accepted: list[Trained] = field(default_factory=list)
    """The parts of the clients whose new private states are kept."""
    counted: list[Trained] = field(default_factory=list)
    """The parts of the sampled clients whose replies the server receives."""
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
    """Clients whose update was not finite; their state is that before the round."""
    losses: dict[str, float]
    """Means over the accepted clients of their metrics: training losses by stage, and those that a method adds."""
    seconds: float
    traffic: Traffic
    gradients: int = 0
    """Number of gradients of single samples that all clients together computed."""
    server_seconds: float = 0.0
    """Part of `seconds` that the server's aggregation took."""
    trace: RoundTrace | None = None
    """The outcome of each client that was asked; None if all of them answer, as in a plain simulation."""

    @property
    def absent(self) -> tuple[int, ...]:
        """Clients that were asked but took no part: their states did not change and their replies did not count."""
        return () if self.trace is None else self.trace.absent

    @property
    def clients_per_second(self) -> float:
        """Sampled clients over seconds."""
        return len(self.clients) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class TrainingFunction:
    """The client function of a round: returns (new state, reply, the client's metrics and WORK)."""

    method: Method

    @property
    def about(self) -> str:
        """The function's name in messages."""
        return f"{self.method.title}, 'local'"

    def __call__(self, client: Client, state: TensorDict, received: TensorDict) -> Parts:
        """Train a client for a round."""
        new, reply = _local(self.method, client, state, received)
        return new, reply, TensorDict({**client.metrics, WORK: client.gradients}, batch_size=[])


@dataclass(frozen=True)
class DeploymentFunction:
    """The client function whose result is (the model that a client deploys,).

    `steps` is None for a client of the federation. For one that never trained, 0 means that it deploys at once, any
    other number that it trains first.
    """

    method: Method
    steps: int | None

    @property
    def about(self) -> str:
        """The function's name in messages."""
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
    """Train a client and return (new state, reply)."""
    with explained(method, client, "local", state=state, received=received):
        return pair(method, client, method.local(client, state, received), state)


def counted(
    group: Group, cohort: Cohort, message: TensorDict | PerClient, function: ClientFunction
) -> tuple[PrivacyRecord, Parts]:
    """Return the privacy record and results of a client function for a group, counted without training.

    No sample is read and no model changes.
    """
    record = PrivacyRecord()
    visit = CohortTask.of(function, replace(cohort, record=record, counting=True), message)
    with torch.no_grad():
        return record, Vectorized().map(visit, Stored(group.states))


def means_of(metrics: Sequence[TensorDict]) -> dict[str, float]:
    """Return the mean of every metric over the clients that report it, of all architectures; empty without clients."""
    if not metrics:
        return {}
    leaves = [dict(tree.leaves(part)) for part in metrics]
    return {name: float(torch.cat([part[name] for part in leaves]).double().nanmean()) for name in leaves[0]}
