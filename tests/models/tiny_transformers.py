"""Tiny transformers and token ids for tests; skips them where the packages are missing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tailorfl.models.registry import build

pytest.importorskip("transformers", reason="pip install 'tailorfl[text]'")
pytest.importorskip("peft", reason="pip install 'tailorfl[text]'")

TOKENS = 40
"""Ids 2 ... 39 are text, 0 is padding, 1 the end."""
LENGTH = 9
"""Of a text."""


def text(*shape: int, seed: int = 0) -> Tensor:
    """Random ids without padding, int64 of `shape`."""
    return torch.randint(2, TOKENS, shape, generator=torch.Generator().manual_seed(seed))


def padded(ids: Tensor, count: int, side: str) -> Tensor:
    """The same rows with `count` more tokens of padding at a side."""
    more = torch.zeros(*ids.shape[:-1], count, dtype=torch.int64)
    return torch.cat([more, ids] if side == "left" else [ids, more], -1)


def ragged(rows: int, length: int, side: str, seed: int = 0) -> Tensor:
    """Rows of 2 to `length` tokens with padding at a side, int64 [rows, length]."""
    ids = text(rows, length, seed=seed)
    real = torch.arange(2, 2 + rows).clamp(max=length).unsqueeze(1)
    place = torch.arange(length) if side == "right" else torch.arange(length).flip(0)
    return torch.where(place < real, ids, 0)


def made(name: str, **options: object) -> nn.Module:
    """A tiny model in evaluation mode, of 4 classes or `TOKENS` tokens."""
    torch.manual_seed(0)
    if name == "vit":
        return build("vit", (1, 8, 8), 4, **options).eval()
    outputs = TOKENS if options.get("head") == "language" else 4
    return build(name, (LENGTH,), outputs, vocabulary=TOKENS, **options).eval()


def batch(name: str, seed: int = 0) -> Tensor:
    """Four samples of such a model, texts with padding."""
    if name == "vit":
        return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return ragged(4, LENGTH, "left" if name == "llama" else "right", seed=seed)


def disturbed(module: nn.Module, names: list[str], clients: int, scale: float = 0.1) -> dict[str, Tensor]:
    """The named parameters, different for every client, [clients, ...]."""
    held = dict(module.named_parameters())
    source = torch.Generator().manual_seed(1)

    def noise(tensor: Tensor) -> Tensor:
        return scale * torch.randn(clients, *tensor.shape, generator=source)

    return {name: held[name].detach() + noise(held[name]) for name in names}


def assert_vmap_is_the_loop(module: nn.Module, names: list[str], x: Tensor) -> None:
    """Forward pass and gradient over clients, `x` [clients, batch, ...], each with its own named parameters."""
    stacked = disturbed(module, names, len(x))
    weight = torch.randn(module(x[0]).shape, generator=torch.Generator().manual_seed(2))

    def loss(part: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        out = functional_call(module, part, (rows,))
        return (weight * out).clamp(min=-100).sum(), out

    gradients, outputs = vmap(grad(loss, has_aux=True))(stacked, x)
    for i in range(len(x)):
        one, out = grad(loss, has_aux=True)({name: t[i] for name, t in stacked.items()}, x[i])
        torch.testing.assert_close(outputs[i], out, atol=1e-5, rtol=1e-4)
        for name in names:
            assert one[name].isfinite().all()
            torch.testing.assert_close(gradients[name][i], one[name], atol=2e-5, rtol=1e-3)
