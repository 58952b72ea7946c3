"""A simulated system: which clients answer in a round, after how long, and how long the round lasts.

How long a client takes is known before it trains, so only those train that answer in time:

    seconds = straggling · (bytes down / bandwidth + gradients of samples / speed + bytes up / (upload · bandwidth))

`straggling` is the factor of stragglers, 1 for others. Speed and bandwidth are constants of a client, or drawn anew
each time that it is asked:

| kind | rate, z normal and u uniform in (0, 1) |
|---|---|
| fixed | median |
| lognormal | median · exp(spread · z) |
| half_normal | median · q / abs(z), q = 0.6745: the seconds are half-normal (FedBuff's simulations) |
| uniform | median · (1 + spread · (2u − 1)) |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from tailorfl.errors import DataError
from tailorfl.rounds.availability import Availability, make_availability, rows_of, uniform
from tailorfl.rounds.participation import ClientOutcome, RoundTrace
from tailorfl.settings.system import RateConfig, SystemConfig

NORMAL = NormalDist()
QUARTILE = NORMAL.inv_cdf(0.75)


@dataclass(frozen=True)
class ClientWork:
    """The work of a client in a round."""

    gradients: float
    """Of single samples."""
    down: float
    """Bytes of the message that it receives."""
    up: float
    """Bytes of its reply."""


class Rates:
    """A rate of every client, such as its speed."""

    def __init__(self, config: RateConfig, seed: int, quantity: str, names: Sequence[str]) -> None:
        self._config, self._seed, self._what = config, seed, quantity
        self._listed: Mapping[int, float] = {}
        if config.kind == "file" and config.file is not None:
            path = Path(config.file)
            self._listed = {i: rate for i, (rate,) in rows_of(path, ("per_second",), names)}
            lacking = sorted(set(range(len(names))) - set(self._listed))
            if lacking:
                raise DataError(f"'{path}' has no line for client {lacking[0]} ('{names[lacking[0]]}')")
            if min(self._listed.values()) <= 0:
                raise DataError(f"'{path}' has a rate that is not positive; nothing would ever be done")

    def of(self, client: int, occasion: int) -> float:
        """Return how many a second a client makes on an occasion; infinite where it takes no time."""
        config = self._config
        if config.kind == "instant":
            return math.inf
        if config.kind == "file":
            return self._listed[client]
        if config.kind == "fixed":
            return config.median
        draw = occasion if config.redraw == "round" else 0
        u = max(uniform(self._seed, self._what, client, draw), 1e-12)
        if config.kind == "uniform":
            return config.median * (1.0 + config.spread * (2.0 * u - 1.0))
        if config.kind == "lognormal":
            return config.median * math.exp(config.spread * NORMAL.inv_cdf(u))
        return config.median * QUARTILE / NORMAL.inv_cdf(0.5 + 0.5 * u)


class Devices:
    """The devices of all clients; a function of (seed, client, occasion)."""

    def __init__(self, config: SystemConfig, seed: int, names: Sequence[str]) -> None:
        self._config, self._seed = config, seed
        self._speed = Rates(config.speed, seed, "speed", names)
        self._bandwidth = Rates(config.bandwidth, seed, "bandwidth", names)

    @property
    def takes_time(self) -> bool:
        """Anything takes time."""
        return any(rate.kind != "instant" for rate in (self._config.speed, self._config.bandwidth))

    def straggles(self, client: int, occasion: int) -> bool:
        """Return whether a client is a straggler on an occasion."""
        stragglers = self._config.stragglers
        draw = occasion if stragglers.redraw == "round" else 0
        return uniform(self._seed, "straggler", client, draw) < stragglers.share

    def seconds(self, client: int, occasion: int, work: ClientWork) -> float:
        """Return how long a client takes for its work, from the question to the answer."""
        speed, bandwidth = self._speed.of(client, occasion), self._bandwidth.of(client, occasion)
        unhindered = (
            work.down / bandwidth + work.gradients / speed + work.up / (self._config.upload * bandwidth)
        )
        return unhindered * (self._config.stragglers.factor if self.straggles(client, occasion) else 1.0)

    def vanishes(self, client: int, occasion: int) -> float | None:
        """Return after which share of its time a client vanishes on an occasion; None where it does not."""
        if uniform(self._seed, "dropout", client, occasion) >= self._config.dropout:
            return None
        return uniform(self._seed, "vanishes", client, occasion)


@dataclass(frozen=True)
class System:
    """Devices, when they can be reached, and what the server does about it."""

    settings: SystemConfig
    availability: Availability
    devices: Devices

    @classmethod
    def of(cls, settings: SystemConfig, seed: int, names: Sequence[str]) -> System:
        """Return the system of clients that have `names`.

        Raises:
            DataError: a file of the settings cannot be used.
        """
        return cls(
            settings, make_availability(settings.availability, seed, names), Devices(settings, seed, names)
        )

    def answer(self, client: int, time: float, occasion: int, work: ClientWork) -> ClientOutcome:
        """Return what becomes of a client that is asked at a time: accepted, lost or unavailable.

        It is lost where chance has it (`dropout`), or where it can no longer be reached before it is done; in both
        cases that is noticed when it happens.
        """
        until = self.availability.until(client, time, occasion)
        if until is None:
            return ClientOutcome(client, "unavailable")
        seconds = self.devices.seconds(client, occasion, work)
        vanished = self.devices.vanishes(client, occasion)
        end = min(seconds if vanished is None else vanished * seconds, until - time)
        if vanished is not None or end < seconds:
            return ClientOutcome(client, "lost", end)
        return ClientOutcome(client, "accepted", seconds)

    def round(
        self,
        number: int,
        time: float,
        sampled: tuple[int, ...],
        training: tuple[int, ...],
        work: Mapping[int, ClientWork],
        enough: int,
    ) -> RoundTrace:
        """Return what becomes of the clients `training` that round `number` asks, of whom `sampled` would count.

        The round ends when `enough` of the sampled have answered; or else when all that were asked have, or were lost;
        in any case at the deadline. Whoever answers later is late. A round that reaches nobody lasts until the first of
        them can be reached.
        """
        answers = [self.answer(i, time, number, work[i]) for i in training]
        counting = set(sampled)
        arrivals = sorted((_seconds(a), a.client) for a in answers if a.answered and a.client in counting)
        deadline = math.inf if self.settings.deadline is None else self.settings.deadline
        last = max((_seconds(a) for a in answers if a.fate != "unavailable"), default=-1.0)
        if last < 0:
            waiting = min((self.availability.next(i, time) for i in training), default=math.inf) - time
            last = waiting if math.isfinite(waiting) else 0.0
        end = min(last, deadline)
        surplus: set[int] = set()
        if self.settings.over_selection and len(arrivals) >= enough:
            end = min(end, arrivals[enough - 1][0])
            surplus = {client for _, client in arrivals[enough:]}
        late = [
            a._replace(fate="late") if a.answered and (_seconds(a) > end or a.client in surplus) else a
            for a in answers
        ]
        return RoundTrace(number, sampled, tuple(late), end)

    def asked(self, fraction: float) -> float:
        """Return the share of the clients that is asked where the replies of a share are wanted."""
        return min(1.0, fraction * (1.0 + self.settings.over_selection))


def _seconds(answer: ClientOutcome) -> float:
    return answer.seconds or 0.0
