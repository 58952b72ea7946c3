"""FedOA and FedSDR: personal models held near the global one by their features."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from references.plain import Batch, Outcome, Problem, State, Term, clone, features, fit, mean, weights_of


def distance(kind: str, z: Tensor, centre: Tensor, micro_batch: int) -> Tensor:
    """D of a batch [samples, width]."""
    if kind == "mean_l2":
        return torch.linalg.vector_norm(z - centre, dim=1).mean()
    if kind == "batch_l2":
        pieces = zip(z.split(micro_batch), centre.split(micro_batch), strict=True)
        return torch.stack([torch.linalg.vector_norm(a - b) for a, b in pieces]).mean()
    if kind == "sdr":
        return (z @ (centre - centre.mean(0)).abs().T).diagonal().abs().mean()
    if kind == "pearson":
        z, centre = z - z.mean(1, keepdim=True), centre - centre.mean(1, keepdim=True)
    cosine = (z * centre).sum(1) / (
        torch.linalg.vector_norm(z, dim=1) * torch.linalg.vector_norm(centre, dim=1)
    )
    return (1 - cosine).mean()


def regularised(
    p: Problem,
    lam: float,
    personal_start: int,
    own_init: bool,
    weights: str,
    distance_kind: str,
    micro_batch: int = 8,
) -> Outcome:
    """The features of the RECEIVED global model are the centre, in evaluation mode, without gradient."""
    w = clone(p.init)
    v = [clone(s) if own_init else clone(p.init) for s in p.first_private]
    for t, sampled in enumerate(p.rounds):
        up = []
        for i in sampled:
            up.append(fit(p, w, p.batches(i, t)))
            if t >= personal_start:
                v[i] = fit(p, v[i], p.batches(i, t), term=feature_term(p, w, lam, distance_kind, micro_batch))
        w = mean(up, weights_of(p, sampled, weights))
    return Outcome(w, v)


def feature_term(p: Problem, w: State, lam: float, kind: str, micro_batch: int) -> Term:
    """The features in training are those of the training pass."""
    fixed, moving = copy.deepcopy(p.module).eval(), copy.deepcopy(p.module).train()

    def term(state: State, batch: Batch) -> Tensor:
        with torch.no_grad():
            centre = features(fixed, w, batch[0])
        now = {n: t if t.requires_grad else t.clone() for n, t in state.items()}
        return lam * distance(kind, features(moving, now, batch[0]), centre, micro_batch)

    return term


def fedoa(
    p: Problem, lam: float, personal_start: int, own_init: bool, weights: str, distance: str, micro_batch: int
) -> Outcome:
    return regularised(p, lam, personal_start, own_init, weights, distance, micro_batch)


def fedsdr(p: Problem, lam: float, personal_start: int, own_init: bool, weights: str) -> Outcome:
    return regularised(p, lam, personal_start, own_init, weights, "sdr")
