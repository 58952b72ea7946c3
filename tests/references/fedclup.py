"""FedCLUP: w = (1 − γλ) w + γλ mean v_i, with the paper's rules for γ and η and for λ from round to round."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from references.plain import Batches, Outcome, Problem, State, clone, fit, mean, norm_of, pull, weights_of
from references.two_models import everywhere, validation_loss


def rates(lam: float, gamma: str, mu: float, big: float, rule: str, lr: float) -> tuple[float, float]:
    """(γλ, η)."""
    share = {"mean": 1.0}.get(gamma, 0.0)
    if gamma == "theory":
        share = lam * (lam + big) / (2 * lam * big)
    elif gamma == "edge":
        share = lam * (1 / lam + 1 / big)
    if rule == "deterministic":
        lr = 1 / (lam + big)
    elif rule == "stochastic":
        lr = min(mu * (lam + big) / (4 * big * (lam + mu) ** 2), 1 / (lam + big))
    return share, lr


def fedclup(
    p: Problem,
    lam: float,
    gamma: str,
    smoothness: float | None,
    convexity: float | None,
    lr_rule: str,
    local_steps: int | None,
    batch_reuse: bool,
    weights: str,
    schedule: dict[str, Any] | str,
) -> Outcome:
    schedule = {"kind": schedule} if isinstance(schedule, str) else schedule
    mu, big, kind = convexity or 0.0, smoothness or 0.0, schedule["kind"]
    w, v = clone(p.init), everywhere(p)
    errors: list[float] = []
    collect = False
    if kind == "corollary":
        lam = corollary(mu, big, **schedule)
    elif kind == "dynamic":
        lam = schedule["values"][0]
    for t, sampled in enumerate(p.rounds):
        alone = collect or not lam  # nobody has been sent a w
        share, rate = rates(lam, gamma, mu, big, lr_rule, p.train.lr) if lam else (0.0, p.train.lr)
        for i in sampled:
            steps: Batches = p.batches(i, t, steps=local_steps)
            if batch_reuse:
                steps = [steps[0]] * len(steps)
            term, rule = None if alone else pull(lam, w), replace(p.train, lr=rate)
            v[i] = fit(p, v[i], steps, term=term, train=rule)
        here = weights_of(p, sampled, weights)
        average = mean([v[i] for i in sampled], here)
        if collect:  # the one round that makes w the mean
            w, collect = average, False
            continue
        new = lam
        if kind == "heuristic" and t + 1 == schedule["switch"]:
            new = heuristic(p, [v[i] for i in sampled], w, schedule)
        elif kind == "dynamic":
            found = [reported(p, v[i], i) * a for i, a in zip(sampled, here, strict=True)]
            errors.append(sum(found) / sum(here))
            new = grown(lam, errors, schedule)
            errors = errors[-1:] if new != lam else errors
        if lam:
            w = {n: (1 - share) * w[n] + share * average[n] if n in p.parameters else average[n] for n in w}
        lam, collect = new, lam == 0 < new
    return Outcome(w, v)


def reported(p: Problem, model: State, i: int) -> float:
    """The validation loss, of clients without validation samples the training loss."""
    return validation_loss(p, model, i, "val" if len(p.whole(i, "val")[1]) else "train")


def corollary(
    mu: float, big: float, radius: float, rho: float, samples: int, clients: int, kind: str
) -> float:
    """Corollary 1's bound."""
    kappa = big / mu
    if radius <= 1 / math.sqrt(samples):
        spread = (2 * big**2 * radius**2 + rho**2 / samples) / (
            big**2 * radius**2 + rho**2 / (samples * clients)
        )
        return max(64 * kappa**2 * big, max(2 * kappa, 5) * mu * spread) - mu
    return rho**2 / (samples * mu * radius**2)


def heuristic(p: Problem, models: list[State], w: State, rule: dict[str, Any]) -> float:
    """From R̂ = mean ‖v_i − w‖ of the models that came up and the w that they were sent."""
    r = sum(float(norm_of({n: m[n] - w[n] for n in p.parameters})) for m in models) / len(models)
    n, c = rule["samples"], rule["constant"]
    found = c / (n * r**2) if r >= 1 / math.sqrt(n) else c / (math.sqrt(n) * r)
    return min(found, rule["most"])


def grown(lam: float, errors: list[float], rule: dict[str, Any]) -> float:
    """The next of the values where the error of p rounds ago has not fallen by its share `tol`."""
    back = rule["patience"]
    if len(errors) <= back:
        return lam
    before, now = errors[-1 - back], errors[-1]
    values = rule["values"]
    at = values.index(lam)
    return values[min(at + 1, len(values) - 1)] if (before - now) / before < rule["tol"] else lam
