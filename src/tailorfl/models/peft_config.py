"""What is put into a transformer so that a small part of it is trained: LoRA or bottleneck adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tailorfl.errors import ModelError
from tailorfl.models.adapters import insert_adapters
from tailorfl.models.lora import inject_lora


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
        """Change the base in place and return the selector of what was put in, "all" if nothing was.

        Raises:
            ModelError: both are asked for, a bad number, or a base that has no place for it.
            MissingExtraError: LoRA without peft.
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
