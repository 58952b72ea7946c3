"""What `tailorfl bench` found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Way:
    """One way to do a round, measured."""

    name: str
    settings: str
    """What chooses it, as KEY=VALUE; "" for the plain loop, which is no engine."""
    kind: str
    """The engine that trains, an automatic one's choice; "" for the plain loop."""
    chunk: int
    """Clients that train together, at most."""
    workers: int
    """Processes."""
    precision: str
    """What networks multiply in."""
    seconds: tuple[float, ...]
    """Of every repetition: of the process on one thread; of the wall where there are several threads or workers."""
    wall_seconds: tuple[float, ...]
    seconds_min: float
    seconds_median: float
    clients_per_second: float
    """At the median."""
    times_faster: float
    """The plain loop's time over this one's, the median over repetitions."""
    spread: tuple[float, float]
    """First and third quartile of it."""
    note: str = ""


@dataclass(frozen=True)
class EngineRecommendation:
    """What to put into the experiment."""

    settings: str
    """As KEY=VALUE."""
    way: str
    why: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """A round of an experiment's first method, done in several ways."""

    experiment: str
    method: str
    title: str
    model: str
    scalars: int
    """Of the model, that may change."""
    clients: int
    """That train in a round."""
    measured: int
    """How many of them were measured; fewer than all where a round is long."""
    gradients: int
    """Gradients of single samples that the method takes of the measured clients; the plain loop takes as many."""
    threads: int
    clock: str
    """process or wall: what `Way.seconds` of a single process are."""
    ways: tuple[Way, ...]
    recommendation: EngineRecommendation
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    """The experiment."""
    features: str = ""
    """What computing frozen layers once takes, in words, where that is done."""

    def way(self, name: str) -> Way:
        """Return the way of that name."""
        return next(timing for timing in self.ways if timing.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)
