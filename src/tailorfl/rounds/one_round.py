"""One round: what the clients did, what was sent, and what is said about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.messages import Broadcast, PerArchitecture, PerClient, Traffic, count_down, count_up
from tailorfl.rounds.groups import Group, by_group, message_for
from tailorfl.rounds.participation import RoundTrace
from tailorfl.training import tree
from tailorfl.training.ledger import Uses


@dataclass(frozen=True)
class RoundResult:
    """What one round did."""

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
    """What became of each client that was asked; None where all of them answer, as in a plain simulation."""

    @property
    def absent(self) -> tuple[int, ...]:
        """Clients that were asked and took no part: nothing of theirs changed, counted or was sent."""
        return () if self.trace is None else self.trace.absent

    @property
    def clients_per_second(self) -> float:
        """Sampled clients over seconds."""
        return len(self.clients) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Trained:
    """What the clients of one architecture did in a round."""

    group: Group
    ids: tuple[int, ...]
    replies: TensorDict
    metrics: TensorDict
    finite: Tensor
    """Whose update holds only finite numbers, bool [clients]; the new states are staged in the group's store."""
    message: TensorDict | PerClient
    """What they had received."""
    uses: Mapping[int, Uses]
    """What private training used, by client."""
    gradients: int = 0
    """Gradients of single samples that all of them computed together."""

    def among(self, wanted: set[int]) -> Trained:
        """The part of the clients that are `wanted`."""
        return self.of([k for k, i in enumerate(self.ids) if i in wanted])

    def of(self, positions: Sequence[int]) -> Trained:
        """The part of the clients at `positions`."""
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


@dataclass(frozen=True)
class Collected:
    """What came back in a round."""

    parts: list[Trained]
    """Of each architecture the clients that answered; one of which nobody did has no part."""
    trace: RoundTrace | None = None
    """What became of each client that was asked; None says that all of them answered."""


def count_traffic(
    message: Broadcast,
    groups: Sequence[Group],
    done: Sequence[Trained],
    sampled: set[int],
    reached: Sequence[int],
) -> Traffic:
    """Returns the traffic of a round: the clients `reached` receive, those of `done` that were `sampled` send."""
    traffic = Traffic()
    buffers = {b for g in groups for b in g.model.buffers}
    if isinstance(message, PerArchitecture):
        for group, where in by_group(groups, reached):
            traffic.add(count_down(message[group.name], len(where), buffers))
    else:
        traffic.add(count_down(message, len(reached), buffers))
    for part in done:
        senders = sum(i in sampled for i in part.ids)
        # Replies of one architecture are of equal size: those of the sampled cost as many others would.
        traffic.add(count_up(part.replies[:senders], buffers))
    return traffic


def means_of(metrics: Sequence[TensorDict]) -> dict[str, float]:
    """Returns the mean over clients of every metric, whatever architecture a client has; nothing without clients."""
    if not metrics:
        return {}
    leaves = [dict(tree.leaves(part)) for part in metrics]
    return {name: float(torch.cat([part[name] for part in leaves]).double().mean()) for name in leaves[0]}
