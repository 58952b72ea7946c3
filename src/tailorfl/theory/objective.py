"""A client's loss as a function of ONE vector, with its gradients and curvature, for the advisor's measurements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from tailorfl.data.source import Source
from tailorfl.errors import DataError
from tailorfl.models.functional import Model
from tailorfl.partition.rows import Ints
from tailorfl.training import tree
from tailorfl.training.objective import Loss


@dataclass(frozen=True, eq=False)
class Objective:
    """`F(theta; rows)`: mean loss of the samples `rows`, plus `(weight_decay/2) ||theta||^2`.

    theta `[d]` holds the parameters in module order; buffers stay those of `state`.
    """

    model: Model
    loss: Loss
    source: Source
    state: TensorDict
    weight_decay: float = 0.0
    dtype: torch.dtype = torch.float32

    @property
    def size(self) -> int:
        """d, the length of theta."""
        return self.model.scalars

    @cached_property
    def separable(self) -> bool:
        """Whether the loss of a batch is a mean of losses of single samples."""
        return not self.loss.mixes

    @cached_property
    def affine(self) -> bool:
        """Whether outputs are affine in theta, so that each of our losses is convex; tested on a few samples.

        A second difference of an affine function is zero for any two points.
        """
        x = self.source.take(torch.arange(min(8, len(self.source))))
        x = x.double() if x.is_floating_point() else x
        generator = torch.Generator().manual_seed(0)
        first, second = torch.randn(2, self.size, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            end, back, middle = (
                self.model(self.tensors(point), x) for point in (first, second, 0.5 * (first + second))
            )
        scale = max(float(end.abs().max()), float(back.abs().max()), 1e-12)
        return bool(((end + back) / 2 - middle).abs().max() < 1e-9 * scale)

    def flat(self, state: TensorDict) -> Tensor:
        """Return theta `[d]` of a model state."""
        return torch.cat([state.get(name).reshape(-1) for name in self.model.parameters]).to(self.dtype)

    def value(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return F, 0-d, of samples `x` `[batch, ...]` with targets `y` `[batch, ...]`."""
        penalty = 0.5 * self.weight_decay * theta.square().sum()
        return self.loss(self.model(self.tensors(theta), x), y, None) + penalty

    def samples(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """Return x and y of rows of the source, in this objective's dtype.

        Raises:
            DataError: if one of them is not finite; names the row.
        """
        index = torch.from_numpy(rows)
        x, y = self.source.take(index), self.source.targets(index)
        for values in (x, y):
            if values.is_floating_point() and not torch.isfinite(values).all():
                bad = int(torch.nonzero(~torch.isfinite(values).flatten(1).all(1))[0])
                raise DataError(
                    f"source '{self.source.name}': sample {int(rows[bad])} holds NaN or infinity; "
                    "remove or fill it"
                )
        return self.cast(x), self.cast(y)

    def cast(self, values: Tensor) -> Tensor:
        """Return `values` in this objective's dtype; classes and token ids stay as they are."""
        return values.to(self.dtype) if values.is_floating_point() else values

    def gradient(self, theta: Tensor, rows: Ints) -> Tensor:
        """Return the gradient of F, `[d]`."""
        gradient: Tensor = grad(self.value)(theta, *self.samples(rows))
        return gradient

    def hessian(self, theta: Tensor, rows: Ints) -> Tensor:
        """Return the Hessian of F, `[d, d]`; for small d."""
        hessian: Tensor = jacrev(grad(self.value))(theta, *self.samples(rows))
        return hessian

    def along(self, theta: Tensor, rows: Ints, direction: Tensor) -> Tensor:
        """Return the Hessian of F times `direction`, `[d]`, without computing the Hessian."""
        x, y = self.samples(rows)
        product: Tensor = jvp(lambda point: grad(self.value)(point, x, y), (theta,), (direction,))[1]
        return product

    def sample_gradients(self, theta: Tensor, rows: Ints) -> Tensor:
        """Return the gradient of every sample's loss, `[rows, d]`; needs a separable loss."""
        of_sample = grad(lambda point, x, y: self.value(point, x.unsqueeze(0), y.unsqueeze(0)))
        gradients: Tensor = vmap(of_sample, in_dims=(None, 0, 0))(theta, *self.samples(rows))
        return gradients

    def tensors(self, theta: Tensor) -> dict[str, Tensor]:
        """Return every tensor of the model by name, with the parameters from theta."""
        state = tree.tensors(self.state)
        out = {n: t.to(theta.dtype) if t.is_floating_point() else t for n, t in state.items()}
        parts = torch.split(theta, [self.model.sizes[name] for name in self.model.parameters])
        for name, part in zip(self.model.parameters, parts, strict=True):
            out[name] = part.reshape(state[name].shape)
        return out
