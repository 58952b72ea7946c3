"""Sharpness-aware ascent: the gradient is taken at p + ε, where ε climbs the loss of the same batch.

SAM (Foret et al., ICLR 2021):            ε = ρ g / ‖g‖₂, one norm over all tensors
layer-wise SAM (PLGU, CVPR 2023, eq. 5):  ε_l = ρ ξ_l g_l / ‖g‖₂, ‖g‖₂ over ALL layers. The printed exponent
                                          (p−1) is a slip: for p = 2 it would divide by ‖g‖².
ASAM form:                                ε = ρ Λ²g / ‖Λg‖₂, the exact maximiser of F(θ + Λε) over ‖ε‖ ≤ ρ

| symbol | here |
|---|---|
| ρ | `rho` |
| ξ_l | `scores[l]`, [layers] |
| layer l | `groups[l]`, names of its parameters |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.gradients import Direction, Gradient

_TINY = 1e-12


class Ascent(Protocol):
    """How far and where a step looks uphill before it descends."""

    @property
    def direction(self) -> Direction:
        """The direction for `Client.fit`."""

    def given(self, given: Sequence[Tensor | TensorDict]) -> Sequence[Tensor | TensorDict]:
        """The per-client inputs of the direction."""


@dataclass(frozen=True)
class SAM:
    """Sharpness-aware minimisation with one radius for the whole model."""

    rho: float = 0.05

    @property
    def direction(self) -> Direction:
        """∇F(p + ρ g/‖g‖)."""

        def ascend(state: TensorDict, grad: Gradient) -> TensorDict:
            g = grad(state)
            return grad(state + g * (self.rho / (tree.norm(g) + _TINY)))

        return ascend

    def given(self, given: Sequence[Tensor | TensorDict]) -> Sequence[Tensor | TensorDict]:
        """Nothing per client."""
        return given


@dataclass(frozen=True)
class LayerwiseSAM:
    """SAM whose radius is scaled layer by layer by scores ξ, which may differ from client to client."""

    rho: float
    groups: tuple[tuple[str, ...], ...]
    scores: Tensor
    form: Literal["paper", "asam"] = "paper"

    @property
    def direction(self) -> Direction:
        """∇F(p + ε)."""

        def ascend(state: TensorDict, grad: Gradient, scores: Tensor) -> TensorDict:
            return grad(state + self.perturbation(grad(state), scores))

        return ascend

    def given(self, given: Sequence[Tensor | TensorDict]) -> Sequence[Tensor | TensorDict]:
        """The scores, after whatever else is given."""
        return (*given, self.scores)

    def perturbation(self, g: TensorDict, scores: Tensor) -> TensorDict:
        """Returns ε for the gradient `g`, with the names of `g`; `scores` [layers]."""
        of = {name: scores[i] for i, group in enumerate(self.groups) for name in group}
        scaled = TensorDict({n: of[n] * t for n, t in g.items()}, batch_size=[])
        if self.form == "paper":
            return scaled * (self.rho / (tree.norm(g) + _TINY))
        twice: dict[str, Any] = {n: of[n] * t for n, t in scaled.items()}
        return TensorDict(twice, batch_size=[]) * (self.rho / (tree.norm(scaled) + _TINY))


def layer_scores(a: TensorDict, b: TensorDict, groups: tuple[tuple[str, ...], ...]) -> Tensor:
    """Returns ξ_l = ‖a_l − b_l‖₂ / dim_l divided by its sum, [layers] (PLGU eq. 4).

    Uniform where all distances are 0 or one is not finite.
    """
    distances = []
    for group in groups:
        square = torch.stack([(a.get(n) - b.get(n)).square().sum() for n in group]).sum()
        distances.append(square.sqrt() / sum(a.get(n).numel() for n in group))
    raw = torch.stack(distances)
    total = raw.sum()
    usable = torch.isfinite(total) & (total > 0)
    return torch.where(usable, raw / torch.where(usable, total, 1.0), 1.0 / len(groups))
