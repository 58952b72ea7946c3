"""Availability of the clients of a simulated system."""

from __future__ import annotations

import contextlib
import csv
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tailorfl.errors import ConfigError, DataError
from tailorfl.settings.system import AvailabilityConfig
from tailorfl.training.keys import bits, derive


def uniform(seed: int, quantity: str, client: int, occasion: int) -> float:
    """Return a number in [0, 1), a function of its arguments only."""
    return float(bits(derive(seed, "system", quantity, client, occasion), 1)[0] >> 11) * 2.0**-53


class Availability(Protocol):
    """Says of every client when it can be reached; times are simulated seconds."""

    def until(self, client: int, time: float, occasion: int) -> float | None:
        """Return when a client that can be reached at a time goes; infinite: it stays; None: it is not there.

        `occasion` numbers the times that somebody is asked for, from which chance is drawn.
        """

    def next(self, client: int, time: float) -> float:
        """Return the earliest time from `time` on at which a client can be reached, infinite if never."""


class ByChance:
    """Each client is there with probability `share` each time that it is asked, whatever the time."""

    def __init__(self, seed: int, share: float) -> None:
        self._seed, self._share = seed, share

    def until(self, client: int, time: float, occasion: int) -> float | None:
        """Return infinity, or None where the client is not there on this occasion."""
        is_there = self._share == 1 or uniform(self._seed, "available", client, occasion) < self._share
        return math.inf if is_there else None

    def next(self, client: int, time: float) -> float:
        """Return the time itself: another occasion may come at once."""
        return time


class Wave:
    """Each client is there for `share` of every day, from its own morning φ_i on: frac(t/period − φ_i) < share.

    Mornings are spread evenly at random over `spread` of a day.
    """

    def __init__(self, seed: int, share: float, period: float, spread: float) -> None:
        self._seed, self._share, self._period, self._spread = seed, share, period, spread

    def _hour(self, client: int, time: float) -> float:
        """Return how much of the client's day has passed, in [0, 1)."""
        return (time / self._period - self._spread * uniform(self._seed, "morning", client, 0)) % 1.0

    def until(self, client: int, time: float, occasion: int) -> float | None:
        """Return the client's next evening, or None by night."""
        hour = self._hour(client, time)
        return time + (self._share - hour) * self._period if hour < self._share else None

    def next(self, client: int, time: float) -> float:
        """Return the time itself by day, else the next morning."""
        hour = self._hour(client, time)
        if hour < self._share:
            return time
        # Rounding may leave the morning a hair before it begins.
        return math.nextafter(time + (1.0 - hour) * self._period, math.inf) + 1e-9 * self._period


class Listed:
    """Each client is there in intervals [start, end); with `repeat` they begin again after so many seconds."""

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
        """Return what a CSV file with the columns client, start, end says; a client that it lacks is never there.

        Raises:
            DataError: it cannot be read, or an interval does not end after it starts, from 0 to `repeat`.
        """
        intervals: dict[int, list[tuple[float, float]]] = {}
        for client, (start, end) in rows_of(path, ("start", "end"), names):
            if not 0 <= start < end <= (math.inf if repeat is None else repeat):
                latest = "" if repeat is None else f", at {repeat:g} at the latest"
                raise DataError(
                    f"'{path}' has the interval {start:g} to {end:g}; start at 0 or later, and end after that{latest}"
                )
            intervals.setdefault(client, []).append((start, end))
        if not intervals:
            raise DataError(f"'{path}' has no intervals, so no client could ever be reached")
        return cls(intervals, repeat)

    def until(self, client: int, time: float, occasion: int) -> float | None:
        """Return the end of the interval, or None outside of all."""
        base, elapsed = self._within(time)
        intervals = self._intervals.get(client, [])
        at = bisect_right(intervals, (elapsed, math.inf)) - 1
        if at < 0 or elapsed >= intervals[at][1]:
            return None
        end = intervals[at][1]
        if end == self._repeat and intervals[0][0] == 0:  # it goes on into the next one
            return math.inf if intervals[0] == (0.0, end) else base + end + intervals[0][1]
        return base + end

    def next(self, client: int, time: float) -> float:
        """Return the time itself, or the start of the next interval."""
        intervals = self._intervals.get(client, [])
        if not intervals or self.until(client, time, 0) is not None:
            return time if intervals else math.inf
        base, elapsed = self._within(time)
        later = [start for start, _ in intervals if start > elapsed]
        if later:
            return base + later[0]
        return math.inf if self._repeat is None else base + self._repeat + intervals[0][0]

    def _within(self, time: float) -> tuple[float, float]:
        """Return when the list has begun for the last time, and the time since."""
        if self._repeat is None:
            return 0.0, time
        base = math.floor(time / self._repeat) * self._repeat
        return base, time - base


def make_availability(config: AvailabilityConfig, seed: int, names: Sequence[str]) -> Availability:
    """Return when the clients, which have `names`, can be reached.

    Raises:
        DataError: a file cannot be used.
        ConfigError: the kind is of a file, and none is given.
    """
    if config.kind == "wave":
        return Wave(seed, config.share, config.period, config.spread)
    if config.kind == "file":
        if config.file is None:
            raise ConfigError("system.availability is of kind file; give system.availability.file")
        return Listed.read(Path(config.file), names, config.repeat)
    return ByChance(seed, config.share if config.kind == "share" else 1.0)


def rows_of(path: Path, columns: Sequence[str], names: Sequence[str]) -> Iterator[tuple[int, list[float]]]:
    """Yield (client, numbers in `columns`) of each line of a file; `names` are those of the clients.

    Raises:
        DataError: it cannot be read, lacks a column, or a line names no client or holds no number; says which.
    """
    clients = {name: number for number, name in enumerate(names)}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            lacking = [c for c in ("client", *columns) if c not in (reader.fieldnames or ())]
            if lacking:
                raise DataError(
                    f"'{path}' has no column {lacking[0]}; its first line is: client,{','.join(columns)}"
                )
            for line, row in enumerate(reader, start=2):
                label = (row["client"] or "").strip()
                client = clients.get(label, int(label) if label.isdecimal() else len(names))
                if client >= len(names):
                    raise DataError(
                        f"line {line} of '{path}' is of client '{label}'; clients are 0 to {len(names) - 1}, or have "
                        f"names such as '{names[0]}'"
                    )
                yield client, [_number(path, line, row[c], c) for c in columns]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read '{path}': {error}; give a CSV file") from error


def _number(path: Path, line: int, text: str | None, column: str) -> float:
    with contextlib.suppress(ValueError):
        if not math.isnan(number := float(text or "")):
            return number
    raise DataError(f"line {line} of '{path}' has {column} = '{text}', which is no number")
