"""Servers that weigh clients by their losses or by their steps: q-FedAvg, AFL, FedNova."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from references.plain import Outcome, Problem, State, clone, fit, mean, plain, pull, weights_of
from references.two_models import validation_loss


def others(p: Problem, states: list[State], weights: list[float]) -> State:
    """The mean of running statistics."""
    return {n: t for n, t in mean(states, weights).items() if n not in p.parameters}


def qfedavg(p: Problem, q: float, weights: str) -> Outcome:
    w, eta = clone(p.init), p.train.lr
    for t, sampled in enumerate(p.rounds):
        a = weights_of(p, sampled, weights)
        theta = [fit(p, w, p.batches(i, t), train=plain(p.train)) for i in sampled]
        step, h = {n: torch.zeros_like(w[n]) for n in p.parameters}, 0.0
        for i, trained, share in zip(sampled, theta, a, strict=True):
            loss = validation_loss(p, w, i, "train") + 1e-10
            gradient = {n: (w[n] - trained[n]) / eta for n in p.parameters}
            square = sum(float((g**2).sum()) for g in gradient.values())
            for n in step:
                step[n] += share * loss**q * gradient[n]
            h += share * (q * loss ** (q - 1) * square + loss**q / eta)
        w = {**others(p, theta, a), **{n: w[n] - step[n] / h for n in p.parameters}}
    return Outcome(w, [])


def project(v: list[float]) -> list[float]:
    """On the simplex, by bisection of the threshold."""
    low, high = min(v) - 1, max(v)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(max(x - middle, 0) for x in v) > 1 else (low, middle)
    return [max(x - low, 0) for x in v]


def afl(p: Problem, gamma: float, weights: str, **options: Any) -> Outcome:
    w, iterates = clone(p.init), []
    count = len(p.sizes)
    mixture = [1 / count] * count
    for t, sampled in enumerate(p.rounds):
        scale = count / len(sampled)
        new = {n: s.clone() for n, s in w.items()}
        losses, trained = [0.0] * count, []
        for i in sampled:
            theta = fit(p, w, p.batches(i, t, steps=1), train=plain(p.train))
            losses[i] = scale * validation_loss(p, w, i, "train")
            for n in p.parameters:
                new[n] += scale * mixture[i] * (theta[n] - w[n])
            trained.append(theta)
        new |= others(p, trained, weights_of(p, sampled, weights))
        mixture = project([m + gamma * x for m, x in zip(mixture, losses, strict=True)])
        w = new
        iterates.append(w)
    shared = mean(iterates, [1.0] * len(iterates))
    counted = {n: s if s.is_floating_point() else w[n] for n, s in shared.items()}
    return Outcome(counted, [], {"mixture": torch.tensor(mixture, dtype=torch.float64)})


def fednova(p: Problem, mu: float, weights: str, server: dict[str, Any]) -> Outcome:
    """Effective steps by running the recursion of the momentum, and of the shrinking towards w, on ones."""
    w, eta = clone(p.init), p.train.lr
    rho = p.train.momentum
    rule = replace(p.train, linear=False, adamw=False)
    velocity = {n: torch.zeros_like(w[n]) for n in p.parameters}
    for t, sampled in enumerate(p.rounds):
        a = weights_of(p, sampled, weights)
        shares = [x / sum(a) for x in a]
        theta, per_step, length = [], [], 0.0
        for i, share in zip(sampled, shares, strict=True):
            steps = p.batches(i, t)
            theta.append(fit(p, w, steps, term=pull(mu, w) if mu else None, train=rule))
            buffer = travelled = 0.0
            for _ in steps:
                buffer = rho * buffer + 1.0
                travelled = (1 - eta * mu) * travelled + buffer
            per_step.append({n: (w[n] - theta[-1][n]) / travelled for n in p.parameters})
            length += share * (len(steps) if mu else travelled)
        new = others(p, theta, a)
        for n in p.parameters:
            delta = -length * sum(s * d[n] for s, d in zip(shares, per_step, strict=True))
            velocity[n] = server["momentum"] * velocity[n] + delta
            new[n] = w[n] + server["lr"] * velocity[n]
        w = new
    return Outcome(w, [])
