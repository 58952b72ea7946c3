"""The pull lam with the smallest error, and the settings of personalized methods that follow from it.

The coupled estimate `v_i = (H + lam)^-1 (H w^_i + lam w)` shrinks a client's own estimate `w^_i` to the common w.
Along a direction of curvature h it keeps the share `a = h / (h + lam)` of the deviation. Over clients whose
optima scatter with variance r^2 around their mean and are known with error s^2 / n, the squared error is

    error(lam) = sum over directions of   s^2 / (n N)  +  (1 - 1/N) a^2 s^2 / n  +  (1 - a)^2 r^2

(r^2 counted over the N clients themselves; the mean moves by 1/N of every client's noise). Its minimum has
`a = r^2 / (r^2 + (1 - 1/N) s^2/n)`. For a model that fits its data the gradient noise is `sigma^2 h`, so `s^2 =
sigma^2 / h`, and one lam is best in ALL directions, whatever their curvature:

    lam* = (1 - 1/N) sigma^2 / (n r^2) = (1 - 1/N) E / R^2,
    E = sigma^2 d / n = rho^2 d / (tr(H) n),     R^2 = d r^2

E is twice the excess loss of a client that trains alone. With the mean curvature `h = tr(H) / d`, lam* is
`rho^2 / (n h R^2)`: FedCLUP's Corollary 1 has mu instead of h, as an upper limit.

All five methods pull a personal model to a common one with `(lam/2) ||v - w||^2`, so the best lam is the same;
their step sizes, local steps and rounds differ. If the loss is strongly convex and optima can be reached
(`theory=True`), steps are whole-data gradient steps and rounds are those of FedCLUP's Corollary 2 and Theorem 2;
otherwise steps use the run's batches, no theory bounds the rounds, and none are recommended.

    eta, whole data     1 / (lam + L)
    eta, batches of B   1 / (lam + L (1 + 1/B) + tr(H) / B), since E[H_B^2] = (1 + 1/B) H^2 + tr(H) H / B for
                        Gaussian features: the largest curvature of a batch, in the mean square
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailorfl.errors import ConfigError
from tailorfl.theory.checks import require_counts, require_not_negative
from tailorfl.theory.fedclup import round_rate, schedule


@dataclass(frozen=True)
class Errors:
    """Expected mean squared distance of the clients' models from their optima."""

    alone: float
    """Training alone: V."""
    pooled: float
    """One model for all: V / N + R^2."""
    coupled: float
    """The best pull: V / N + R^2 V' / (R^2 + V') with V' = (1 - 1/N) V; exact if all curvatures are equal."""


def best_pull(excess: float, radius2: float, clients: int, most: float = math.inf) -> float:
    """Return lam*, at most `most`, which replaces infinity if clients do not differ.

    >>> best_pull(excess=0.1, radius2=0.5, clients=10)
    0.18

    Args:
        excess: E, twice the excess loss of a client that trains alone.
        radius2: R^2; an estimate may be 0 or negative, and the pull is then the largest.
        clients: N.
        most: largest lam.

    Raises:
        ConfigError: if excess is negative, most is not positive or there is no client.
    """
    require_not_negative(excess=excess)
    require_counts(clients=clients)
    if not most > 0:
        raise ConfigError(f"most is the largest lam and must be above 0, but is {most}")
    if radius2 <= 0:
        return most
    return min((1 - 1 / clients) * excess / radius2, most)


def expected_errors(noise: float, radius2: float, clients: int) -> Errors:
    """Return the errors of training alone, together and coupled.

    >>> expected_errors(noise=0.1, radius2=0.09, clients=10).coupled
    0.055

    Args:
        noise: V, squared error of training alone.
        radius2: R^2; below 0 it counts as 0.
        clients: N.
    """
    require_not_negative(noise=noise)
    require_counts(clients=clients)
    radius2, own_noise = max(radius2, 0.0), (1 - 1 / clients) * noise
    both = radius2 + own_noise
    between = radius2 * own_noise / both if both > 0 else 0.0
    return Errors(noise, noise / clients + radius2, noise / clients + between)


FEDAVG_STEPS = 5
"""Local steps of the averaged model if every step uses all data: few, so that clients hardly drift."""
REST = 0.1
"""Rounds are enough when the remaining optimisation error is this share of the statistical error."""
LARGEST_BETA = 2.0
CLOSE = 1.05
"""A plain baseline is good enough if its expected error is at most this many times that of the best pull."""


@dataclass(frozen=True)
class Situation:
    """The numbers that the settings depend on."""

    lam: float
    smoothness: float
    """Largest L of any client's loss."""
    mu: float
    """Smallest curvature of any client's loss; NaN if it has no meaning."""
    trace: float
    samples: float
    batch: int
    """Batch size of the run; 0 is all samples."""
    lr: float
    """Learning rate of the run."""
    errors: Errors
    initial: float
    """Squared distance from the initial model to the clients' optima."""

    @property
    def theory(self) -> bool:
        """Whether the theory's rates and rounds apply."""
        return math.isfinite(self.mu) and self.mu > 0

    @property
    def target(self) -> float:
        """Share of the initial squared error that may remain."""
        return min(0.5, REST * self.errors.coupled / max(self.initial, 1e-300))

    def eta(self, all_data: bool, pulled: bool = True) -> float:
        """Return the step size of the personal model, or of the common one if not `pulled`."""
        steepest = self.smoothness
        if not all_data and self.batch > 0:
            batch = min(self.batch, self.samples)
            steepest += (self.smoothness + max(self.trace, 0.0)) / batch
        return 1 / (steepest + (self.lam if pulled else 0.0))


@dataclass(frozen=True)
class Recommendation:
    """Settings of one method, as in an experiment's file."""

    method: str
    options: Mapping[str, Any]
    train: Mapping[str, Any] = field(default_factory=dict)
    rounds: int | None = None
    """Rounds after which the optimisation error no longer matters; None if no theory gives them."""
    why: str = ""

    def to_config(self) -> dict[str, Any]:
        """Return the method's entry in `methods:`."""
        rounds = {} if self.rounds is None else {"rounds": self.rounds}
        train = {"train": dict(self.train)} if self.train else {}
        return {"name": self.method, **self.options, **rounds, **train}


def recommendations(situation: Situation) -> tuple[Recommendation, ...]:
    """Return plain baselines that do as well, then FedCLUP, Ditto, pFedMe and PerAda with the same lam."""
    return (*baselines(situation), fedclup(situation), ditto(situation), pfedme(situation), perada(situation))


def baselines(situation: Situation) -> tuple[Recommendation, ...]:
    """Return FedAvg or local training if the best pull is hardly better; only if optima can be reached.

    Errors after a few epochs show how far a model moved, not how good it would become.
    """
    if not situation.theory:
        return ()
    out = []
    for name, error in (("fedavg", situation.errors.pooled), ("local", situation.errors.alone)):
        if error <= CLOSE * situation.errors.coupled:
            train = {
                "lr": _short(situation.eta(all_data=True, pulled=False)),
                "steps": FEDAVG_STEPS,
                "batch_size": 0,
            }
            reason = f"expected error {error:.3g}, that of the best pull {situation.errors.coupled:.3g}"
            out.append(
                Recommendation(name, {}, train, _descent_rounds(situation, 1 / situation.smoothness), reason)
            )
    return tuple(out)


def fedclup(situation: Situation) -> Recommendation:
    """Return FedCLUP with Corollary 2's steps and rounds, or with the experiments' plain mean."""
    if not situation.theory:
        options = {"lam": _short(situation.lam), "gamma": "mean"}
        return Recommendation(
            "fedclup", options, _gentle(situation), None, "server takes the mean (gamma = 1/lam)"
        )
    plan = schedule(situation.mu, situation.smoothness, situation.lam)
    options = {"lam": _short(situation.lam), "gamma": "theory", "smoothness": _short(situation.smoothness)}
    train = {"lr": _short(plan.eta), "steps": plan.fewest_steps, "batch_size": 0}
    reason = f"Corollary 2: gamma = {plan.gamma:.3g}, K = {plan.fewest_steps}, rate {plan.rate:.3f} per round"
    return Recommendation("fedclup", options, train, plan.rounds(situation.target), reason)


def ditto(situation: Situation) -> Recommendation:
    """Return Ditto: FedAvg and a pulled model, both with the smaller of their step sizes."""
    options = {"lam": _short(situation.lam)}
    if not situation.theory:
        return Recommendation("ditto", options, _gentle(situation), None, "lam as for FedCLUP")
    eta = situation.eta(all_data=True)
    rounds = _descent_rounds(situation, eta)
    train = {"lr": _short(eta), "steps": FEDAVG_STEPS, "batch_size": 0}
    reason = f"gradient descent keeps at most {1 - eta * situation.mu:.3f} of the distance per step"
    return Recommendation("ditto", options, train, rounds, reason)


def pfedme(situation: Situation) -> Recommendation:
    """Return pFedMe: one repetition and `eta lam = 1` (FedCLUP's fixed point); with batches, a pass of repetitions."""
    lam = situation.lam
    if situation.theory:
        plan = schedule(situation.mu, situation.smoothness, lam)
        beta = min(lam * plan.gamma, LARGEST_BETA)
        rate = round_rate(situation.mu, situation.smoothness, lam, beta / lam)
        options = {
            "lam": _short(lam),
            "inner_steps": plan.fewest_steps,
            "local_rounds": 1,
            "lr": _short(1 / lam),
            "personal_lr": _short(plan.eta),
            "beta": _short(beta),
        }
        rounds = math.ceil(math.log(situation.target) / math.log(rate))
        return Recommendation(
            "pfedme", options, {"batch_size": 0}, rounds, "one exact repetition: no bias from R > 1"
        )
    batch = situation.batch if situation.batch > 0 else situation.samples
    repetitions = min(20, max(1, math.ceil(situation.samples / batch)))
    options = {
        "lam": _short(lam),
        "inner_steps": 5,
        "local_rounds": repetitions,
        "lr": _short(1 / (lam * repetitions)),
        "personal_lr": _short(min(situation.lr, situation.eta(all_data=False))),
    }
    reason = "one pass per round; eta lam R = 1, so the local copy moves about as far as an exact step"
    return Recommendation("pfedme", options, {}, None, reason)


def perada(situation: Situation) -> Recommendation:
    """Return PerAda with Ditto's settings: its personal objective is Ditto's on the adapters."""
    like = ditto(situation)
    reason = "as Ditto, on the adapters; code that penalises lam ||v - w||^2 needs half this lam"
    return Recommendation("perada", like.options, like.train, like.rounds, reason)


def perfed_ckt(lam: Sequence[float]) -> tuple[Recommendation, ...]:
    """Return PerFed-CKT with one lam, the median of the clients'; () if no client's spread is measured."""
    finite = [value for value in lam if math.isfinite(value) and value > 0]
    if not finite:
        return ()
    reason = "median of lam_k; the method has one lam, and teachers are clusters, not weights alpha_k"
    return (Recommendation("perfed_ckt", {"lam": _short(statistics.median(finite))}, why=reason),)


def _descent_rounds(situation: Situation, eta: float) -> int:
    """Return the rounds of gradient descent that leave at most the wanted share of the squared error."""
    step = -math.log1p(-min(eta * situation.mu, 1 - 1e-12))
    return math.ceil(math.log(1 / situation.target) / (2 * FEDAVG_STEPS * step))


def _gentle(situation: Situation) -> dict[str, Any]:
    """Return a lower learning rate if the run's is too large for the pulled problem, else {}."""
    eta = situation.eta(all_data=False)
    return {"lr": _short(eta)} if eta < situation.lr else {}


def _short(value: float) -> float:
    """Round to three significant digits: no estimate here is more precise."""
    return float(f"{value:.3g}")
