"""Client code as engines run it: a round of training, and the models that come out.

These are objects and not functions inside a function, so that another process can be told which of them to run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.messages import PerClient
from tailorfl.core.method import Method
from tailorfl.engines.base import ClientFunction, CohortTask, Stored
from tailorfl.engines.results import Parts
from tailorfl.engines.vectorized import Vectorized
from tailorfl.rounds.groups import Group, by_group, message_for
from tailorfl.rounds.method_errors import explained, pair, whole_model
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort
from tailorfl.training.ledger import PrivacyRecord

WORK = "gradients of samples"
"""Where the function of a round returns how many gradients a client computed."""


@dataclass(frozen=True)
class TrainingFunction:
    """The client function of a round: returns (new state, reply, what the client reports and WORK)."""

    method: Method

    @property
    def about(self) -> str:
        """Names it in messages."""
        return f"{self.method.title}, 'local'"

    def __call__(self, client: Client, state: TensorDict, received: TensorDict) -> Parts:
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
    """Returns (new state, reply) of a client that trains."""
    with explained(method, client, "local", state=state, received=received):
        return pair(method, client, method.local(client, state, received), state)


def deployment_message(
    method: Method, server: TensorDict, group: Group, ids: Sequence[int], steps: int | None
) -> TensorDict | PerClient:
    """Returns what clients of a group receive before they deploy; `steps` as in `DeploymentFunction`."""
    if steps is None and not method.personal_receives:
        return tree.empty()
    send = method.broadcast if steps is None else method.welcome
    return message_for(send(server, tuple(ids)), group, range(len(ids)))


def in_parts(
    groups: Sequence[Group], ids: Sequence[int], at_once: int
) -> Iterator[tuple[Group, tuple[int, ...]]]:
    """Yields (group, some of its clients), `at_once` of them at most."""
    for group, where in by_group(groups, ids):
        for start in range(0, len(where), at_once):
            yield group, tuple(ids[k] for k in where[start : start + at_once])


def counted(
    group: Group, cohort: Cohort, message: TensorDict | PerClient, function: ClientFunction
) -> tuple[PrivacyRecord, Parts]:
    """Returns what private training would use where clients of a group ran a function, and what came out of it.

    No sample is looked at and no model moves.
    """
    record = PrivacyRecord()
    visit = CohortTask.of(function, replace(cohort, record=record, counting=True), message)
    with torch.no_grad():
        return record, Vectorized().map(visit, Stored(group.states))
