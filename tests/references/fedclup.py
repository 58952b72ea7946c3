"""FedCLUP: w = (1 − γλ) w + γλ mean v_i, with the paper's rules for γ and η."""

from __future__ import annotations

from dataclasses import replace

from references.plain import Batches, Outcome, Problem, clone, fit, mean, pull, weights_of
from references.two_models import everywhere


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
) -> Outcome:
    mu, big = convexity or 0.0, smoothness or 0.0
    rate = p.train.lr
    if lr_rule == "deterministic":
        rate = 1 / (lam + big)
    elif lr_rule == "stochastic":
        rate = min(mu * (lam + big) / (4 * big * (lam + mu) ** 2), 1 / (lam + big))
    share = 1.0
    if gamma == "theory":
        share = lam * (lam + big) / (2 * lam * big)
    elif gamma == "edge":
        share = lam * (1 / lam + 1 / big)
    w, v = clone(p.init), everywhere(p)
    for t, sampled in enumerate(p.rounds):
        for i in sampled:
            steps: Batches = p.batches(i, t, steps=local_steps)
            if batch_reuse:
                steps = [steps[0]] * len(steps)
            v[i] = fit(p, v[i], steps, term=pull(lam, w), train=replace(p.train, lr=rate))
        average = mean([v[i] for i in sampled], weights_of(p, sampled, weights))
        w = {n: (1 - share) * w[n] + share * average[n] if n in p.parameters else average[n] for n in w}
    return Outcome(w, v)
