"""What comes back from clients in a round: replies, and the updates in them, reply − anchor, of model parameters.

Rules that look at updates, and attacks that change them, leave all else as it was sent: running statistics, and whole
numbers such as counters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.messages import PerClient
from tailorfl.core.method import Method
from tailorfl.privacy.client_privacy import matching
from tailorfl.privacy.ledger import Uses
from tailorfl.rounds.groups import Group, message_for
from tailorfl.training import tree


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
    method: Method
    server: TensorDict
    """The state of the server that the message was made of."""
    uses: Mapping[int, Uses]
    """What private training used, by client."""
    gradients: int = 0
    """Gradients of single samples that all of them computed together."""

    def among(self, clients: Collection[int]) -> Trained:
        """Return the part of those that are `clients`."""
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
        """What the replies are measured from (`Method.anchor`): entries of one reply, or [clients, ...]."""
        received = self.message
        if isinstance(received, PerClient):
            received = received.payloads[received.rows]
        return self.method.anchor(self.server, received)

    @property
    def updates(self) -> ClientUpdates:
        """The replies, taken apart."""
        return ClientUpdates.of(self.replies, self.anchor, self.group.model.buffers)


@dataclass(frozen=True)
class ClientUpdates:
    """The replies of some clients of one architecture, taken apart."""

    replies: TensorDict
    """[clients, ...]"""
    changes: Mapping[str, Tensor]
    """Reply − anchor by path, [clients, ...] each, of every entry of floating numbers but running statistics."""
    origins: Mapping[str, Tensor]
    """The anchors of the same paths, [clients or 1, ...], or a single 0 where a reply is a change itself."""

    @classmethod
    def of(cls, replies: TensorDict, anchor: TensorDict, buffers: Collection[str]) -> ClientUpdates:
        """Return the updates of replies [clients, ...]; `buffers` are the names of running statistics."""
        anchors, changes, origins = dict(tree.leaves(anchor)), {}, {}
        for path, tensor in tree.leaves(replies):
            if tensor.is_floating_point() and path.rpartition("/")[2] not in buffers:
                origin = matching(anchors.get(path), tensor)
                origins[path] = torch.zeros((), dtype=tensor.dtype) if origin is None else origin
                changes[path] = tensor - origins[path]
        return cls(replies, changes, origins)

    def with_changes(self, changes: Mapping[str, Tensor]) -> TensorDict:
        """Return the replies whose updates are `changes`, by path, [clients or 1, ...] each; the rest is as it was."""
        leaves = [
            (path, (self.origins[path] + changes[path]).expand_as(t) if path in changes else t)
            for path, t in tree.leaves(self.replies)
        ]
        return tree.nest(leaves, self.replies.batch_size)
