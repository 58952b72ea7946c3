"""A network with two sets of LoRA, which answer together, weighted for every input.

    y = W x + s (w_g B_g A_g x + w_e B_e A_e x)        in every layer with LoRA
    w_g = mix_0 + κ(x),   w_e = mix_1 − κ(x),   κ(x) = ⟨e(x)/‖e(x)‖, memory⟩

e(x) are the features of x under the second set alone. With memory = 0 the weights are those of `mix` for every input,
and so they are in training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from tailorfl.errors import ModelError
from tailorfl.models.layers import head_layer, head_name

OWN = "own"
"""What the second set is called beside `shared`, the first."""


class TwoDown(nn.Module):
    """The factors A of both sets: x -> (A_g x, A_e x)."""

    def __init__(self, shared: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, own

    @property
    def weight(self) -> Any:
        """That of the first set, whose dtype layers with LoRA look at."""
        return self.shared.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., 2 r]."""
        return torch.cat([self.shared(x), self.own(x)], -1)


class TwoUp(nn.Module):
    """The factors B of both sets: (h_g, h_e) -> B_g h_g + B_e h_e."""

    def __init__(self, shared: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, own

    def forward(self, h: Tensor) -> Tensor:
        """[..., 2 r] -> [..., out]."""
        first, second = h.chunk(2, -1)
        out: Tensor = self.shared(first) + self.own(second)
        return out


class TwoAdapters(nn.Module):
    """A network with two sets of LoRA; how much of each answers depends on the input."""

    mix: Tensor
    memory: Tensor
    feature_layer = "features"

    def __init__(self, network: nn.Module, head: str, width: int, adapted: list[str], like: Tensor) -> None:
        super().__init__()
        self.network, self.head, self.adapted = network, head, adapted
        self.features = nn.Identity()
        declared = getattr(network, "feature_boundary", ())
        names = (declared,) if isinstance(declared, str) else declared
        self.feature_boundary = tuple(f"network.{name}" for name in names)
        self.register_buffer("mix", torch.tensor([1.0, 0.0]).to(like))
        self.register_buffer("memory", torch.zeros(width).to(like))

    def forward(self, x: Tensor) -> Tensor:
        """Return samples -> outputs."""
        if self.training:
            outputs, z = self.weighted(x, self.mix)
            self.features(z)
            return outputs
        _, e = self.weighted(x, torch.stack([self.mix[0] * 0, self.mix[1] * 0 + 1]))
        kappa = normalize(self.features(e), dim=-1) @ self.memory
        return self.weighted(x, torch.stack([self.mix[0] + kappa, self.mix[1] - kappa], -1))[0]

    def weighted(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and features with weights [2], or [batch, 2], of the two sets."""
        features: list[Tensor] = []
        layers = [self.network.get_submodule(name) for name in self.adapted]
        handles = [
            layer.register_forward_hook(lambda _, arguments, out: self.scaled(out, weights))
            for layer in layers
        ]
        head = self.network.get_submodule(self.head)
        handles.append(head.register_forward_pre_hook(lambda _, arguments: features.append(arguments[0])))
        try:
            outputs = self.network(x)
        finally:
            for handle in handles:
                handle.remove()
        z = features[0]
        return outputs, z[:, -1] if z.dim() == 3 else z

    def scaled(self, both: Tensor, weights: Tensor) -> Tensor:
        """Return (A_g x, A_e x) [batch, ..., 2 r], each half times its weight."""
        pair = both.reshape(*both.shape[:-1], 2, both.shape[-1] // 2)
        factor_weights = weights[:, None]
        if weights.dim() == 2:
            factor_weights = weights.reshape(len(weights), *[1] * (pair.dim() - 3), 2, 1)
        return (pair * factor_weights).reshape(both.shape)


def with_two_adapters(network: nn.Module) -> TwoAdapters:
    """Return a network whose layers with LoRA have a second set of factors, drawn as the first.

    Raises:
        ModelError: it has no such layer, or no features of a known width.
    """
    head, name = head_layer(network), head_name(network)
    width = getattr(head, "in_features", None)
    downs = [path for path, part in network.named_modules() if is_factor(path, part, "lora_A")]
    if name is None or width is None or not downs:
        raise ModelError(
            f"two sets of LoRA are for a network with LoRA and a linear head, but a {type(network).__name__} has "
            f"{len(downs)} layers with LoRA and {'no such head' if width is None else 'a head'}"
        )
    for path in downs:
        for factor, kind in (("lora_A", TwoDown), ("lora_B", TwoUp)):
            factor_path = path.replace("lora_A", factor)
            part: Any = network.get_submodule(factor_path)
            second = nn.Linear(part.in_features, part.out_features, bias=False).to(part.weight)
            if factor == "lora_B":
                nn.init.zeros_(second.weight)
            network.set_submodule(factor_path, kind(part, second))
    like = next(iter(network.parameters()))
    return TwoAdapters(network, name, int(width), downs, like)


def is_factor(path: str, part: nn.Module, factor: str) -> bool:
    """Whether a part of a network is a factor of LoRA of that name."""
    return isinstance(part, nn.Linear) and factor in path.split(".")


def is_own(name: str, tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor is of the second set, or says how the two answer; a selector."""
    return OWN in name.split(".") or isinstance(module, TwoAdapters)
