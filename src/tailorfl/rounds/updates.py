"""Replies of a round, and the updates in them, reply − anchor, of model parameters.

Rules that look at updates, and attacks that change them, leave all else as it was sent: running statistics, and whole
numbers such as counters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.messages import PerClient
from tailorfl.core.method import Method
from tailorfl.privacy.ledger import Uses
from tailorfl.rounds.groups import Group, message_for
from tailorfl.training import tree
from tailorfl.training.keys import Keys
from tailorfl.training.sample_privacy import normal


@dataclass(frozen=True)
class Trained:
    """The part of a round that the clients of one architecture are."""

    group: Group
    ids: tuple[int, ...]
    replies: TensorDict
    metrics: TensorDict
    finite: Tensor
    """Clients whose update is finite, bool [clients]; the new states are staged in the group's store."""
    message: TensorDict | PerClient
    """The message that they received."""
    method: Method
    server: TensorDict
    """The state of the server that the message was made of."""
    uses: Mapping[int, Uses]
    """Uses of private data by client."""
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
        """The origin of the replies' updates (`Method.anchor`): entries of one reply, or [clients, ...]."""
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
    """The anchor of every entry that has one, [clients or 1, ...]; a single 0 where a reply is a change itself."""

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
        """Return the replies whose updates are `changes`, by path, [clients or 1, ...] each; the rest is as it was."""
        leaves = [
            (path, (self.origins[path] + changes[path]).expand_as(t) if path in changes else t)
            for path, t in tree.leaves(self.replies)
        ]
        return tree.nest(leaves, self.replies.batch_size)


def _matching(origin: Tensor | None, reply: Tensor) -> Tensor | None:
    """Return what replies [clients, ...] of a path are measured from, one for all [1, ...] or [clients, ...].

    None where nothing of their shape was received under it.
    """
    if origin is None:
        return None
    if origin.shape == reply.shape[1:]:
        return origin[None]
    return origin if origin.shape == reply.shape else None


def noise_like(key: Keys, number: int, like: Tensor) -> Tensor:
    """Return standard normal numbers in the shape and dtype of a tensor, a function of (key, number)."""
    return normal(torch.tensor(int(key.astype(np.int64))), number, like.shape).to(like.dtype)
