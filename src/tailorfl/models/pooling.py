"""Max-pooling and ReLU that a convolution of many clients takes along.

The image that a convolution makes is larger than what pooling leaves of it. Where each client's image is pooled as soon
as it is there, it is still in the cache, and only what pooling leaves is put together and kept for the backward pass:

    y = conv(x, W),   p = max over windows of y,   out = max(p, 0)          for one client after another

ReLU does not fall, so pooling before it or behind it gives the same outputs and gradients; pooling first is less work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tailorfl.models.layouts import empty

Pair = tuple[int, int]
Layer = TypeVar("Layer", bound=nn.Module)


@dataclass(frozen=True)
class Pool:
    """Max-pooling, and the ReLU before or behind it."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil: bool

    def __call__(self, y: Tensor) -> Tensor:
        """[batch, channels, height, width] -> the same with smaller images."""
        p = F.max_pool2d(y, self.kernel, self.stride, self.padding, self.dilation, self.ceil)
        return p.relu()

    def apart(
        self, images: Iterable[Tensor], clients: int, channels_last: bool
    ) -> tuple[Tensor, Tensor, torch.Size]:
        """Pools one client's images after another.

        Returns (pooled images of all clients, places of the largest numbers, shape of one client's images before).
        """
        out = maxima = None
        size = torch.Size()
        for i, y in enumerate(images):
            if out is None or maxima is None:
                size = y.shape
                p, at = torch.ops.aten.max_pool2d_with_indices(y, *self._how)
                out, maxima = empty(p, clients, channels_last), empty(at, clients, channels_last)
                out[0], maxima[0] = p, at
            else:
                to = {"out": out[i], "indices": maxima[i]}
                torch.ops.aten.max_pool2d_with_indices.out(y, *self._how, **to)
            out[i].relu_()
        assert out is not None
        assert maxima is not None
        return out, maxima, size

    def back(
        self, g: Tensor, out: Tensor, maxima: Tensor, size: torch.Size, channels_last: bool
    ) -> Iterator[Tensor]:
        """Yield the gradient of one client's images after another, all in the same memory.

        `g` and `out` [clients, batch, channels, height, width], the gradient of what `apart` returned and that itself.
        """
        # The operation wants the images, of which it takes the shape alone.
        images = empty(g.new_empty(1).expand(size), 1, channels_last)[0]
        gradient = torch.empty_like(images)
        for i in range(len(g)):
            before = torch.ops.aten.threshold_backward(g[i], out[i], 0)
            torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
                before, images, *self._how, maxima[i], grad_input=gradient
            )
            yield gradient

    @property
    def _how(self) -> tuple[list[int], list[int], list[int], list[int], bool]:
        return list(self.kernel), list(self.stride), list(self.padding), list(self.dilation), self.ceil


def of_all(pool: Pool, y: Tensor) -> Tensor:
    """Return `pool` of the images of all clients, [clients, batch, channels, height, width]."""
    p = pool(y.flatten(0, 1))
    return p.view(*y.shape[:2], *p.shape[1:])


def taken_along(module: nn.Module, convolution: type[Layer]) -> dict[Layer, Pool]:
    """Take the pooling and the ReLU behind convolutions out of a chain, and return what convolutions then have to do.

    Only out of plain `nn.Sequential` networks, all the way from the outside: in others, code that is not known here may
    look at what lies between. For the same reason not where hooks or the attribute `feature_layer` might.
    """
    if hasattr(module, "feature_layer"):
        return {}
    pools: dict[Layer, Pool] = {}
    for chain in _chains(module):
        names = [name for name, part in chain._modules.items() if type(part) is not nn.Identity]
        for conv, *followers in zip(names, names[1:], names[2:], strict=False):
            layer, *following = (chain._modules[name] for name in (conv, *followers))
            pool = _pool_of(following)
            if pool is None or not isinstance(layer, convolution) or _watched(layer, *following):
                continue
            if sum(part is layer for part in _occurrences(module)) == 1:
                pools[layer] = pool
                for name in followers:
                    chain._modules[name] = nn.Identity()
    return pools


def _chains(module: nn.Module | None) -> Iterator[nn.Sequential]:
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        if not _watched(module):
            yield module
        for part in module._modules.values():
            yield from _chains(part)


def _occurrences(module: nn.Module) -> Iterator[nn.Module | None]:
    for owner in module.modules():
        yield from owner._modules.values()


def _watched(*parts: nn.Module | None) -> bool:
    return any(p is not None and (p._forward_hooks or p._forward_pre_hooks) for p in parts)


def _pool_of(following: Sequence[nn.Module | None]) -> Pool | None:
    kinds = {type(part): part for part in following}
    pool = kinds.get(nn.MaxPool2d)
    if set(kinds) != {nn.MaxPool2d, nn.ReLU} or not isinstance(pool, nn.MaxPool2d) or pool.return_indices:
        return None
    kernel, padding, dilation = _pair(pool.kernel_size), _pair(pool.padding), _pair(pool.dilation)
    return Pool(kernel, _pair(pool.stride), padding, dilation, pool.ceil_mode)


def _pair(size: int | tuple[int, ...]) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
