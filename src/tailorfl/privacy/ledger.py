"""The ledger: what every client's private samples were used for, as sample-level privacy has to account for it.

A use is a batch from which noisy gradients were released (DP-SGD, Abadi et al., CCS 2016). It is written down where the
training takes its batches, `tailorfl.training.fit`, so no method can forget one. Several gradients of the same
batch (the two of SAM, the K inner steps of pFedMe) are one release with less noise: r Gaussian releases of deviation σ
of the same samples tell as much as a single one of deviation σ/√r.

A batch that is a Poisson sample is a use of its rate q = batch size / samples. Of shuffled batches a pass is one use of
rate 1: every sample is in exactly one of them, whichever it is, so a pass tells of it what one Gaussian mechanism does,
and no drawing hides it (counting them as Poisson samples would be no bound: Chua et al., "How Private are DP-SGD
Implementations?", ICML 2024).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tailorfl.errors import ConfigError

RULES = 2
"""The version of the rules by which uses are written; 1 counted everything as Poisson samples."""

EVERYONE = -1
"""The client of a use that concerns all clients alike, whether they took part or not."""

Purpose = Literal["training", "deployment", "newcomer", "updates"]
"""The purpose of a use: rounds of training; the model that a client deploys after the last one; that of a client that
joins late; updates that left a client, under client-level privacy."""


Entry = tuple[float, float, int]
"""(q, σ, steps): `steps` releases, in each of which a sample takes part with probability q."""


@dataclass(frozen=True, order=True)
class Use:
    """One way of using a batch, or a pass of shuffled batches."""

    rate: float
    """q: with what probability a sample is in the batch; 1 for a pass, in which every sample is."""
    noise: float
    """σ of each gradient, in units of the clip."""
    gradients: int = 1
    """r: noisy gradients that were released of this one batch."""

    def entry(self, steps: int) -> Entry:
        """Return what `steps` such batches are to an accountant: r releases of one batch are one of σ/√r."""
        return self.rate, self.noise / math.sqrt(self.gradients), steps


Uses = Counter[Use]
"""Number of batches, or passes, by the way in which they were used."""


class PrivacyRecord:
    """The uses of one pass of an engine over client code, by client; a cohort carries it."""

    def __init__(self) -> None:
        self.uses: dict[int, Uses] = {}

    def add(self, client: int, rate: float, noise: float, gradients: NDArray[np.int64]) -> None:
        """Note a fit: `gradients` [uses] of each of its batches or passes, 0 where the client has already finished."""
        counts, batches = np.unique(gradients[gradients > 0], return_counts=True)
        client_uses = self.uses.setdefault(client, Counter())
        for r, steps in zip(counts.tolist(), batches.tolist(), strict=True):
            client_uses[Use(rate, noise, r)] += steps

    def merge(self, other: PrivacyRecord) -> None:
        """Add what another record notes."""
        for client, uses in other.uses.items():
            self.uses.setdefault(client, Counter()).update(uses)

    def forget(self) -> None:
        """Drop what was noted, where the pass is made again."""
        self.uses.clear()


class PrivacyLedger:
    """All uses of all clients by purpose. Clients that looked at no data of theirs are not in it."""

    def __init__(self) -> None:
        self._uses: dict[Purpose, dict[int, Uses]] = {}

    def __bool__(self) -> bool:
        return any(self._uses.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrivacyLedger) and sorted(self.rows()) == sorted(other.rows())

    __hash__ = None  # type: ignore[assignment]

    def book(self, purpose: Purpose, uses: Mapping[int, Uses]) -> None:
        """Add uses to what the clients had."""
        booked = self._uses.setdefault(purpose, {})
        for client, client_uses in uses.items():
            booked.setdefault(client, Counter()).update(client_uses)

    def settle(self, purpose: Purpose, uses: Mapping[int, Uses], *, keep_larger: bool = False) -> None:
        """Put uses in place of those that the clients had for this purpose: of several models one is released.

        With `keep_larger` only where they are more batches than before.
        """
        settled = self._uses.setdefault(purpose, {})
        for client, client_uses in uses.items():
            if not keep_larger or client_uses.total() > settled.get(client, Counter()).total():
                settled[client] = Counter(client_uses)

    @property
    def clients(self) -> tuple[int, ...]:
        """Ids of the clients that have uses of their own."""
        return tuple(sorted({c for booked in self._uses.values() for c in booked if c != EVERYONE}))

    def entries(self, client: int) -> tuple[Entry, ...]:
        """Return everything a client's data were used for, for an accountant."""
        client_uses = [booked[c] for booked in self._uses.values() for c in {client, EVERYONE} if c in booked]
        return tuple(sorted(use.entry(steps) for uses in client_uses for use, steps in uses.items()))

    def rows(self) -> Iterator[tuple[Purpose, int, Use, int]]:
        """Yield (purpose, client, how, batches), in order of clients."""
        for purpose, booked in self._uses.items():
            for client in sorted(booked):
                for use, steps in sorted(booked[client].items()):
                    yield purpose, client, use, steps

    def dump(self) -> dict[str, Any]:
        """Return everything as plain values, which `restore` reads."""
        return {
            "rules": RULES,
            "uses": [[p, c, u.rate, u.noise, u.gradients, n] for p, c, u, n in self.rows()],
        }

    @classmethod
    def restore(cls, dumped: Mapping[str, Any]) -> PrivacyLedger:
        """Return the ledger that was dumped.

        Raises:
            ConfigError: an earlier version made it, whose uses are not what they would be counted as now.
        """
        if not isinstance(dumped, Mapping) or dumped.get("rules") != RULES:
            raise ConfigError(
                "this checkpoint has an account of privacy by the rules of an earlier version, which took shuffled "
                "batches and cohorts of fixed size for Poisson samples; its ε was too small and cannot be continued. "
                "Start the run anew (--overwrite)"
            )
        ledger = cls()
        for purpose, client, rate, noise, gradients, steps in dumped["uses"]:
            ledger.book(purpose, {int(client): Counter({Use(rate, noise, int(gradients)): int(steps)})})
        return ledger
