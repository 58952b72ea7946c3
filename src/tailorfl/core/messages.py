"""What travels: payloads down, replies up, and their cost in scalars and bytes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from tailorfl.core import tree

Weights = Literal["samples", "uniform"]


@dataclass(frozen=True)
class PerClient:
    """A broadcast that sends every client of the cohort a payload of its own: [clients, ...]."""

    payloads: TensorDict


Broadcast = TensorDict | PerClient
"""One payload for all, or one a client."""


@dataclass(frozen=True)
class Replies:
    """What came back from the clients whose update was accepted, ordered by client id."""

    stack: TensorDict
    """[clients, ...]"""
    clients: tuple[int, ...]
    samples: NDArray[np.int64]
    """[clients] training samples."""
    weighting: Weights
    total_clients: int
    """N, all training clients, whether sampled or not."""
    parameters: frozenset[str]
    """Names of the model's parameters, to tell them from running statistics."""

    def weights(self) -> torch.Tensor:
        """Returns the aggregation weights a_i, [clients] float64, summing to 1 (Σ a_i over the cohort)."""
        if self.weighting == "uniform":
            return torch.full((len(self.clients),), 1.0 / len(self.clients), dtype=torch.float64)
        share = torch.from_numpy(self.samples.astype(np.float64))
        return share / share.sum()

    def mean(self) -> TensorDict:
        """Returns Σ a_i reply_i; integer counters are the first client's."""
        return tree.weighted_mean(self.stack, self.weights())

    def towards(self, w: TensorDict, step: float) -> TensorDict:
        """Returns (1 − step)·w + step·Σ a_i reply_i for the parameters.

        Running statistics become the mean.
        """
        mean = self.mean()
        if step == 1:
            return mean
        old = self.of_parameters(w)
        return tree.merge(mean, old + (self.of_parameters(mean) - old) * step)

    def of_parameters(self, state: TensorDict) -> TensorDict:
        """Returns the parameters of a model state, without running statistics."""
        return state.select(*(n for n in state.keys() if n in self.parameters))  # noqa: SIM118


@dataclass
class Traffic:
    """Counters of what crossed the network; parameters and buffers are counted apart, bytes count both."""

    up: int = 0
    """Parameter scalars sent by clients."""
    down_unicast: int = 0
    """Parameter scalars received, every receiver counted."""
    down_multicast: int = 0
    """Parameter scalars sent by the server, each distinct payload counted once."""
    buffers_up: int = 0
    buffers_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def add(self, other: Traffic) -> None:
        """Adds the counters of `other` to these."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def as_dict(self) -> dict[str, int]:
        """Returns the counters by name."""
        return {f.name: int(getattr(self, f.name)) for f in fields(self)}


def payload_size(payload: TensorDict, buffers: Collection[str]) -> tuple[int, int, int]:
    """Returns (parameter scalars, buffer scalars, bytes) of one payload.

    A leaf named like a model buffer is a buffer; a whole number, such as the choice of a cluster, is neither.
    """
    parameters = held = size = 0
    for path, tensor in tree.leaves(payload):
        if path.rpartition("/")[2] in buffers:
            held += tensor.numel()
        elif tensor.is_floating_point():
            parameters += tensor.numel()
        size += tensor.numel() * tensor.element_size()
    return parameters, held, size


def count_down(broadcast: Broadcast, receivers: int, buffers: Collection[str]) -> Traffic:
    """Returns the cost of sending `broadcast` to `receivers` clients."""
    if isinstance(broadcast, PerClient):
        parameters, held, size = payload_size(broadcast.payloads, buffers)
        return Traffic(down_unicast=parameters, down_multicast=parameters, buffers_down=held, bytes_down=size)
    parameters, held, size = payload_size(broadcast, buffers)
    return Traffic(
        down_unicast=parameters * receivers,
        down_multicast=parameters,
        buffers_down=held * receivers,
        bytes_down=size * receivers,
    )


def count_up(stack: TensorDict, buffers: Collection[str]) -> Traffic:
    """Returns the cost of the stacked replies of a round."""
    parameters, held, size = payload_size(stack, buffers)
    return Traffic(up=parameters, buffers_up=held, bytes_up=size)
