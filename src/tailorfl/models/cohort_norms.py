"""Normalisation of the images of a whole cohort at once, in which every client has statistics of its own.

As `tailorfl.models.cohort_layers`: physical tensors [clients, batch, channels, height, width] in place of what
`torch.func.vmap` makes of a norm, which copies its input into another order. Large images go client by client, small
ones together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._C._functorch import _add_batch_dim, is_batchedtensor, maybe_get_level
from torch.nn import functional as F

from tailorfl.models.half import widened
from tailorfl.models.mapping import front, mapped_once, outside, physical

LARGE = 20_000
"""Numbers of one client's batch from which on it is normalised by itself."""


class GroupNorm(nn.GroupNorm):
    """A group norm of images that may be many clients'."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, channels, ...] -> the same."""
        if not is_batchedtensor(input) or not mapped_once(input, self.weight, self.bias):
            return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        level = maybe_get_level(input)
        with outside():
            x = front(*physical(input), 0)
            weight, bias = (
                None if t is None else front(*physical(t), len(x)) for t in (self.weight, self.bias)
            )
            y = self._large(x, weight, bias) if x[0].numel() >= LARGE else self._small(x, weight, bias)
        out: Tensor = _add_batch_dim(y, 0, level)
        return out

    def _large(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        none = [None] * len(x)
        by_client = zip(
            x.contiguous().unbind(),
            none if weight is None else weight.unbind(),
            none if bias is None else bias.unbind(),
            strict=True,
        )
        return torch.stack(
            [F.group_norm(images, self.num_groups, w, b, self.eps) for images, w, b in by_client]
        )

    def _small(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = F.group_norm(x.flatten(0, 1).contiguous(), self.num_groups, eps=self.eps).reshape(x.shape)
        shape = (len(x), 1, -1, *[1] * (x.dim() - 3))
        if weight is not None:
            y = y * weight.reshape(shape)
        return y if bias is None else y + bias.reshape(shape)


class BatchNorm1d(nn.BatchNorm1d):
    """A batch norm of features, in float32: mapped over clients it takes one type only, and statistics are that."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, features] or [batch, channels, length] -> the same."""
        return super().forward(widened(input))


class BatchNorm2d(nn.BatchNorm2d):
    """A batch norm of images that may be many clients', in float32."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, channels, height, width] -> the same; in training mode running statistics change in place."""
        input = widened(input)
        tensors = (input, self.weight, self.bias, self.running_mean, self.running_var)
        if (
            not is_batchedtensor(input)
            or self.momentum is None
            or self.running_mean is None
            or self.running_var is None
            or not mapped_once(*tensors)
            or (self.training and not is_batchedtensor(self.running_mean))
        ):
            return super().forward(input)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        level = maybe_get_level(input)
        with outside():
            x = front(*physical(input), 0)
            clients = len(x)
            outputs = [
                [None] * clients if t is None else front(*physical(t), clients).unbind() for t in tensors[1:]
            ]
            parts = zip(x.contiguous().unbind(), *outputs, strict=True)
            y = torch.stack(
                [
                    F.batch_norm(images, mean, var, w, b, self.training, self.momentum, self.eps)
                    for images, w, b, mean, var in parts
                ]
            )
        out: Tensor = _add_batch_dim(y, 0, level)
        return out
