"""Clients are sent models mixed out of each other's, by how near they are: FedAMP, HeurFedAMP, pFedGraph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from references.fairness import project
from references.global_models import head_names
from references.plain import Batch, Outcome, Problem, State, Term, clone, fit, mean, pull, weights_of
from references.two_models import everywhere

Row = Callable[[int, list[int], list[State]], dict[int, float]]
"""(client, the others that have uploaded, all models): what each of those others counts in its cloud model."""


def one_vector(p: Problem, state: State) -> Tensor:
    return torch.cat([state[n].flatten() for n in p.parameters])


def clouds(p: Problem, row: Row, lam: float, start: str) -> Outcome:
    w, here = everywhere(p), set[int]()
    for t, sampled in enumerate(p.rounds):
        sent = {}
        for i in sampled:
            others = sorted(here - {i})
            xi = row(i, others, w)
            left = 1.0 - sum(xi.values())
            cloud = mean([w[i], *(w[j] for j in others)], [left, *(xi[j] for j in others)])
            sent[i] = {n: t if t.is_floating_point() else w[0][n] for n, t in cloud.items()}
        trained = {}
        for i in sampled:
            first = w[i] if start == "own" else sent[i]
            trained[i] = fit(p, first, p.batches(i, t), term=pull(lam, sent[i]))
        for i in sampled:
            w[i] = trained[i]
        here |= set(sampled)
    return Outcome(None, w, {f"models/{n}": torch.stack([v[n] for v in w]) for n in p.parameters})


def fedamp(p: Problem, lam: float, alpha: float, sigma: float, start: str, **options: Any) -> Outcome:
    def row(i: int, others: list[int], w: list[State]) -> dict[int, float]:
        xi = {}
        for j in others:
            gap = float((one_vector(p, w[i]) - one_vector(p, w[j])).square().sum())
            xi[j] = alpha * math.exp(-gap / sigma) / sigma
        total = max(sum(xi.values()), 1.0)
        return {j: x / total for j, x in xi.items()}

    return clouds(p, row, lam / alpha, start)


def heurfedamp(
    p: Problem,
    lam: float,
    sigma: float,
    self_weight: float | None,
    cosine_of: str,
    start: str,
    **options: Any,
) -> Outcome:
    own = 1 / len(p.sizes) if self_weight is None else self_weight
    origin = one_vector(p, p.init) if cosine_of == "updates" else 0.0

    def row(i: int, others: list[int], w: list[State]) -> dict[int, float]:
        a, score = one_vector(p, w[i]) - origin, {}
        for j in others:
            b = one_vector(p, w[j]) - origin
            sizes = float(a.norm() * b.norm())
            score[j] = math.exp(sigma * float(a @ b) / sizes) if sizes else 1.0
        return {j: (1 - own) * s / sum(score.values()) for j, s in score.items()}

    return clouds(p, row, lam, start)


def pfedgraph(
    p: Problem, lam: float, alpha: float, variant: str, measure: str, released: bool, weights: str
) -> Outcome:
    names = p.parameters if measure == "all" else list(head_names(p))
    w, sent = everywhere(p), [clone(p.init) for _ in p.clients]
    along: list[State] = [{n: torch.zeros_like(p.init[n]) for n in names} for _ in p.clients]

    def vector(state: State) -> Tensor:
        return torch.cat([state[n].flatten() for n in names])

    def towards(g: State) -> Term:
        def term(state: State, batch: Batch) -> Tensor:
            cosine = vector(g) @ vector(state) / vector(state).norm()
            return lam * cosine if released else -lam * cosine

        return term

    for t, sampled in enumerate(p.rounds):
        for i in sampled:
            g = along[i]
            if variant == "approximate":
                g = {n: sent[i][n] / vector(sent[i]).norm() for n in names}
            w[i] = fit(p, sent[i], p.batches(i, t), term=towards(g) if t > 0 else None)
        share = weights_of(p, sampled, weights)
        origin = vector(p.init)
        for i in sampled:
            row = []
            for j, a in zip(sampled, share, strict=True):
                u, v = vector(w[i]) - origin, vector(w[j]) - origin
                sizes = float(u.norm() * v.norm())
                cosine = float(u @ v) / sizes if sizes else 0.0
                row.append(a / sum(share) + (1.0 if cosine > 0.9 else cosine) / (2 * alpha))
            graph = project(row)
            sent[i] = mean([w[j] for j in sampled], graph)
            along[i] = {
                n: sum(a * w[j][n] / vector(w[j]).norm() for a, j in zip(graph, sampled, strict=True))  # type: ignore[misc]
                for n in names
            }
    return Outcome(None, w, {f"models/{n}": torch.stack([s[n] for s in sent]) for n in p.parameters})
