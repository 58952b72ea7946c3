"""Messages: payloads down, replies up, and their cost in scalars and bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.context import Context
from tailorfl.settings.experiment import Weights
from tailorfl.training import tree

PRESENT = "present"
"""Name of a bool entry [rows] of a message that marks which rows of the tables in the same group are present."""


@dataclass(frozen=True)
class PerClient:
    """A broadcast that sends each client of the cohort its own rows of a table of payloads."""

    payloads: TensorDict
    """[rows, ...]; without `index` row k is client k's."""
    index: Tensor | None = None
    """Which rows each client gets, int64 [clients], or [clients, M] for M payloads per client.

    A client then receives the M rows stacked. Rows that several clients get are sent once by multicast.
    """

    @property
    def rows(self) -> Tensor:
        """Which rows each client gets, int64 [clients] or [clients, M]."""
        return torch.arange(self.payloads.batch_size[0]) if self.index is None else self.index


def table_of(message: TensorDict | PerClient) -> tuple[TensorDict, Tensor | None]:
    """Return a message as an engine takes it: (one payload for all, None), or (a table, the rows of each client)."""
    return (message.payloads, message.rows) if isinstance(message, PerClient) else (message, None)


class PerArchitecture(dict[str, TensorDict]):
    """One payload per architecture, by name: models are exchanged only among clients with the same architecture."""


Broadcast = TensorDict | PerClient | PerArchitecture
"""One payload for all, one per client, or one per architecture."""


@dataclass(frozen=True)
class Replies:
    """The replies of the clients whose update was accepted, ordered by client id."""

    stack: TensorDict
    """[clients, ...]; only the entries that all architectures have in the same shape."""
    clients: tuple[int, ...]
    samples: NDArray[np.int64]
    """[clients] training samples."""
    weighting: Weights
    context: Context
    """The information available to the server: models, the public set, the number of clients."""
    round: int = 0
    """Rounds before this one."""
    metrics: TensorDict = field(default_factory=tree.empty)
    """[clients] single numbers that clients report along with their reply, such as their training loss.

    They are for the progress display and are not counted as traffic.
    """
    parts: Mapping[str, Replies] = field(default_factory=dict)
    """The replies of each architecture, by name; only if clients have different ones."""
    rate: float | None = None
    """The probability of drawing a client, if client-level privacy hides which and how many were drawn: the stack is
    then one row, the sum of the private updates divided by the expected number of clients."""

    @property
    def share(self) -> float:
        """The cohort's share of the weight of all N clients.

        That is m/N, or Σ_S n_i / Σ n_i by samples; under client-level privacy it is the expected share (`rate`).

        `share · mean()` is Σ_S p_i reply_i with the p_i of all clients. So a server that adds it to a sum over clients
        keeps Σ p_i (...) exactly, whoever is sampled.
        """
        if self.rate is not None:
            return self.rate
        clients, context = len(self.clients), self.context
        total = int(context.members.sum())
        if self.weighting == "uniform":
            return clients / total
        return float(self.samples.sum()) / (context.samples * total)

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the model's parameters, to tell them from running statistics."""
        return frozenset(self.context.model.parameters)

    def by_architecture(self) -> Iterable[tuple[str, Replies]]:
        """Return (architecture, the replies of its clients) for every architecture that has any."""
        return self.parts.items() if self.parts else [(self.context.architecture, self)]

    def weights(self) -> Tensor:
        """Return the aggregation weights a_i, [clients] float64, summing to 1 (Σ a_i over the cohort)."""
        if self.weighting == "uniform":
            return torch.full((len(self.clients),), 1.0 / len(self.clients), dtype=torch.float64)
        share = torch.from_numpy(self.samples.astype(np.float64))
        return share / share.sum()

    def mean(self) -> TensorDict:
        """Return Σ a_i reply_i; integer counters are the first client's."""
        return tree.weighted_mean(self.stack, self.weights())

    def towards(self, w: TensorDict, step: float) -> TensorDict:
        """Return (1 − step)·w + step·Σ a_i reply_i for the parameters.

        Running statistics become the mean.
        """
        mean = self.mean()
        if step == 1:
            return mean
        old = self.of_parameters(w)
        return tree.merge(mean, old + (self.of_parameters(mean) - old) * step)

    def of_parameters(self, state: TensorDict) -> TensorDict:
        """Return the parameters of a model state, without running statistics."""
        return state.select(*(n for n in state.keys() if n in self.parameters))  # noqa: SIM118


@dataclass
class Traffic:
    """Counters of network traffic; parameters and buffers are counted separately, bytes count both."""

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
        """Add the counters of `other` to these."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return {f.name: int(getattr(self, f.name)) for f in fields(self)}


def payload_size(payload: TensorDict, buffers: Collection[str]) -> tuple[int, int, int]:
    """Return (parameter scalars, buffer scalars, bytes) of one payload.

    A leaf named like a model buffer is a buffer; a leaf of integers, such as the number of a cluster, is neither. If
    the same group has a leaf `PRESENT`, only the rows of a table that it marks are sent.
    """
    parameters = of_buffers = size = 0
    leaves = dict(tree.leaves(payload))
    for path, tensor in leaves.items():
        group, _, name = path.rpartition("/")
        present = leaves.get(f"{group}/{PRESENT}" if group else PRESENT)
        scalars = tensor.numel()
        if present is not None and name != PRESENT and tensor.shape[: present.ndim] == present.shape:
            scalars = int(present.sum()) * (scalars // max(present.numel(), 1))
        if name in buffers:
            of_buffers += scalars
        elif tensor.is_floating_point():
            parameters += scalars
        size += scalars * tensor.element_size()
    return parameters, of_buffers, size


def count_down(broadcast: TensorDict | PerClient, receivers: int, buffers: Collection[str]) -> Traffic:
    """Return the cost of sending `broadcast` to `receivers` clients."""
    if isinstance(broadcast, PerClient):
        if any(path.rpartition("/")[2] == PRESENT for path, _ in tree.leaves(broadcast.payloads)):
            return _of_rows(broadcast, buffers)
        parameters, of_buffers, size = payload_size(broadcast.payloads, buffers)
        table, sent = max(broadcast.payloads.batch_size[0], 1), broadcast.rows
        receipts, distinct = sent.numel(), len(sent.unique())
        return Traffic(
            down_unicast=parameters // table * receipts,
            down_multicast=parameters // table * distinct,
            buffers_down=of_buffers // table * receipts,
            bytes_down=size // table * receipts,
        )
    parameters, of_buffers, size = payload_size(broadcast, buffers)
    return Traffic(
        down_unicast=parameters * receivers,
        down_multicast=parameters if receivers else 0,
        buffers_down=of_buffers * receivers,
        bytes_down=size * receivers,
    )


def _of_rows(broadcast: PerClient, buffers: Collection[str]) -> Traffic:
    """Return the cost of payloads with different rows present."""
    table, sent = broadcast.payloads, broadcast.rows.flatten()
    sizes = {int(k): payload_size(table[int(k)], buffers) for k in sorted(set(sent.tolist()))}
    parameters, of_buffers, size = (sum(sizes[k][j] for k in sent.tolist()) for j in range(3))
    distinct = sum(parameters for parameters, _, _ in sizes.values())
    return Traffic(down_unicast=parameters, down_multicast=distinct, buffers_down=of_buffers, bytes_down=size)


def count_up(stack: TensorDict, buffers: Collection[str]) -> Traffic:
    """Return the cost of the stacked replies of a round."""
    parameters, of_buffers, size = payload_size(stack, buffers)
    return Traffic(up=parameters, buffers_up=of_buffers, bytes_up=size)
