"""Rates of single operations: large products and copies, convolutions, what stands between them, linear layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kernel_parts.timing import BATCH, RATE, Table, in_turn
from torch import Tensor
from torch.nn import functional as F

from tailorfl.models.cohort_convs import Pool, conv2d, of_all

CONVOLUTIONS = {"1→32 on 28×28": (1, 32, 28), "32→64 on 14×14": (32, 64, 14)}
"""Channels given and made, and the side of the images, of CNN2."""

convolution_backward = torch.ops.aten.convolution_backward


def limits() -> Table:
    """Return the rates of one core: GFLOP/s of products of 1024³, GB/s read and written by a copy of 256 MB."""
    a, out = torch.randn(1024, 1024), torch.empty(1024, 1024)
    half, half_out = a.bfloat16(), out.bfloat16()
    source, target = torch.randn(2**26), torch.empty(2**26)
    found = in_turn(
        {
            "float32": lambda: torch.mm(a, a, out=out),
            "bfloat16": lambda: torch.mm(half, half, out=half_out),
            "copy": lambda: target.copy_(source),
        },
        repeat=5,
    )
    flops = 2 * 1024**3 / 1e9
    return [
        {
            "float32 GFLOP/s": flops / found["float32"],
            "bfloat16 GFLOP/s": flops / found["bfloat16"],
            "copy GB/s": 2 * 4 * 2**26 / found["copy"] / 1e9,
        }
    ]


def columns(x: Tensor) -> Tensor:
    """[clients, batch, side, side, channels] -> the 3 x 3 windows of padded images, [clients, pixels, 9 channels]."""
    clients, batch, side, _, channels = x.shape
    padded = F.pad(x, (0, 0, 1, 1, 1, 1)).flatten(0, 1)
    images, row = clients * batch, (side + 2) * channels
    windows = padded.as_strided(
        (images, side, side, 3, 3 * channels), ((side + 2) * row, row, channels, row, 1)
    )
    return windows.reshape(clients, batch * side * side, 9 * channels)


def convolution(given: int, made: int, side: int, clients: int = 8) -> Table:
    """Return milliseconds and GFLOP/s of all clients' convolutions 3 x 3; the first layer needs no input gradient.

    Tensors are in the layout of each way before the clock starts.
    """
    x = torch.randn(clients, BATCH, side, side, given)
    w, b = torch.randn(clients, made, 3, 3, given), torch.randn(clients, made)
    g = torch.randn(clients, BATCH, side, side, made)
    mask = [given > 1, True, True]

    def back(g: Tensor, x: Tensor, w: Tensor, groups: int = 1) -> Any:
        return convolution_backward(g, x, w, [len(w)], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, mask)

    def loop(dtype: torch.dtype, last: bool) -> tuple[Callable[[], object], Callable[[], object]]:
        images, weights, signal = (t.movedim(-1, 2).to(dtype) for t in (x, w, g))
        if not last:
            images, weights, signal = images.contiguous(), weights.contiguous(), signal.contiguous()
        bias = b.to(dtype)
        return (
            lambda: [F.conv2d(images[i], weights[i], bias[i], padding=1) for i in range(clients)],
            lambda: [back(signal[i], images[i], weights[i]) for i in range(clients)],
        )

    merged, signal = (t.permute(1, 0, 4, 2, 3).flatten(1, 2).contiguous() for t in (x, g))
    stacked, bias = w.movedim(-1, 2).flatten(0, 1).contiguous(), b.flatten()
    windows, flat = columns(x), w.flatten(2).transpose(1, 2)
    rows = g.view(clients, -1, made)

    def products() -> object:
        dw, db = torch.bmm(rows.transpose(1, 2), windows), rows.sum(1)
        if not mask[0]:
            return dw, db
        turned = w.flip(2, 3).permute(0, 2, 3, 1, 4).reshape(clients, 9 * made, given)
        return dw, db, torch.bmm(columns(g), turned)

    ways = {
        "grouped convolution (vmap)": (
            lambda: F.conv2d(merged, stacked, bias, padding=1, groups=clients),
            lambda: back(signal, merged, stacked, clients),
        ),
        "loop, NCHW": loop(torch.float32, last=False),
        "loop, channels last": loop(torch.float32, last=True),
        "im2col + batched products": (lambda: torch.baddbmm(b.unsqueeze(1), columns(x), flat), products),
        "loop, channels last, bfloat16": loop(torch.bfloat16, last=True),
    }
    forward = in_turn({name: pair[0] for name, pair in ways.items()}, repeat=5)
    backward = in_turn({name: pair[1] for name, pair in ways.items()}, repeat=5)
    flops = 2 * clients * BATCH * side**2 * 9 * given * made / 1e9
    return [
        {
            "way": name,
            "forward ms": 1e3 * forward[name],
            "GFLOP/s": flops / forward[name],
            "backward ms": 1e3 * backward[name],
            "GFLOP/s back": flops * (1 + mask[0]) / backward[name],
        }
        for name in ways
    ]


def between(clients: int = 8) -> Table:
    """Return milliseconds of ReLU and pooling on the first convolution's images of all clients."""
    table: Table = []
    for layout, form in (("NCHW", torch.contiguous_format), ("channels last", torch.channels_last)):
        x = torch.randn(clients * BATCH, 32, 28, 28).to(memory_format=form).requires_grad_()
        for name, layer in (("relu", F.relu), ("max_pool2d 2×2", lambda x: F.max_pool2d(x, 2))):
            y = layer(x)
            found = in_turn(_pass(layer, x, y, torch.randn_like(y)), repeat=5)
            table.append({"way": f"{name}, {layout}", **{f"{way} ms": 1e3 * s for way, s in found.items()}})
    return table


def taken_along(clients: int = 8) -> Table:
    """Return milliseconds of the library's convolutions of all clients with pooling and ReLU, one layer at a time for
    all clients, and with the three done for one client after another."""
    table: Table = []
    for title, (given, made, side) in CONVOLUTIONS.items():
        x = torch.randn(clients, BATCH, side, side, given).movedim(-1, 2).requires_grad_(given > 1)
        w = torch.randn(clients, made, given, 3, 3, requires_grad=True)
        b = torch.randn(clients, made, requires_grad=True)
        how, pool = ((1, 1), (1, 1), (1, 1), 1, True), Pool((2, 2), (2, 2), (0, 0), (1, 1), False)
        wanted = [w, b, *([x] if given > 1 else [])]
        ways = {
            "layer by layer": partial(_layers, x, w, b, how, pool),
            "client by client": partial(conv2d, x, w, b, *how, pool),
        }
        forward = in_turn(dict(ways), repeat=5)
        outputs = {name: way() for name, way in ways.items()}
        g = torch.randn(clients, BATCH, side // 2, side // 2, made).movedim(-1, 2)
        backward = in_turn(
            {
                name: partial(torch.autograd.grad, y, wanted, g, retain_graph=True)
                for name, y in outputs.items()
            },
            repeat=5,
        )
        table += [
            {
                "layer": title,
                "way": name,
                "forward ms": 1e3 * forward[name],
                "backward ms": 1e3 * backward[name],
            }
            for name in ways
        ]
    return table


def _layers(x: Tensor, w: Tensor, b: Tensor, how: Any, pool: Pool) -> Tensor:
    return of_all(pool, conv2d(x, w, b, *how))


def _pass(
    layer: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, g: Tensor
) -> dict[str, Callable[[], object]]:
    plain = x.detach()
    return {
        "forward": lambda: layer(plain),
        "backward": lambda: torch.autograd.grad(y, x, g, retain_graph=True),
    }


def linear() -> Table:
    """Return microseconds a client of the products of a 784 x 200 layer, and the megabytes of weights they move."""
    table: Table = []
    for clients in (4, 16, 64):
        x, w = torch.randn(clients, BATCH, 784), torch.randn(clients, 200, 784)
        g = 1e-6 * torch.randn(clients, BATCH, 200)
        found = in_turn(_products(x, w, g))
        megabytes = 4 * w[0].numel() / 1e6
        moved = {"forward X Wᵀ": 1, "forward W Xᵀ": 1, "gradient + add_": 4}
        moved |= {"transposed gradient + add_": 4, "baddbmm_": 2}
        for name, seconds in found.items():
            each = seconds / clients
            table.append(
                {
                    "clients": clients,
                    "way": name,
                    "µs a client": 1e6 * each,
                    "MB of weights": moved[name] * megabytes,
                    "GB/s": moved[name] * megabytes / 1e3 / each,
                    "GFLOP/s": 2 * BATCH * w[0].numel() / 1e9 / each,
                }
            )
    return table


def _products(x: Tensor, w: Tensor, g: Tensor) -> dict[str, Callable[[], object]]:
    return {
        "forward X Wᵀ": lambda: torch.bmm(x, w.transpose(1, 2)),
        "forward W Xᵀ": lambda: torch.bmm(w, x.transpose(1, 2)),
        "gradient + add_": lambda: w.add_(torch.bmm(g.transpose(1, 2), x), alpha=-RATE),
        "transposed gradient + add_": lambda: w.add_(
            torch.bmm(x.transpose(1, 2), g).transpose(1, 2), alpha=-RATE
        ),
        "baddbmm_": lambda: w.baddbmm_(g.transpose(1, 2), x, alpha=-RATE),
    }
