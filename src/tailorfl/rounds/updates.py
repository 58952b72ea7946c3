"""What a client's reply says beside what the server knew: its update, reply − anchor, of model parameters.

Rules that look at updates, and attacks that change them, leave all else as it was sent: running statistics, and whole
numbers such as counters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.messages import PerClient
from tailorfl.core.method import Method
from tailorfl.privacy.client_privacy import matching
from tailorfl.rounds.one_round import Trained
from tailorfl.training import tree


def anchor_of(method: Method, server: TensorDict, part: Trained) -> TensorDict:
    """Returns what the replies of a part of a round are measured from: entries of one reply, or [clients, ...]."""
    received = part.message
    return method.anchor(
        server, received.payloads[received.rows] if isinstance(received, PerClient) else received
    )


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
        """Returns the updates of replies [clients, ...]; `buffers` are the names of running statistics."""
        known, changes, origins = dict(tree.leaves(anchor)), {}, {}
        for path, tensor in tree.leaves(replies):
            if tensor.is_floating_point() and path.rpartition("/")[2] not in buffers:
                origin = matching(known.get(path), tensor)
                origins[path] = torch.zeros((), dtype=tensor.dtype) if origin is None else origin
                changes[path] = tensor - origins[path]
        return cls(replies, changes, origins)

    def with_changes(self, changes: Mapping[str, Tensor]) -> TensorDict:
        """Returns the replies whose updates are `changes`, by path, [clients or 1, ...] each; the rest is as it was."""
        leaves = [
            (path, (self.origins[path] + changes[path]).expand_as(t) if path in changes else t)
            for path, t in tree.leaves(self.replies)
        ]
        return tree.nest(leaves, self.replies.batch_size)
