"""Gradient-boosted decision trees for tables, as a reference for networks: local, pooled, and federated by bagging.

LocalTrees:      each client grows scikit-learn's HistGradientBoosting on its own samples; nothing is sent.
PooledTrees:     the same on the union of all training data; not federated, a reference.
FederatedTrees:  bagging of clients' trees, as in Flower's XGBoost example: in each round every sampled client grows
                 `max_iter` iterations on top of the ensemble F that it receives, and the server appends all of them:

    T_i = trees of client i from the derivatives of its loss at F,      F ← F + Σ_{i in S} T_i / |S|

F starts at the weighted mean of the baselines of the first round's clients, while XGBoost's starts at 0. With `scaled`
false values add up, as in Flower's example by default; a round of many clients then steps too far.

A client's ensemble, or the server's, is tensors like any other state (`tailorfl.models.tree_ensemble`); trees ignore
the run's model and the settings of its training. Local and pooled ensembles are grown whole in a client's first round,
and newcomers after k steps have k iterations. Missing values and words are used as they are in a table
(`tailorfl.training.boosting`).

| symbol | here |
|---|---|
| F | client state, or server state |
| η | `learning_rate`, as scikit-learn calls it |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import exposure
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.methods.bases import ServerModel
from tailorfl.methods.local import Alone
from tailorfl.models.functional import Model
from tailorfl.training import tree
from tailorfl.training.boosting import TASKS, continued, ensemble, fitted


class Trees(Method):
    """Trees of scikit-learn, with its names for their settings."""

    family = "trees"
    of_networks = False
    grid = {"learning_rate": (0.03, 0.1, 0.3), "max_leaf_nodes": (7, 31), "min_samples_leaf": (5, 20)}
    exposures = [exposure("samples without noise, by which trees are grown")]

    learning_rate: float = Field(0.1, gt=0, description="η: factor on the values of each tree")
    max_leaf_nodes: int = Field(31, ge=2, le=8192, description="largest number of leaves of a tree")
    min_samples_leaf: int = Field(20, ge=1, description="smallest number of samples in a leaf")
    l2_regularization: float = Field(0.0, ge=0, description="λ added to a leaf's second derivatives")
    max_features: float = Field(1.0, gt=0, le=1, description="share of the features for each split")

    max_iter: int = Field(100, ge=1, description="trees of each output")

    def grown(self, client: Client, of: Callable[..., dict[str, Tensor]], state: TensorDict) -> TensorDict:
        """Return the trees that a function of `boosting` grows on a client's samples; report the number of splits."""
        names = Trees.model_fields.keys() - Method.model_fields.keys()
        new = client.compute(partial(of, **{name: getattr(self, name) for name in names}), state)
        client.metrics["splits"] = (new["left"] != new["right"]).sum().float()
        return new

    def check_source(self, source: Source) -> None:
        if source.task not in TASKS or source.holds_tokens:
            kind = "token ids" if source.holds_tokens else f"a task of {source.task}"
            raise ConfigError(f"{self.title} need a task of {', '.join(TASKS)}; leave them out for {kind}")

    def make_model(self, model: Model, source: Source) -> Model:
        return ensemble(source, self.max_iter, self.max_leaf_nodes)


@register
class LocalTrees(Trees, Alone):
    """Every client grows trees on its own samples."""

    name = "local_trees"
    title = "Local trees"
    paper = "reference (scikit-learn's HistGradientBoosting)"
    use = "checking whether a table needs networks or other clients at all"
    has_global = False

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        return self.grown(client, fitted, state), tree.empty()


@register
class PooledTrees(Trees, ServerModel):
    """Trees grown on pooled data."""

    name = "pooled_trees"
    title = "Pooled trees"
    paper = "reference (scikit-learn's HistGradientBoosting, pooled data)"
    use = "the result of trees on pooled data"
    has_personal = False
    pooled = True

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        return state, self.grown(client, fitted, received)


@register
class FederatedTrees(Trees):
    """Clients grow trees on top of those of all clients."""

    name = "federated_trees"
    title = "Federated trees"
    paper = "Flower's XGBoost bagging"
    use = "trees on tables that stay with their clients"
    has_personal = False
    max_iter: int = Field(1, ge=1, description="trees per output that a client adds in a round")
    scaled: bool = Field(True, description="values are divided by the round's clients; false adds them up")

    def server_state(self, ctx: Context) -> TensorDict:
        start = tree.tensors(ctx.init).items()
        return TensorDict({name: t if name == "baseline" else t[None][:0] for name, t in start})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        return state, self.grown(client, continued, received)

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        stack = tree.tensors(replies.stack)
        if self.scaled:
            stack["value"] = stack["value"] / len(replies.clients)
        new = {name: torch.cat([server[name], t]) for name, t in stack.items() if name != "baseline"}
        new["baseline"] = server["baseline"] if len(server["value"]) else replies.mean()["baseline"]
        return TensorDict(new)
