"""A simulated system: which clients can be reached and answer in a round, how long they take, and how long it lasts.

The time that a client takes is known before it trains, so only clients that answer in time train:

    seconds = straggling · (bytes down / bandwidth + gradients of samples / speed + bytes up / (upload · bandwidth))

`straggling` is the factor of stragglers, 1 for others. A client's speed and bandwidth are constant, or redrawn each
time that it is asked:

| kind | rate, z normal and u uniform in (0, 1) |
|---|---|
| fixed | median |
| lognormal | median · exp(spread · z) |
| half_normal | median · q / abs(z), q = 0.6745: the seconds are half-normal (FedBuff's simulations) |
| uniform | median · (1 + spread · (2u − 1)) |
"""

from __future__ import annotations

import contextlib
import csv
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

from tailorfl.errors import ConfigError, DataError
from tailorfl.rounds.participation import ClientOutcome, RoundTrace
from tailorfl.settings.system import AvailabilityConfig, RateConfig, SystemConfig
from tailorfl.training.keys import bits, derive

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
                raise DataError(f"'{path}' has a rate that is not positive; all rates must be above 0")

    def of(self, client: int, occasion: int) -> float:
        """Return a client's rate per second on an occasion; infinite if it takes no time."""
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
        """Whether computation or communication takes time."""
        return any(rate.kind != "instant" for rate in (self._config.speed, self._config.bandwidth))

    def straggles(self, client: int, occasion: int) -> bool:
        """Return whether a client is a straggler on an occasion."""
        stragglers = self._config.stragglers
        draw = occasion if stragglers.redraw == "round" else 0
        return uniform(self._seed, "straggler", client, draw) < stragglers.share

    def seconds(self, client: int, occasion: int, work: ClientWork) -> float:
        """Return the seconds that a client takes for its work, from request to reply."""
        speed, bandwidth = self._speed.of(client, occasion), self._bandwidth.of(client, occasion)
        unhindered = (
            work.down / bandwidth + work.gradients / speed + work.up / (self._config.upload * bandwidth)
        )
        return unhindered * (self._config.stragglers.factor if self.straggles(client, occasion) else 1.0)

    def vanishes(self, client: int, occasion: int) -> float | None:
        """Return the share of its time after which a client vanishes on an occasion; None if it does not."""
        if uniform(self._seed, "dropout", client, occasion) >= self._config.dropout:
            return None
        return uniform(self._seed, "vanishes", client, occasion)


@dataclass(frozen=True)
class System:
    """Devices, their availability, and the server's settings for both."""

    settings: SystemConfig
    availability: Availability
    devices: Devices

    @classmethod
    def of(cls, settings: SystemConfig, seed: int, names: Sequence[str]) -> System:
        """Return the system of clients with `names`.

        Raises:
            DataError: a file of the settings cannot be used.
        """
        return cls(
            settings, make_availability(settings.availability, seed, names), Devices(settings, seed, names)
        )

    def answer(self, client: int, time: float, occasion: int, work: ClientWork) -> ClientOutcome:
        """Return the outcome of a client that is asked at a time: accepted, lost or unavailable.

        It is lost at random (`dropout`), or if it becomes unreachable before it is done; the server notices either at
        once.
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
        """Return the trace of round `number`, which asks the clients `training`; replies of `sampled` would count.

        With over-selection the round ends when `enough` of the sampled have answered; else when all that were asked
        have answered or are lost; at the latest at the deadline. Later answers are late. A round that reaches no client
        lasts until the first of them can be reached.
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
        """Return the share of clients to ask in order to get the replies of a share."""
        return min(1.0, fraction * (1.0 + self.settings.over_selection))


def _seconds(answer: ClientOutcome) -> float:
    return answer.seconds or 0.0


def uniform(seed: int, quantity: str, client: int, occasion: int) -> float:
    """Return a number in [0, 1), a function of its arguments only."""
    return float(bits(derive(seed, "system", quantity, client, occasion), 1)[0] >> 11) * 2.0**-53


class Availability(Protocol):
    """When each client can be reached; times are simulated seconds."""

    def until(self, client: int, time: float, occasion: int) -> float | None:
        """Return until when a client can be reached; infinite: forever; None: it cannot be reached at `time`.

        `occasion` counts requests and seeds the random draw.
        """

    def next(self, client: int, time: float) -> float:
        """Return the earliest time from `time` on at which a client can be reached; infinite if never."""


class ByChance:
    """Each client can be reached with probability `share` at each request, whatever the time."""

    def __init__(self, seed: int, share: float) -> None:
        self._seed, self._share = seed, share

    def until(self, client: int, time: float, occasion: int) -> float | None:
        """Return infinity, or None if the client cannot be reached on this occasion."""
        is_there = self._share == 1 or uniform(self._seed, "available", client, occasion) < self._share
        return math.inf if is_there else None

    def next(self, client: int, time: float) -> float:
        """Return the time itself: another request may be made at once."""
        return time


class Wave:
    """Each client can be reached for `share` of every day, from its own morning φ_i on: frac(t/period − φ_i) < share.

    Mornings are drawn uniformly over `spread` of a day.
    """

    def __init__(self, seed: int, share: float, period: float, spread: float) -> None:
        self._seed, self._share, self._period, self._spread = seed, share, period, spread

    def _hour(self, client: int, time: float) -> float:
        """Return the elapsed share of the client's day, in [0, 1)."""
        return (time / self._period - self._spread * uniform(self._seed, "morning", client, 0)) % 1.0

    def until(self, client: int, time: float, occasion: int) -> float | None:
        """Return the client's next evening, infinity if there is no night, or None at night."""
        if self._share == 1:
            return math.inf
        hour = self._hour(client, time)
        return time + (self._share - hour) * self._period if hour < self._share else None

    def next(self, client: int, time: float) -> float:
        """Return the time itself during the day, else the next morning."""
        hour = self._hour(client, time)
        if hour < self._share:
            return time
        # Rounding may place the morning slightly too early.
        return math.nextafter(time + (1.0 - hour) * self._period, math.inf) + 1e-9 * self._period


class Listed:
    """Each client can be reached in intervals [start, end), which repeat every `repeat` seconds if that is set."""

    def __init__(
        self, intervals: Mapping[int, Iterable[tuple[float, float]]], repeat: float | None = None
    ) -> None:
        self._repeat = repeat
        self._intervals: dict[int, list[tuple[float, float]]] = {}
        for client, pairs in intervals.items():
            joined: list[tuple[float, float]] = []
            for start, end in sorted(pairs):
                if joined and start <= joined[-1][1]:
                    joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
                else:
                    joined.append((start, end))
            self._intervals[client] = joined

    @classmethod
    def read(cls, path: Path, names: Sequence[str], repeat: float | None) -> Listed:
        """Return the intervals of a CSV file with columns client, start, end; clients not in it are never reachable.

        Raises:
            DataError: it cannot be read, or an interval is empty or not within 0 and `repeat`.
        """
        intervals: dict[int, list[tuple[float, float]]] = {}
        for client, (start, end) in rows_of(path, ("start", "end"), names):
            if not 0 <= start < end <= (math.inf if repeat is None else repeat):
                latest = "" if repeat is None else f", and at most at {repeat:g}"
                raise DataError(
                    f"'{path}' has the interval {start:g} to {end:g}; an interval must start at 0 or later and end "
                    f"after its start{latest}"
                )
            intervals.setdefault(client, []).append((start, end))
        if not intervals:
            raise DataError(f"'{path}' has no intervals, so no client would ever be available")
        return cls(intervals, repeat)

    def until(self, client: int, time: float, occasion: int) -> float | None:
        """Return the end of the current interval, or None outside of all."""
        base, elapsed = self._within(time)
        intervals = self._intervals.get(client, [])
        at = bisect_right(intervals, (elapsed, math.inf)) - 1
        if at < 0 or elapsed >= intervals[at][1]:
            return None
        end = intervals[at][1]
        if end == self._repeat and intervals[0][0] == 0:  # it continues in the next repetition
            return math.inf if intervals[0] == (0.0, end) else base + end + intervals[0][1]
        return base + end

    def next(self, client: int, time: float) -> float:
        """Return the time itself, or the start of the next interval."""
        intervals = self._intervals.get(client, [])
        if not intervals or self.until(client, time, 0) is not None:
            return time if intervals else math.inf
        base, elapsed = self._within(time)
        later = [start for start, _ in intervals if start > elapsed]
        if not later and self._repeat is None:
            return math.inf
        start = base + (later[0] if later else (self._repeat or 0.0) + intervals[0][0])
        # Rounding may place the start slightly too early, or at `time` itself.
        reachable = start > time and self.until(client, start, 0) is not None
        return start if reachable else math.nextafter(max(start, time), math.inf)

    def _within(self, time: float) -> tuple[float, float]:
        """Return the start of the current repetition, and the time since."""
        if self._repeat is None:
            return 0.0, time
        base = math.floor(time / self._repeat) * self._repeat
        return base, time - base


def make_availability(config: AvailabilityConfig, seed: int, names: Sequence[str]) -> Availability:
    """Return the availability of clients with `names`.

    Raises:
        DataError: a file cannot be used.
        ConfigError: kind=file without a file.
    """
    if config.kind == "wave":
        return Wave(seed, config.share, config.period, config.spread)
    if config.kind == "file":
        if config.file is None:
            raise ConfigError("system.availability.kind=file needs a file; set system.availability.file")
        return Listed.read(Path(config.file), names, config.repeat)
    return ByChance(seed, config.share if config.kind == "share" else 1.0)


def rows_of(path: Path, columns: Sequence[str], names: Sequence[str]) -> Iterator[tuple[int, list[float]]]:
    """Yield (client, numbers in `columns`) of each line of a file; `names` are those of the clients.

    Raises:
        DataError: it cannot be read, lacks a column, or a line, which is named, lacks a known client or a number.
    """
    clients = {name: number for number, name in enumerate(names)}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            lacking = [c for c in ("client", *columns) if c not in (reader.fieldnames or ())]
            if lacking:
                raise DataError(
                    f"'{path}' has no column {lacking[0]}; its first line should be: client,{','.join(columns)}"
                )
            for line, row in enumerate(reader, start=2):
                label = (row["client"] or "").strip()
                client = clients.get(label, int(label) if label.isdecimal() else len(names))
                if client >= len(names):
                    raise DataError(
                        f"line {line} of '{path}' names client '{label}'; clients are 0 to {len(names) - 1}, or names "
                        f"such as '{names[0]}'"
                    )
                yield client, [_number(path, line, row[c], c) for c in columns]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read '{path}': {error}; give a CSV file") from error


def _number(path: Path, line: int, text: str | None, column: str) -> float:
    with contextlib.suppress(ValueError):
        if not math.isnan(number := float(text or "")):
            return number
    raise DataError(f"line {line} of '{path}' has {column} = '{text}', which is not a number")
