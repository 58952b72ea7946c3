"""Robust aggregation: what takes the place of the mean of the clients' updates, so that few of them cannot steer it.

Coordinate-wise median and trimmed mean: Yin et al., ICML 2018. Krum and multi-Krum: Blanchard et al., NeurIPS 2017.
Norm bounding and weak differential privacy: Sun et al., "Can You Really Backdoor Federated Learning?", 2019.

    Δ_i = reply_i − what it is measured from (`Method.anchor`),   the parameters in a reply, all together
    median          per coordinate, of an even number the mean of the two in the middle
    trimmed mean    per coordinate, without the ⌊βm⌋ smallest and the ⌊βm⌋ largest of m
    Krum            the Δ_i of the lowest score, Σ of its m − f − 2 smallest ‖Δ_i − Δ_j‖², j ≠ i; of equals the first
    multi-Krum      the mean of the k of lowest score
    norm bounding   Δ_i · min(1, M/‖Δ_i‖) in place of Δ_i, and N(0, σ²) added to their mean

The server of a method gets replies that are all equal to anchor + rule, as with client-level privacy: so whatever mean
it takes of them is that, and only methods that need nothing but the mean can have such a rule. Clients count alike
under it, since a liar may claim many samples; norm bounding alone keeps every client's own reply, and its weight. Where
clients have different architectures, those of each are judged among themselves. Running statistics and whole numbers
keep the mean.

Krum stands f hostile clients among m ≥ 2f + 3. An update that is not finite was refused before and counts as one of the
f. In a round with fewer clients, because some are absent, the clients have no update: the server stays as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.method import Method
from tailorfl.errors import ConfigError
from tailorfl.rounds.requirements import check_federated, check_mean_only
from tailorfl.rounds.updates import ClientUpdates, Trained
from tailorfl.settings.privacy import PrivacyLevel
from tailorfl.settings.server import RobustConfig
from tailorfl.training import tree
from tailorfl.training.keys import derive
from tailorfl.training.sample_privacy import normal

log = logging.getLogger(__name__)

Changes = Mapping[str, Tensor]
"""ClientUpdates by path, [clients, ...] each."""


def check_robust(method: Method, rule: RobustConfig, level: PrivacyLevel | None) -> None:
    """Nothing if a method can be run with a rule.

    Raises:
        ConfigError: its server needs more than a mean, trains on pooled data, or privacy has a rule of its own.
    """
    if rule.rule == "none":
        return
    check_federated(method, f"updates of clients for server.robust={rule.rule}")
    check_mean_only(method, f"server.robust={rule.rule} cannot take its place")
    if level == "client":
        raise ConfigError(
            f"client-level privacy shortens every update to train.dp.clip and then needs the mean, so there is no room "
            f"for server.robust={rule.rule}: train.dp.clip is norm_bound already (with noise: 0 nothing else); leave "
            "out one of the two"
        )


def check_enough(rule: RobustConfig, clients: int) -> None:
    """Nothing if `clients` a round are enough for a rule.

    Raises:
        ConfigError: they are too few.
    """
    if rule.rule in ("krum", "multi_krum") and clients < least_clients(rule.f):
        raise ConfigError(
            f"{rule.rule} with f={rule.f} needs 2f + 3 = {least_clients(rule.f)} clients a round (of each "
            f"architecture), but there are {clients}; lower server.robust.f, or raise fraction"
        )
    if rule.rule == "multi_krum" and rule.k is not None and rule.k > clients:
        raise ConfigError(
            f"multi_krum averages k={rule.k} updates, but there are {clients} clients a round (of an architecture); "
            "lower server.robust.k, or leave it out"
        )


def least_clients(f: int) -> int:
    """Returns how many clients Krum needs to stand f hostile ones: 2f + 3."""
    return 2 * f + 3


@dataclass(frozen=True)
class Robust:
    """A rule, and the key of its noise."""

    rule: RobustConfig
    seed: int

    def shown(self, part: Trained, round: int, refused: int) -> Trained | None:
        """Return a part of a round as the server's half of the method sees it; None if too few are left for the rule.

        `refused` clients sent beside these what is no finite number.
        """
        replies = self.replies(part.updates, round, part.group.name, refused)
        return None if replies is None else replace(part, replies=replies)

    def replies(
        self, updates: ClientUpdates, round: int, architecture: str, refused: int
    ) -> TensorDict | None:
        """Returns the replies that the server of a method may average; the rest is as `shown` has it."""
        if not updates.changes:
            return updates.replies
        if self.rule.rule == "norm_bound":
            return self._bounded(updates, round, architecture)
        if self.rule.rule in ("krum", "multi_krum"):
            return self._nearest(updates, round, refused)
        by_coordinate: Callable[[Tensor], Tensor] = (
            median if self.rule.rule == "median" else lambda u: trimmed_mean(u, self.rule.trim)
        )
        return updates.with_changes({p: by_coordinate(u)[None] for p, u in updates.changes.items()})

    def _nearest(self, updates: ClientUpdates, round: int, refused: int) -> TensorDict | None:
        clients, f = updates.replies.batch_size[0], max(0, self.rule.f - refused)
        if clients < least_clients(f):
            log.warning(
                "round %d: %s with f=%d needs %d clients, but %d answered; the server stays as it is",
                round + 1,
                self.rule.rule,
                f,
                least_clients(f),
                clients,
            )
            return None
        k = 1 if self.rule.rule == "krum" else clients - f if self.rule.k is None else self.rule.k
        chosen = krum(updates.changes, f, k)
        return updates.with_changes({p: _mean(u[chosen])[None] for p, u in updates.changes.items()})

    def _bounded(self, updates: ClientUpdates, round: int, architecture: str) -> TensorDict:
        size = norms(updates.changes)
        limit = float(median(size)) if self.rule.bound == "median" else self.rule.bound
        short = size <= limit
        scale = torch.where(short, 1.0, limit / size.clamp(min=1e-300))
        key = torch.tensor(int(derive(self.seed, "weak privacy", round, architecture).astype(np.int64)))
        found = dict(tree.leaves(updates.replies))
        for number, (path, u) in enumerate(updates.changes.items()):
            cut = updates.origins[path] + u * _column(scale, u)
            # What need not be shortened stays as it was sent, to the bit.
            found[path] = torch.where(_column(short, u), found[path], cut)
            if self.rule.noise > 0:
                found[path] += normal(key, number, u.shape[1:]).to(u.dtype) * self.rule.noise
        return tree.nest(found.items(), updates.replies.batch_size)


def median(values: Tensor) -> Tensor:
    """Returns the median over the leading axis; of an even number the mean of the two in the middle."""
    ranked, clients = values.sort(0).values, len(values)
    return _mean(ranked[(clients - 1) // 2 : clients // 2 + 1])


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """Returns the mean over the leading axis [m] without the ⌊trim·m⌋ smallest and as many largest."""
    # ⌊0.1 · 30⌋ is 3, though 0.1 · 30 may be a hair below it as a float
    dropped = math.floor(round(trim * len(values), 9))
    return _mean(values.sort(0).values[dropped : len(values) - dropped])


def krum(changes: Changes, f: int, k: int) -> list[int]:
    """Returns the positions of the k clients of lowest score, in rising order; `changes` [clients, ...] by path."""
    distances = squared_distances(changes)
    clients = len(distances)
    distances.fill_diagonal_(math.inf)
    scores = distances.sort(1).values[:, : clients - f - 2].sum(1)
    return sorted(scores.argsort(stable=True)[:k].tolist())


def squared_distances(changes: Changes) -> Tensor:
    """Returns ‖Δ_i − Δ_j‖² over all entries together, [clients, clients] float64."""
    total = torch.zeros(())
    for update in changes.values():
        flat = update.reshape(len(update), -1).double()
        flat = flat - flat.mean(0)  # distances do not change, and what cancels in them becomes small
        product = flat @ flat.T
        square = product.diagonal()
        total = total + (square[:, None] + square[None, :] - 2 * product)
    return total.clamp(min=0.0)


def norms(changes: Changes) -> Tensor:
    """Returns ‖Δ_i‖ over all entries together, [clients] float64."""
    squares = [u.double().square().reshape(len(u), -1).sum(1) for u in changes.values()]
    return torch.stack(squares).sum(0).sqrt()


def _mean(values: Tensor) -> Tensor:
    return values.double().mean(0).to(values.dtype)


def _column(each: Tensor, like: Tensor) -> Tensor:
    """One number a client, in the shape of updates [clients, ...]; floating ones in their precision."""
    found = each.to(like.dtype) if each.is_floating_point() else each
    return found.reshape(-1, *(1,) * (like.ndim - 1))
