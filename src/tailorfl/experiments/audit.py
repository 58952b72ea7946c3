"""An audit of sample-level privacy: many private trainings with and without a canary, and what tells them apart.

The canary's gradient always points the same way and is always clipped; the other samples have none. The attack sees
the model after every step, as the accountants allow it to. A step moves it by −(lr·C/B)(b + σZ), b = 1 where the canary
is in the batch, which it is with probability q, so the best score is the likelihood ratio of what was seen:

    Σ_t log(1 − q + q·exp((2 d_t − 1)/(2σ²))),      d_t = the step in units of −lr·C/B

Every trial is a client that trains alone (LocalTrain), so all run at once, through the same engine, batches, noise and
ledger as any experiment. What is stated is ε of the ledger, by the accountant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.privacy.accounting import epsilon
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.privacy import UNBOUND
from tailorfl.theory.audit import Attack, attack
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.sample_privacy import SampleDP

SHORT_STEP = 1e-2
"""Learning rate: any will do, since the canary's gradient does not depend on the model."""


@dataclass(frozen=True)
class Audit:
    """What is stated and what an attack shows."""

    stated: float
    """ε by the ledger."""
    shown: float
    """What ε is at least."""
    confidence: float
    attack: Attack

    @property
    def broken(self) -> bool:
        """Whether the attack does better than the stated ε allows."""
        return self.shown > self.stated


def audit_samples(
    dp: SampleDP,
    *,
    samples: int = 20,
    batch_size: int = 10,
    steps: int = 5,
    trials: int = 2000,
    delta: float = UNBOUND.delta,
    confidence: float = 0.95,
    seed: int = 0,
) -> Audit:
    """Returns the audit of clients with `samples` samples each, `trials` with the canary and as many without.

    Raises:
        ConfigError: fewer than two samples or four trials, or no noise, without which nothing is stated.
    """
    if samples < 2 or batch_size < 1 or steps < 1 or dp.noise <= 0:
        raise ConfigError(
            "an audit needs at least 2 samples, 1 sample a batch, 1 step and noise above 0, but got "
            f"samples = {samples}, batch_size = {batch_size}, steps = {steps} and noise = {dp.noise:g}"
        )
    train = TrainConfig(epochs=None, steps=1, batch_size=batch_size, lr=SHORT_STEP, dp=dp)
    model = Model(lambda: build("linear", (1,), 1))
    engine, federation = make_engine("vectorized"), _federation(samples, trials)
    sim = Simulation(make_method("local"), federation, model, train, engine=engine, seed=seed)
    size = min(batch_size, samples)
    rate = size / samples
    before, scores = _weights(sim), np.zeros(2 * trials)
    for _ in range(steps):
        sim.step()
        after = _weights(sim)
        moved = (before - after) * size / (SHORT_STEP * dp.clip)
        likelier = (2 * moved - 1) / (2 * dp.noise**2)
        scores += likelier if rate == 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + likelier)
        before = after
    told = attack(scores[:trials], scores[trials:], delta)
    return Audit(epsilon(sim.ledger.entries(0), delta), told.epsilon(delta, confidence), confidence, told)


def _weights(sim: Simulation) -> NDArray[np.float64]:
    """The one weight of every trial's model, [clients]."""
    parts = sim.personal_models(range(sim.participants), at_once=sim.participants)
    return torch.cat([part["head.weight"].flatten() for _, part in parts]).double().numpy()


def _federation(samples: int, trials: int) -> Federation:
    """Clients of `samples` rows; one row is the canary for the first `trials` of them, and nothing for the others."""
    x, y = torch.zeros(samples + 1, 1), torch.zeros(samples + 1, 1)
    x[0], y[0] = 1.0, -1e6
    source = Source("canaries", x, y, "regression", 1)
    others = np.arange(1, samples, dtype=np.int64)
    rows = [np.concatenate([[0 if k < trials else samples], others]) for k in range(2 * trials)]
    none = [np.zeros(0, dtype=np.int64)] * len(rows)
    names = tuple(f"trial {k}" for k in range(len(rows)))
    return Federation(source, rows, none, none, names, len(rows))
