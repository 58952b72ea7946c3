"""FedAS (Yang et al., "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024).

    FedPer whose received body is first aligned to the client's old features; the server weighs by Fisher information

    server sends φ
    client i:  P_c = mean of f(x; φ_i) over its samples of class c,                 φ_i the body it trained last
               φ' = SGD from φ on  Σ_{c in batch} mean over its samples of class c of MSE(f(x; φ'), P_c)
               (φ_i, h_i) = LocalSGD((φ', h_i), E);     F_i = Σ over batches ‖∇ mean loss(φ_i, h_i)‖²
               sends φ_i, F_i
    server:    φ = Σ_S F_i φ_i / Σ_S F_i                               deployed: (φ_i, h_i) as last trained

F_i is of one pass over the training samples, in evaluation mode, of body and head; it grows with the number of batches,
as in the official code. There alignment changes the server's own model object, so each client begins where the previous
one left off; here each aligns a copy, and the order does not matter. Before its first training φ_i is the initial body.
If all F_i are 0, clients count equally. A newcomer has φ and the initial head.

| symbol | here |
|---|---|
| φ | server state |
| φ_i, h_i | client state, a whole model |
| length and rate of the alignment | `align_epochs`, `align_steps`, `align_lr` (default: the run's) |
| weights by F_i, or as in the run | `fisher` |
"""

from __future__ import annotations

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import exposure, nothing, to_local
from tailorfl.methods.bases import TwoModels
from tailorfl.methods.class_features import class_means, classes_only
from tailorfl.models.functional import Model
from tailorfl.models.split import Split
from tailorfl.training import tree
from tailorfl.training.objective import Seen, Term
from tailorfl.training.update import Optimizer

FISHER = "fisher"
"""Name of F_i in a reply, next to the tensors of the body."""


@register
class FedAS(TwoModels):
    """FedPer that aligns the received body to the client's old features and weighs clients by Fisher information."""

    name = "fedas"
    title = "FedAS"
    paper = "Yang et al., CVPR 2024"
    family = "parts"
    use = "FedPer with a body that fits rarely sampled clients"
    grid = {"align_epochs": (0, 1, 5)}
    special_cases = [to_local("with a single round, without alignment,", rounds=1, align_length=0)]
    exposures = [
        exposure("the class means and the Fisher information of a client's samples", "sample", **when)
        for when in ({"fisher": True}, {"align_length__not": 0})
    ]
    has_global = False
    personal_receives = False
    align_epochs: int = Field(1, ge=0, description="epochs that align the received body to the old features")
    align_steps: int | None = Field(None, ge=0, description="steps instead of align_epochs")
    align_lr: float | None = Field(None, gt=0, description="rate of the alignment (official code: 0.01)")
    fisher: bool = Field(True, description="weight clients by F_i; if false, as in the run")

    @property
    def averages_replies(self) -> bool:
        return not self.fisher

    def make_split(self, model: Model) -> Split:
        return model.split("head")

    def server_state(self, ctx: Context) -> TensorDict:
        classes_only(ctx, self.title)
        return ctx.split.select_shared(ctx.init)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        model = client.fit(self.aligned(client, state, tree.merge(state, received)))
        reply: TensorDict = client.split.select_shared(model)
        if self.fisher:
            reply = tree.merge(reply, TensorDict({FISHER: client.fisher(model)}))
        return model, reply

    def aligned(self, client: Client, old: TensorDict, model: TensorDict) -> TensorDict:
        """Return `model` with its body moved so that a class's features are near their mean under `old`."""
        length = self.length("align")
        if nothing(length):
            return model
        means, _, _ = class_means(client, old)
        return client.fit(
            model,
            train=client.split.shared,
            term=Term(apart, given=(means,), replaces=True, mixes=True),
            length=length,
            optimizer=Optimizer(lr=client.rate(self.align_lr)),
            purpose="align",
        )

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        if not self.fisher:
            return replies.mean()
        weights = replies.stack[FISHER].double().clamp(min=0.0)  # privacy noise may make one negative
        if not float(weights.sum()) > 0:
            weights = torch.ones_like(weights)
        return tree.weighted_mean(replies.stack.exclude(FISHER), weights / weights.sum())

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return tree.merge(state, received)


def apart(batch: Seen, means: Tensor) -> Tensor:
    """Return the sum over the classes of a batch of the mean, over their samples and entries, of (z − P_c)², 0-d."""
    member = torch.nn.functional.one_hot(batch.y, len(means)).to(means.dtype)
    if batch.weight is not None:
        member = member * batch.weight[:, None].to(means.dtype)
    gap = (batch.features - means[batch.y]).square().mean(1)
    return ((gap[:, None] * member).sum(0) / member.sum(0).clamp(min=1)).sum()
