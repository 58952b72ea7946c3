"""Clients by architecture: their model, its initial state, and their private states.

Most federations have one group. If clients have different architectures, each group runs through the engine
separately, and what they exchange (predictions, say) is joined again in the order of clients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.context import Context
from tailorfl.core.messages import Broadcast, PerArchitecture, PerClient, Replies
from tailorfl.core.method import Method, needs_one_architecture, needs_public
from tailorfl.core.reduction import hold
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source, subset
from tailorfl.engines.state import StateStore
from tailorfl.errors import ConfigError, unknown
from tailorfl.models.functional import Model
from tailorfl.settings.train import PrivacyLevel
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.keys import torch_seed


@dataclass(frozen=True)
class Group:
    """The clients of one architecture."""

    context: Context
    start: TensorDict
    states: StateStore
    clients: frozenset[int] | range

    @property
    def name(self) -> str:
        """The architecture; "" if it is the only one."""
        return self.context.architecture

    @property
    def model(self) -> Model:
        """The structure of the clients' models."""
        return self.context.model


def trained_models(
    method: Method,
    federation: Federation,
    models: Model | Mapping[str, Model],
    assignment: Sequence[str],
) -> dict[str, Model]:
    """Return the models that clients train, by architecture.

    Raises:
        ConfigError: the method does not support several architectures or such samples, its public set is missing, or a
            client has no architecture.
    """
    _check(method, federation, models, assignment)
    named = {"": models} if isinstance(models, Model) else models
    return {name: method.make_model(model, federation.source) for name, model in named.items()}


def make_groups(
    method: Method,
    federation: Federation,
    models: Mapping[str, Model],
    assignment: Sequence[str],
    train: TrainConfig,
    seed: int,
    state_folder: Path | None,
    see: Callable[[Source | None], Source | None],
) -> tuple[Group, ...]:
    """Return the groups of a federation; `assignment` names every client's architecture, held-out ones included.

    `models` are those of `trained_models`, which read sources as `see` returns them.
    """
    source, rows = federation.source, federation.server
    validation = subset(source, rows, "the server's validation samples") if len(rows) else None
    contexts = tuple(
        Context(
            model,
            method.make_split(model),
            federation.num_clients,
            train,
            # Same as building the model after `torch.manual_seed(seed)`, so that other code starts from it too.
            model.init(seed),
            seed,
            task=source.task,
            public=see(federation.public),
            validation=see(validation),
            architecture=name,
            **_sizes(federation),
        )
        for name, model in models.items()
    )
    everyone = range(len(federation.train))
    groups = []
    for context in contexts:
        full = replace(context, siblings=contexts) if len(contexts) > 1 else context
        start = method.client_state(full)
        individual = functools.partial(own_start, method, full) if method.individual_start else None
        store = StateStore(start, state_folder, individual)
        # With one architecture nothing is assigned: all clients have it.
        theirs = frozenset(i for i, name in enumerate(assignment) if name == full.architecture)
        groups.append(Group(full, start, store, theirs if assignment else everyone))
    return tuple(groups)


def why_fixed(method: Method, level: PrivacyLevel | None, architectures: int = 1) -> str:
    """Return why no client can join a run that has started, as a sentence; "" if one can."""
    reason = method.fixed_clients if hold(method.fixed_when, method) else ""
    if level == "client":
        reason = "the epsilon of client-level privacy depends on the number of clients"
    elif architectures > 1:
        reason = "architectures are assigned by the sizes of all clients"
    return f"no client can join {method.title} once it has begun: {reason}" if reason else ""


def extended(method: Method, group: Group, federation: Federation) -> Group:
    """Return the group of the only architecture, extended by the clients that join.

    Args:
        method: of the run.
        group: the present clients.
        federation: of the present clients, followed by the new ones.

    Raises:
        ConfigError: the server's state depends on the number of clients.
    """
    context = replace(group.context, num_clients=federation.num_clients, **_sizes(federation))
    before, after = (
        tree.shapes(tree.leaves(method.server_state(member_context)))
        for member_context in (group.context, context)
    )
    if before != after:
        raise ConfigError(f"no client can join {method.title}: its server keeps a state for each client")
    return replace(group, context=context, clients=range(len(federation)))


def _sizes(federation: Federation) -> dict[str, Any]:
    """Return the fields of a context about the training clients' numbers of samples."""
    sizes = federation.sizes()[: federation.num_clients]
    return {"samples": float(sizes[sizes > 0].mean()), "sizes": tuple(sizes.tolist())}


def own_start(method: Method, context: Context, client: int) -> TensorDict:
    """Return a client's initial private state if every client draws its own initial model."""
    drawn = context.model.init(torch_seed(context.seed, "initial model of a client", client))
    return method.client_state(replace(context, init=drawn))


def _check(
    method: Method,
    federation: Federation,
    models: Model | Mapping[str, Model],
    assignment: Sequence[str],
) -> None:
    if method.needs_public and federation.public is None:
        raise needs_public(method)
    method.check_source(federation.source)
    if isinstance(models, Model):
        if len(assignment):
            raise ConfigError(
                "`assignment` names architectures, so `model` must be a mapping of several models by name, not one "
                "model"
            )
        return
    if not method.heterogeneous and len(models) > 1:
        raise needs_one_architecture(method, list(models))
    for name in models:
        if "/" in name:
            raise ConfigError(f"the name of an architecture must not contain '/', but one is '{name}'")
    if len(assignment) != len(federation.train):
        raise ConfigError(
            f"{len(assignment)} architectures are assigned, but the federation has {len(federation.train)} clients"
        )
    for name in set(assignment):
        if name not in models:
            raise unknown("architecture", name, models)


def assign_by_size(
    sizes: Sequence[int], architectures: Sequence[str], rng: np.random.Generator | None = None
) -> list[str]:
    """Return every client's architecture: equal shares, the last ones for the clients with most samples.

    With `rng`, shares are random: clients of the largest architecture are drawn first, without replacement, with
    probabilities n_i / Σ n over those left, then those of the next (ranked by log n_i + a Gumbel number, the same law).

    `sizes` [clients] training samples; `architectures` from the smallest to the largest.

    >>> assign_by_size([30, 5, 20, 10], ["small", "large"])
    ['large', 'small', 'large', 'small']
    """
    keys = np.asarray(sizes, dtype=np.float64)
    if rng is not None:
        keys = np.log(np.maximum(keys, np.finfo(np.float64).tiny)) + rng.gumbel(size=len(keys))
    rank = np.argsort(np.argsort(keys, kind="stable"), kind="stable")
    return [architectures[int(r) * len(architectures) // len(sizes)] for r in rank]


def by_group(groups: Sequence[Group], ids: Sequence[int]) -> Iterator[tuple[Group, tuple[int, ...]]]:
    """Yield (group, positions in `ids` of its clients) for the groups that have any."""
    for group in groups:
        positions = (
            tuple(range(len(ids)))
            if len(groups) == 1
            else tuple(k for k, i in enumerate(ids) if i in group.clients)
        )
        if positions:
            yield group, positions


def in_parts(
    groups: Sequence[Group], ids: Sequence[int], at_once: int
) -> Iterator[tuple[Group, tuple[int, ...]]]:
    """Yield (group, some of its clients), at most `at_once` of them."""
    for group, positions in by_group(groups, ids):
        for start in range(0, len(positions), at_once):
            yield group, tuple(ids[k] for k in positions[start : start + at_once])


def message_for(message: Broadcast, group: Group, positions: Sequence[int]) -> TensorDict | PerClient:
    """Return the part of a broadcast for the clients at `positions` of its receivers."""
    if isinstance(message, PerArchitecture):
        return message[group.name]
    if isinstance(message, PerClient):
        return PerClient(message.payloads, message.rows[torch.tensor(positions, dtype=torch.int64)])
    return message


def gather(parts: Mapping[str, Replies]) -> Replies:
    """Return the replies of all architectures in the order of clients.

    The stack has the entries that are in all parts with the same shape.
    """
    if len(parts) == 1 and next(iter(parts.values())).context.architecture == "":
        return next(iter(parts.values()))
    replies = list(parts.values())
    clients = np.concatenate([part.clients for part in replies])
    order = np.argsort(clients)
    first = replies[0]
    return Replies(
        stack=stacked([part.stack for part in replies], torch.from_numpy(order)),
        clients=tuple(int(c) for c in clients[order]),
        samples=np.concatenate([part.samples for part in replies])[order],
        weighting=first.weighting,
        context=first.context,
        round=first.round,
        metrics=stacked([part.metrics for part in replies], torch.from_numpy(order)),
        parts=dict(parts),
    )


def stacked(stacks: Sequence[TensorDict], order: Tensor) -> TensorDict:
    """Join stacks [clients, ...] and reorder the clients; only entries that all have in the same shape remain."""
    leaves = [dict(tree.leaves(stack)) for stack in stacks]
    common = [
        p for p, t in leaves[0].items() if all(p in l and l[p].shape[1:] == t.shape[1:] for l in leaves)
    ]
    joined = {p: torch.cat([l[p] for l in leaves]).index_select(0, order) for p in common}
    return tree.nest(joined.items(), [len(order)])
