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
LENGTH, OPTIONS, OPTION_LENGTH = 9, 3, 4
"""Of a text, which is the prompt where options follow it."""
CHOICE = {"head": "choice", "option_length": OPTION_LENGTH}


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


def made(name: str, spread: bool = False, **options: object) -> nn.Module:
    """A tiny model in evaluation mode, of 4 classes, `OPTIONS` options or `TOKENS` tokens.

    Args:
        name: Of the model.
        spread: Whether its parameters are far from the start, where attention is uniform.
        options: Of the model.
    """
    torch.manual_seed(0)
    head = options.get("head")
    outputs = {"language": TOKENS, "choice": OPTIONS}.get(str(head), 4)
    shape = (1, 8, 12) if name == "vit" else (LENGTH + (head == "choice") * OPTIONS * OPTION_LENGTH,)
    module = build(name, shape, outputs, **options, **({} if name == "vit" else {"vocabulary": TOKENS}))
    if spread:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
    return module.eval()


def side_of(name: str) -> str:
    """Where the padding of such a model's texts is."""
    return "left" if name == "llama" else "right"


def batch(name: str, seed: int = 0, length: int = LENGTH) -> Tensor:
    """Four samples of such a model, texts with padding."""
    if name == "vit":
        return torch.randn(4, 1, 8, 12, generator=torch.Generator().manual_seed(seed))
    return ragged(4, length, side_of(name), seed=seed)


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
