"""Federated tuning of LoRA: one adapter for all, and copies of it that clients tune.

FedIT: Zhang et al., "Towards Building the Federated GPT: Federated Instruction Tuning", ICASSP 2024.
FedLoRA: its tuned copies, as in the baseline of FedOA (2025).

    φ: all factors A and B of LoRA, and all else that the model does not freeze
    server sends φ
    client i:  φ_i = AdamW(φ, E epochs, rate falling to 0 within the round)          sends φ_i
    server:    φ = mean_S φ_i,   A and B averaged separately: mean(B) mean(A) is not mean(B A)

`mean_of` = product, which is not part of FedIT, makes the server's B A the mean of what clients add to the weights:

    P = Σ_S a_i B_i A_i = U S Vᵀ;   A = c V_rᵀ,  B = U_r S_r / c     r largest singular values, c² r = Σ_S a_i ‖A_i‖²

which is P itself if its rank is at most r, and otherwise the nearest matrix of rank r. A keeps its scale and none of
its rows vanishes, so that every direction can still be learned. Signs make the largest entry of each row of A positive.

    FedLoRA: client i deploys φ tuned for E_ft more epochs, which it does not send

So FedIT is FedAvg on whatever the model trains. The authors' code weights clients by their samples, FedOA's equally
(`weights: uniform`). Optimizer, rate and schedule are the run's training settings; FedOA's are `train:
{optimizer: adamw, schedule: linear, lr: 3e-4, epochs: 2, batch_size: 32}`.

| symbol | here |
|---|---|
| φ | server state `w` |
| E, η | the run's training settings |
| E_ft | `ft_epochs`, or in steps `ft_steps` |
| A, B | parameters `…lora_A…weight` [r, in], `…lora_B…weight` [out, r] |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import to_fedavg
from tailorfl.errors import ConfigError
from tailorfl.methods.fedavg import FedAvg, FedAvgFT
from tailorfl.training import tree


class MeanOfLoRA(FedAvg):
    """FedAvg on adapters, whose factors or whose products are averaged."""

    special_cases = [case.where(mean_of="factors") for case in FedAvg.special_cases]
    of_adapters = True
    mean_of: Literal["factors", "product"] = Field(
        "factors", description="average A and B separately, or B·A truncated to the rank of A (not FedIT)"
    )

    @model_validator(mode="after")
    def _products_are_no_gradient(self) -> Self:
        if self.mean_of == "product" and not self.server.is_plain_average:
            raise ValueError(
                "mean_of = product replaces A and B, so the server cannot take a step; leave out server"
            )
        return self

    @property
    def averages_replies(self) -> bool:
        return self.mean_of == "factors"

    def server_state(self, ctx: Context) -> TensorDict:
        if self.mean_of == "product" and not lora_pairs(ctx.split.trainable):
            raise ConfigError(
                "mean_of = product averages the factors of LoRA, but the model trains none; use a model with lora"
            )
        return super().server_state(ctx)

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        state = super().aggregate(server, replies)
        if self.mean_of == "factors":
            return state
        stack, weights = replies.stack, replies.weights()
        new = {}
        for a, b in lora_pairs(replies.context.split.trainable):
            new[a], new[b] = mean_of_products(stack.get(a), stack.get(b), weights)
        return TensorDict({**dict(state.items()), "w": tree.merge(state["w"], TensorDict(new))})


def lora_pairs(names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return (name of A, name of B) of every pair of factors among the names of parameters."""
    all_names = set(names)
    pairs = (
        (n, n.replace("lora_A", "lora_B"))
        for n in sorted(all_names)
        if "lora_A" in n and n.endswith("weight")
    )
    return tuple(pair for pair in pairs if pair[1] in all_names)


def mean_of_products(a: Tensor, b: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return (A [r, in], B [out, r]) whose product is nearest to Σ_i weights[i]·b[i] @ a[i].

    `a` [clients, r, in]; `b` [clients, out, r]; `weights` [clients] sum to 1. The sum itself is never computed.
    """
    share = weights.double()
    rank = a.shape[1]
    us, v = svd_of_products(a, b, weights)
    size = len(v)
    c = ((share * a.double().square().sum((1, 2))).sum() / rank).sqrt()
    c = c.clamp(min=torch.finfo(torch.float32).tiny)
    new_a, new_b = torch.zeros_like(a[0].double()), torch.zeros_like(b[0].double())
    new_a[:size], new_b[:, :size] = c * v, us / c
    return new_a.to(a.dtype), new_b.to(b.dtype)


def svd_of_products(a: Tensor, b: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return (U S [out, k], Vᵀ [k, in]) of Σ_i weights[i]·b[i] @ a[i], its k = r largest singular values, in float64.

    Arguments and signs as in `mean_of_products`.
    """
    wide, tall, share = a.double(), b.double(), weights.double()
    clients, rank = a.shape[:2]
    rows = wide.reshape(clients * rank, -1)
    columns = (tall * share[:, None, None]).transpose(0, 1).reshape(-1, clients * rank)
    q_b, r_b = torch.linalg.qr(columns)
    q_a, r_a = torch.linalg.qr(rows.T)
    u, s, vt = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    count = min(rank, len(s))
    v, basis = vt[:count] @ q_a.T, q_b @ u[:, :count]
    sign = v.gather(1, v.abs().argmax(1, keepdim=True)).sign()
    return basis * sign.T * s[:count], sign * v


@register
class FedIT(MeanOfLoRA):
    """One global adapter: the mean of locally trained ones."""

    name = "fedit"
    title = "FedIT"
    paper = "Zhang et al., ICASSP 2024"
    family = "one model"
    use = "one LoRA of a large model for all"


@register
class FedLoRA(MeanOfLoRA, FedAvgFT):
    """FedIT, then every client tunes its own copy of the adapter."""

    name = "fedlora"
    title = "FedLoRA"
    paper = "FedIT with local tuning, as in FedOA (2025)"
    family = "tuned"
    use = "a personal LoRA, tuned from the shared one"
    grid = {"ft_epochs": (1, 2, 5)}
    special_cases = [to_fedavg("without epochs of tuning", "fedit", keep=("mean_of",), ft_length=0)]
    ft_epochs: int = Field(2, ge=0, description="E_ft: epochs of tuning on the client's own data")
