"""The cost of noisy releases of private data together: ε at a given δ, and the noise that a wanted ε needs.

A release is one step of the subsampled Gaussian mechanism: every sample takes part with probability q, what it may
change has norm 1, and the noise has standard deviation σ. A sequence of entries (q, σ, steps) composes.

| accountant | paper | bound |
|---|---|---|
| `prv` | Gopi, Lee and Wutschitz, "Numerical Composition of Differential Privacy", NeurIPS 2021 | tight |
| `rdp` | Mironov, "Rényi Differential Privacy", CSF 2017, for the sampled Gaussian mechanism | looser, quick |

Both are those of the package `opacus`, which is imported by the first call: it takes seconds. The package `dp-
accounting` (0.6.0) does not replace it. Its RDP leaves out fractional orders whose series does not converge, so
that ε is up to 4.9 % larger, and it asks for `attrs` below 24. Its PLD agrees with `prv`: over 15 settings it
is lower by 0.1 to 2 %, which is 0.01 of ε, the error that `prv` adds to be a bound.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, get_args

from tailorfl.errors import ConfigError, MissingExtraError, TailorflError, unknown
from tailorfl.privacy.ledger import Entry
from tailorfl.settings.privacy import UNBOUND, Accountant

LARGEST = 500.0
"""Above this ε (by RDP) PRV would leave the range of floating-point numbers; it protects nobody anyway."""
WHOLE_ORDERS: Sequence[float] = [*range(2, 32), *range(32, 64, 4), 64, 96, 128, 192, 256, 384, 512, 1000]
"""Orders of Rényi divergence that are quick to compute; the large ones are for a small ε."""
SMALL = 20.0
"""Up to this ε whole orders are fine enough to tell its range."""
FEW_ORDERS: Sequence[float] = [1.1, 1.2, 1.4, 1.7, *WHOLE_ORDERS]
ALL_ORDERS: Sequence[float] = [*(1 + k / 10 for k in range(1, 100) if k % 10), *WHOLE_ORDERS]
DIGITS = 4
"""Significant digits of the noise that a wanted ε needs, rounded up."""


def epsilon(entries: Sequence[Entry], delta: float, accountant: Accountant = UNBOUND.accountant) -> float:
    """Return ε of all entries together at `delta`; 0 without releases, infinity where one has no noise.

    Raises:
        ConfigError: δ is not between 0 and 1, a rate q not between 0 and 1, or a σ or number of steps negative.
        TailorflError: the accountant cannot tell, as PRV for an ε above `LARGEST`; says which other one can.
        MissingExtraError: `opacus` is not installed.
    """
    history = _merged(entries)
    if accountant not in get_args(Accountant):
        raise unknown("accountant", accountant, get_args(Accountant))
    if not 0 < delta < 1:
        raise ConfigError(f"delta must lie between 0 and 1, but is {delta}; the usual one is below 1/samples")
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
        TailorflError, MissingExtraError: as `epsilon`.
    """
    if not 0 < target < LARGEST:
        raise ConfigError(f"epsilon must be positive and below {LARGEST:g}, but is {target:g}")
    history = _merged(entries)
    if not history:
        return 0.0

    def gap(power: float) -> float:
        """Return how far ε is above the target, on the scale of logarithms, where σ grows by 2^power."""
        try:
            reached = epsilon([(q, 2.0**power * s, steps) for q, s, steps in history], delta, accountant)
        except _TooLargeError:
            reached = LARGEST
        return math.log(max(reached, 1e-9) / target)

    power = _crossing(gap)
    if power is None:
        raise ConfigError(
            f"epsilon = {target:g} at delta = {delta:g} cannot be reached with any reasonable noise; take a larger "
            "epsilon or delta"
        )
    unit = 10.0 ** (math.floor(math.log10(2.0**power)) - DIGITS + 1)
    count = math.ceil(2.0**power / unit)
    while gap(math.log2(count * unit)) > 0:
        count += 1
    return float(f"{count * unit:.{DIGITS}g}")


def _crossing(gap: Callable[[float], float]) -> float | None:
    """Return where a falling function crosses 0, to 1e-4; None where it does not within 2^±20."""
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
    """PRV cannot tell an ε as large as this."""


def _merged(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return the entries in a fixed order, those of equal rate and noise as one: equal histories are computed once."""
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
            f"the accountant prv cannot tell an epsilon as large as this one ({by_rdp:.4g} by rdp); take more noise, "
            "or the accountant rdp"
        )
    # A mesh as fine as the number asks for: 1 % of a small ε, 0.01 up to ten, a thousandth above.
    error = max(min(max(by_rdp / 100, 1e-3), 1e-2), by_rdp / 1000)
    return min(_ask(_prv(orders), history, delta, eps_error=error), by_rdp)


def _prv(orders: Sequence[float]) -> Any:
    """Return the PRV accountant of opacus, whose range of ε is found by few orders of RDP.

    Any upper bound of the range will do, and the many orders that opacus takes are most of its time.
    """
    import numpy as np
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
    import numpy as np

    accountant.history = [(sigma, q, steps) for q, sigma, steps in history]
    try:
        # Opacus warns where the best of its orders is the last (the bound is then looser, and still one), and
        # divides by 1 − q where everybody takes part.
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            epsilon_found = float(accountant.get_epsilon(delta, **options))
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise TailorflError(
            f"the accountant {accountant.mechanism()} of opacus failed on (q, noise, steps) = {list(history)} at "
            f"delta = {delta:g}: {error}; try the other one, or another delta"
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
        from opacus import accountants
    except ImportError as error:
        raise MissingExtraError("opacus", "privacy") from error
    finally:  # importing opacus sets up the logging of the whole process, which is not its to set up
        root.handlers[:] = handlers
        root.setLevel(level)
    return accountants
