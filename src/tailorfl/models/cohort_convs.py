"""Convolutions and pooling of a whole cohort at once, with separate weights for every client.

As `tailorfl.models.cohort_layers`, on physical tensors [clients, batch, channels, height, width]: large convolutions
client by client, small ones as one grouped convolution, 1x1 ones as linear layers.

A convolution includes the max-pooling and the ReLU that follow it. Its output is larger than the pooled one. Each
client's output is pooled at once, while it is still in the cache, and only pooled outputs are stacked and kept for the
backward pass:

    y = conv(x, W),   p = max over windows of y,   out = max(p, 0)          for one client after another

ReLU is monotonic, so pooling before or after it gives the same outputs and gradients; pooling first is less work.

Pooling that follows another layer, such as a norm, is a layer of its own. torch pools images with channels first much
more slowly than with channels last, so these images are rearranged first. The numbers stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import (
    _add_batch_dim,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_level,
)
from torch.nn import functional as F

from tailorfl.models.cohort_layers import WeightStep, linear, step_of
from tailorfl.models.half import rounded
from tailorfl.models.mapping import front, mapped_once, outside, physical, together

SMALL_CONV = 200_000
"""Floating-point operations per sample below which a loop over clients costs more than one grouped convolution."""
MANY_CHANNELS = 6
"""Channels from which on images with channels first are pooled faster if they are rearranged first."""
Pair = tuple[int, ...]
"""One number for each of the two axes of an image."""
Window = tuple[Pair, Pair, Pair, Pair, bool]
"""Kernel, stride, padding and dilation of a pooling, and whether it rounds sizes up."""
Layer = TypeVar("Layer", bound=nn.Module)


def arranged(x: Tensor, channels_last: bool) -> Tensor:
    """Return `x` [clients, batch, channels, height, width] in the given memory order."""
    if not channels_last:
        return x.contiguous()
    batch, channels, height, width = x.shape[1:]
    if channels == 1:
        # Both orders are the same in memory; only these strides mark channels as last.
        pixels = height * width
        return x.contiguous().as_strided(x.shape, (batch * pixels, pixels, 1, width, 1))
    return x.movedim(2, -1).contiguous().movedim(-1, 2)


def stacked(images: Iterable[Tensor], clients: int, channels_last: bool) -> Tensor:
    """Stack each client's images into [clients, batch, channels, height, width] in the given memory order."""
    out: Tensor | None = None
    for i, image in enumerate(images):
        if clients == 1:
            if not channels_last:
                return image.contiguous().unsqueeze(0)
            return image.movedim(1, -1).contiguous().unsqueeze(0).movedim(-1, 2)
        if out is None:
            out = empty(image, clients, channels_last)
        out[i] = image
    assert out is not None
    return out


def empty(like: Tensor, clients: int, channels_last: bool) -> Tensor:
    """Return an empty [clients, batch, channels, height, width] in the given order; `like` is one client's part."""
    if not channels_last:
        return like.new_empty(clients, *like.shape)
    batch, channels, height, width = like.shape
    return like.new_empty(clients, batch, height, width, channels).movedim(-1, 2)


@dataclass(frozen=True)
class Pool:
    """Max-pooling, and the ReLU before or after it."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil: bool

    def __call__(self, y: Tensor) -> Tensor:
        """[batch, channels, height, width] -> the same with smaller images."""
        return max_pool(y, self._how).relu()

    def apart(
        self, images: Iterable[Tensor], clients: int, channels_last: bool
    ) -> tuple[Tensor, Tensor, torch.Size]:
        """Pool one client's images after another.

        Returns (pooled images of all clients, indices of the maxima, shape of one client's images before pooling).
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

        `out` [clients, batch, channels, height, width] are the images that `apart` returned, `g` their gradient.
        """
        # The operation requires the images but uses only their shape.
        images = empty(g.new_empty(1).expand(size), 1, channels_last)[0]
        gradient = torch.empty_like(images)
        for i in range(len(g)):
            before = torch.ops.aten.threshold_backward(g[i], out[i], 0)
            torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
                before, images, *self._how, maxima[i], grad_input=gradient
            )
            yield gradient

    @property
    def _how(self) -> Window:
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil


def max_pool(images: Tensor, window: Window) -> Tensor:
    """Return the pooled images, [batch, channels, height, width], with channels first or last as the input."""
    if (
        images.device.type != "cpu"
        or images.dim() != 4
        or images.shape[1] < MANY_CHANNELS
        or is_functorch_wrapped_tensor(images)
        or images.is_contiguous(memory_format=torch.channels_last)
    ):
        return F.max_pool2d(images, *window)
    pooled: Tensor = _ChannelsLastPool.apply(images, window)  # type: ignore[no-untyped-call]
    return pooled


class _ChannelsLastPool(torch.autograd.Function):
    """Pool images with channels first; forward with channels last, backward with channels first, each the faster."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, window: Window) -> Tensor:
        last = images.contiguous(memory_format=torch.channels_last)
        pooled, maxima = torch.ops.aten.max_pool2d_with_indices(last, *window)
        ctx.window = window
        ctx.save_for_backward(images, maxima)
        first: Tensor = pooled.contiguous()
        return first

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        images, maxima = ctx.saved_tensors
        return torch.ops.aten.max_pool2d_with_indices_backward(g, images, *ctx.window, maxima), None


class MaxPool2d(nn.MaxPool2d):
    """Max-pooling of images that may have a client axis."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, channels, height, width] -> the same with smaller images."""
        if self.return_indices:
            with_indices: Tensor = super().forward(input)
            return with_indices
        window = _window(self)
        if not is_batchedtensor(input) or input.dim() != 4 or not mapped_once(input):
            return max_pool(input, window)
        level = maybe_get_level(input)
        with outside():
            y = torch.stack([max_pool(images, window) for images in front(*physical(input), 0)])
        out: Tensor = _add_batch_dim(y, 0, level)
        return out


def of_all(pool: Pool, y: Tensor) -> Tensor:
    """Apply `pool` to the images of all clients, [clients, batch, channels, height, width]."""
    p = pool(y.flatten(0, 1))
    return p.view(*y.shape[:2], *p.shape[1:])


def taken_along(module: nn.Module, convolution: type[Layer]) -> dict[Layer, Pool]:
    """Remove the pooling and the ReLU after convolutions from a network, and return the pooling of each convolution.

    Only from chains of plain `nn.Sequential` up to the outermost module: in others, unknown code may read the tensors
    in between. So may hooks and the attribute `feature_layer`; modules with them are left alone.
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
    pool = kinds.get(MaxPool2d, kinds.get(nn.MaxPool2d))
    if set(kinds) != {type(pool), nn.ReLU} or not isinstance(pool, nn.MaxPool2d) or pool.return_indices:
        return None
    return Pool(*_window(pool))


def _window(pool: nn.MaxPool2d) -> Window:
    sizes = (_pair(n) for n in (pool.kernel_size, pool.stride, pool.padding, pool.dilation))
    kernel, stride, padding, dilation = sizes
    return kernel, stride, padding, dilation, pool.ceil_mode


def _pair(size: int | tuple[int, ...]) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


class Conv2d(nn.Conv2d):
    """A convolution whose weight may have a client axis."""

    channels_last: bool
    """Whether convolutions that run client by client use this layout, see `Skeleton`."""
    pool: Pool | None = None
    """The pooling that this layer includes, see `taken_along`."""

    def forward(self, input: Tensor) -> Tensor:
        """[batch, channels, height, width] -> the same with other sizes."""
        plain = self.padding_mode == "zeros" and input.dim() == 4
        if is_batchedtensor(self.weight) and plain and not isinstance(self.padding, str):
            layer = partial(
                conv2d,
                stride=self.stride,
                padding=self.padding,
                dilation=self.dilation,
                groups=self.groups,
                channels_last=self.channels_last,
                pool=self.pool,
            )
            outputs = together(layer, input, self.weight, self.bias)
            if outputs is not None:
                return outputs
        plain_outputs: Tensor = self._conv_forward(input, self.weight, self.bias)
        return plain_outputs if self.pool is None else self.pool(plain_outputs)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    channels_last: bool,
    pool: Pool | None = None,
) -> Tensor:
    """Return every client's convolution, pooled if `pool` is given, [clients, batch, out, height, width].

    `x` [clients, batch, in, height, width]; `weight` [clients, out, in / groups, kernel, kernel]; `bias` [clients,
    out].
    """
    clients, batch, channels, height, width = x.shape
    kernel = weight.shape[-2:]
    if kernel == (1, 1) and stride == (1, 1) and padding == (0, 0) and groups == 1:
        y = linear(x.movedim(2, -1), weight.flatten(2), bias).movedim(-1, 2)
        return y if pool is None else of_all(pool, y)
    if 2 * height * width * weight[0].numel() // (stride[0] * stride[1]) < SMALL_CONV:
        merged = x.transpose(0, 1).reshape(batch, clients * channels, height, width)
        flat = None if bias is None else bias.reshape(-1)
        y = F.conv2d(merged, weight.flatten(0, 1), flat, stride, padding, dilation, clients * groups)
        y = y if pool is None else pool(y)
        return y.view(batch, clients, weight.shape[1], *y.shape[-2:]).transpose(0, 1)
    result: Tensor = _CohortConv.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, (stride, padding, dilation, groups), channels_last, pool
    )
    return result


class _CohortConv(torch.autograd.Function):
    """Run one client's convolution and pooling after another, which is fastest for libraries and caches."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: tuple[Any, ...],
        channels_last: bool,
        pool: Pool | None,
    ) -> Tensor:
        x, w = arranged(rounded(x), channels_last), rounded(weight)
        bias = None if bias is None else rounded(bias)
        ctx.how, ctx.last, ctx.pool = geometry, channels_last, pool
        ctx.share, ctx.biased = step_of(weight), bias is not None
        clients = len(weight)
        images = (F.conv2d(x[i], w[i], None if bias is None else bias[i], *geometry) for i in range(clients))
        if pool is None:
            out, maxima = stacked(images, clients, channels_last), None
        else:
            out, maxima, ctx.unpooled = pool.apart(images, clients, channels_last)
        ctx.save_for_backward(x, w, weight, None if pool is None else out, maxima)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, weight, out, maxima = ctx.saved_tensors
        share: WeightStep | None = ctx.share
        pool: Pool | None = ctx.pool
        stride, padding, dilation, groups = ctx.how
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        mask = [needs_x, needs_w, ctx.biased and needs_b]
        g = arranged(g, ctx.last)
        gradients = g.unbind() if pool is None else pool.back(g, out, maxima, ctx.unpooled, ctx.last)
        by_client: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        for i, gradient in enumerate(gradients):
            dx, dw, db = torch.ops.aten.convolution_backward(
                gradient,
                x[i],
                w[i],
                [weight.shape[1]],
                stride,
                padding,
                dilation,
                False,
                [0, 0],
                groups,
                mask,
            )
            if share is not None:
                share.subtract(weight, i, dw)
                dw = None
            by_client.append((dx, dw, db))
        return (
            stacked((dx for dx, _, _ in by_client), len(by_client), ctx.last) if needs_x else None,
            torch.stack([dw for _, dw, _ in by_client if dw is not None])
            if needs_w and share is None
            else None,
            torch.stack([db for _, _, db in by_client if db is not None]) if mask[2] else None,
            None,
            None,
            None,
        )
