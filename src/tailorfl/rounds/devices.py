"""How long clients of a simulated system take: their devices, their connections, and chance.

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
from tailorfl.rounds.availability import uniform
from tailorfl.rounds.client_files import rows_of
from tailorfl.settings.system import RateConfig, SystemConfig

NORMAL = NormalDist()
QUARTILE = NORMAL.inv_cdf(0.75)


@dataclass(frozen=True)
class Work:
    """What a client is asked to do in a round."""

    gradients: float
    """Of single samples."""
    down: float
    """Bytes of the message that it receives."""
    up: float
    """Bytes of its reply."""


class Rates:
    """A rate of every client, such as its speed."""

    def __init__(self, config: RateConfig, seed: int, what: str, names: Sequence[str]) -> None:
        self._config, self._seed, self._what = config, seed, what
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
        """Returns how many a second a client makes on an occasion; infinite where it takes no time."""
        config = self._config
        if config.kind == "instant":
            return math.inf
        if config.kind == "file":
            return self._listed[client]
        if config.kind == "fixed":
            return config.median
        when = occasion if config.redraw == "round" else 0
        u = max(uniform(self._seed, self._what, client, when), 1e-12)
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
        """Whether anything takes time."""
        return any(rate.kind != "instant" for rate in (self._config.speed, self._config.bandwidth))

    def straggles(self, client: int, occasion: int) -> bool:
        """Returns whether a client is a straggler on an occasion."""
        stragglers = self._config.stragglers
        when = occasion if stragglers.redraw == "round" else 0
        return uniform(self._seed, "straggler", client, when) < stragglers.share

    def seconds(self, client: int, occasion: int, work: Work) -> float:
        """Returns how long a client takes for its work, from the question to the answer."""
        speed, bandwidth = self._speed.of(client, occasion), self._bandwidth.of(client, occasion)
        alone = work.down / bandwidth + work.gradients / speed + work.up / (self._config.upload * bandwidth)
        return alone * (self._config.stragglers.factor if self.straggles(client, occasion) else 1.0)

    def vanishes(self, client: int, occasion: int) -> float | None:
        """Returns after which share of its time a client vanishes on an occasion; None where it does not."""
        if uniform(self._seed, "dropout", client, occasion) >= self._config.dropout:
            return None
        return uniform(self._seed, "vanishes", client, occasion)
