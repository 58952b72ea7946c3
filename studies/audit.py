"""An audit of sample-level privacy: many private trainings with and without a canary, and what tells them apart.

The canary's gradient always points the same way and is always clipped; the other samples have none. The attack sees
the model after every step, as the accountants allow it to. A step moves it by −(lr·C/B)(b + σZ), b = 1 where the canary
is in the batch, which it is with probability q, so the best score is the likelihood ratio of what was seen:

    Σ_t log(1 − q + q·exp((2 d_t − 1)/(2σ²))),      d_t = the step in units of −lr·C/B

Every trial is a client that trains alone (LocalTrain), so all run at once, through the same engine, batches, noise and
ledger as any experiment. What is stated is ε of the ledger, by the accountant.

The lower bound: whoever guesses "with" where a score is above a threshold is right with probability TPR and wrong with
probability FPR. (ε, δ)-privacy allows no better than (Kairouz, Oh and Viswanath, ICML 2015)

    TPR ≤ e^ε FPR + δ,     TNR ≤ e^ε FNR + δ,     so   ε ≥ log((TPR − δ)/FPR)   and   ε ≥ log((TNR − δ)/FNR)

The threshold is chosen on one half of the runs. The rates are those of the other half, by Clopper and Pearson's exact
bounds, which hold together with the stated confidence. A bound above the stated ε shows that a promise is broken; one
below it shows nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, cast, get_args

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from studies.program import program, run
from tailorfl.cli.arguments import AsJson
from tailorfl.cli.screen import PROSE, print_json, show_table, stdout
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.choice import make_engine
from tailorfl.errors import ConfigError, unknown
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.privacy import epsilon
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.train import UNBOUND, BatchSampling
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.sample_privacy import SampleDP

app = program()
Scores = NDArray[np.float64]
THRESHOLDS = 101
"""How many are tried: quantiles of all scores."""
SHORT_STEP = 1e-2
"""Learning rate: any will do, since the canary's gradient does not depend on the model."""


@dataclass(frozen=True)
class Attack:
    """How well a threshold told runs with a canary from those without."""

    hits: int
    """Of `trials` runs with it, how many were above the threshold."""
    false_alarms: int
    """Of `trials` runs without it."""
    trials: int
    """Runs of each kind that the rates are of: half of all."""

    def epsilon(self, delta: float, confidence: float = 0.95) -> float:
        """Return what ε is at least, with the stated confidence; 0 where nothing was told apart."""
        out = 0.0
        n, error = self.trials, (1 - confidence) / 4  # two rates by each of two inequalities
        for right, wrong in ((self.hits, self.false_alarms), (n - self.false_alarms, n - self.hits)):
            least, most = at_least(right, n, error), at_most(wrong, n, error)
            if least > delta:
                out = max(out, math.log((least - delta) / most))
        return out


def at_least(successes: int, trials: int, error: float) -> float:
    """Return the probability that an event has at least, wrong with probability `error`."""
    from scipy.stats import beta

    return float(beta.ppf(error, successes, trials - successes + 1)) if successes else 0.0


def at_most(successes: int, trials: int, error: float) -> float:
    """Return the probability that an event has at most, wrong with probability `error`."""
    return 1.0 - at_least(trials - successes, trials, error)


def attack(with_it: Scores, without: Scores, delta: float) -> Attack:
    """Return the attack on scores [runs] of both kinds, which are larger where the canary was there.

    Raises:
        ConfigError: the two are not equally many, or fewer than four.
    """
    if len(with_it) != len(without) or len(with_it) < 4:
        raise ConfigError(
            f"an attack needs as many runs with the canary as without, four at least; got {len(with_it)} and "
            f"{len(without)}"
        )
    half = len(with_it) // 2
    tried = np.quantile(np.concatenate([with_it[:half], without[:half]]), np.linspace(0, 1, THRESHOLDS))
    chosen = max(tried, key=lambda t: _counted(with_it[:half], without[:half], t).epsilon(delta))
    return _counted(with_it[half:], without[half:], float(chosen))


def _counted(with_it: Scores, without: Scores, threshold: float) -> Attack:
    return Attack(int((with_it >= threshold).sum()), int((without >= threshold).sum()), len(with_it))


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
    """Return the audit of clients with `samples` samples each, `trials` with the canary and as many without.

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
    """Return the one weight of every trial's model, [clients]."""
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


@app.command()
def command(
    noise: Annotated[float, typer.Option("--noise", help="sigma, in units of the clip.")] = 1.0,
    clip: Annotated[float, typer.Option("--clip", help="Largest norm of a sample's gradient.")] = 1.0,
    samples: Annotated[int, typer.Option("--samples", help="Of a client.")] = 20,
    batch: Annotated[int, typer.Option("--batch", help="Samples of a batch.")] = 10,
    steps: Annotated[int, typer.Option("--steps", help="Batches that a client trains on.")] = 5,
    sampling: Annotated[str, typer.Option("--sampling", help="poisson or shuffle.")] = "poisson",
    trials: Annotated[
        int, typer.Option("--trials", help="Trainings with the canary, and as many without.")
    ] = 2000,
    delta: Annotated[float, typer.Option("--delta", help="Of (epsilon, delta)-privacy.")] = 1e-5,
    seed: Annotated[int, typer.Option("--seed", help="Of batches and noise.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Attack private training with a canary; exits with 1 if that tells more than the stated epsilon allows."""
    if sampling not in get_args(BatchSampling):
        raise unknown("sampling", sampling, get_args(BatchSampling))
    dp = SampleDP(clip, noise, cast(BatchSampling, sampling))
    given = {"samples": samples, "batch_size": batch, "steps": steps, "trials": trials}
    found = audit_samples(dp, **given, delta=delta, seed=seed)
    if as_json:
        attack = found.attack
        print_json(
            {
                "delta": delta,
                "stated": found.stated,
                "at_least": found.shown,
                "confidence": found.confidence,
                "trials": attack.trials,
                "hits": attack.hits,
                "false_alarms": attack.false_alarms,
                "broken": found.broken,
            }
        )
    else:
        table = Table(title=f"Samples, neighbours zero-out, delta {delta:g}", show_header=False)
        table.add_column(style="bold", ratio=PROSE)
        table.add_column(justify="right")
        table.add_row("stated epsilon", f"{found.stated:.4g}")
        table.add_row(f"epsilon is at least ({found.confidence:.0%} confidence)", f"{found.shown:.4g}")
        table.add_row(
            "runs with the canary, of which told", f"{found.attack.trials:,}, {found.attack.hits:,}"
        )
        table.add_row(
            "runs without it, of which told", f"{found.attack.trials:,}, {found.attack.false_alarms:,}"
        )
        show_table(stdout(), table)
    if found.broken:
        Console(stderr=True).print("broken: the attack tells more than the stated epsilon allows")
        raise typer.Exit(1)


if __name__ == "__main__":
    run(app)
