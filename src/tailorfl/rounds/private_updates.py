"""Privacy of a whole run: what methods can be run privately, and client-level privacy between replies and server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict

from tailorfl.core.messages import PerClient
from tailorfl.core.method import Method
from tailorfl.data.scaling import PRIVATE_SCALING, PrivateScaling
from tailorfl.data.source import Source
from tailorfl.engines.base import ClientFunction
from tailorfl.errors import ConfigError
from tailorfl.privacy.client_privacy import ClientDP, check_payload, private_replies, uses_of_updates
from tailorfl.rounds.client_code import counted
from tailorfl.rounds.groups import Group
from tailorfl.rounds.one_round import Trained
from tailorfl.rounds.updates import anchor_of
from tailorfl.settings.experiment import Sampling, Weights
from tailorfl.settings.privacy import PrivacyLevel
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, TrainConfig
from tailorfl.training.ledger import EVERYONE, Uses


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
        ConfigError: samples were scaled by statistics of private ones, so that one sample, or one client, changes all
            others.
    """
    scaled: PrivateScaling | None = source.info.get(PRIVATE_SCALING)
    if level is None or scaled is None or not (level == "sample" or scaled.shared):
        return
    raise ConfigError(
        f"the samples of '{source.name}' are scaled by {scaled.by}, so one {level} changes all others, which "
        f"{level}-level privacy does not cover; scale them by public constants ({scaled.instead})"
    )


def check_objective(source: Source, train: TrainConfig) -> None:
    """Nothing if clients of these data can descend what `train.objective` says.

    Raises:
        ConfigError: the balanced softmax of a task without classes, or under sample-level privacy.
    """
    if not train.balanced:
        return
    if source.task != "classification":
        raise ConfigError(
            f"objective = balanced_softmax weighs classes (data with task classification), which a task of "
            f"{source.task} does not have; leave it out"
        )
    if train.dp is not None:
        raise ConfigError(
            "objective = balanced_softmax uses the number of a client's samples of each class, which sample-level "
            "privacy does not cover; leave it out, or train.dp, or take train.dp.level=client"
        )


@dataclass(frozen=True)
class PrivateUpdates:
    """Client-level privacy of the rounds of a method: what the server sees of an update, and what that costs."""

    dp: ClientDP
    method: Method
    seed: int
    sampling: Sampling
    fraction: float
    participants: int

    @property
    def secret(self) -> bool:
        """Whether privacy counts on nobody seeing who takes part: a mean of clients drawn each by itself."""
        return self.sampling == "bernoulli" and self.fraction < 1 and self.method.averages_replies

    def hidden(self, part: Trained, server: TensorDict, round: int, members: int) -> Trained:
        """Returns what the server may see of a round: private replies, and nothing that clients report beside them.

        `members` may be drawn of the architecture of that part.

        Raises:
            ConfigError, ModelError: replies hold what noise cannot cover.
        """
        check_payload(part.replies, part.group.model.buffers)
        replies = private_replies(
            part.replies,
            anchor_of(self.method, server, part),
            self.dp,
            (self.seed, round, part.group.name),
            part.ids,
            self.method.averages_replies,
            self.fraction * members if self.secret else None,
        )
        shown = replace(part, replies=replies, metrics=TensorDict({}, batch_size=replies.batch_size))
        return replace(shown, ids=(EVERYONE,)) if self.secret else shown

    def used(self, ids: Sequence[int], replies: TensorDict) -> dict[int, Uses]:
        """Returns what a round costs whom; nothing where nothing is sent."""
        if not any(tensor.is_floating_point() for _, tensor in tree.leaves(replies)):
            return {}
        everyone = self.method.averages_replies and len(ids) == self.participants
        rate = self.fraction if self.secret else 1.0 if everyone else None
        return uses_of_updates(ids, self.dp.noise, rate)


def nobody(group: Group, local: ClientFunction, one: Cohort, message: TensorDict | PerClient) -> Trained:
    """Returns what a round is of a group of which nobody takes part: no rows, in the shape of a client's reply.

    `one` of its clients has that shape, also where it looks at no sample; `message` is what it receives.
    """
    _, (_, replies, metrics) = counted(group, one, message, local)
    none = torch.ones(0, dtype=torch.bool)
    return Trained(group, (), replies[:0], metrics[:0], none, message, {})
