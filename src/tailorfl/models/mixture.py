"""Several networks of one kind that answer together: outputs log Σ_m π_m σ(f_m(x)), the logarithms of probabilities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from tailorfl.models.dropout import replace_dropout

SHARES = "mixture.shares"
"""The name of π in the state of a `Mixture`."""
LEAST = 1e-30
"""A share counts as so much in a logarithm."""


class Mixing(nn.Module):
    """Logits of all networks beside each other [batch, M · C] -> log Σ_m π_m σ of theirs [batch, C]."""

    shares: Tensor

    def __init__(self, count: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.register_buffer("shares", torch.full((count,), 1.0 / count, dtype=dtype))

    def forward(self, logits: Tensor) -> Tensor:
        """[batch, M · C] -> [batch, C]."""
        shape = (*logits.shape[:-1], len(self.shares), logits.shape[-1] // len(self.shares))
        log_probabilities = logits.reshape(shape).log_softmax(-1)
        return (log_probabilities + self.shares.clamp(min=LEAST).log()[:, None]).logsumexp(-2)


class Mixture(nn.Module):
    """Networks whose probabilities are mixed by shares π; what goes into the mixture are its features."""

    feature_layer = "mixture"

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        first = next((p.dtype for p in self.networks.parameters()), None)
        self.mixture = Mixing(len(networks), first)

    def forward(self, x: Tensor) -> Tensor:
        """Return samples -> logarithms of probabilities [batch, C]."""
        logits: Tensor = self.mixture(torch.cat([network(x) for network in self.networks], -1))
        return logits


def apart(logits: Tensor, count: int) -> Tensor:
    """[batch, M · C] logits of M = `count` networks beside each other -> [batch, M, C]."""
    return logits.reshape(*logits.shape[:-1], count, logits.shape[-1] // count)


def is_shares(name: str, tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor of a model is π; a selector."""
    return isinstance(module, Mixing)


def joined(
    factory: Callable[[], nn.Module],
    prepare: Callable[[nn.Module], object] | None,
    count: int,
    join: Callable[[Sequence[nn.Module]], nn.Module],
) -> nn.Module:
    """Return `count` networks, drawn and prepared one after another, as `join` makes one of them."""
    networks = []
    for _ in range(count):
        network = replace_dropout(factory())
        if prepare is not None:
            prepare(network)
        networks.append(network)
    return join(networks)


def is_live(frozen: Collection[str], name: str, *_: object) -> bool:
    """Whether a tensor of joined networks trains, where those of names `frozen` do not in each."""
    name_parts = name.split(".", 2)
    return name_parts[0] != "networks" or name_parts[2] not in frozen
