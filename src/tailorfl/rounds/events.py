"""The line of time of buffered rounds: who trains at the moment, when each ends, and who starts next.

At most `concurrency` clients train at once. Whoever ends frees a place, which a client takes with the server's model of
then: one drawn uniformly among those that can be reached, do not train and have no update in the buffer. Ends at one
time are all received, in the order of clients, before anybody starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailorfl.errors import RunError
from tailorfl.rounds.availability import uniform
from tailorfl.rounds.participation import ClientOutcome, RoundTrace
from tailorfl.rounds.system import ClientWork, System

WorkOf = Callable[[Sequence[int]], Mapping[int, ClientWork]]
"""What clients would have to do that start now."""
VAIN = 50
"""Trainings for each client and place of the buffer that may come to nothing before that counts as always."""
PATIENCE = 100_000
"""Occasions on which chance may let nobody be there before that counts as never."""


@dataclass(frozen=True)
class Flight:
    """A client that trains."""

    end: float
    client: int
    answer: ClientOutcome
    """What becomes of it at its end, with the version that it started from."""


@dataclass(frozen=True)
class Timeline:
    """The state between two aggregations."""

    now: float = 0.0
    occasion: int = 0
    """How often somebody was asked for."""
    flights: tuple[Flight, ...] = ()

    @property
    def versions(self) -> frozenset[int]:
        """The versions that clients train from."""
        return frozenset(f.answer.version for f in self.flights if f.answer.version is not None)

    def dump(self) -> dict[str, Any]:
        """Returns it as plain values."""
        flights = [[f.end, *f.answer] for f in self.flights]
        return {"now": self.now, "occasion": self.occasion, "flights": flights}

    @classmethod
    def load(cls, plain: Mapping[str, Any]) -> Timeline:
        """Returns what `dump` returned."""
        flights = tuple(
            Flight(float(end), int(rest[0]), ClientOutcome(*rest)) for end, *rest in plain["flights"]
        )
        return cls(float(plain["now"]), int(plain["occasion"]), flights)


@dataclass(frozen=True)
class Buffer:
    """How replies are gathered: `replies` make an aggregation, `concurrency` of `clients` train at once."""

    system: System
    seed: int
    clients: int
    replies: int
    concurrency: int

    def until_full(self, start: Timeline, version: int, work_of: WorkOf) -> tuple[RoundTrace, Timeline]:
        """Returns what happens until the buffer is full, from the state `start` at a `version`, and the state then.

        Raises:
            RunError: nobody trains, and nobody can ever be reached again.
        """
        now, occasion, flights = start.now, start.occasion, sorted(start.flights, key=_order)
        ended: list[ClientOutcome] = []
        held: set[int] = set()
        while len(held) < self.replies:
            if flights and flights[0].end <= now:
                answer = flights.pop(0).answer
                ended.append(answer)
                if len(ended) - len(held) > VAIN * (self.replies + self.clients):
                    raise RunError(
                        f"after {now:.4g} simulated seconds {len(ended) - len(held)} trainings came to nothing, so "
                        f"the buffer of {self.replies} replies stays at {len(held)}; clients are lost, or slower than "
                        "the deadline or the time that they can be reached: see system.deadline, speed, availability"
                    )
                held |= {answer.client} if answer.answered else set()
                continue
            idle = set(range(self.clients)) - {f.client for f in flights} - held
            occasion, starting = self._drawn(occasion, now, idle, self.concurrency - len(flights))
            if starting:
                work = work_of(sorted(client for client, _ in starting))
                flights += [self._flight(c, at, now, version, work[c]) for c, at in starting]
                flights.sort(key=_order)
            if not flights:
                later = min((self.system.availability.next(i, now) for i in idle), default=math.inf)
                if math.isinf(later) or occasion - start.occasion > PATIENCE:
                    raise RunError(
                        f"after {now:.4g} simulated seconds nobody trains and no client can be reached any more, so "
                        f"the buffer of {self.replies} replies stays at {len(held)}; set fewer rounds, or see "
                        "system.availability"
                    )
                now = later
            else:
                now = max(now, flights[0].end)
        answers = tuple(sorted(ended, key=lambda a: (a.client, a.version or 0)))
        done = RoundTrace(version + 1, tuple(sorted(held)), answers, now - start.now)
        return done, Timeline(now, occasion, tuple(flights))

    def _drawn(
        self, occasion: int, now: float, idle: set[int], places: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Returns the next occasion, and (client, occasion) of those that take free places."""
        starting: list[tuple[int, int]] = []
        left = sorted(idle)
        for _ in range(places):
            occasion += 1
            there = [i for i in left if self.system.availability.until(i, now, occasion) is not None]
            if not there:
                break
            chosen = there[int(uniform(self.seed, "starts", 0, occasion) * len(there))]
            left.remove(chosen)
            starting.append((chosen, occasion))
        return occasion, starting

    def _flight(self, client: int, occasion: int, now: float, version: int, work: ClientWork) -> Flight:
        answer = self.system.answer(client, now, occasion, work)._replace(version=version)
        deadline = self.system.settings.deadline
        seconds = answer.seconds or 0.0
        if deadline is not None and seconds > deadline:
            answer, seconds = answer._replace(fate="late"), deadline
        return Flight(now + seconds, client, answer)


def _order(flight: Flight) -> tuple[float, int]:
    return flight.end, flight.client
