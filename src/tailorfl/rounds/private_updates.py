"""Privacy of a whole run: what methods can be run privately, and client-level privacy between replies and server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from tailorfl.core import tree
from tailorfl.core.client_privacy import check_payload, private_replies, uses_of_updates
from tailorfl.core.ledger import EVERYONE, Record, Uses
from tailorfl.core.messages import PerClient, Replies
from tailorfl.core.method import Method
from tailorfl.data.scaling import PRIVATE_SCALING, PrivateScaling
from tailorfl.data.source import Source
from tailorfl.engines.base import Visit
from tailorfl.engines.vectorized import Vectorized
from tailorfl.errors import ConfigError
from tailorfl.rounds.groups import Group, message_for
from tailorfl.rounds.one_round import Trained
from tailorfl.settings.experiment import Weights
from tailorfl.settings.privacy import PrivacyLevel

if TYPE_CHECKING:
    from tailorfl.rounds.simulation import Simulation


def check_private(method: Method, level: PrivacyLevel, weights: Weights) -> None:
    """Nothing if a method can be run with privacy of a level and these weights of clients.

    Raises:
        ConfigError: what it does with private data is not covered, or its settings must change.
    """
    leak = method.unprotected(level)
    if leak:
        raise ConfigError(
            f"{method.title} uses {leak}, which {level}-level privacy does not cover; leave that out, or train.dp"
        )
    if level == "sample":
        return
    if method.pooled:
        raise ConfigError(
            f"{method.title} trains on pooled data, so there are no clients that client-level privacy could hide"
        )
    if method.averages_replies and weights != "uniform":
        raise ConfigError(
            f"client-level privacy of {method.title} needs equal weights, since one client may hold most samples; "
            "set weights=uniform"
        )


def check_data(source: Source, level: PrivacyLevel | None) -> None:
    """Nothing if what was done with the samples before training is covered by privacy of a level.

    Raises:
        ConfigError: samples were scaled by statistics of private ones, so that one sample changes all others.
    """
    scaled: PrivateScaling | None = source.info.get(PRIVATE_SCALING)
    if level == "sample" and scaled is not None:
        raise ConfigError(
            f"the samples of '{source.name}' are scaled by {scaled.by}, so one sample changes all others, which "
            f"sample-level privacy does not cover; scale them by public constants ({scaled.instead})"
        )


def cohort_is_secret(sim: Simulation) -> bool:
    """Whether privacy counts on nobody seeing who takes part in a round: a mean of clients drawn each by itself."""
    alone = sim.sampling == "bernoulli" and sim.fraction < 1
    return sim.client_dp is not None and alone and sim.method.averages_replies


def hidden(sim: Simulation, part: Trained) -> Replies:
    """Returns what the server may see of a round: private replies, and nothing that clients report beside them.

    Raises:
        ConfigError, ModelError: replies hold what noise cannot cover.
    """
    assert sim.client_dp is not None
    check_payload(part.replies, part.group.model.buffers)
    received = part.message
    known = received.payloads[received.rows] if isinstance(received, PerClient) else received
    expected = sim.fraction * len(_members(sim, part.group)) if cohort_is_secret(sim) else None
    replies = private_replies(
        part.replies,
        sim.method.anchor(sim.server, known),
        sim.client_dp,
        (sim.seed, sim.round, part.group.name),
        part.ids,
        sim.method.averages_replies,
        expected,
    )
    shown = replace(part, replies=replies, metrics=TensorDict({}, batch_size=replies.batch_size))
    if expected is None:
        return sim.replies(shown)
    return replace(sim.replies(replace(shown, ids=(EVERYONE,))), rate=sim.fraction)


def with_the_absent(sim: Simulation, asked: Sequence[Trained]) -> list[Trained]:
    """Returns the parts of a round that have clients; where the cohort is secret, all architectures in order.

    A group of which nobody was drawn then has replies of no rows, in the shape of those of a client that looks at no
    sample: what the server gets of it is noise alone.
    """
    if not cohort_is_secret(sim):
        return [part for part in asked if part.ids]
    there = {part.group.name: part for part in asked}
    return [
        there[group.name] if group.name in there else nobody(sim, group, sim.round)
        for group in sim.groups
        if _members(sim, group)
    ]


def nobody(sim: Simulation, group: Group, round: int) -> Trained:
    """Returns what a round is of a group of which nobody takes part: no rows, in the shape of a client's reply."""
    one = (_members(sim, group)[0],)
    message = message_for(sim.method.broadcast(sim.server, one), group, (0,))
    cohort = replace(sim.cohort(one), round=round, record=Record(), counting=True)
    with torch.no_grad():
        found = Vectorized().map(Visit.of(sim.local, cohort, message), group.states.get(one))
    none = torch.ones(0, dtype=torch.bool)
    return Trained(group, (), found[1][:0], found[2][:0], none, message, {})


def _members(sim: Simulation, group: Group) -> list[int]:
    """The clients of a group that may be drawn."""
    return sorted(i for i in group.clients if i < sim.participants)


def updates_used(sim: Simulation, ids: Sequence[int], replies: TensorDict) -> dict[int, Uses]:
    """Returns what a round of client-level privacy costs whom; nothing where nothing is sent."""
    assert sim.client_dp is not None
    if not any(tensor.is_floating_point() for _, tensor in tree.leaves(replies)):
        return {}
    everyone = sim.method.averages_replies and len(ids) == sim.participants
    rate = sim.fraction if cohort_is_secret(sim) else 1.0 if everyone else None
    return uses_of_updates(ids, sim.client_dp.noise, rate)
