"""Differential privacy of a job: the noise that a wanted ε needs, and what was spent in the end."""

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
"""Share by which ε may exceed a target for want of digits."""

NEIGHBOURS = {
    "sample": "zero-out: one sample of a client contributes nothing, all else is equal",
    "client": "zero-out: the updates of one client are zero, all else is equal",
}
"""Between which runs ε bounds the difference."""
SECRETS = (
    "the seed",
    "who took part in a round, and how many",
    "bytes and losses of single rounds",
    "checkpoints",
)
"""What must not be released where ε counts on nobody seeing who takes part."""

COLUMNS = ["client", "purpose", "rate", "gradients", "steps", "noise", "delta", "epsilon", "accountant"]
"""Of the table of what clients' data were used for."""

Simulated = TypeVar("Simulated", bound=Simulation)
Build = Callable[[SampleDP | None, ClientDP | None], Simulated]
"""Makes the simulation of a job with privacy of one level, or with none."""


def privacy_of(job: Job) -> PrivacyConfig | None:
    """Return the privacy settings of a job: those of its method, else of the experiment; None without."""
    settings = job.config.train_of(job.method)["dp"]
    return None if settings is None else PrivacyConfig.model_validate(settings)


def with_privacy(job: Job, build: Build[Simulated]) -> Simulated:
    """Return the simulation of a job, with the noise that its settings give or that its wanted ε needs.

    Raises:
        ConfigError: privacy does not cover what the method does, or the wanted ε cannot be reached.
        TailorflError, MissingExtraError: as `tailorfl.privacy.epsilon`.
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
    """Return the noise with which no client of a ledger made with noise 1 exceeds ε = `target`."""
    histories = {ledger.entries(client) for client in (*ledger.clients, EVERYONE)}
    noise = 0.0
    # The costliest first, by what small ε grow with: for most others one look then shows that it is enough.
    for history in sorted(histories, key=_size, reverse=True):
        scaled = tuple((q, noise * sigma, steps) for q, sigma, steps in history)
        if not noise or _told(scaled, delta, accountant)[0] > target:
            noise = max(noise, noise_for(target, delta, history, accountant))
    return noise


def noises_needed(
    ledger: PrivacyLedger, target: float, delta: float, accountant: Accountant
) -> dict[int, float]:
    """Return the noise with which each client of a ledger made with noise 1 reaches ε = `target`, and no more."""
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
    """What the private data of a run's clients were used for, and what that costs.

    Attributes:
        ledger: all uses.
        epsilons: client -> (ε, the accountant that tells it), of all that a client took part in; held-out ones too.
        clients: how many train; their ids come first.
        noises: σ of each client that trains, from the first on, where they differ.
        secret: whether ε counts on nobody seeing who took part in a round.
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
        """ε of the client that spent most."""
        return max((value for value, _ in self.epsilons.values()), default=0.0)

    def summary(self) -> dict[str, Any]:
        """Return the settings, ε over the clients that train (and over those held out), and what composed."""
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
        """Return a table with a row for every client, purpose and kind of use; ε is of all rows of a client."""
        import pandas as pd

        rows = []
        for purpose, client, use, steps in self.ledger.rows():
            epsilon_of, accountant = self.epsilons[min(self.epsilons) if client == EVERYONE else client]
            uses = (purpose, use.rate, use.gradients, steps, use.noise, self.settings.delta)
            rows.append(("all" if client == EVERYONE else client, *uses, epsilon_of, accountant))
        return str(pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False, lineterminator="\n"))


def spent(job: Job, sim: Simulation, ledger: PrivacyLedger | None = None) -> Spent | None:
    """Return what a simulation has spent, or will have by a planned `ledger`; None without privacy."""
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
            "%s, seed %d: epsilon is %g, above the wanted %g: this method used more of its data than could be known "
            "before the first round",
            job.method.label,
            job.seed,
            result.largest,
            settings.epsilon,
            extra={"once": (job.method.label, "the wanted epsilon")},
        )
    return result


def epsilon_so_far(job: Job, sim: Simulation) -> dict[str, float]:
    """Return {"epsilon": ε of the client whose data were used most so far}; {} without privacy.

    Used most is what has the largest Σ steps (q / σ)²; one client is accounted for, as `spent` takes long for all.
    """
    settings = privacy_of(job)
    if settings is None:
        return {}
    histories = {sim.ledger.entries(client) for client in (*sim.ledger.clients, EVERYONE)}
    worst = max(histories, key=_size)
    return {"epsilon": _told(worst, settings.delta, settings.accountant)[0]}


def _told(entries: tuple[Entry, ...], delta: float, accountant: Accountant) -> tuple[float, Accountant]:
    """ε and the accountant that tells it: RDP's bound where PRV has none."""
    try:
        return epsilon(entries, delta, accountant), accountant
    except TailorflError:
        if accountant == "rdp":
            raise
        return epsilon(entries, delta, "rdp"), "rdp"


def _statistics(values: list[float]) -> dict[str, float]:
    array = np.array(values)
    with np.errstate(invalid="ignore"):  # infinite ones have no spread
        return {
            "mean": float(array.mean()),
            "std": float(array.std()),
            "min": float(array.min()),
            "max": float(array.max()),
        }


def _composed(ledger: PrivacyLedger) -> dict[str, dict[str, float]]:
    """By purpose: how many clients (all of them, where it concerns all alike), and the steps of each."""
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
