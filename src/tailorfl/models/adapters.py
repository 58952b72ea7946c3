"""Adapters: small layers inside a network, which barely change its outputs when training starts.

Residual ones go between the layers of a convolutional network, bottlenecks into the blocks of a transformer (Houlsby et
al., ICML 2019). `PeftConfig` selects the insertions into a transformer: these, or LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from tailorfl.errors import ModelError
from tailorfl.models.factories import make_norm
from tailorfl.models.layers import is_norm
from tailorfl.models.lora import candidates, inject_lora, linear_layers

RESIDUAL_DEVIATION = 1e-4
"""Standard deviation of the initial convolution of a residual adapter."""


class ResidualAdapter(nn.Module):
    """x + Conv1x1(Dropout(Norm(x))): 2c + c² scalars for c channels (PerAda; Pillutla et al., ICML 2022).

    [batch, channels, height, width] -> the same. The released code of partial personalization adds x twice, which
    the following norm undoes; here it is added once.
    """

    def __init__(self, channels: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.norm = make_norm(norm, channels)
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Redraw the convolution, close to 0."""
        nn.init.normal_(self.conv.weight, std=RESIDUAL_DEVIATION)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus a small correction; `x` is not changed in place."""
        out: Tensor = x + self.conv(self.dropout(self.norm(x)))
        return out


def optional_adapter(channels: int, norm: str, dropout: float | None) -> nn.Module:
    """Return a residual adapter, or an Identity if `dropout` is None: names of the backbone do not depend on it."""
    return nn.Identity() if dropout is None else ResidualAdapter(channels, norm, dropout)


BOTTLENECK_DEVIATION = 1e-2
"""Standard deviation of the initial weights of a bottleneck adapter."""


class BottleneckAdapter(nn.Module):
    """x + up(relu(down(dropout(x)))): 2hs + h + s scalars for width h and bottleneck s; near the identity at first.

    [..., hidden] -> the same.
    """

    def __init__(self, hidden: int, size: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.down = nn.Linear(hidden, size)
        self.up = nn.Linear(size, hidden)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Redraw weights with deviation 0.01; biases are 0."""
        for layer in (self.down, self.up):
            nn.init.normal_(layer.weight, std=BOTTLENECK_DEVIATION)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus a small correction; `x` is not changed in place."""
        out: Tensor = x + self.up(self.down(self.dropout(x)).relu())
        return out


class Adapted(nn.Module):
    """A layer followed by its adapter. The layer is called `base_layer`, as in LoRA; weight files omit that name."""

    def __init__(self, base_layer: nn.Module, adapter: BottleneckAdapter) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.adapter = adapter

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        out: Tensor = self.adapter(self.base_layer(x))
        return out


def insert_adapters(base: nn.Module, hidden: int, size: int, dropout: float) -> None:
    """Put an adapter after the attention and MLP output of every block, before the residual addition.

    The two are found by inspection: the last linear layer inside the block's attention, and the last one outside it.

    Raises:
        ModelError: a transformer without such blocks.
    """
    blocks = [(block, inner) for block in _listed(base) if (inner := _attention(block)) is not None]
    if not blocks:
        raise ModelError(
            "adapters need the blocks of a transformer, a list of modules with one attention module each; "
            f"{type(base).__name__} has no such blocks. Its linear layers: {candidates(base)}."
        )
    for block, attention in blocks:
        names = list(linear_layers(block))
        inside = [name for name in names if name.startswith(f"{attention}.")]
        outside = [name for name in names if name not in inside]
        for part, ends in (("attention", inside[-1:]), ("MLP", outside[-1:])):
            if not ends or linear_layers(block)[ends[0]] != hidden:
                raise ModelError(
                    f"the {part} of a {type(block).__name__} does not end in a linear layer of {hidden} outputs, so no "
                    f"adapter can be added there. Linear layers of the block: {candidates(block)}."
                )
            layer = block.get_submodule(ends[0])
            block.set_submodule(ends[0], Adapted(layer, BottleneckAdapter(hidden, size, dropout)))


def _attention(block: nn.Module) -> str | None:
    """Return the name of the block's attention, found by its type's name: each family of models has its own class."""
    return next((name for name, part in block.named_children() if "Attention" in type(part).__name__), None)


def adapted_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks that hold bottleneck adapters."""
    return [
        block
        for block in _listed(module)
        if any(isinstance(inner, BottleneckAdapter) for inner in block.modules())
    ]


def transformer_blocks(base: nn.Module) -> tuple[str, ...]:
    """Return the names of a transformer's blocks in order, and of the norm after the last one if there is one."""
    lists = [(path, part) for path, part in base.named_modules() if isinstance(part, nn.ModuleList)]
    blocks = [
        f"{path}.{k}" for path, part in lists for k, block in enumerate(part) if _attention(block) is not None
    ]
    last = [name for name, part in base.named_children() if is_norm(part)]
    return (*blocks, *last) if blocks else ()


def _listed(module: nn.Module) -> list[nn.Module]:
    """Return the members of all lists of modules, in which transformers keep their blocks."""
    return [block for part in module.modules() if isinstance(part, nn.ModuleList) for block in part]


@dataclass(frozen=True)
class PeftConfig:
    """LoRA of rank `lora`, or adapters of width `adapter_size`; 0 for none."""

    lora: int = 0
    lora_alpha: float = 16
    lora_dropout: float = 0.05
    lora_targets: Sequence[str] | None = None
    adapter_size: int = 0
    adapter_dropout: float = 0.0

    def apply(self, base: nn.Module, hidden: int) -> str:
        """Change the base in place and return the selector of the inserted parts, "all" if there are none.

        Raises:
            ModelError: both are requested, a number is invalid, or the base has no place for them.
            MissingExtraError: LoRA is requested and peft is not installed.
        """
        if self.lora and self.adapter_size:
            raise ModelError("a model has LoRA or adapters: set lora or adapter_size, not both.")
        if self.lora:
            inject_lora(base, self.lora, self.lora_alpha, self.lora_dropout, self.lora_targets)
            return "lora"
        if self.adapter_size:
            insert_adapters(base, hidden, self.adapter_size, self.adapter_dropout)
            return "adapter"
        return "all"


NO_PEFT = PeftConfig()
