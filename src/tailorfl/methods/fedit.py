"""Federated tuning of LoRA: one adapter for all, and copies of it tuned at home.

FedIT: Zhang et al., "Towards Building the Federated GPT: Federated Instruction Tuning", ICASSP 2024.
FedLoRA: its tuned copies, as the baseline of FedOA (2025) has them.

    φ: all factors A and B of LoRA, what a model with LoRA does not freeze
    server sends φ
    client i:  φ_i = AdamW(φ, E epochs, rate falling to 0 within the round)          sends φ_i
    server:    φ = (1/m) Σ_S φ_i,   A and B each averaged by itself: mean(B) mean(A) is not mean(B A)

    FedLoRA: client i deploys φ tuned for E_ft more epochs, which it keeps to itself

So FedIT is FedAvg with equal weights on whatever the model trains. The authors' own code weighs clients by their
samples (`weights: samples`). Optimizer, rate and schedule are the run's training settings; FedOA's are `train:
{optimizer: adamw, schedule: linear, lr: 3e-4, epochs: 2, batch_size: 32}`.

| symbol | here |
|---|---|
| φ | server state `w` |
| E, η | the run's training settings |
| E_ft | `ft_epochs` |
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tailorfl.core.messages import Weights
from tailorfl.core.method import register
from tailorfl.methods.fedavg import FedAvg, FedAvgFT


@register
class FedIT(FedAvg):
    """One global adapter: the mean of locally trained ones."""

    name: ClassVar[str] = "fedit"
    title: ClassVar[str] = "FedIT"
    paper: ClassVar[str] = "Zhang et al., ICASSP 2024"
    weights: Weights = "uniform"


@register
class FedLoRA(FedAvgFT):
    """FedIT, then every client tunes its own copy of the adapter."""

    name: ClassVar[str] = "fedlora"
    title: ClassVar[str] = "FedLoRA"
    paper: ClassVar[str] = "FedIT with local tuning, as in FedOA (2025)"
    weights: Weights = "uniform"
    ft_epochs: int = Field(2, ge=0, description="E_ft: epochs of tuning on the client's own data")
