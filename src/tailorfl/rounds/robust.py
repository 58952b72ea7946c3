"""Robust aggregation: rules instead of the mean of the clients' updates, so that a few clients cannot steer it.

Coordinate-wise median and trimmed mean: Yin et al., ICML 2018. Krum and multi-Krum: Blanchard et al., NeurIPS 2017.
Norm bounding and weak differential privacy: Sun et al., "Can You Really Backdoor Federated Learning?", 2019.

    Δ_i = reply_i − its origin (`Method.anchor`),   over all parameters in a reply together
    median          per coordinate, of an even number the mean of the two in the middle
    trimmed mean    per coordinate, without the ⌊βm⌋ smallest and the ⌊βm⌋ largest of m
    Krum            the Δ_i of the lowest score, Σ of its m − f − 2 smallest ‖Δ_i − Δ_j‖², j ≠ i; of equals the first
    multi-Krum      the mean of the k of lowest score
    norm bounding   Δ_i · min(1, M/‖Δ_i‖) instead of Δ_i, and N(0, σ²) added to their mean

As with client-level privacy, the server of a method receives replies that all equal anchor + rule, so any mean of them
is the rule's result. Only methods that need nothing but the mean can have such a rule. Clients have equal weights,
since a malicious client may claim many samples; only norm bounding keeps each client's reply and weight. If clients
have different architectures, the rule is applied to each separately. Running statistics and integers keep the mean.

Krum withstands f hostile clients among m ≥ 2f + 3. An update that is not finite was refused before and counts as one
of the f. If clients are absent and fewer than that are left, the server keeps its state.

A rule is a function with the decorator `aggregation_rule`, which registers it under its name; the table of
docs/robust.md is generated from the decorators.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.method import Method
from tailorfl.errors import ConfigError, unknown
from tailorfl.rounds.one_round import ClientUpdates, Trained, noise_like
from tailorfl.rounds.requirements import check_federated, check_mean_only
from tailorfl.settings.system import RobustConfig
from tailorfl.settings.train import PrivacyLevel
from tailorfl.training import tree
from tailorfl.training.keys import derive
from tailorfl.training.update import along

log = logging.getLogger(__name__)

Changes = Mapping[str, Tensor]
"""Updates by path, [clients, ...] each."""


@dataclass(frozen=True)
class RuleInput:
    """The input of a rule: a round's clients of one architecture."""

    updates: ClientUpdates
    settings: RobustConfig
    refused: int
    """Number of further clients, whose updates were not finite."""
    seed: int
    round: int
    """Rounds before this one."""
    architecture: str


RuleFunction = Callable[[RuleInput], TensorDict | None]
"""The function that returns the replies a method's server may average, or None if too few arrived."""


@dataclass(frozen=True)
class AggregationRule:
    """A rule with its name and documentation."""

    name: str
    function: RuleFunction
    meaning: str
    """The replacement for the mean, in words."""
    withstands: str
    """Number of hostile clients among m that it withstands."""
    cost: str
    """The server's cost of a round."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Option of `server.robust` -> its default, in words."""
    keeps_weights: bool = False
    """Whether clients keep their weights in the mean; if not, all weights are equal."""
    check: Callable[[RobustConfig, int], None] = lambda settings, clients: None
    """Raises ConfigError if `clients` a round are too few."""


RULES: dict[str, AggregationRule] = {}
"""All rules by name."""


def aggregation_rule(name: str, **facts: Any) -> Callable[[RuleFunction], RuleFunction]:
    """Return a decorator that registers a rule under its name; `facts` are further fields of `AggregationRule`."""

    def register(function: RuleFunction) -> RuleFunction:
        RULES[name] = AggregationRule(name, function, **facts)
        return function

    return register


def find_rule(settings: RobustConfig) -> AggregationRule | None:
    """Return the rule that settings name; None for the plain mean.

    Raises:
        ConfigError: there is no such rule, or an option belongs to another one.
    """
    rule = RULES.get(settings.rule)
    if rule is None and settings.rule != "none":
        raise unknown("rule of server.robust", settings.rule, ["none", *RULES])
    allowed = {"rule", *(rule.options if rule else ())}
    for option, setting in type(settings).model_fields.items():
        if option not in allowed and getattr(settings, option) != setting.default:
            having = [name for name, candidate in RULES.items() if option in candidate.options]
            raise ConfigError(
                f"server.robust.{option} is an option of the rules {', '.join(having)}, but rule={settings.rule}; "
                f"leave {option} out, or set another rule"
            )
    return rule


def check_robust(method: Method, settings: RobustConfig, level: PrivacyLevel | None) -> None:
    """Check that a method supports the rule that settings name.

    Raises:
        ConfigError: there is no such rule, the method's server needs more than a mean, the method trains on pooled
            data, or client-level privacy already clips updates.
    """
    if find_rule(settings) is None:
        return
    check_federated(method, f"updates of clients for server.robust={settings.rule}")
    check_mean_only(method, f"server.robust={settings.rule} cannot replace that step")
    if level == "client":
        raise ConfigError(
            f"server.robust={settings.rule} cannot replace the mean that client-level privacy needs, where "
            "train.dp.clip already bounds the norms; leave out one of the two"
        )


@dataclass(frozen=True)
class Robust:
    """A rule with its settings, and the seed of its random numbers."""

    settings: RobustConfig
    rule: AggregationRule
    seed: int

    @classmethod
    def of(cls, settings: RobustConfig, seed: int) -> Robust | None:
        """Return the rule that settings name; None for the plain mean. Raises ConfigError if there is no such rule."""
        rule = find_rule(settings)
        return None if rule is None else cls(settings, rule, seed)

    def shown(self, part: Trained, round: int, refused: int) -> Trained | None:
        """Return the part of a round that the server receives; None if too few clients are left for the rule.

        `refused` is the number of further clients, whose updates were not finite.
        """
        updates = part.updates
        if not updates.changes:
            return part
        view = RuleInput(updates, self.settings, refused, self.seed, round, part.group.name)
        replies = self.rule.function(view)
        return None if replies is None else replace(part, replies=replies)


@aggregation_rule(
    "median",
    meaning="the median per coordinate; for an even number, the mean of the two middle ones",
    withstands="less than half of m",
    cost="m log m per coordinate",
)
def coordinate_median(view: RuleInput) -> TensorDict:
    """Return replies whose updates are all the median of each coordinate."""
    updates = view.updates
    return updates.with_changes({p: median(u)[None] for p, u in updates.changes.items()})


@aggregation_rule(
    "trimmed_mean",
    meaning="the mean per coordinate, without the b = ⌊trim·m⌋ smallest and the b largest",
    withstands="b",
    cost="m log m per coordinate",
    options={"trim": "0.2"},
)
def coordinate_trimmed_mean(view: RuleInput) -> TensorDict:
    """Return replies whose updates are all the trimmed mean of each coordinate."""
    updates, trim = view.updates, view.settings.trim
    return updates.with_changes({p: trimmed_mean(u, trim)[None] for p, u in updates.changes.items()})


def _check_krum(settings: RobustConfig, clients: int) -> None:
    if clients < least_clients(settings.f):
        raise ConfigError(
            f"{settings.rule} with f={settings.f} needs 2f + 3 = {least_clients(settings.f)} clients per round (of "
            f"each architecture), but there are {clients}; lower server.robust.f, or raise fraction"
        )
    if settings.rule == "multi_krum" and settings.k is not None and settings.k > clients:
        raise ConfigError(
            f"multi_krum averages k={settings.k} updates, but there are {clients} clients per round (of an "
            "architecture); lower server.robust.k"
        )


@aggregation_rule(
    "multi_krum",
    meaning="the mean of the k updates with the smallest such sums",
    withstands="f, if m ≥ 2f + 3 and k ≤ m − f",
    cost="m² per coordinate",
    options={"f": "1", "k": "all but f"},
    check=_check_krum,
)
@aggregation_rule(
    "krum",
    meaning="the one update with the smallest sum of squared distances to its m − f − 2 nearest",
    withstands="f, if m ≥ 2f + 3",
    cost="m² per coordinate",
    options={"f": "1"},
    check=_check_krum,
)
def nearest_updates(view: RuleInput) -> TensorDict | None:
    """Return replies whose updates are all the mean of those with the lowest scores."""
    updates, settings = view.updates, view.settings
    clients, f = updates.replies.batch_size[0], max(0, settings.f - view.refused)
    if clients < least_clients(f):
        log.warning(
            "round %d: %s with f=%d needs %d clients, but %d answered; the server is not changed",
            view.round + 1,
            settings.rule,
            f,
            least_clients(f),
            clients,
        )
        return None
    k = 1 if settings.rule == "krum" else clients - f if settings.k is None else settings.k
    chosen = krum(updates.changes, f, k)
    return updates.with_changes({p: _mean(u[chosen])[None] for p, u in updates.changes.items()})


@aggregation_rule(
    "norm_bound",
    meaning="the mean of Δ · min(1, M/‖Δ‖), plus N(0, σ²) in each coordinate",
    withstands="how far a hostile client can move the mean: M/m",
    cost="m per coordinate",
    options={"bound": "M, or `median` of the round's norms", "noise": "σ, 0"},
    keeps_weights=True,
)
def bounded_updates(view: RuleInput) -> TensorDict:
    """Return replies whose updates are shortened to a norm, with one noise added to all."""
    updates, settings = view.updates, view.settings
    norms = updates.norms()
    limit = float(median(norms)) if settings.bound == "median" else settings.bound
    short = norms <= limit
    scale = torch.where(short, 1.0, limit / norms.clamp(min=1e-300))
    key = derive(view.seed, "weak privacy", view.round, view.architecture)
    replies = dict(tree.leaves(updates.replies))
    for position, (path, u) in enumerate(updates.changes.items()):
        cut = updates.origins[path] + u * along(scale.to(u.dtype), u)
        # Short updates stay bit-identical to what was sent.
        replies[path] = torch.where(along(short, u), replies[path], cut)
        if settings.noise > 0:
            replies[path] += noise_like(key, position, u[0]) * settings.noise
    return tree.nest(replies.items(), updates.replies.batch_size)


def least_clients(f: int) -> int:
    """Return how many clients Krum needs to withstand f hostile ones: 2f + 3."""
    return 2 * f + 3


def median(values: Tensor) -> Tensor:
    """Return the median over the leading axis; for an even number, the mean of the two in the middle."""
    ranked, clients = values.sort(0).values, len(values)
    return _mean(ranked[(clients - 1) // 2 : clients // 2 + 1])


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """Return the mean over the leading axis [m] without the ⌊trim·m⌋ smallest and ⌊trim·m⌋ largest; one value stays."""
    # rounding first: trim · m in floating point may be slightly below an integer
    dropped = min(math.floor(round(trim * len(values), 9)), (len(values) - 1) // 2)
    return _mean(values.sort(0).values[dropped : len(values) - dropped])


def krum(changes: Changes, f: int, k: int) -> list[int]:
    """Return positions of the k clients with the lowest scores, in rising order; `changes` [clients, ...] by path."""
    distances = squared_distances(changes)
    clients = len(distances)
    distances.fill_diagonal_(math.inf)
    scores = distances.sort(1).values[:, : clients - f - 2].sum(1)
    return sorted(scores.argsort(stable=True)[:k].tolist())


def squared_distances(changes: Changes) -> Tensor:
    """Return ‖Δ_i − Δ_j‖² over all entries together, [clients, clients] float64."""
    total = torch.zeros(())
    for update in changes.values():
        flat = update.reshape(len(update), -1).double()
        flat = flat - flat.mean(0)  # distances do not change, but cancellation errors become smaller
        product = flat @ flat.T
        square = product.diagonal()
        total = total + (square[:, None] + square[None, :] - 2 * product)
    return total.clamp(min=0.0)


def _mean(values: Tensor) -> Tensor:
    return values.double().mean(0).to(values.dtype)
