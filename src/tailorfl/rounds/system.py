"""A simulated system: which clients answer in a round, after how long, and how long the round lasts.

What a client takes is known before it trains (`rounds/devices.py`), so only those train that answer in time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tailorfl.rounds.acceptance import Acceptance, Answer
from tailorfl.rounds.availability import Availability, make_availability
from tailorfl.rounds.devices import Devices, Work
from tailorfl.settings.system import SystemConfig


@dataclass(frozen=True)
class System:
    """Devices, when they can be reached, and what the server does about it."""

    settings: SystemConfig
    availability: Availability
    devices: Devices

    @classmethod
    def of(cls, settings: SystemConfig, seed: int, names: Sequence[str]) -> System:
        """Returns the system of clients that have `names`.

        Raises:
            DataError: a file of the settings cannot be used.
        """
        return cls(
            settings, make_availability(settings.availability, seed, names), Devices(settings, seed, names)
        )

    def answer(self, client: int, time: float, occasion: int, work: Work) -> Answer:
        """Returns what becomes of a client that is asked at a time: accepted, lost or unavailable.

        It is lost where chance has it (`dropout`), or where it can no longer be reached before it is done; in both
        cases that is noticed when it happens.
        """
        until = self.availability.until(client, time, occasion)
        if until is None:
            return Answer(client, "unavailable")
        seconds = self.devices.seconds(client, occasion, work)
        vanished = self.devices.vanishes(client, occasion)
        end = min(seconds if vanished is None else vanished * seconds, until - time)
        if vanished is not None or end < seconds:
            return Answer(client, "lost", end)
        return Answer(client, "accepted", seconds)

    def round(
        self,
        number: int,
        time: float,
        sampled: tuple[int, ...],
        asked: tuple[int, ...],
        work: Mapping[int, Work],
        wanted: int,
    ) -> Acceptance:
        """Returns what becomes of the clients that are `asked` in round `number`, of whom `sampled` would count.

        The round ends when `wanted` of the sampled have answered; or else when all that were asked have, or were lost;
        in any case at the deadline. Whoever answers later is late. A round that reaches nobody lasts until the first of
        them can be reached.
        """
        answers = [self.answer(i, time, number, work[i]) for i in asked]
        counting = set(sampled)
        arrivals = sorted((_seconds(a), a.client) for a in answers if a.answered and a.client in counting)
        deadline = math.inf if self.settings.deadline is None else self.settings.deadline
        last = max((_seconds(a) for a in answers if a.fate != "unavailable"), default=-1.0)
        if last < 0:
            waiting = min((self.availability.next(i, time) for i in asked), default=math.inf) - time
            last = waiting if math.isfinite(waiting) else 0.0
        end = min(last, deadline)
        surplus: set[int] = set()
        if self.settings.over_selection and len(arrivals) >= wanted:
            end = min(end, arrivals[wanted - 1][0])
            surplus = {client for _, client in arrivals[wanted:]}
        late = [
            a._replace(fate="late") if a.answered and (_seconds(a) > end or a.client in surplus) else a
            for a in answers
        ]
        return Acceptance(number, sampled, tuple(late), end)

    def asked(self, fraction: float) -> float:
        """Returns the share of the clients that is asked where the replies of a share are wanted."""
        return min(1.0, fraction * (1.0 + self.settings.over_selection))


def _seconds(answer: Answer) -> float:
    return answer.seconds or 0.0
