"""FedEM (Marfoq et al., "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021).

    min over θ_1..θ_M, π_i:  − Σ_i Σ_s log Σ_m π_im exp(−ℓ(θ_m; s)),   each client's data are a mixture of M components

    server sends θ_1, ..., θ_M                                             (they start differently)
    client i:  q_m(s) = softmax_m(log π_im − ℓ(θ_m; s)) of its samples, with the received θ;     π_im = mean_s q_m(s)
               θ_m,i = LocalSGD(θ_m, E) on  (1/B) Σ_b q_m(s_b) ℓ(θ_m; s_b),  all m on the same batches
               sends all θ_m,i
    server:    θ_m = θ_m + Σ_S p_i (θ_m,i − θ_m)                           deployed: log Σ_m π_im σ(f(x; θ_m))

p_i are shares of ALL clients, as in the official code, so a round of few clients is a small step; `normalise` = cohort
divides by the cohort's share. π_i starts at 1/M. A client that has not taken part yet, such as a newcomer, fits π_i
to the θ it receives, in `newcomer_passes` passes over its samples (1 in the official code). The M networks train as one
model, so `train.clip` bounds their gradient together. Running statistics are averaged over the cohort.

| symbol | here |
|---|---|
| θ_1..θ_M | server state: a `Mixture` of M networks without π |
| π_i; whether it took part | client state `mixture.shares`; `rounds` |
| M | `components` |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import comparable, exposure
from tailorfl.errors import ConfigError
from tailorfl.methods.bases import ServerModel
from tailorfl.methods.class_features import classes_only
from tailorfl.models.functional import Model
from tailorfl.models.split import Split
from tailorfl.training import tree
from tailorfl.training.objective import Seen, Term

ROUNDS = "rounds"
"""Entry of a client's state: the number of rounds in which it took part."""
SHARES = "mixture.shares"
"""The name of π in the state of a `Mixture`."""
LEAST = 1e-30
"""A share counts at least this much in a logarithm."""


@register
class FedEM(ServerModel):
    """Networks that all clients share, and that each client mixes with its own weights."""

    fixed_clients = "a reply counts by its share of all clients' samples (normalise=all)"
    fixed_when = {"normalise": "all"}
    name = "fedem"
    title = "FedEM"
    paper = "Marfoq et al., NeurIPS 2021"
    family = "mixture"
    use = "clients that are mixtures of a few kinds"
    grid = {"components": (2, 3, 4)}
    special_cases = [
        comparable(
            "with M = 1",
            "personal",
            "is FedAvg, with logarithms of probabilities as its outputs",
            components=1,
            **when,
        )
        for when in ({"everyone": True}, {"normalise": "cohort"})
    ]
    exposures = [exposure("a client's mixture weights, learnt from its samples", "sample")]
    has_global = False
    components: int = Field(2, ge=1, description="M: networks that all clients share (official code: 3)")
    normalise: Literal["all", "cohort"] = Field(
        "all",
        description="weight of an update: its share of the samples of all clients, or of the round's clients",
    )
    newcomer_passes: int = Field(
        1, ge=0, description="passes over the samples to fit π of a client that has not taken part yet"
    )

    def wrap(self, model: Model) -> Model:
        return model.several(self.components, Mixture)

    def make_split(self, model: Model) -> Split:
        return model.split(is_shares)

    def server_state(self, ctx: Context) -> TensorDict:
        classes_only(ctx, self.title)
        if ctx.train.balanced:
            raise ConfigError(
                "FedEM weights the losses of samples itself, instead of the run's loss; turn train.objective off for "
                "this method: {name: fedem, train: {objective: task}}"
            )
        start: TensorDict = ctx.split.select_shared(ctx.init)
        learned = [n.split(".", 2)[2] for n in ctx.split.trainable if n.startswith("networks.0.")]
        starts = [[start.get(f"networks.{m}.{n}") for n in learned] for m in range(self.components)]
        if self.components > 1 and all(map(torch.equal, starts[0], starts[1])):
            raise ConfigError(
                "FedEM needs networks that start differently, but all trained parts of this model start from the same "
                "(pretrained) weights; also train a randomly initialised part, such as a head"
            )
        return start

    def client_state(self, ctx: Context) -> TensorDict:
        return TensorDict({SHARES: ctx.init[SHARES], ROUNDS: torch.zeros(())})

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        shares = state[SHARES]
        model = tree.merge(received, TensorDict({SHARES: shares}))
        term = Term(partial(weighed, count=self.components), given=(model,), replaces=True)
        trained = client.fit(model, term=term)
        new = TensorDict({SHARES: self.refitted(client, model, shares), ROUNDS: state[ROUNDS] + 1})
        return new, trained.select(*received.keys())

    def refitted(self, client: Client, model: TensorDict, shares: Tensor) -> Tensor:
        """Return π_i = mean_s q_m(s), [M]; unchanged for a client without samples."""
        of = partial(responsibilities, count=self.components)
        total = client.summed(model, of, given=(shares,))
        return torch.where(client.samples > 0, total / client.samples.to(total.dtype), shares)

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return replies.towards(server, replies.share if self.normalise == "all" else 1.0)

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        shares = state[SHARES]
        model = tree.merge(received, TensorDict({SHARES: shares}))
        fitted = shares
        for _ in range(self.newcomer_passes):
            fitted = self.refitted(client, model, fitted)
        return tree.merge(model, TensorDict({SHARES: torch.where(state[ROUNDS] > 0, shares, fitted)}))


def losses(features: Tensor, y: Tensor, count: int) -> Tensor:
    """Return the cross entropy of every sample under every network, [batch, M], from all their logits [batch, M C]."""
    log_probabilities = apart(features, count).log_softmax(-1)
    return -log_probabilities.gather(-1, y[:, None, None].expand(-1, count, 1)).squeeze(-1)


def responsibilities(batch: Seen, shares: Tensor, count: int) -> Tensor:
    """Return q [batch, M] of samples under networks in evaluation mode."""
    return (shares.clamp(min=LEAST).log() - losses(batch.features, batch.y, count)).softmax(-1)


def weighed(batch: Seen, model: TensorDict, count: int) -> Tensor:
    """Return mean_b Σ_m q_m ℓ_m, 0-d, with q of the received `model`."""
    fixed = losses(batch.of(model)[1], batch.y, count)
    q = (model[SHARES].clamp(min=LEAST).log() - fixed).softmax(-1)
    return batch.mean((q * losses(batch.features, batch.y, count)).sum(-1))


class Mixing(nn.Module):
    """Concatenated logits z_m of all networks [batch, M · C] -> log Σ_m π_m σ(z_m) [batch, C]."""

    shares: Tensor

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("shares", torch.full((count,), 1.0 / count, dtype=dtype))

    def forward(self, logits: Tensor) -> Tensor:
        """[batch, M · C] -> [batch, C]."""
        shape = (*logits.shape[:-1], len(self.shares), logits.shape[-1] // len(self.shares))
        log_probabilities = logits.reshape(shape).log_softmax(-1)
        return (log_probabilities + self.shares.clamp(min=LEAST).log()[:, None]).logsumexp(-2)


class Mixture(nn.Module):
    """Networks whose probabilities are mixed by shares π; their logits are the features of the mixture.

    Outputs are log Σ_m π_m σ(f_m(x)), the logarithms of probabilities.
    """

    feature_layer = "mixture"

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.mixture = Mixing(len(networks), next(self.networks.parameters()).dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithms of the probabilities of samples `x`, [batch, C]."""
        logits: Tensor = self.mixture(torch.cat([network(x) for network in self.networks], -1))
        return logits


def apart(logits: Tensor, count: int) -> Tensor:
    """Return the concatenated logits [batch, M · C] of M = `count` networks as [batch, M, C]."""
    return logits.reshape(*logits.shape[:-1], count, logits.shape[-1] // count)


def is_shares(name: str, tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor of a model is π; a selector."""
    return isinstance(module, Mixing)
