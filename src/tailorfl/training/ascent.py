"""Sharpness-aware ascent: the gradient is taken at p + ε, where ε climbs the loss of the same batch.

SAM (Foret et al., ICLR 2021):            ε = ρ g / ‖g‖₂, one norm over all tensors
layer-wise SAM (PLGU, CVPR 2023, eq. 5):  ε_l = ξ_l δ_l(g);   for p = 2:  ε_l = ρ ξ_l g_l / ‖g‖₂, ‖g‖₂ over ALL layers
ASAM form:                                ε = Λ δ(Λg), the exact maximiser of F(θ + Λδ) over ‖δ‖_p ≤ ρ;
                                          for p = 2:  ε = ρ Λ²g / ‖Λg‖₂

δ(g) is the δ of ‖δ‖_p ≤ ρ with the largest ⟨g, δ⟩:

    δ(g) = ρ sign(g) |g|^{q−1} / (‖g‖_q^q)^{1/p},   1/p + 1/q = 1;   p = ∞:  ρ sign(g)

The paper prints p − 1 instead of 1/p as the exponent of the denominator, a misprint: p = 2 would divide by ‖g‖².

| symbol | here |
|---|---|
| ρ, p | `rho`, `p` |
| ξ_l | `scores[l]`, [layers] |
| layer l | `groups[l]`, names of its parameters |
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.models.layers import Groups
from tailorfl.training import tree
from tailorfl.training.gradients import Direction, Gradient

_TINY = 1e-12

ScoreNorm = Literal["sum", "mean", "none", "ones"]


def sam(rho: float) -> Direction:
    """Return the direction ∇F(p + ρ g/‖g‖)."""

    def ascend(state: TensorDict, grad: Gradient) -> TensorDict:
        g = grad(state)
        return grad(state + g * (rho / (tree.norm(g) + _TINY)))

    return ascend


def layerwise_perturbation(
    g: TensorDict,
    scores: Tensor,
    groups: Groups,
    rho: float,
    form: Literal["paper", "asam"] = "paper",
    p: float = 2.0,
) -> TensorDict:
    """Return ε of layer-wise SAM for the gradient `g`, with the names of `g`; `scores` [layers], p > 1."""
    of = {name: scores[i] for i, group in enumerate(groups) for name in group}

    def scaled(t: TensorDict) -> TensorDict:
        return TensorDict({n: of[n] * x for n, x in tree.tensors(t).items()})

    entries = g if form == "paper" else scaled(g)
    climb, length = steepest(entries, p)
    return scaled(climb) * (rho / (length + _TINY))


def steepest(g: TensorDict, p: float) -> tuple[TensorDict, Tensor]:
    """Return (δ, ‖δ‖_p), where δ has the largest ⟨g, δ⟩ for its length, p > 1: δ = g for p = 2."""
    if p == 2:
        return g, tree.norm(g)
    q = 1.0 if math.isinf(p) else p / (p - 1)
    parts = tree.tensors(g)
    # Divided by the largest entry, since |g|^q over- or underflows for p near 1; δ/‖δ‖_p does not change.
    top = torch.stack([t.abs().max() for t in parts.values()]).max()
    share = {n: t.abs() / (top + _TINY) for n, t in parts.items()}
    total = torch.stack([t.pow(q).sum() for t in share.values()]).sum()
    climb = {n: t.sign() * share[n].pow(q - 1) for n, t in parts.items()}
    return TensorDict(climb), total.pow(1 - 1 / q)


def layer_scores(a: TensorDict, b: TensorDict, groups: Groups, norm: ScoreNorm = "sum") -> Tensor:
    """Return the score ξ_l of every layer, [layers], from ‖a_l − b_l‖₂ / dim_l (PLGU eqs. 6 and 10).

    `norm`: sum divides by the sum over layers, so that Σξ = 1, as the paper claims (dividing by dim_l alone does not
    give this); mean divides by the mean, so that layer-wise radii have the scale of SAM's; none keeps the distances;
    ones ignores them. Scores are uniform if all distances are 0 (the first round) or one is not finite.
    """
    if norm == "ones":
        return torch.ones(len(groups))
    distances = []
    for group in groups:
        square = torch.stack([(a.get(n) - b.get(n)).square().sum() for n in group]).sum()
        distances.append(square.sqrt() / sum(a.get(n).numel() for n in group))
    raw = torch.stack(distances)
    total = raw.sum()
    usable = torch.isfinite(total) & (total > 0)
    share = torch.where(usable, raw / torch.where(usable, total, 1.0), 1.0 / len(groups))
    if norm == "none":
        return torch.where(usable, raw, share)
    return share * len(groups) if norm == "mean" else share
