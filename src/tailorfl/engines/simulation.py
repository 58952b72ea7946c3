"""The rounds: sample a cohort, broadcast, train, check, aggregate; and the models that come out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.client import Client
from tailorfl.core.cohort import Cohort, TrainConfig
from tailorfl.core.keys import generator
from tailorfl.core.messages import (
    Broadcast,
    PerArchitecture,
    PerClient,
    Replies,
    Traffic,
    count_down,
    count_up,
)
from tailorfl.core.method import Method
from tailorfl.core.objective import LOSSES
from tailorfl.data.federation import Federation
from tailorfl.engines.auto import Auto
from tailorfl.engines.base import Engine, Parts, finite_clients
from tailorfl.engines.groups import Group, by_group, gather, make_groups, message_for
from tailorfl.engines.memory import keep_freed_memory
from tailorfl.engines.sequential import Sequential
from tailorfl.engines.vectorized import Vectorized
from tailorfl.errors import ConfigError, DivergenceError, unknown
from tailorfl.models.functional import Model

log = logging.getLogger(__name__)

Sampling = Literal["uniform", "proportional", "bernoulli"]
ENGINES = ("auto", "sequential", "vectorized")


def make_engine(name: str = "auto", chunk: int | None = None) -> Engine:
    """Returns an engine by name.

    Raises:
        ConfigError: unknown name.
    """
    if name == "auto":
        return Auto(chunk)
    if name == "vectorized":
        return Vectorized(chunk)
    if name == "sequential":
        return Sequential()
    raise unknown("engine", name, ENGINES)


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
    server_seconds: float = 0.0
    """Part of `seconds` that the server's aggregation took."""

    @property
    def clients_per_second(self) -> float:
        """Sampled clients over seconds."""
        return len(self.clients) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class _Trained:
    """What the clients of one architecture did in a round."""

    group: Group
    ids: tuple[int, ...]
    new: TensorDict
    replies: TensorDict
    metrics: TensorDict
    finite: Tensor

    def of(self, positions: Sequence[int]) -> _Trained:
        """The part of the clients at `positions`."""
        if len(positions) == len(self.ids):
            return self
        index = torch.tensor(positions, dtype=torch.int64)
        return replace(
            self,
            ids=tuple(self.ids[k] for k in positions),
            new=self.new[index],
            replies=self.replies[index],
            metrics=self.metrics[index],
            finite=self.finite[index],
        )


class Simulation:
    """One method on one federation, round by round.

    Args:
        model: the clients' model, or several by name where clients have different architectures.
        assignment: the name of every client's architecture, held-out clients included (with several models).
        fraction: share of training clients sampled each round, in (0, 1]; at least one client.
        sampling: uniform without replacement; proportional to training samples; bernoulli (each client by
            itself, redrawn if none).
        state_folder: where private states are memory-mapped; None keeps them in memory.

    Attributes `model`, `split`, `init`, `start` and `states` are those of the first architecture; `groups` has all.

    Raises:
        ConfigError: `fraction` outside (0, 1]; the method needs a public set or one architecture.
    """

    def __init__(
        self,
        method: Method,
        federation: Federation,
        model: Model | Mapping[str, Model],
        train: TrainConfig,
        *,
        assignment: Sequence[str] = (),
        engine: Engine | None = None,
        seed: int = 0,
        fraction: float = 1.0,
        sampling: Sampling = "uniform",
        state_folder: Path | None = None,
    ) -> None:
        keep_freed_memory()
        if not 0 < fraction <= 1:
            raise ConfigError(f"fraction must lie in (0, 1], but is {fraction}")
        self.method, self.federation, self.train = method, federation, train
        self.engine: Engine = engine if engine is not None else Auto()
        self.seed, self.fraction, self.sampling = seed, fraction, sampling
        self.groups = make_groups(method, federation, model, assignment, train, seed, state_folder)
        first = self.groups[0]
        self.context = first.context
        self.model, self.split, self.init = first.model, first.context.split, first.context.init
        self.start, self.states = first.start, first.states
        self.server = method.server_state(self.context)
        self.traffic = Traffic()
        self.round = 0
        self._members, self._val = self._rows()

    @property
    def trained_scalars(self) -> int:
        """Scalars that one client optimises in a round: `d` for one model, `2d` for two.

        The mean over clients where they have different architectures.
        """
        counts = [
            (len(g.clients), sum(g.model.sizes[n] for n in g.context.split.trainable)) for g in self.groups
        ]
        share = sum(clients * scalars for clients, scalars in counts) / sum(clients for clients, _ in counts)
        return self.method.models_trained * round_half_up(share)

    # -- one round ------------------------------------------------------------------------------------------

    def step(
        self, sampled: tuple[int, ...] | None = None, training: tuple[int, ...] | None = None
    ) -> RoundResult:
        """Runs the next round and returns what it did.

        `sampled` are the clients whose replies count, in rising order, by default drawn; `training` those that
        train, by default as the method's participation says.

        Raises:
            DivergenceError: no client that trained returned a finite update.
        """
        begin = time.perf_counter()
        sampled = self.sample(self.round) if sampled is None else sampled
        if training is None:
            training = tuple(range(len(self._members))) if self.method.participation == "all" else sampled
        message = self.method.broadcast(self.server, training)
        done = [
            self._train(group, tuple(training[k] for k in where), message_for(message, group, where))
            for group, where in by_group(self.groups, training)
        ]
        rejected = tuple(
            sorted(c for t in done for c, ok in zip(t.ids, t.finite.tolist(), strict=True) if not ok)
        )
        if 0 < len(rejected) < len(training):
            log.warning(
                "round %d: update of client %s is not finite and was rejected (learning rate too high?)",
                self.round + 1,
                _listed(rejected),
            )
        if len(rejected) == len(training):
            raise DivergenceError(
                f"round {self.round + 1}: all {len(training)} clients diverged (updates are NaN or infinite); "
                "lower train.lr, set train.clip, or check the scale of the data"
            )
        accepted = [t.of([int(k) for k in t.finite.nonzero()[:, 0]]) for t in done]
        for part in accepted:
            part.group.states.put(part.ids, part.new)
        wanted = set(sampled)
        arrived = {
            part.group.name: self._replies(part.of([k for k, i in enumerate(part.ids) if i in wanted]))
            for part in accepted
            if wanted & set(part.ids)
        }
        traffic = self._count(message, done, wanted)
        middle = time.perf_counter()
        if arrived:  # else the server keeps what it has: idle clients trained, those that were asked diverged
            self.server = tree.contiguous(self.method.aggregate(self.server, gather(arrived)))
        end = time.perf_counter()
        losses = _means([part.metrics for part in accepted])
        self.traffic.add(traffic)
        result = RoundResult(self.round, sampled, rejected, losses, end - begin, traffic, end - middle)
        self.round += 1
        return result

    def _train(self, group: Group, ids: tuple[int, ...], message: TensorDict | PerClient) -> _Trained:
        new, replies, metrics = self.run(ids, group.states.get(ids), message, self._local)
        return _Trained(group, ids, new, replies, metrics, finite_clients(new, replies))

    def _replies(self, part: _Trained) -> Replies:
        return Replies(
            stack=part.replies,
            clients=part.ids,
            samples=np.array([len(self._members[i]) for i in part.ids], dtype=np.int64),
            weighting=self.method.weights,
            context=part.group.context,
            round=self.round,
            metrics=part.metrics,
        )

    def sample(self, round: int) -> tuple[int, ...]:
        """Returns the clients of a round in rising order.

        They depend on (seed, round) only, so all methods see the same cohorts.
        """
        total = len(self._members)
        rng = generator(self.seed, "sample", round)
        if self.sampling == "bernoulli":
            while True:
                chosen = np.flatnonzero(rng.random(total) < self.fraction)
                if len(chosen):
                    return tuple(int(c) for c in chosen)
        size = max(1, round_half_up(self.fraction * total))
        share = None
        if self.sampling == "proportional":
            sizes = np.array([len(m) for m in self._members], dtype=np.float64)
            share = sizes / sizes.sum()
        return tuple(sorted(int(c) for c in rng.choice(total, size=min(size, total), replace=False, p=share)))

    # -- running client code --------------------------------------------------------------------------------

    def cohort(self, ids: Sequence[int], limit: int | None = None, own: bool = False) -> Cohort:
        """Returns the cohort `ids` of this round, clients of one architecture.

        `own` reads the federation's clients even where training is pooled.
        """
        ((group, _),) = by_group(self.groups, ids)
        members = self.federation.train if own else self._members
        val = self.federation.val if own else self._val
        return Cohort(
            ids=tuple(ids),
            members=tuple(members[i] for i in ids),
            val=tuple(val[i] for i in ids),
            source=self.federation.source,
            model=group.model,
            split=group.context.split,
            public=self.federation.public,
            loss=LOSSES[self.federation.source.task],
            config=self.train,
            seed=self.seed,
            round=self.round,
            limit=limit,
        )

    def run(
        self,
        ids: Sequence[int],
        states: TensorDict,
        message: Broadcast,
        function: Any,
        limit: int | None = None,
        own: bool = False,
    ) -> Parts:
        """Returns a client function of `ids`, clients of one architecture, stacked."""
        if isinstance(message, PerArchitecture):
            ((group, _),) = by_group(self.groups, ids)
            message = message[group.name]
        index = message.rows if isinstance(message, PerClient) else None
        received = message.payloads if isinstance(message, PerClient) else message
        with torch.no_grad():
            return self.engine.map(function, self.cohort(ids, limit, own), states, received, index)

    def _local(self, client: Client, state: TensorDict, received: TensorDict) -> Parts:
        new, reply = self.method.local(client, state, received)
        return new, reply, TensorDict(dict(client.metrics), batch_size=[])

    def _count(self, message: Broadcast, done: Sequence[_Trained], sampled: set[int]) -> Traffic:
        """Returns the traffic of a round: whoever trains has received (or everyone), only the sampled send."""
        traffic = Traffic()
        if self.method.pooled:
            return traffic
        buffers = {b for g in self.groups for b in g.model.buffers}
        everyone = range(len(self._members)) if self.method.reaches_all else [i for t in done for i in t.ids]
        if isinstance(message, PerArchitecture):
            for group, where in by_group(self.groups, everyone):
                traffic.add(count_down(message[group.name], len(where), buffers))
        else:
            traffic.add(count_down(message, len(everyone), buffers))
        for part in done:
            senders = sum(i in sampled for i in part.ids)
            # Replies of one architecture are of equal size: those of the sampled cost as many others would.
            traffic.add(count_up(part.replies[:senders], buffers))
        return traffic

    def _rows(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        federation, n = self.federation, self.federation.num_clients
        if self.method.pooled:
            return (np.concatenate(federation.train[:n]),), (np.concatenate(federation.val[:n]),)
        return federation.train[:n], federation.val[:n]

    # -- the models that come out ---------------------------------------------------------------------------

    def personal_models(
        self, ids: Sequence[int], at_once: int = 32
    ) -> Iterator[tuple[tuple[int, ...], TensorDict]]:
        """Yields (clients, their deployable models [clients, ...]); every personal metric is of these."""
        for group, part in self._parts(ids, at_once):
            yield part, self._personal(group, part, group.states.get(part), None)

    def newcomer_models(
        self, ids: Sequence[int], steps: int, at_once: int = 32
    ) -> Iterator[tuple[tuple[int, ...], TensorDict]]:
        """Yields the models of clients that never trained, after at most `steps` batches of each training.

        0: what such a client can deploy at once. Nothing is stored and nothing is sent.
        """
        for group, part in self._parts(ids, at_once):
            fresh = tree.nest(group.states.starts(part).items(), [len(part)])
            yield part, self._personal(group, part, fresh, steps)

    def _parts(self, ids: Sequence[int], at_once: int) -> Iterator[tuple[Group, tuple[int, ...]]]:
        for group, where in by_group(self.groups, ids):
            for start in range(0, len(where), at_once):
                yield group, tuple(ids[k] for k in where[start : start + at_once])

    def _personal(
        self, group: Group, ids: tuple[int, ...], states: TensorDict, steps: int | None
    ) -> TensorDict:
        def deploy(client: Client, state: TensorDict, received: TensorDict) -> Parts:
            if steps is not None:
                state = self.method.newcomer(state, received)
                if steps > 0:
                    state, _ = self.method.local(client, state, received)
            return (self.method.personal(client, state, received),)

        message: TensorDict | PerClient = tree.empty()
        if steps is not None or self.method.personal_receives:
            send = self.method.broadcast if steps is None else self.method.welcome
            message = message_for(send(self.server, ids), group, range(len(ids)))
        return self.run(ids, states, message, deploy, limit=steps, own=True)[0]

    def global_model(self, architecture: str | None = None) -> TensorDict | None:
        """Returns the global model, or None for a method that has none.

        `architecture` names one of several; by default the first.
        """
        if not self.method.has_global:
            return None
        found = self.method.shared(self.server)
        name = self.groups[0].name if architecture is None else architecture
        return found[name] if isinstance(found, PerArchitecture) else found

    # -- checkpoints ----------------------------------------------------------------------------------------

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns (tensors, facts) from which `load` continues exactly.

        The tensors are those of the run, not copies: write or load them before the next round.
        """
        tensors = {f"server/{p}": t for p, t in tree.leaves(self.server)}
        for group in self.groups:
            tensors |= {f"{_place(group)}{p}": t for p, t in group.states.dump().items()}
        return tensors, {"round": self.round, "engine": self.engine.name, "traffic": self.traffic.as_dict()}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restores what `dump` returned."""
        # Copies: a tensor inside a file's buffer may lie where matrix products use other instructions and round
        # otherwise than on memory of their own.
        saved = {p.removeprefix("server/"): t.clone() for p, t in tensors.items() if p.startswith("server/")}
        self.server = tree.fill(self.server, saved)
        for group in self.groups:
            place = _place(group)
            group.states.load({p.removeprefix(place): t for p, t in tensors.items() if p.startswith(place)})
        self.round, self.traffic = int(facts["round"]), Traffic(**facts["traffic"])
        if isinstance(self.engine, Auto) and facts["engine"] != "auto":
            self.engine.choose(str(facts["engine"]))


def round_half_up(value: float) -> int:
    """Returns the nearest integer, halves upwards, so that 0.25 · 10 clients is 3 on every machine."""
    return int(np.floor(value + 0.5))


def _place(group: Group) -> str:
    """Where a checkpoint holds the private states of a group's clients."""
    return f"clients/{group.name}/" if group.name else "clients/"


def _means(metrics: Sequence[TensorDict]) -> dict[str, float]:
    """Returns the mean over clients of every metric, whatever architecture a client has."""
    leaves = [dict(tree.leaves(part)) for part in metrics]
    return {name: float(torch.cat([part[name] for part in leaves]).double().mean()) for name in leaves[0]}


def _listed(clients: Sequence[int], most: int = 20) -> str:
    more = len(clients) - most
    return ", ".join(map(str, clients[:most])) + (f" and {more} more" if more > 0 else "")
