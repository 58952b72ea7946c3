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
    padding: float
    """Padded samples that are computed, over the real ones."""
    memory_bytes: float | None
    """By how much resident memory grew at the peak of a round; None where the system does not tell."""
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
class Recommendation:
    """What to put into the experiment."""

    settings: str
    """As KEY=VALUE."""
    way: str
    why: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Operator:
    """An operator of torch in a round."""

    name: str
    calls: int
    seconds: float
    """Its own, without the operators it calls."""
    share: float


@dataclass(frozen=True)
class Profile:
    """Where the time of a round goes, and what the machine could do."""

    way: str
    operators: tuple[Operator, ...]
    seconds: float
    """Of all operators together, under the profiler."""
    flops: float
    """Floating point operations of the round's gradients: matrix products and convolutions."""
    flops_per_second: float
    """Over the round's shortest time without the profiler."""
    machine_flops_per_second: float
    """Of this machine in a large matrix product."""
    moved_bytes: float
    """What plain steps move: weights read twice and the gradient written for a gradient, both read and the weights
    written for a step. A kernel that does several of these at once moves less."""
    moved_per_second: float
    machine_bytes_per_second: float
    """Of this machine in a large copy, reading and writing."""


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
    steps: int
    """Of all measured clients, as the method takes them; the plain loop takes as many."""
    samples: int
    """Gradients of single samples that the method takes of the measured clients."""
    beyond: tuple[str, ...]
    """What the method does and the plain loop does not."""
    threads: int
    clock: str
    """process or wall: what `Way.seconds` of a single process are."""
    ways: tuple[Way, ...]
    recommendation: Recommendation
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    """The experiment."""
    profile: Profile | None = None
    features: str = ""
    """What computing frozen layers once takes and brings, in words, where that is done."""

    def way(self, name: str) -> Way:
        """Returns the way of that name."""
        return next(way for way in self.ways if way.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain values, ready for JSON."""
        return asdict(self)
