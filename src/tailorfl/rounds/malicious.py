"""Malicious clients: who they are, what they send instead of their update, and what they train on.

    sign_flip    Δ ← −s·Δ             scale    Δ ← s·Δ              noise    Δ ← N(0, s²) in every coordinate
    nan          Δ ← NaN, so the server refuses the reply and the client keeps its previous state
    label_flip   trains on wrong labels: C − 1 − y for C classes, 1 − y in a binary or multilabel task

Δ is the update of the parameters (`rounds/one_round.py`); in a method that sends none, that of its predictions or
prototypes. Everything beside parameters (losses, numbers of steps, running statistics, integers) is sent unchanged. All
kinds but label_flip train normally. Malicious clients are drawn from the seed only, so all methods have the same
attackers, and those of a smaller share are a subset of those of a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tailorfl.core.method import Method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.rounds.one_round import Trained, noise_like
from tailorfl.rounds.participation import sampled_clients
from tailorfl.rounds.requirements import check_federated
from tailorfl.settings.system import MaliciousConfig
from tailorfl.training import tree
from tailorfl.training.keys import derive, generator
from tailorfl.training.update import along

STRENGTH = {"sign_flip": 1.0, "scale": 10.0, "noise": 1.0}
"""Default strengths, for the kinds that have one."""
FLIPPED = ("classification", "binary", "multilabel")
"""Tasks whose labels can be flipped."""


@dataclass(frozen=True)
class Malicious:
    """The malicious clients of a run."""

    settings: MaliciousConfig
    clients: frozenset[int]
    seed: int

    def attack(self, round: int) -> bool:
        """Return whether the malicious clients attack in a round, counted from 0."""
        return bool(self.clients) and round + 1 >= self.settings.from_round

    def sent(self, part: Trained, round: int) -> Trained:
        """Return a part of a round as the server receives it."""
        is_hostile = torch.tensor([i in self.clients for i in part.ids], dtype=torch.bool)
        kind = self.settings.kind
        if kind == "label_flip" or not self.attack(round) or not is_hostile.any():
            return part
        updates = part.updates
        if not updates.changes:
            return part
        strength = STRENGTH.get(kind, math.nan) if self.settings.strength is None else self.settings.strength
        replies = dict(tree.leaves(part.replies))
        attacked = _attacked(updates.changes, part.group.model.parameters)
        for number, (path, change) in enumerate(updates.changes.items()):
            if path not in attacked:
                continue
            if kind == "noise":
                changed = self._noise(part.ids, round, number, change) * strength
            else:
                changed = change * (-strength if kind == "sign_flip" else strength)
            replies[path] = torch.where(
                along(is_hostile, change), updates.origins[path] + changed, replies[path]
            )
        finite = part.finite & ~is_hostile if kind == "nan" else part.finite
        return replace(part, replies=tree.nest(replies.items(), part.replies.batch_size), finite=finite)

    def _noise(self, ids: Sequence[int], round: int, number: int, like: Tensor) -> Tensor:
        """Return standard normal noise in the shape of the updates `like` [clients, ...]; 0 for benign clients."""
        noise = torch.zeros_like(like)
        for row, client in zip(noise, ids, strict=True):
            if client in self.clients:
                row += noise_like(
                    derive(self.seed, "noise of a malicious client", round, client), number, row
                )
        return noise

    def poisoned(self, federation: Federation) -> Source | None:
        """Return the samples with the malicious clients' labels flipped; None if no client flips labels.

        Raises:
            ConfigError: labels of the task cannot be flipped, or benign clients train on the same samples.
        """
        if self.settings.kind != "label_flip" or not self.clients:
            return None
        source, train = federation.source, federation.part("train")[: federation.num_clients]
        if source.task not in FLIPPED:
            raise ConfigError(
                f"system.malicious.kind=label_flip needs labels to flip (a task of {', '.join(FLIPPED)}), but "
                f"'{source.name}' is a {source.task} task; use another kind"
            )
        theirs = np.array(sorted(self.clients), dtype=np.int64)
        benign = np.setdiff1d(np.arange(len(train)), theirs)
        rows = np.unique(train.of_clients(theirs).flat())
        if np.isin(train.of_clients(benign).flat(), rows).any():
            raise ConfigError(
                "system.malicious.kind=label_flip changes the training samples of malicious clients, but other clients "
                "train on some of them; give every sample to only one client, or use another kind"
            )
        y, hostile_rows = source.y.clone(), torch.from_numpy(rows)
        y[hostile_rows] = (source.outputs - 1 if source.task == "classification" else 1) - y[hostile_rows]
        return replace(source, y=y)


def _attacked(paths: Collection[str], parameters: Collection[str]) -> set[str]:
    """Return the paths of parameters; if there is none, all."""
    names = set(parameters)
    return {path for path in paths if names.intersection(path.split("/"))} or set(paths)


def check_malicious(method: Method, settings: MaliciousConfig) -> None:
    """Check that clients of a method can be malicious.

    Raises:
        ConfigError: the method trains on pooled data, or its replies have no update for an attack that multiplies it.
    """
    if not settings.any:
        return
    check_federated(method, "malicious clients (system.malicious)")
    if settings.kind in ("sign_flip", "scale") and not method.sends_updates:
        raise ConfigError(
            f"system.malicious.kind={settings.kind} multiplies a client's update, but a reply of {method.title} does "
            "not tell from which model the client started; use noise, nan or label_flip"
        )


def drawn(settings: MaliciousConfig, federation: Federation, method: Method, seed: int) -> Malicious:
    """Return the malicious clients of a run.

    Raises:
        ConfigError: a named client is no training client, all clients would be malicious, or training is pooled.
    """
    check_malicious(method, settings)
    total = federation.num_clients
    for client in settings.clients:
        if client >= total:
            raise ConfigError(
                f"system.malicious.clients names client {client}, but the training clients are 0 to {total - 1}"
            )
    chosen = list(settings.clients)
    if settings.share > 0:
        order = generator(seed, "malicious clients").permutation(total)
        chosen = order[: sampled_clients(settings.share, total)].tolist()
    if len(chosen) == total:
        raise ConfigError(
            f"all {total} training clients are malicious, so there is no client left to evaluate; lower "
            "system.malicious.share"
        )
    return Malicious(settings, frozenset(chosen), seed)
