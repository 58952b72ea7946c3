"""The rounds: sample a cohort, broadcast, train, check, aggregate; and the models that come out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from tailorfl.core.messages import PerClient, Replies, Traffic, count_down, count_up
from tailorfl.core.method import Context, Method
from tailorfl.core.objective import LOSSES
from tailorfl.core.state import StateStore
from tailorfl.data.federation import Federation
from tailorfl.engines.auto import Auto
from tailorfl.engines.base import Engine, Parts, finite_clients
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
    """Mean training loss over the accepted clients, by stage."""
    seconds: float
    traffic: Traffic

    @property
    def clients_per_second(self) -> float:
        """Sampled clients over seconds."""
        return len(self.clients) / max(self.seconds, 1e-9)


class Simulation:
    """One method on one federation, round by round.

    Args:
        fraction: share of training clients sampled each round, in (0, 1]; at least one client.
        sampling: uniform without replacement; proportional to training samples; bernoulli (each client by
            itself, redrawn if none).
        state_folder: where private states are memory-mapped; None keeps them in memory.

    Raises:
        ConfigError: `fraction` outside (0, 1].
    """

    def __init__(
        self,
        method: Method,
        federation: Federation,
        model: Model,
        train: TrainConfig,
        *,
        engine: Engine | None = None,
        seed: int = 0,
        fraction: float = 1.0,
        sampling: Sampling = "uniform",
        state_folder: Path | None = None,
    ) -> None:
        keep_freed_memory()
        if not 0 < fraction <= 1:
            raise ConfigError(f"fraction must lie in (0, 1], but is {fraction}")
        self.method, self.federation, self.model, self.train = method, federation, model, train
        self.engine: Engine = engine if engine is not None else Auto()
        self.seed, self.fraction, self.sampling = seed, fraction, sampling
        self.split = method.make_split(model)
        # As `torch.manual_seed(seed)` before building the model gives it: the start other code has, too.
        self.init = model.init(seed)
        self.context = Context(model, self.split, federation.num_clients, train, self.init, seed)
        self.server = method.server_state(self.context)
        self.start = method.client_state(self.context)
        self.states = StateStore(self.start, state_folder)
        self.traffic = Traffic()
        self.round = 0
        self._members, self._val = self._rows()

    @property
    def trained_scalars(self) -> int:
        """Scalars that one client optimises in a round: `d` for one model, `2d` for two."""
        return self.method.models_trained * sum(self.model.sizes[n] for n in self.split.trainable)

    # -- one round ------------------------------------------------------------------------------------------

    def step(self) -> RoundResult:
        """Runs the next round and returns what it did.

        Raises:
            DivergenceError: no sampled client returned a finite update.
        """
        begin = time.perf_counter()
        sampled = self.sample(self.round)
        training = tuple(range(len(self._members))) if self.method.participation == "all" else sampled
        message = self.method.broadcast(self.server, training)
        states = self.states.get(training)
        new, replies, metrics = self.run(training, states, message, self._local)
        finite = finite_clients(new, replies)
        rejected = tuple(c for c, ok in zip(training, finite.tolist(), strict=True) if not ok)
        if 0 < len(rejected) < len(training):
            log.warning(
                "round %d: update of client %s is not finite and was rejected (learning rate too high?)",
                self.round + 1,
                _listed(rejected),
            )
        kept = finite.nonzero()[:, 0]
        if not len(kept):
            raise DivergenceError(
                f"round {self.round + 1}: all {len(training)} clients diverged (updates are NaN or infinite); "
                "lower train.lr, set train.clip, or check the scale of the data"
            )
        self.states.put([training[k] for k in kept], new if len(kept) == len(training) else new[kept])
        wanted = set(sampled)
        arrived = [int(k) for k in kept if training[int(k)] in wanted]
        receivers = len(self._members) if self.method.reaches_all else len(training)
        traffic = self._count(message, replies, receivers=receivers, senders=len(sampled))
        if arrived:
            ids = tuple(training[k] for k in arrived)
            aggregated = self.method.aggregate(
                self.server,
                Replies(
                    stack=replies if len(arrived) == len(training) else replies[torch.tensor(arrived)],
                    clients=ids,
                    samples=np.array([len(self._members[i]) for i in ids], dtype=np.int64),
                    weighting=self.method.weights,
                    total_clients=len(self._members),
                    parameters=frozenset(self.model.parameters),
                ),
            )
            self.server = tree.contiguous(aggregated)
        losses = {name: float(t[kept].double().mean()) for name, t in tree.leaves(metrics)}
        self.traffic.add(traffic)
        result = RoundResult(self.round, sampled, rejected, losses, time.perf_counter() - begin, traffic)
        self.round += 1
        return result

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
        """Returns the cohort `ids` of this round.

        `own` reads the federation's clients even where training is pooled.
        """
        members = self.federation.train if own else self._members
        val = self.federation.val if own else self._val
        return Cohort(
            ids=tuple(ids),
            members=tuple(members[i] for i in ids),
            val=tuple(val[i] for i in ids),
            source=self.federation.source,
            model=self.model,
            split=self.split,
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
        message: TensorDict | PerClient,
        function: Any,
        limit: int | None = None,
        own: bool = False,
    ) -> Parts:
        """Returns a client function of `ids`, stacked."""
        each = isinstance(message, PerClient)
        received = message.payloads if isinstance(message, PerClient) else message
        with torch.no_grad():
            return self.engine.map(function, self.cohort(ids, limit, own), states, received, each)

    def _local(self, client: Client, state: TensorDict, received: TensorDict) -> Parts:
        new, reply = self.method.local(client, state, received)
        return new, reply, TensorDict(dict(client.metrics), batch_size=[])

    def _count(
        self, message: TensorDict | PerClient, replies: TensorDict, receivers: int, senders: int
    ) -> Traffic:
        """Returns the traffic of a round: whoever trains has received (or everyone), only the sampled send."""
        if self.method.pooled:
            return Traffic()
        traffic = count_down(message, receivers, self.model.buffers)
        sent = replies[:senders] if replies.batch_size[0] > senders else replies
        traffic.add(count_up(sent, self.model.buffers))
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
        for start in range(0, len(ids), at_once):
            part = tuple(ids[start : start + at_once])
            yield part, self._personal(part, self.states.get(part), None)

    def newcomer_models(
        self, ids: Sequence[int], steps: int, at_once: int = 32
    ) -> Iterator[tuple[tuple[int, ...], TensorDict]]:
        """Yields the models of clients that never trained, after at most `steps` steps of each training.

        0 steps: what such a client can deploy at once. Nothing is stored and nothing is sent.
        """
        for start in range(0, len(ids), at_once):
            part = tuple(ids[start : start + at_once])
            fresh = tree.nest(
                [(p, t.expand(len(part), *t.shape)) for p, t in tree.leaves(self.start)], [len(part)]
            )
            yield part, self._personal(part, fresh, steps)

    def _personal(self, ids: tuple[int, ...], states: TensorDict, steps: int | None) -> TensorDict:
        def deploy(client: Client, state: TensorDict, received: TensorDict) -> Parts:
            if steps is not None:
                state = self.method.newcomer(state, received)
                if steps > 0:
                    state, _ = self.method.local(client, state, received)
            return (self.method.personal(client, state, received),)

        message = self.method.broadcast(self.server, ids)
        return self.run(ids, states, message, deploy, limit=steps, own=True)[0]

    def global_model(self) -> TensorDict | None:
        """Returns the global model, or None for a method that has none."""
        if not self.method.has_global:
            return None
        return self.method.shared(self.server)

    # -- checkpoints ----------------------------------------------------------------------------------------

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns (tensors, facts) from which `load` continues exactly.

        The tensors are those of the run, not copies: write or load them before the next round.
        """
        tensors = {f"server/{p}": t for p, t in tree.leaves(self.server)}
        tensors |= {f"clients/{p}": t for p, t in self.states.dump().items()}
        return tensors, {"round": self.round, "engine": self.engine.name, "traffic": self.traffic.as_dict()}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restores what `dump` returned."""
        # Copies: a tensor inside a file's buffer may lie where matrix products use other instructions and round
        # otherwise than on memory of their own.
        saved = {p.removeprefix("server/"): t.clone() for p, t in tensors.items() if p.startswith("server/")}
        self.server = tree.fill(self.server, saved)
        self.states.load(
            {p.removeprefix("clients/"): t for p, t in tensors.items() if p.startswith("clients/")}
        )
        self.round, self.traffic = int(facts["round"]), Traffic(**facts["traffic"])
        if isinstance(self.engine, Auto) and facts["engine"] != "auto":
            self.engine.choose(str(facts["engine"]))


def round_half_up(value: float) -> int:
    """Returns the nearest integer, halves upwards, so that 0.25 · 10 clients is 3 on every machine."""
    return int(np.floor(value + 0.5))


def _listed(clients: Sequence[int], most: int = 20) -> str:
    more = len(clients) - most
    return ", ".join(map(str, clients[:most])) + (f" and {more} more" if more > 0 else "")
