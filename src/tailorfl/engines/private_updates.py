"""Privacy of a whole run: what methods can be run privately, and client-level privacy between replies and server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tensordict import TensorDict

from tailorfl.core import tree
from tailorfl.core.client_privacy import ClientDP, check_payload, private_replies, uses_of_updates
from tailorfl.core.ledger import Uses
from tailorfl.core.messages import PerClient
from tailorfl.core.method import Method
from tailorfl.core.privacy import Level
from tailorfl.engines.rounds import Trained, sampled_clients
from tailorfl.errors import ConfigError

if TYPE_CHECKING:
    from tailorfl.engines.simulation import Simulation


def check_private(method: Method, level: Level) -> None:
    """Nothing if a method can be run with privacy of a level.

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
    if method.averages_replies and method.weights != "uniform":
        raise ConfigError(
            f"client-level privacy of {method.title} needs equal weights, since one client may hold most samples; "
            f"set methods.{method.name}.weights=uniform"
        )


def hidden(part: Trained, dp: ClientDP, method: Method, server: TensorDict, key: tuple[int, int]) -> Trained:
    """Returns what the server may see of a round: private replies, and nothing that clients report beside them.

    `key` is (seed, round).

    Raises:
        ConfigError, ModelError: replies hold what noise cannot cover.
    """
    check_payload(part.replies, part.group.model.buffers)
    received = part.message
    known = received.payloads[received.rows] if isinstance(received, PerClient) else received
    replies = private_replies(
        part.replies,
        method.anchor(server, known),
        dp,
        (*key, part.group.name),
        part.ids,
        method.averages_replies,
    )
    return replace(part, replies=replies, metrics=TensorDict({}, batch_size=[len(part.ids)]))


def updates_used(sim: Simulation, ids: Sequence[int], replies: TensorDict) -> dict[int, Uses]:
    """Returns what a round of client-level privacy costs whom; nothing where nothing is sent."""
    assert sim.client_dp is not None
    if not any(tensor.is_floating_point() for _, tensor in tree.leaves(replies)):
        return {}
    rate = None
    if sim.method.averages_replies and sim.sampling != "proportional":
        clients = sim.federation.num_clients
        rate = (
            sim.fraction if sim.sampling == "bernoulli" else sampled_clients(sim.fraction, clients) / clients
        )
    return uses_of_updates(ids, sim.client_dp.noise, rate)
