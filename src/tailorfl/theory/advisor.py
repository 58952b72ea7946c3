"""The advisor: the numbers in the papers' formulas, estimated from a federation, and the settings that follow.

    pilot -> R, V, rho, L, mu, v_k -> lam -> step sizes, local steps and rounds of each method

Each number is documented in the module that estimates it: `pilot` (training), `spread` (R, V, v_k),
`measures` (rho, L, mu), `recommend` (lam, errors, settings).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tailorfl.data.federation import Federation
from tailorfl.errors import ConfigError, DataError
from tailorfl.models.functional import Model
from tailorfl.partition.rows import spread_indices
from tailorfl.theory.fedclup_statistics import LambdaRange, Problem, lambda_range
from tailorfl.theory.measures import Curvature, curvature, gain_of_own, gradient_noise, prediction_ratio
from tailorfl.theory.objective import Objective
from tailorfl.theory.perfed_ckt import best_transfer
from tailorfl.theory.pilot import Mode, Pilot, Watch, run_pilot
from tailorfl.theory.recommend import (
    Errors,
    Recommendation,
    Situation,
    best_pull,
    expected_errors,
    perfed_ckt,
    recommendations,
)
from tailorfl.theory.spread import Floats, SpreadInterval, client_spread, heterogeneity, interval, resampled
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import LOSSES


@dataclass(frozen=True)
class Facts:
    """Measured quantities; squared distances are between weights."""

    mode: Mode
    clients: int
    """N, clients of the federation that train."""
    used: int
    """Clients in the pilot."""
    samples: float
    """n, harmonic mean over the pilot's clients: the error of one client's estimate goes as 1/n_i."""
    median_samples: float
    total_samples: int
    dim: int
    rank: int
    radius: SpreadInterval
    """R, root mean square distance of the clients' optima from their mean."""
    radius2: float
    """Unbiased estimate of R^2; may be below 0 if clients are alike."""
    noise: SpreadInterval
    """V, squared error of a client that trains alone."""
    excess: float
    """E, twice the excess loss of such a client over its optimum."""
    rho: SpreadInterval
    """Standard deviation of one sample's gradient at the client's own optimum."""
    curvature: Curvature
    gain: SpreadInterval
    """Loss of the mean model minus that of the clients' own models, on samples that neither was trained on."""
    travelled: float
    """Squared distance from the initial model to the clients' mean."""
    seconds: float


@dataclass(frozen=True)
class Transfer:
    """PerFed-CKT's optimum (Theorem 4.2) for every client of the pilot; all lists in the order of `clients`."""

    clients: tuple[str, ...]
    v2: tuple[float, ...]
    """v_k^2, variance of one weight of the client's optimum around the common one."""
    pull: tuple[float, ...]
    """lambda_k as a pull on weights that is added to the client's mean loss; infinite if no spread is measured."""
    lam: tuple[float, ...]
    """lambda_k as in the method, on predictions for public samples (for training samples if there are none)."""
    alpha: tuple[float, ...]
    """Weight of the client's model in every client's teacher; the weights sum to 1."""
    own_weight: tuple[float, ...]
    """Weight of a client's own model in its estimate; the teacher has the rest."""


@dataclass(frozen=True)
class Advice:
    """The advisor's answer."""

    facts: Facts
    errors: Errors
    lam: SpreadInterval
    corollary: LambdaRange | None
    """Corollary 1's range of lam in the problem's units; None without mu."""
    transfer: Transfer
    recommendations: tuple[Recommendation, ...]
    notes: tuple[str, ...] = ()
    """Caveats to read before trusting the numbers."""

    def to_config(self) -> dict[str, Any]:
        """Return `{"methods": [...]}`, to be pasted into an experiment."""
        return {"methods": [method.to_config() for method in self.recommendations]}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON; numbers that are not finite become None."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


STRONGEST = {"optimum": 30.0, "training": 1.0}
"""Largest lam, in units of L: it leaves at most 1/30 of a deviation, or at most halves the step size."""
PUBLIC_ROWS = 256


def advise(
    federation: Federation,
    model: Model,
    train: TrainConfig,
    *,
    clients: int = 30,
    rounds: int = 10,
    seed: int = 0,
    watch: Watch = lambda _: None,
) -> Advice:
    """Return advice for personalized training of `model` on a federation, from a cheap pilot.

    Args:
        federation: the clients; only training samples are read.
        model: the network; every parameter trains.
        train: local training as in the experiment.
        clients: largest number of clients in the pilot, drawn by `seed`.
        rounds: rounds of averaging before clients' models are compared, unless optima can be reached.
        seed: seed of all random draws.
        watch: called with a description of each stage.

    Raises:
        ConfigError: clients < 2 or rounds < 0.
        DataError: fewer than two clients with two samples, or samples that are not finite.
        DivergenceError: the pilot's training diverged.
    """
    if clients < 2 or rounds < 0:
        raise ConfigError(f"the pilot needs clients >= 2 and rounds >= 0, but has {clients} and {rounds}")
    source = federation.source
    objective = Objective(model, LOSSES[source.task], source, model.init(seed), train.weight_decay)
    pilot = run_pilot(federation, objective, train, clients=clients, rounds=rounds, seed=seed, watch=watch)
    watch("curvature and gradient noise")
    return conclude(federation, pilot, curvature(pilot, seed=seed), gradient_noise(pilot), train, seed)


def conclude(
    federation: Federation, pilot: Pilot, curved: Curvature, rho2: Floats, train: TrainConfig, seed: int = 0
) -> Advice:
    """Return advice from a finished pilot and the measurements on it: `rho2` `[N]` of every client."""
    sizes, clients = pilot.sizes.astype(float), len(federation.members)
    noise = pilot.gaps / 4 * _halves_excess(pilot)
    excess = _excess(pilot, curved, rho2)
    if not (noise.any() and np.isfinite(noise).all() and curved.smoothness > 0):
        raise DataError(
            "both halves of every client give the same model, so there is no noise to compare differences with; either "
            "the pilot's training changes nothing (see train.lr), or samples are repeated"
        )
    strongest = STRONGEST[pilot.mode] * curved.client_smoothness
    samples = float(1 / (1 / sizes).mean())

    def statistics(picked: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[float, ...]:
        spread = heterogeneity(pilot.gram, picked, clients)
        lam = best_pull(max(float(excess[picked].mean()), 0.0), spread, clients, strongest)
        return spread, float(noise[picked].mean()), float(rho2[picked].mean()), lam

    drawn = resampled(len(sizes), statistics, seed=seed)
    radius2, mean_noise = heterogeneity(pilot.gram, among=clients), float(noise.mean())
    gain = gain_of_own(pilot)
    facts = Facts(
        mode=pilot.mode,
        clients=clients,
        used=len(sizes),
        samples=samples,
        median_samples=float(np.median(sizes)),
        total_samples=int(federation.sizes("train")[: federation.num_clients].sum()),
        dim=pilot.objective.size,
        rank=pilot.rank,
        radius=interval(radius2, drawn[:, 0]).root(),
        radius2=radius2,
        noise=interval(mean_noise, drawn[:, 1]),
        excess=float(excess.mean()),
        rho=interval(float(rho2.mean()), drawn[:, 2]).root(),
        curvature=curved,
        gain=interval(
            float(gain.mean()), resampled(len(gain), lambda p: [float(gain[p].mean())], seed=seed)[:, 0]
        ),
        travelled=pilot.travelled,
        seconds=pilot.seconds,
    )
    lam = interval(best_pull(max(facts.excess, 0.0), radius2, clients, strongest), drawn[:, 3])
    errors = expected_errors(mean_noise, radius2, clients)
    situation = Situation(
        lam=max(lam.value, 1e-4 * curved.smoothness),
        smoothness=curved.client_smoothness,
        mu=curved.client_mu if pilot.mode == "optimum" else math.nan,
        trace=curved.trace,
        samples=samples,
        batch=train.batch_size,
        lr=train.lr,
        errors=errors,
        initial=pilot.travelled + max(radius2, 0.0),
    )
    transfer = _transfer(federation, pilot, noise, facts.excess)
    # PerFed-CKT exchanges class probabilities.
    exchanging = perfed_ckt(transfer.lam) if federation.source.task == "classification" else ()
    advice = Advice(
        facts=facts,
        errors=errors,
        lam=lam,
        corollary=_corollary(facts),
        transfer=transfer,
        recommendations=(*recommendations(situation), *exchanging),
    )
    return dataclasses.replace(advice, notes=_notes(advice, federation, train))


def _halves_excess(pilot: Pilot) -> Floats:
    """Return factors `[N]` that correct an error estimated from halves to that of all samples.

    With m samples in r determined directions the error of least squares goes as `1 / (m - r - 1)`, not as 1/m:
    that of a half is more than twice as large.
    """
    if pilot.mode == "training":
        return np.ones(len(pilot.sizes))
    n, used = pilot.sizes.astype(float), pilot.rank + 1
    return np.asarray(np.maximum(n - 2 * used, 1.0) / np.maximum(n - used, 1.0))


def _excess(pilot: Pilot, curved: Curvature, rho2: Floats) -> Floats:
    """Return E of every client, `[N]`: from gradient noise and mean curvature, or from the gap of two models.

    The second needs no optimum: training too short for some directions reduces noise and heterogeneity alike.
    """
    if pilot.mode == "optimum":
        return np.asarray(rho2 * pilot.rank / (curved.trace * pilot.sizes))
    return pilot.curved / 4


def _corollary(facts: Facts) -> LambdaRange | None:
    curved = facts.curvature
    if facts.mode == "training" or not (curved.mu > 0 and facts.rho.value > 0):
        return None
    samples = max(1, round(facts.samples))
    problem = Problem(
        curved.mu, curved.smoothness, facts.rho.value, facts.radius.value, samples, facts.clients
    )
    return lambda_range(problem)


def _transfer(federation: Federation, pilot: Pilot, noise: Floats, excess: float) -> Transfer:
    dim = pilot.objective.size
    estimated = client_spread(pilot.gram, pilot.gaps / 2, dim)
    least = 1e-3 * float(noise.mean()) / dim
    v2 = np.maximum(estimated, least)
    best = best_transfer(1.0, float(noise.mean()) / dim, 1.0, [float(v) for v in v2])
    pull = np.where(estimated > least, excess / (dim * v2), math.inf)
    public = federation.public
    rows = np.concatenate(pilot.rows) if public is None else np.arange(len(public))
    some = rows[spread_indices(len(rows), PUBLIC_ROWS)]  # the first may be alike, of one client or class
    x = (pilot.objective.source if public is None else public).take(torch.from_numpy(some))
    return Transfer(
        clients=tuple(federation.names[client] for client in pilot.clients),
        v2=tuple(map(float, estimated)),
        pull=tuple(map(float, pull)),
        lam=tuple(map(float, pull * prediction_ratio(pilot, x) / 2)),
        alpha=tuple(map(float, best.alpha)),
        own_weight=tuple(map(float, np.where(estimated > least, best.own_weight, 0.0))),
    )


def _notes(advice: Advice, federation: Federation, train: TrainConfig) -> tuple[str, ...]:
    """Return caveats in words."""
    facts, out = advice.facts, []
    small = sum(len(federation.train[client]) < 2 for client in federation.members)
    if small:
        out.append(f"{small} clients with fewer than 2 training samples took no part")
    if facts.used < 8:
        out.append(f"intervals come from resampling only {facts.used} clients, so they are rough")
    if facts.mode == "training":
        out.append(
            "the model or the data have no reachable optimum: mu has no meaning, no theory bounds the rounds, and R "
            "and V are those of a few epochs; lam depends on their ratio and is a heuristic"
        )
        out.append("a global model that trains longer than the pilot may become better: compare with fedavg")
    elif facts.curvature.client_mu <= 0:
        out.append(
            "some client's samples do not determine all weights: its loss is not strongly convex, so no rounds are "
            "given"
        )
    if facts.curvature.flat:
        out.append(f"{facts.curvature.flat} directions of the weights change no output and are left out")
    if facts.radius.low == 0:
        out.append(
            "clients may be alike: R cannot be distinguished from 0, and the best pull has no upper bound"
        )
    if train.dp is not None:
        out.append(
            "the pilot trains without privacy: its numbers must not leave the machine that holds the data"
        )
    return tuple(out)
