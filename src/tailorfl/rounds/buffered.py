"""Buffered asynchronous rounds (FedBuff: Nguyen et al., AISTATS 2022).

"Federated Learning with Buffered Asynchronous Aggregation." Works for every method whose server needs only the mean
of its clients' replies.

    a client starts from version k of the server's state; while it trains, the server aggregates τ times
    Δ_i = reply_i − anchor_k            the origin of a reply (`Method.anchor`), in version k
    reply_i ← anchor_{k+τ} + s(τ) Δ_i   s(τ) = 1/√(1 + τ), or 1
    after K replies: the method's own `aggregate` of them; the version increases by 1

So FedAvg's server becomes w ← w + Σ a_i s(τ_i) Δ_i, with its optimizer if it has one. The a_i are the run's weights
within the buffer; the paper's are 1/K (`weights: uniform`). Running statistics and integers stay as they were sent.

At most `concurrency` clients train at once. When one finishes, another starts from the server's current model. It is
drawn uniformly from the clients that can be reached, are not training and have no update in the buffer. Replies that
arrive at the same time are all received, in the order of clients, before any client starts.

| symbol | name |
|---|---|
| K | `system.buffer` |
| clients that train at once | `system.concurrency` |
| s | `system.staleness` |
| k | `ClientOutcome.version` |

Departures: a client whose update is in the buffer starts again only after the aggregation, so none is in it twice. The
authors' release divides s(τ) by s(1), sums without 1/K and flushes a partly filled buffer at the end of an epoch.
A client's private state changes when it finishes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.messages import PerClient
from tailorfl.core.method import Method
from tailorfl.errors import ConfigError, RunError
from tailorfl.rounds.groups import by_group, message_for, stacked
from tailorfl.rounds.one_round import RoundResult, RoundState, Trained, counted
from tailorfl.rounds.participation import ClientOutcome, RoundTrace
from tailorfl.rounds.planning import work_of
from tailorfl.rounds.requirements import check_mean_only
from tailorfl.rounds.simulation import Simulation
from tailorfl.rounds.system import ClientWork, System, uniform
from tailorfl.settings.experiment import DEFAULT, Sampling
from tailorfl.settings.system import SystemConfig
from tailorfl.settings.train import PrivacyConfig
from tailorfl.training import tree

WorkOf = Callable[[Sequence[int]], Mapping[int, ClientWork]]
"""The function that returns the work of clients that start now."""
VAIN = 50
"""Failed trainings, per client and reply of the buffer, after which the run gives up."""
PATIENCE = 100_000
"""Draws without a reachable client after which the run gives up."""


class Flight(NamedTuple):
    """A client in training; sorted by end time, then by client."""

    end: float
    client: int
    answer: ClientOutcome
    """The outcome, with the version that the client started from."""


@dataclass(frozen=True)
class Timeline:
    """The state between two aggregations."""

    now: float = 0.0
    occasion: int = 0
    """Number of draws of a starting client so far."""
    flights: tuple[Flight, ...] = ()

    @property
    def versions(self) -> frozenset[int]:
        """The versions that clients train from."""
        return frozenset(f.answer.version for f in self.flights if f.answer.version is not None)

    def dump(self) -> dict[str, Any]:
        """Return the timeline as plain values."""
        flights = [[f.end, *f.answer] for f in self.flights]
        return {"now": self.now, "occasion": self.occasion, "flights": flights}

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Timeline:
        """Return the timeline that `dump` turned into plain values."""
        flights = tuple(
            Flight(float(end), int(outcome[0]), ClientOutcome(*outcome)) for end, *outcome in plain["flights"]
        )
        return cls(float(plain["now"]), int(plain["occasion"]), flights)


@dataclass(frozen=True)
class Buffer:
    """A buffer of replies: `replies` trigger an aggregation, `concurrency` of `clients` train at once."""

    system: System
    seed: int
    clients: int
    replies: int
    concurrency: int

    def until_full(self, start: Timeline, version: int, work_of: WorkOf) -> tuple[RoundTrace, Timeline]:
        """Return the trace from `start` at a `version` until the buffer is full, and the state at that time.

        Raises:
            RunError: too many trainings failed, or no client trains and none can be reached again.
        """
        time, occasion, flights = start.now, start.occasion, sorted(start.flights)
        ended: list[ClientOutcome] = []
        buffered: set[int] = set()
        while len(buffered) < self.replies:
            if flights and flights[0].end <= time:
                answer = flights.pop(0).answer
                ended.append(answer)
                if len(ended) - len(buffered) > VAIN * (self.replies + self.clients):
                    raise RunError(
                        f"the buffer needs {self.replies} replies, but has {len(buffered)} after {time:.4g} simulated "
                        f"seconds and {len(ended)} trainings, since clients are lost or too slow; check "
                        "system.deadline, system.speed and system.availability"
                    )
                buffered |= {answer.client} if answer.answered else set()
                continue
            idle = set(range(self.clients)) - {f.client for f in flights} - buffered
            occasion, starting = self._drawn(occasion, time, idle, self.concurrency - len(flights))
            if starting:
                work = work_of(sorted(client for client, _ in starting))
                flights += [self._flight(c, at, time, version, work[c]) for c, at in starting]
                flights.sort()
            if not flights:
                later = min((self.system.availability.next(i, time) for i in idle), default=math.inf)
                if math.isinf(later) or occasion - start.occasion > PATIENCE:
                    raise RunError(
                        f"the buffer needs {self.replies} replies, but has {len(buffered)}, and after {time:.4g} "
                        "simulated seconds no client is available any more; lower rounds, or check system.availability"
                    )
                time = later
            else:
                time = max(time, flights[0].end)
        answers = tuple(sorted(ended, key=lambda a: (a.client, a.version or 0)))
        trace = RoundTrace(version + 1, tuple(sorted(buffered)), answers, time - start.now)
        return trace, Timeline(time, occasion, tuple(flights))

    def _drawn(
        self, occasion: int, time: float, idle: set[int], free_places: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Return the last occasion, and (client, occasion) of the clients that fill the free places."""
        starting: list[tuple[int, int]] = []
        idle_clients = sorted(idle)
        for _ in range(free_places):
            occasion += 1
            reachable = [
                i for i in idle_clients if self.system.availability.until(i, time, occasion) is not None
            ]
            if not reachable:
                break
            chosen = reachable[int(uniform(self.seed, "starts", 0, occasion) * len(reachable))]
            idle_clients.remove(chosen)
            starting.append((chosen, occasion))
        return occasion, starting

    def _flight(self, client: int, occasion: int, time: float, version: int, work: ClientWork) -> Flight:
        answer = self.system.answer(client, time, occasion, work)._replace(version=version)
        deadline = self.system.settings.deadline
        seconds = answer.seconds or 0.0
        if deadline is not None and seconds > deadline:
            answer, seconds = answer._replace(fate="late"), deadline
        return Flight(time + seconds, client, answer)


USUAL_BUFFER = 10


def check_buffered(
    method: Method, fraction: float, sampling: Sampling, privacy: PrivacyConfig | None = None
) -> None:
    """Check that a method can have buffered rounds with these settings of a run.

    Raises:
        ConfigError: its server needs more than a mean, rounds involve all clients, or a setting needs cohorts.
    """
    check_mean_only(
        method,
        "it cannot mix replies to older and newer versions of its state, as mode=buffered does",
    )
    if method.participation == "all" or method.reaches_all:
        raise ConfigError(
            f"{method.title} involves all clients in every round (participation=all, or a message to everybody), which "
            "mode=buffered cannot do; set participation=sampled"
        )
    if fraction != 1 or sampling != "uniform":
        raise ConfigError(
            "with mode=buffered clients are drawn one by one, uniformly, so fraction and sampling have no effect; "
            "leave them out and set system.concurrency"
        )
    if privacy is not None and privacy.level == "client":
        raise ConfigError(
            "client-level privacy is accounted for cohorts that train the same version of the model, which "
            "mode=buffered does not have; set system.mode=synchronous, or train.dp.level=sample"
        )
    if privacy is not None and privacy.epsilon is not None:
        raise ConfigError(
            "the noise for an epsilon depends on the cohorts of all rounds, which are unknown in advance with "
            "mode=buffered; set train.dp.noise instead"
        )


class Buffered(Simulation):
    """A simulation whose rounds are aggregations of a buffer; arguments as of `Simulation`.

    Raises:
        ConfigError: the method or a setting does not support buffered rounds, or `system` names more replies or
            concurrent clients than there are clients.
    """

    def __init__(self, *args: Any, system: SystemConfig = DEFAULT.system, **settings: Any) -> None:
        super().__init__(*args, system=system, **settings)
        check_buffered(self.method, self.fraction, self.sampling)
        if self.client_dp is not None:
            check_buffered(self.method, 1.0, "uniform", PrivacyConfig(level="client", clip=1.0, noise=0.0))
        self._check_replies()
        clients = self.participants
        if self.trace is None and len(self.population.present) < clients:
            raise ConfigError(
                "system.mode=buffered starts clients one after another, so without one (data.excluded_clients) all "
                "others would start at other times; replay a trace without that client (system.trace), as tailorfl "
                "unlearn does"
            )
        usual = min(USUAL_BUFFER, max(1, clients // 2))
        replies = usual if system.buffer is None else system.buffer
        concurrency = clients if system.concurrency is None else system.concurrency
        for name, number in (("buffer", replies), ("concurrency", concurrency)):
            if number > clients:
                raise ConfigError(
                    f"system.{name}={number} is more than the {clients} clients, each of which has one training at a "
                    f"time and one reply in the buffer; set system.{name}={clients} at most"
                )
        self._check_enough(replies)
        simulated = self.system or System.of(system, self.seed, self.federation.names)
        self.buffer = Buffer(simulated, self.seed, clients, replies, concurrency)
        self.staleness = system.staleness
        self.timeline = Timeline()
        self.versions: dict[int, TensorDict] = {}
        """Earlier states of the server that clients still train from."""

    def _check_replies(self) -> None:
        """Raise ConfigError if replies of the first two rounds differ, which one buffer may hold, or are not sent."""
        client, entries = self.population.present[:1], []
        ((group, positions),) = by_group(self.groups, client)
        received = message_for(self.method.broadcast(self.server, client), group, positions)
        for number in (0, 1):
            cohort = self.population.cohort(client, number, self.train)
            replies = counted(group, cohort, received, self.local)[1][1]
            entries.append({path for path, _ in tree.leaves(replies)})
        silent = not entries[0] and type(self.method).aggregate is not Method.aggregate
        if silent or entries[0] != entries[1] or self.method.replies_change:
            raise ConfigError(
                f"clients of {self.method.title} send different things in different rounds with these options, or "
                "nothing in some, so mode=buffered cannot mix replies of several rounds; set system.mode=synchronous"
            )

    def weight(self, age: int) -> float:
        """Return s(τ), the weight of an update that is `age` aggregations old."""
        return 1.0 / math.sqrt(1.0 + age) if self.staleness == "polynomial" else 1.0

    def step(
        self,
        sampled: tuple[int, ...] | None = None,
        training: tuple[int, ...] | None = None,
        trace: RoundTrace | None = None,
    ) -> RoundResult:
        """Run until the buffer is full and aggregate it; if clients are named, run a plain round of them.

        Raises:
            DivergenceError, ConfigError: as in `Simulation`.
            RunError: the buffer cannot be filled.
        """
        if sampled is not None or training is not None:
            return super().step(sampled, training, trace)
        timeline = self.timeline
        if trace is None and self.trace is None:
            trace, timeline = self.buffer.until_full(timeline, self.round, self._work)
        version, server = self.round, self.server
        done = super().step(trace=trace)
        self.timeline = timeline
        needed = timeline.versions if self.trace is None else self._played_later(self.round)
        self.versions = {k: s for k, s in {**self.versions, version: server}.items() if k in needed}
        return done

    def _work(self, clients: Sequence[int]) -> Mapping[int, ClientWork]:
        ids = tuple(clients)
        if not self.buffer.system.devices.takes_time:
            return dict.fromkeys(ids, ClientWork(0, 0, 0))
        return work_of(self, self.method.broadcast(self.server, ids), ids, self.round)[0]

    def _played_later(self, after: int) -> frozenset[int]:
        """Return the starting versions of clients in a recorded run that finish after round `after`."""
        later = (
            a
            for round_trace in self.trace or ()
            if round_trace.round > after
            for a in round_trace.answers
            if a.answered
        )
        return frozenset(a.version for a in later if a.version is not None)

    def collect(self, current: RoundState) -> list[Trained]:
        """Return the replies of a full buffer, each trained from its version and moved to the current anchor."""
        if current.trace is None:
            return super().collect(current)
        started: dict[int, list[int]] = {}
        for outcome in current.trace.answers:
            if outcome.answered:
                version = self.round if outcome.version is None else outcome.version
                started.setdefault(version, []).append(outcome.client)
        positions = {i: k for k, i in enumerate(current.training)}
        parts: dict[str, list[Trained]] = {}
        for version, clients in sorted(started.items()):
            clients.sort()
            server = self._state_of(version)
            sent = self.method.broadcast(server, tuple(clients))
            for group, positions_of_group in by_group(self.groups, clients):
                ids = tuple(clients[k] for k in positions_of_group)
                part = self._train(
                    group, ids, message_for(sent, group, positions_of_group), (version, server)
                )
                present = message_for(current.message, group, [positions[i] for i in ids])
                parts.setdefault(group.name, []).append(self._as_of_now(part, present, version))
        joined = [_joined(versions) for versions in parts.values()]
        return [
            replace(part, message=message_for(current.message, part.group, [positions[i] for i in part.ids]))
            for part in joined
        ]

    def _state_of(self, version: int) -> TensorDict:
        if version == self.round:
            return self.server
        if version not in self.versions:
            raise ConfigError(
                f"a client started from version {version}, which is no longer kept in round {self.round + 1}; the "
                "trace was recorded after different earlier rounds"
            )
        return self.versions[version]

    def _as_of_now(self, part: Trained, message: TensorDict | PerClient, version: int) -> Trained:
        """Return a part as if its clients had received the current `message`: its anchors + s(τ) Δ."""
        present = replace(part, message=message, server=self.server)
        age = self.round - version
        if age == 0:
            return present
        scaled = {path: change * self.weight(age) for path, change in part.updates.changes.items()}
        return replace(present, replies=present.updates.with_changes(scaled))

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, facts) from which `load` continues exactly, including clients that are still training."""
        tensors, facts = super().dump()
        for version, server in self.versions.items():
            tensors |= {f"versions/{version}/{p}": t for p, t in tree.leaves(server)}
        return tensors, {**facts, "timeline": self.timeline.dump(), "versions": sorted(self.versions)}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore the run from what `dump` returned."""
        super().load(tensors, facts)
        self.timeline = Timeline.load(facts["timeline"])
        start = self.method.server_state(self.context)
        self.versions = {}
        for version in facts["versions"]:
            prefix = f"versions/{version}/"
            tensors_of_version = {
                p.removeprefix(prefix): t.clone() for p, t in tensors.items() if p.startswith(prefix)
            }
            self.versions[int(version)] = tree.fill(start, tensors_of_version)


def _joined(parts: Sequence[Trained]) -> Trained:
    """Return the parts of one architecture as one, in rising order of clients, with the message of the first."""
    if len(parts) == 1:
        return parts[0]
    first, ids = parts[0], [i for part in parts for i in part.ids]
    order = torch.tensor(sorted(range(len(ids)), key=ids.__getitem__), dtype=torch.int64)
    return replace(
        first,
        ids=tuple(ids[k] for k in order.tolist()),
        replies=stacked([part.replies for part in parts], order),
        metrics=stacked([part.metrics for part in parts], order),
        finite=torch.cat([part.finite for part in parts])[order],
        uses={i: uses for part in parts for i, uses in part.uses.items()},
        gradients=sum(part.gradients for part in parts),
    )
