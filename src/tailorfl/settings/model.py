"""The settings of models, `model`."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
)

from tailorfl.settings.base import Named, Whole


class OneModelConfig(Named):
    """A model: a registered name or `package.module:function`, and the weights it starts from."""

    name: str = Field(default="mlp", description="see `tailorfl list models`, or your own module:function")
    weights: str | None = Field(
        default=None,
        description="weights to start from: .npz, .safetensors, data:FILE, torchvision:NAME, timm:NAME",
    )
    skip_head: Whole | bool = Field(
        default=False, description="leave out the last linear layer(s) of `weights`"
    )
    trainable: str | tuple[str, ...] | None = Field(
        default=None,
        description="part that may change, such as adapter+head or name patterns; the rest is frozen, held "
        "once and never sent; by default the LoRA or adapters of a transformer that has them, else all",
    )


class ModelConfig(OneModelConfig):
    """The clients' model, or models of several sizes."""

    larger: tuple[OneModelConfig, ...] = Field(
        default=(),
        description="further models in growing size, for equal shares of the clients, those with more data",
    )
    assign: Literal["size", "random"] = Field(
        default="size",
        description="larger models go to clients with most data, or at random with chances by data",
    )

    @property
    def architectures(self) -> dict[str, OneModelConfig]:
        """All models by name, the smallest first; a name that comes twice is numbered."""
        models: dict[str, OneModelConfig] = {}
        for model in (self, *self.larger):
            count = sum(earlier.name == model.name for earlier in models.values())
            models[f"{model.name}-{count + 1}" if count else model.name] = model
        return models
