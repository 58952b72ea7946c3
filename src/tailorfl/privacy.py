"""Privacy accounting: the uses of every client's private samples, and the ε that they cost.

The ledger holds uses, the units of accounting for sample-level privacy. A use is a batch from which noisy gradients
were released (DP-SGD, Abadi et al., CCS 2016). It is recorded where training takes its batches,
`tailorfl.training.fit`, so no method can forget one. Several gradients of the same batch (the two of SAM, the K inner
steps of pFedMe) are one release with less noise: r Gaussian releases of deviation σ of the same samples reveal as much
as a single one of deviation σ/√r.

A batch that is a Poisson sample is a use of rate q = batch size / samples. A pass over shuffled batches is one use of
rate 1: every sample is in exactly one batch, so a pass reveals as much about it as one Gaussian mechanism, without
amplification by sampling (counting the batches as Poisson samples would not give a bound: Chua et al., "How Private are
DP-SGD Implementations?", ICML 2024).

An accountant computes the total cost of noisy releases, ε at a given δ, and the noise that a target ε needs. A release
is one step of the subsampled Gaussian mechanism: every sample takes part with probability q, its contribution has at
most norm 1, and the noise has standard deviation σ. A sequence of entries (q, σ, steps) composes.

| accountant | paper | bound |
|---|---|---|
| `prv` | Gopi, Lee and Wutschitz, "Numerical Composition of Differential Privacy", NeurIPS 2021 | tight |
| `rdp` | Mironov, "Rényi Differential Privacy", CSF 2017, for the sampled Gaussian mechanism | looser, quick |

Both come from the package `opacus`, whose import takes seconds and happens on the first call. The package
`dp-accounting` (0.6.0) cannot replace it. Its RDP leaves out fractional orders whose series does not converge, so that
ε is up to 4.9 % larger, and it requires `attrs` below 24. Its PLD agrees with `prv`: over 15 settings it is lower by
0.1 to 2 %, which is 0.01 of ε, the error that `prv` adds to be a bound.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tailorfl.errors import ConfigError, TailorflError, needs_extra, unknown
from tailorfl.settings.train import UNBOUND, Accountant

RULES = 2
"""The version of the rules for recording uses; version 1 counted all batches as Poisson samples."""

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
    """q: probability that a sample is in the batch; 1 for a pass, which has every sample."""
    noise: float
    """σ of each gradient, in units of the clip."""
    gradients: int = 1
    """r: number of noisy gradients released from this one batch."""

    def entry(self, steps: int) -> Entry:
        """Return the accountant's entry for `steps` such batches: r releases of one batch are one of σ/√r."""
        return self.rate, self.noise / math.sqrt(self.gradients), steps


Uses = Counter[Use]
"""Use -> number of batches or passes."""


class PrivacyRecord:
    """The uses of one pass of an engine over client code, by client; a cohort carries it."""

    def __init__(self) -> None:
        self.uses: dict[int, Uses] = {}

    def add(self, client: int, rate: float, noise: float, gradients: NDArray[np.int64]) -> None:
        """Record a fit: `gradients` [uses] of each of its batches or passes, 0 if the client has already finished."""
        counts, batches = np.unique(gradients[gradients > 0], return_counts=True)
        client_uses = self.uses.setdefault(client, Counter())
        for r, steps in zip(counts.tolist(), batches.tolist(), strict=True):
            client_uses[Use(rate, noise, r)] += steps

    def merge(self, other: PrivacyRecord) -> None:
        """Add the uses of another record."""
        for client, uses in other.uses.items():
            self.uses.setdefault(client, Counter()).update(uses)

    def forget(self) -> None:
        """Delete all uses, before a pass is repeated."""
        self.uses.clear()


class PrivacyLedger:
    """All uses of all clients by purpose. Clients that used none of their data are not in it."""

    def __init__(self) -> None:
        self._uses: dict[Purpose, dict[int, Uses]] = {}

    def __bool__(self) -> bool:
        return any(self._uses.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrivacyLedger) and sorted(self.rows()) == sorted(other.rows())

    __hash__ = None  # type: ignore[assignment]

    def book(self, purpose: Purpose, uses: Mapping[int, Uses]) -> None:
        """Add uses to those of the clients."""
        booked = self._uses.setdefault(purpose, {})
        for client, client_uses in uses.items():
            booked.setdefault(client, Counter()).update(client_uses)

    def settle(self, purpose: Purpose, uses: Mapping[int, Uses], *, keep_larger: bool = False) -> None:
        """Replace the clients' uses for this purpose: only one of several models is released.

        With `keep_larger` only if the new uses have more batches than the old ones.
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
        """Return all uses of a client's data as entries for an accountant."""
        client_uses = [booked[c] for booked in self._uses.values() for c in {client, EVERYONE} if c in booked]
        return tuple(sorted(use.entry(steps) for uses in client_uses for use, steps in uses.items()))

    def rows(self) -> Iterator[tuple[Purpose, int, Use, int]]:
        """Yield (purpose, client, use, batches), for each purpose in the order of clients."""
        for purpose, booked in self._uses.items():
            for client in sorted(booked):
                for use, steps in sorted(booked[client].items()):
                    yield purpose, client, use, steps

    def dump(self) -> dict[str, Any]:
        """Return the ledger as plain values, which `restore` reads."""
        return {
            "rules": RULES,
            "uses": [[p, c, u.rate, u.noise, u.gradients, n] for p, c, u, n in self.rows()],
        }

    @classmethod
    def restore(cls, dumped: Mapping[str, Any]) -> PrivacyLedger:
        """Return the ledger that was dumped.

        Raises:
            ConfigError: an earlier version wrote it, by other rules for counting uses.
        """
        if not isinstance(dumped, Mapping) or dumped.get("rules") != RULES:
            raise ConfigError(
                "this checkpoint has a privacy ledger of an earlier version, which treated shuffled batches and "
                "cohorts of fixed size as Poisson samples; its ε was too small and cannot be continued. Start the run "
                "again (--overwrite)"
            )
        ledger = cls()
        for purpose, client, rate, noise, gradients, steps in dumped["uses"]:
            ledger.book(purpose, {int(client): Counter({Use(rate, noise, int(gradients)): int(steps)})})
        return ledger


LARGEST = 500.0
"""Above this ε (by RDP) PRV would exceed the range of floating-point numbers; such an ε protects nobody anyway."""
WHOLE_ORDERS: Sequence[float] = [*range(2, 32), *range(32, 64, 4), 64, 96, 128, 192, 256, 384, 512, 1000]
"""Orders of Rényi divergence that are fast to compute; the large ones are for a small ε."""
SMALL = 20.0
"""Largest ε for which whole orders are fine enough to find its range."""
FEW_ORDERS: Sequence[float] = [1.1, 1.2, 1.4, 1.7, *WHOLE_ORDERS]
ALL_ORDERS: Sequence[float] = [*(1 + k / 10 for k in range(1, 100) if k % 10), *WHOLE_ORDERS]
DIGITS = 4
"""Significant digits of the noise for a target ε, rounded up."""


def epsilon(entries: Sequence[Entry], delta: float, accountant: Accountant = UNBOUND.accountant) -> float:
    """Return ε of all entries together at `delta`; 0 without releases, infinity if one has no noise.

    Raises:
        ConfigError: δ is not between 0 and 1, a rate q not between 0 and 1, or a σ or number of steps negative.
        TailorflError: the accountant cannot compute it, as PRV for an ε above `LARGEST`; names another one that can.
        MissingExtraError: `opacus` is not installed.
    """
    history = _merged(entries)
    if accountant not in get_args(Accountant):
        raise unknown("accountant", accountant, get_args(Accountant))
    if not 0 < delta < 1:
        raise ConfigError(f"delta must be between 0 and 1, but is {delta}; it is usually below 1/samples")
    if not history:
        return 0.0
    if any(sigma == 0 for _, sigma, _ in history):
        return math.inf
    return _epsilon(history, delta, accountant)


def noise_for(
    target: float, delta: float, entries: Sequence[Entry], accountant: Accountant = UNBOUND.accountant
) -> float:
    """Return the factor by which the σ of all `entries` must grow so that together they cost at most ε = `target`.

    With entries (q, 1, steps) that is the noise itself. It is the smallest with `DIGITS` digits, 0 without releases.

    Raises:
        ConfigError: the target is not positive, or out of reach.
        TailorflError, MissingExtraError: see `epsilon`.
    """
    if not 0 < target < LARGEST:
        raise ConfigError(f"epsilon must be positive and below {LARGEST:g}, but is {target:g}")
    history = _merged(entries)
    if not history:
        return 0.0

    def gap(power: float) -> float:
        """Return log(ε / target) if σ grows by the factor 2^power."""
        try:
            reached = epsilon([(q, 2.0**power * s, steps) for q, s, steps in history], delta, accountant)
        except _TooLargeError:
            reached = LARGEST
        return math.log(max(reached, 1e-9) / target)

    power = _crossing(gap)
    if power is None:
        raise ConfigError(
            f"epsilon = {target:g} at delta = {delta:g} cannot be reached with any reasonable noise; use a larger "
            "epsilon or delta"
        )
    unit = 10.0 ** (math.floor(math.log10(2.0**power)) - DIGITS + 1)
    count = math.ceil(2.0**power / unit)
    while gap(math.log2(count * unit)) > 0:
        count += 1
    return float(f"{count * unit:.{DIGITS}g}")


def _crossing(gap: Callable[[float], float]) -> float | None:
    """Return the zero of a decreasing function to 1e-4, or None if there is none within ±20."""
    from scipy.optimize import brentq

    low = high = 0.0
    while gap(high) > 0:
        low, high = high, high + 1
        if high > 20:
            return None
    while low == high or gap(low) <= 0:
        low, high = low - 1, low if gap(low) <= 0 else high
        if low < -20:
            return None
    return float(brentq(gap, low, high, xtol=1e-4))


class _TooLargeError(TailorflError):
    """PRV cannot compute an ε as large as this."""


def _merged(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return the entries in a fixed order, merged by rate and noise, so that equal histories are computed once."""
    merged: dict[tuple[float, float], int] = {}
    for q, sigma, steps in entries:
        if not 0 <= q <= 1 or not sigma >= 0 or steps < 0:
            raise ConfigError(
                "a release needs a rate q in 0..1, noise of at least 0 and a number of steps, "
                f"but is (q={q}, noise={sigma}, steps={steps})"
            )
        if q > 0 and steps > 0:
            merged[q, sigma] = merged.get((q, sigma), 0) + steps
    return tuple((q, sigma, steps) for (q, sigma), steps in sorted(merged.items()))


@functools.lru_cache(maxsize=65536)
def _epsilon(history: tuple[Entry, ...], delta: float, accountant: Accountant) -> float:
    opacus = _accountants()
    if accountant == "rdp":
        return _ask(opacus.RDPAccountant(), history, delta, alphas=ALL_ORDERS)
    orders = WHOLE_ORDERS
    by_rdp = _ask(opacus.RDPAccountant(), history, delta, alphas=orders)
    if by_rdp > SMALL:
        orders = FEW_ORDERS
        by_rdp = _ask(opacus.RDPAccountant(), history, delta, alphas=orders)
    if by_rdp > LARGEST:
        raise _TooLargeError(
            f"the accountant prv cannot compute an epsilon as large as this one ({by_rdp:.4g} by rdp); use more noise, "
            "or the accountant rdp"
        )
    # The mesh depends on ε: 1 % of a small one, 0.01 up to ten, a thousandth above.
    error = max(min(max(by_rdp / 100, 1e-3), 1e-2), by_rdp / 1000)
    return min(_ask(_prv(orders), history, delta, eps_error=error), by_rdp)


def _prv(orders: Sequence[float]) -> Any:
    """Return the PRV accountant of opacus, with a range of ε from a few orders of RDP.

    Any upper bound of the range suffices, and the many orders of opacus take most of its time.
    """
    from opacus.accountants.analysis.prv import Domain

    opacus = _accountants()

    class Quick(opacus.PRVAccountant):  # type: ignore[misc, name-defined]
        def _get_domain(
            self,
            prvs: Sequence[Any],
            num_self_compositions: Sequence[int],
            eps_error: float,
            delta_error: float,
        ) -> Any:
            total = sum(num_self_compositions)
            single = [(p.sample_rate, p.noise_multiplier, 1) for p in prvs]
            history = [(q, s, n) for (q, s, _), n in zip(single, num_self_compositions, strict=True)]
            questions = [
                (history, delta_error / 4),
                *(([single_step], delta_error / (8 * total)) for single_step in single),
            ]
            reach = max(_ask(opacus.RDPAccountant(), h, d, alphas=orders) for h, d in questions)
            reach = max(reach, eps_error) + 3
            mesh = eps_error / np.sqrt(total * np.log(12 / delta_error) / 2)
            return Domain.create_aligned(-reach, reach, mesh)

    return Quick()


def _ask(accountant: Any, history: Sequence[Entry], delta: float, **options: Any) -> float:
    accountant.history = [(sigma, q, steps) for q, sigma, steps in history]
    try:
        # Opacus warns if the best of its orders is the last (the bound is then looser, but holds), and divides by 1 − q
        # if every sample takes part.
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            epsilon_found = float(accountant.get_epsilon(delta, **options))
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise TailorflError(
            f"the accountant {accountant.mechanism()} of opacus failed on (q, noise, steps) = {list(history)} at delta "
            f"= {delta:g}: {error}; try the other accountant, or another delta"
        ) from error
    if math.isnan(epsilon_found):
        raise TailorflError(
            f"the accountant {accountant.mechanism()} of opacus found no epsilon for {list(history)}"
        )
    return max(epsilon_found, 0.0)


def _accountants() -> Any:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with needs_extra("opacus", "privacy"):
            from opacus import accountants
    finally:  # importing opacus changes the logging of the whole process
        root.handlers[:] = handlers
        root.setLevel(level)
    return accountants
