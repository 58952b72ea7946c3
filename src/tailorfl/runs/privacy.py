"""Differential privacy of a job: the noise that a target ε needs, and the ε spent in the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tailorfl.errors import TailorflError
from tailorfl.privacy import EVERYONE, Entry, PrivacyLedger, epsilon, noise_for
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.planning import planned_ledger
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.job import Job
from tailorfl.settings.train import Accountant, PrivacyConfig
from tailorfl.training.sample_privacy import SampleDP

log = logging.getLogger(__name__)

SLACK = 1e-6
"""Share by which ε may exceed a target because of rounding."""

NEIGHBOURS = {
    "sample": "zero-out: one sample of a client contributes nothing, all else is equal",
    "client": "zero-out: the updates of one client are zero, all else is equal",
}
"""The neighbouring runs whose difference ε bounds."""
SECRETS = (
    "the seed",
    "who took part in a round, and how many",
    "bytes and losses of single rounds",
    "checkpoints",
)
"""Facts that must not be released if ε requires that nobody sees who takes part."""

COLUMNS = ["client", "purpose", "rate", "gradients", "steps", "noise", "delta", "epsilon", "accountant"]
"""Columns of the table of uses of clients' data."""

Simulated = TypeVar("Simulated", bound=Simulation)
Build = Callable[[SampleDP | None, ClientDP | None], Simulated]
"""Makes the simulation of a job with privacy of one level, or without privacy."""


def privacy_of(job: Job) -> PrivacyConfig | None:
    """Return the privacy settings of a job, its method's or else the experiment's, or None without privacy."""
    settings = job.config.train_of(job.method)["dp"]
    return None if settings is None else PrivacyConfig.model_validate(settings)


def with_privacy(job: Job, build: Build[Simulated]) -> Simulated:
    """Return the simulation of a job, with the noise in its settings or the noise that its target ε needs.

    Raises:
        ConfigError: privacy does not cover the method, or the target ε cannot be reached.
        TailorflError, MissingExtraError: see `tailorfl.privacy.epsilon`.
    """
    settings = privacy_of(job)
    if settings is None:
        return build(None, None)
    if settings.noise is not None:
        return build(*_levels(settings, settings.noise))
    assert settings.epsilon is not None
    unit = build(*_levels(settings, 1.0))
    ledger, target = planned(job, unit), (settings.epsilon, settings.delta, settings.accountant)
    noises_of_clients: tuple[float, ...] = ()
    if settings.noise_of_each:
        noises = noises_needed(ledger, *target)
        noise = max(noises.values(), default=0.0)
        noises_of_clients = tuple(noises.get(client, noise) for client in range(len(unit.federation.train)))
    else:
        noise = noise_needed(ledger, *target)
    log.info(
        "%s, seed %d: epsilon = %g needs noise = %g", job.method.label, job.seed, settings.epsilon, noise
    )
    return build(*_levels(settings, noise, noises_of_clients))


def _levels(
    settings: PrivacyConfig, noise: float, noises: tuple[float, ...] = ()
) -> tuple[SampleDP | None, ClientDP | None]:
    if settings.level == "sample":
        return SampleDP(settings.clip, noise, settings.sampling, noises), None
    return None, ClientDP(settings.clip, noise)


def planned(job: Job, sim: Simulation) -> PrivacyLedger:
    """Return the ledger that a job will have at its end, held-out clients included."""
    sets = (*job.config.eval.sets, *job.config.eval.final)
    heldout = "heldout" in sets and len(sim.federation.train) > sim.federation.num_clients
    return planned_ledger(sim, job.rounds, max(job.config.eval.adapt_steps, default=0) if heldout else None)


def noise_needed(ledger: PrivacyLedger, target: float, delta: float, accountant: Accountant) -> float:
    """Return the noise at which no client of a ledger made with noise 1 exceeds ε = `target`."""
    histories = {ledger.entries(client) for client in (*ledger.clients, EVERYONE)}
    noise = 0.0
    # The costliest first, by Σ steps (q / σ)²: for most others one check then shows that the noise suffices.
    for history in sorted(histories, key=_size, reverse=True):
        scaled = tuple((q, noise * sigma, steps) for q, sigma, steps in history)
        if not noise or _told(scaled, delta, accountant)[0] > target:
            noise = max(noise, noise_for(target, delta, history, accountant))
    return noise


def noises_needed(
    ledger: PrivacyLedger, target: float, delta: float, accountant: Accountant
) -> dict[int, float]:
    """Return for each client of a ledger made with noise 1 the noise at which it just reaches ε = `target`."""
    noises: dict[tuple[Entry, ...], float] = {}
    for client in ledger.clients:
        history = ledger.entries(client)
        if history not in noises:
            noises[history] = noise_for(target, delta, history, accountant)
    return {client: noises[ledger.entries(client)] for client in ledger.clients}


def _size(history: Iterable[Entry]) -> float:
    return sum(steps * (q / sigma) ** 2 if sigma else math.inf for q, sigma, steps in history)


@dataclass(frozen=True)
class Spent:
    """The uses of the private data of a run's clients, and their cost.

    Attributes:
        ledger: all uses.
        epsilons: client -> (ε, its accountant) over all uses of a client's data, held-out clients included.
        clients: number of training clients; their ids come first.
        noises: σ of each training client, in the order of ids, if they differ.
        secret: whether ε requires that nobody sees who took part in a round.
    """

    settings: PrivacyConfig
    noise: float
    ledger: PrivacyLedger
    epsilons: Mapping[int, tuple[float, Accountant]]
    clients: int
    secret: bool
    noises: tuple[float, ...] = ()

    @property
    def largest(self) -> float:
        """Largest ε of all clients."""
        return max((value for value, _ in self.epsilons.values()), default=0.0)

    def summary(self) -> dict[str, Any]:
        """Return the settings, statistics of ε over the training (and the held-out) clients, and the composed steps."""
        of_training = [value for client, (value, _) in self.epsilons.items() if client < self.clients]
        of_others = [value for client, (value, _) in self.epsilons.items() if client >= self.clients]
        settings = self.settings
        return {
            "level": settings.level,
            "neighbours": NEIGHBOURS[settings.level],
            "clip": settings.clip,
            "noise": self.noise,
            **({"noise_of_clients": _statistics(list(self.noises))} if self.noises else {}),
            "target": settings.epsilon,
            "delta": settings.delta,
            "accountant": settings.accountant,
            "batches": settings.sampling if settings.level == "sample" else None,
            "epsilon": _statistics(of_training),
            **({"epsilon_heldout": _statistics(of_others)} if of_others else {}),
            "composed": _composed(self.ledger),
            **({"not_for_release": list(SECRETS)} if self.secret else {}),
        }

    def csv(self) -> str:
        """Return a table with a row per client, purpose and kind of use.

        ε is that of all rows of a client; in a row of uses that concern all clients, the largest.
        """
        import pandas as pd

        rows = []
        for purpose, client, use, steps in self.ledger.rows():
            epsilon_of, accountant = (
                max(self.epsilons.values()) if client == EVERYONE else self.epsilons[client]
            )
            uses = (purpose, use.rate, use.gradients, steps, use.noise, self.settings.delta)
            rows.append(("all" if client == EVERYONE else client, *uses, epsilon_of, accountant))
        return str(pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False, lineterminator="\n"))


def spent(job: Job, sim: Simulation, ledger: PrivacyLedger | None = None) -> Spent | None:
    """Return what a simulation has spent, or will have spent by a planned `ledger`, or None without privacy."""
    settings = privacy_of(job)
    if settings is None:
        return None
    dp = sim.train.dp if sim.train.dp is not None else sim.client_dp
    assert dp is not None
    book = sim.ledger if ledger is None else ledger
    ids = sorted({*sim.population.present, *book.clients})
    epsilons = {i: _told(book.entries(i), settings.delta, settings.accountant) for i in ids}
    noises = tuple(dp.own[i] for i in sim.population.present) if isinstance(dp, SampleDP) and dp.own else ()
    result = Spent(settings, dp.noise, book, epsilons, sim.participants, sim.cohort_is_secret, noises)
    if any(by != settings.accountant for _, by in epsilons.values()):
        log.warning(
            "%s, seed %d: epsilon is too large for the accountant prv; the looser bound of rdp is reported",
            job.method.label,
            job.seed,
            extra={"once": (job.method.label, "the accountant")},
        )
    if settings.epsilon is not None and result.largest > settings.epsilon * (1 + SLACK):
        log.warning(
            "%s, seed %d: epsilon is %g, above the target %g: this method used more of its data than was known before "
            "the first round",
            job.method.label,
            job.seed,
            result.largest,
            settings.epsilon,
            extra={"once": (job.method.label, "the wanted epsilon")},
        )
    return result


def epsilon_so_far(job: Job, sim: Simulation) -> dict[str, float]:
    """Return {"epsilon": ε of the client whose data were used most so far}, or {} without privacy.

    Most used are the data with the largest Σ steps (q / σ)²; only one client is accounted for, as `spent` is slow.
    """
    settings = privacy_of(job)
    if settings is None:
        return {}
    histories = {sim.ledger.entries(client) for client in (*sim.ledger.clients, EVERYONE)}
    worst = max(histories, key=_size)
    return {"epsilon": _told(worst, settings.delta, settings.accountant)[0]}


def _told(entries: tuple[Entry, ...], delta: float, accountant: Accountant) -> tuple[float, Accountant]:
    """Return ε and its accountant: RDP's bound if PRV has none."""
    try:
        return epsilon(entries, delta, accountant), accountant
    except TailorflError:
        if accountant == "rdp":
            raise
        return epsilon(entries, delta, "rdp"), "rdp"


def _statistics(values: list[float]) -> dict[str, float]:
    array = np.array(values)
    with np.errstate(invalid="ignore"):  # the deviation of infinite values is undefined
        return {
            "mean": float(array.mean()),
            "std": float(array.std()),
            "min": float(array.min()),
            "max": float(array.max()),
        }


def _composed(ledger: PrivacyLedger) -> dict[str, dict[str, float]]:
    """Return purpose -> number of clients (left out if it concerns all alike), mean and largest number of steps."""
    steps: dict[str, dict[int, int]] = {}
    for purpose, client, _, count in ledger.rows():
        counts = steps.setdefault(purpose, {})
        counts[client] = counts.get(client, 0) + count
    return {
        purpose: {
            **({} if EVERYONE in counts else {"clients": len(counts)}),
            "steps_mean": float(np.mean(list(counts.values()))),
            "steps_max": max(counts.values()),
        }
        for purpose, counts in steps.items()
    }
