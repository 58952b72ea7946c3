"""Shared by methods that use classes: their mean features, a pull towards such means, and linear heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.errors import ConfigError
from tailorfl.training import tree
from tailorfl.training.objective import Seen, Term

FAR = 1e9
"""Squared distance assigned to prototypes that a client does not use."""
HEAD = ("weight", "bias")
"""Names of a linear head's tensors in messages between clients of different architectures."""


def classes_only(ctx: Context, title: str) -> None:
    """Check that the task has classes.

    Raises:
        ConfigError: it has none.
    """
    if ctx.task != "classification":
        raise ConfigError(f"{title} needs a classification task, but the task is {ctx.task}")


def linear_head(ctx: Context, title: str) -> tuple[str, ...]:
    """Return the names of the head's weight [C, d_z] and, if it has one, its bias [C].

    Raises:
        ConfigError: the task has no classes, or the head is not a trained linear layer.
    """
    classes_only(ctx, title)
    split = ctx.model.split("head", allow_empty=True)
    names = tuple(n for n in split.personal if n in ctx.split.trainable)
    if [ctx.init.get(n).ndim for n in names] not in ([2], [2, 1]):
        raise ConfigError(
            f"{title} needs a model whose head is one trained linear layer, but the trained part of this model's head "
            f"is {', '.join(names) or 'empty'}"
        )
    return names


def trained_head(ctx: Context, title: str) -> None:
    """Check that the part of the head that stays on clients is trained.

    Raises:
        ConfigError: it is frozen.
    """
    if not set(ctx.split.personal) & set(ctx.split.trainable):
        raise ConfigError(
            f"{title} trains a head of each client, but the model's is frozen; add it to model.trainable (lora+head)"
        )


def no_prototypes(ctx: Context, title: str, bias: bool = False) -> dict[str, Tensor]:
    """Return prototypes P̄ [C, d_z] of zeros, and which classes have one, bool [C]: none yet.

    Raises:
        ConfigError: see `linear_head`; architectures with features of different widths; `bias` and a head without one.
    """
    heads = {name: linear_head(c, title) for name, c in ctx.architectures.items()}
    widths = {name: ctx.architectures[name].init.get(head[0]).shape[1] for name, head in heads.items()}
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{name} has {width}" for name, width in widths.items())
        raise ConfigError(
            f"{title} compares the features of all clients, so all architectures need one feature width, but {listed}"
        )
    if bias and any(len(head) < 2 for head in heads.values()):
        raise ConfigError(
            f"{title} needs a head with a bias to predict by prototypes, but this model's head has none"
        )
    weight: Tensor = ctx.init.get(linear_head(ctx, title)[0])
    return {"prototypes": torch.zeros_like(weight), "present": torch.zeros(len(weight), dtype=torch.bool)}


def class_means(client: Client, model: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
    """Return a client's mean features by class [C, d_z], 0 for absent classes, their counts [C] and the mean ‖z‖²."""

    def both(batch: Seen) -> Tensor:
        z = batch.features
        return torch.cat([z, z.square().sum(1, keepdim=True)], 1)

    sums, counts = client.summed(model, both, by_class=True), client.class_counts()
    counts = counts.to(sums.dtype)
    return sums[:, :-1] / counts.clamp(min=1)[:, None], counts, sums[:, -1].sum() / counts.sum().clamp(min=1)


def moments(means: Tensor, counts: Tensor, square: Tensor) -> dict[str, Tensor]:
    """Return M[c] = π_c μ_c and V = (mean ‖z‖² − Σ_c ‖M[c]‖²)/n, from what `class_means` returns."""
    samples = counts.sum().clamp(min=1)
    moment = means * (counts / samples)[:, None]
    return {"moment": moment, "variance": (square - moment.square().sum()).clamp(min=0) / samples}


def near(lam: float, targets: Tensor, present: Tensor) -> Term:
    """Return the term λ · mean over a batch and over entries of (z − target of its class)², 0 for absent targets."""

    def pull(batch: Seen, targets: Tensor, present: Tensor) -> Tensor:
        gap = (batch.features - targets[batch.y]).square().mean(1)
        return lam * batch.mean(gap * present[batch.y])

    return Term(pull, given=(targets, present))


def shared_prototypes(server: TensorDict, means: Tensor, counts: Tensor) -> Mapping[str, Tensor]:
    """Return P̄ after a round: the mean of `means` [m, C, d_z] by `counts` [m, C]; absent classes keep theirs."""
    total = counts.sum(0)
    mean = (counts[:, :, None] * means).sum(0) / torch.where(total > 0, total, 1.0)[:, None]
    prototypes = torch.where((total > 0)[:, None], mean, server["prototypes"])
    return {"prototypes": prototypes, "present": server["present"] | (total > 0)}


def common_head(ctx: Context, title: str) -> dict[str, Tensor]:
    """Return the initial head of all architectures as `weight` [C, d_z] and, if they have one, `bias` [C].

    Raises:
        ConfigError: see `no_prototypes`; some architectures with a bias and others without.
    """
    no_prototypes(ctx, title)
    heads = {name: linear_head(c, title) for name, c in ctx.architectures.items()}
    if len({len(head) for head in heads.values()}) > 1:
        listed = ", ".join(f"{name} has {'one' if len(head) > 1 else 'none'}" for name, head in heads.items())
        raise ConfigError(
            f"{title} gives all architectures the same head, so all or none must have a bias, but {listed}"
        )
    return dict(zip(HEAD, (ctx.init.get(n) for n in linear_head(ctx, title)), strict=False))


def with_head(client: Client, model: TensorDict, head: TensorDict) -> TensorDict:
    """Return a model of the client's architecture with a head in the form of `common_head`."""
    names = client.select("head")
    return tree.merge(model, TensorDict({n: head[kind] for n, kind in zip(names, HEAD, strict=False)}))


def nearest_head(client: Client, model: TensorDict, prototypes: Tensor, among: Tensor) -> TensorDict:
    """Return the model with a head that answers by the nearest prototype; unchanged if there is none.

    argmin ‖z − P_c‖² = argmax 2⟨P_c, z⟩ − ‖P_c‖².

    Args:
        client: the client of the model.
        model: its state.
        prototypes: P [C, d_z].
        among: which of them are used, bool [C].
    """
    offsets = torch.where(among, -prototypes.square().sum(1), -FAR)
    head = dict(zip(client.select("head"), (2.0 * prototypes, offsets), strict=True))
    return tree.merge(model, TensorDict({n: torch.where(among.any(), t, model[n]) for n, t in head.items()}))
