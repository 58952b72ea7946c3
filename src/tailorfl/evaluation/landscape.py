"""The loss around models: on a plane through one along two random directions, or on the plane through three.

    L(a, b) = F(w + a u + b v)                                    F: the mean loss, in evaluation mode

**Random directions** (Li et al., "Visualizing the Loss Landscape of Neural Nets", NeurIPS 2018; PLGU, figure 7): u and
v are normal, each filter (row of a linear layer) rescaled to the norm of the same filter of w, and 0 for biases and
norm layers. So 1 on an axis is as far as the weights are large, whatever their scale.

**Three models** (FedOA, figure 3): w is the first, u points to the second, v is the part of the way to the third that
is orthogonal to u. Axes are in units of the distance between the first two; running statistics are the first model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.evaluation.sharpness import mean_loss
from tailorfl.models.functional import Model
from tailorfl.training.keys import torch_seed

Vector = dict[str, Tensor]


@dataclass(frozen=True)
class Plane:
    """A point and two directions in the space of a model's parameters, and where known models lie."""

    origin: TensorDict
    u: Vector
    v: Vector
    points: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    """(a, b) of the models that the plane was made of."""

    def at(self, a: float, b: float) -> dict[str, Tensor]:
        """Returns the state at w + a u + b v."""
        moved = {n: self.origin.get(n) + a * self.u[n] + b * self.v[n] for n in self.u}
        return {**{str(n): t for n, t in self.origin.items()}, **moved}


def random_plane(model: Model, state: TensorDict, seed: int = 0) -> Plane:
    """Returns the plane along two filter-normalised random directions, a function of `seed`."""
    generator = torch.Generator().manual_seed(torch_seed(seed, "landscape"))
    u, v = (_filter_normalised(model, state, generator) for _ in range(2))
    return Plane(state, u, v)


def plane_through(model: Model, states: Sequence[TensorDict]) -> Plane:
    """Returns the plane through three models.

    Raises:
        ConfigError: not three models, or three that lie on a line (two equal ones among them).
    """
    if len(states) != 3:
        raise ConfigError(f"a plane goes through three models, but {len(states)} were given")
    first, second, third = ({n: s.get(n).double() for n in model.parameters} for s in states)
    u = {n: second[n] - first[n] for n in first}
    to_third = {n: third[n] - first[n] for n in first}
    length = _dot(u, u) ** 0.5
    share = _dot(u, to_third) / max(length**2, 1e-300)
    v = {n: to_third[n] - share * u[n] for n in first}
    height = _dot(v, v) ** 0.5
    if length == 0 or height <= 1e-6 * length:
        raise ConfigError("the three models lie on a line, two of them may be equal; name three that differ")
    places = ((0.0, 0.0), (1.0, 0.0), (share, height / length))
    v = {n: t * (length / height) for n, t in v.items()}
    like = states[0]
    u, v = ({n: t.to(like.get(n).dtype) for n, t in d.items()} for d in (u, v))
    return Plane(like, u, v, places)


def losses(
    model: Model, plane: Plane, source: Source, rows: Tensor, a: Sequence[float], b: Sequence[float]
) -> NDArray[np.float64]:
    """Returns the mean loss on samples `rows` at every (a, b), [b, a]."""
    return np.array([[mean_loss(model, plane.at(x, y), source, rows) for x in a] for y in b])


def _filter_normalised(model: Model, state: TensorDict, generator: torch.Generator) -> Vector:
    out = {}
    for name in model.parameters:
        weight = state.get(name)
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)
        if weight.ndim < 2:
            out[name] = torch.zeros_like(weight)
            continue
        own, given = (t.flatten(1).norm(dim=1) for t in (drawn, weight))
        out[name] = drawn * (given / own.clamp(min=1e-12)).reshape(-1, *[1] * (weight.ndim - 1))
    return out


def _dot(a: Vector, b: Vector) -> float:
    return float(sum((a[n] * b[n]).sum() for n in a))
