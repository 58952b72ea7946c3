"""The line of time of buffered rounds: who trains at the moment, when each ends, and who starts next.

At most `concurrency` clients train at once. Whoever ends frees a place, which a client takes with the server's model of
then: one drawn uniformly among those that can be reached, do not train and have no update in the buffer. Ends at one
time are all received, in the order of clients, before anybody starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tailorfl.errors import RunError
from tailorfl.rounds.availability import uniform
from tailorfl.rounds.participation import ClientOutcome, RoundTrace
from tailorfl.rounds.system import ClientWork, System

WorkOf = Callable[[Sequence[int]], Mapping[int, ClientWork]]
"""The work of clients that start now."""
VAIN = 50
"""Trainings for each client and place of the buffer that may come to nothing before that counts as always."""
PATIENCE = 100_000
"""Occasions on which chance may let nobody be there before that counts as never."""


class Flight(NamedTuple):
    """A client that trains; sorted by when it ends, then by client."""

    end: float
    client: int
    answer: ClientOutcome
    """Its outcome, with the version that it started from."""


@dataclass(frozen=True)
class Timeline:
    """The state between two aggregations."""

    now: float = 0.0
    occasion: int = 0
    """Draws of a starting client so far."""
    flights: tuple[Flight, ...] = ()

    @property
    def versions(self) -> frozenset[int]:
        """The versions that clients train from."""
        return frozenset(f.answer.version for f in self.flights if f.answer.version is not None)

    def dump(self) -> dict[str, Any]:
        """Return it as plain values."""
        flights = [[f.end, *f.answer] for f in self.flights]
        return {"now": self.now, "occasion": self.occasion, "flights": flights}

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Timeline:
        """Return what `dump` returned."""
        flights = tuple(
            Flight(float(end), int(outcome[0]), ClientOutcome(*outcome)) for end, *outcome in plain["flights"]
        )
        return cls(float(plain["now"]), int(plain["occasion"]), flights)


@dataclass(frozen=True)
class Buffer:
    """A buffer of replies: `replies` make an aggregation, `concurrency` of `clients` train at once."""

    system: System
    seed: int
    clients: int
    replies: int
    concurrency: int

    def until_full(self, start: Timeline, version: int, work_of: WorkOf) -> tuple[RoundTrace, Timeline]:
        """Return what happens until the buffer is full, from the state `start` at a `version`, and the state then.

        Raises:
            RunError: nobody trains, and nobody can ever be reached again.
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
                        f"the buffer of {self.replies} replies stays at {len(buffered)} after {time:.4g} simulated "
                        f"seconds and {len(ended)} trainings: clients are lost or too slow; see system.deadline, "
                        "system.speed and system.availability"
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
                        f"the buffer of {self.replies} replies stays at {len(buffered)}: after {time:.4g} simulated "
                        "seconds no client can be reached any more; set fewer rounds, or see system.availability"
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
        """Return the next occasion, and (client, occasion) of those that take free places."""
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
