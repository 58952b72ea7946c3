"""The hooks of a round: they observe it, or change it, between its steps.

All of them, in the order in which they are called:

| step | moment | hook | what it does |
|---|---|---|---|
| sample | | | |
| broadcast | `after_broadcast` | `SimulatedSystem` | sets the round's trace: who answers, and when |
| collect | `after_training` | `Attacks` | changes the replies of malicious clients |
| accept | `after_acceptance` | `PrivateReplies` | counts updates that are not finite as zero; hides a secret cohort |
| aggregate | `before_aggregation` | `PrivateReplies` | clips updates and adds noise (client-level privacy) |
| | | `RobustRule` | replaces the mean by a robust rule |
| record | `after_round` | `TrafficCount` | counts traffic |
| | | `WorkCount` | counts gradients, answers and seconds |
| | | `PrivacyAccount` | books uses of private data |

Every hook is called in every round and does nothing in runs that do not need it. Buffered rounds and deployments
override only the step `collect`; the hooks stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tensordict import TensorDict

from tailorfl.core.messages import PerArchitecture, PerClient, count_down, count_up
from tailorfl.privacy import EVERYONE
from tailorfl.rounds.federated_run import FederatedRun
from tailorfl.rounds.groups import by_group
from tailorfl.rounds.one_round import RoundState, Trained
from tailorfl.rounds.participation import sampled_clients
from tailorfl.rounds.planning import nobody, uses_unheard, work_of
from tailorfl.rounds.system import ClientWork


class RoundHook:
    """The moments of a round; a hook overrides those that it needs."""

    def after_broadcast(self, run: FederatedRun, current: RoundState) -> None:
        """Receive the message before any client trains."""

    def after_training(self, run: FederatedRun, part: Trained, number: int) -> Trained:
        """Return what clients of one architecture send; they trained from the server's state after `number` rounds."""
        return part

    def after_acceptance(self, run: FederatedRun, current: RoundState) -> None:
        """Receive the clients whose replies count."""

    def before_aggregation(self, run: FederatedRun, current: RoundState, part: Trained) -> Trained | None:
        """Return the replies of one architecture that the server receives; None if it receives none."""
        return part

    def after_round(self, run: FederatedRun, current: RoundState) -> None:
        """Receive the completed round, after all new states are stored."""


class SimulatedSystem(RoundHook):
    """Simulated devices and availability: decides which clients answer."""

    def after_broadcast(self, run: FederatedRun, current: RoundState) -> None:
        """Set the round's trace, unless its clients are named or recorded."""
        system, clients = run.system, current.training
        if system is None or not current.drawn:
            return
        work = dict.fromkeys(clients, ClientWork(0, 0, 0))
        if system.devices.takes_time:
            work, _ = work_of(run, current.message, clients, current.number)
        enough = sampled_clients(run.fraction, run.participants)
        current.trace = system.round(current.number + 1, run.clock, current.sampled, clients, work, enough)


class Attacks(RoundHook):
    """Attacks of malicious clients on their replies."""

    def after_training(self, run: FederatedRun, part: Trained, number: int) -> Trained:
        """Return a part with the replies of malicious clients changed."""
        return run.malicious.sent(part, number)


class PrivateReplies(RoundHook):
    """Client-level privacy, applied to replies before the server receives them."""

    def after_acceptance(self, run: FederatedRun, current: RoundState) -> None:
        """Count updates that are not finite as zero, and hide the cohort if it is secret."""
        if run.updates is None:
            return
        # That an update is not finite must not be revealed, so it counts; clipping sets it to zero.
        counted = [part.among(set(current.sampled)) for part in current.parts]
        current.counted, current.refused = [part for part in counted if part.ids], ()
        if run.updates.secret:  # a group without drawn clients has replies without rows: only noise
            by_architecture = {part.group.name: part for part in counted}
            current.counted = [
                by_architecture[group.name]
                if group.name in by_architecture
                else nobody(run, group, current.number)
                for group in run.groups
                if run.population.members(group)
            ]

    def before_aggregation(self, run: FederatedRun, current: RoundState, part: Trained) -> Trained | None:
        """Return private replies, without the metrics that clients report."""
        if run.updates is None:
            return part
        members = len(run.population.members(part.group))
        replies = run.updates.visible_replies(part, current.number, members)
        ids = (EVERYONE,) if run.updates.secret else part.ids
        return replace(part, ids=ids, replies=replies, metrics=TensorDict({}, batch_size=replies.batch_size))


class RobustRule(RoundHook):
    """A robust rule instead of the mean."""

    def before_aggregation(self, run: FederatedRun, current: RoundState, part: Trained) -> Trained | None:
        """Return replies whose mean is the rule's result; None if too few arrived for it."""
        if run.robust is None:
            return part
        sampled = set(current.sampled)
        refused = sum(
            int((~came.among(sampled).finite).sum()) for came in current.parts if came.group is part.group
        )
        return run.robust.shown(part, current.number, refused)


class TrafficCount(RoundHook):
    """Traffic: the message to every client that was reached, and the replies of sampled clients that answered."""

    def after_round(self, run: FederatedRun, current: RoundState) -> None:
        """Count the messages and replies of a round."""
        if run.population.pooled:
            return
        reached: Sequence[int] = [i for part in current.parts for i in part.ids]
        message, traffic, groups = current.message, current.traffic, run.groups
        if current.trace is not None:
            reached = current.trace.reached
            if isinstance(message, PerClient):
                positions = {i: k for k, i in enumerate(current.trace.asked)}
                rows = torch.tensor([positions[i] for i in reached], dtype=torch.int64)
                message = PerClient(message.payloads, message.rows[rows])
        if run.method.reaches_all:
            reached = run.population.present
        buffers = {b for g in groups for b in g.model.buffers}
        if isinstance(message, PerArchitecture):
            for group, positions_of_group in by_group(groups, reached):
                traffic.add(count_down(message[group.name], len(positions_of_group), buffers))
        else:
            traffic.add(count_down(message, len(reached), buffers))
        sampled = set(current.sampled)
        for part in current.parts:
            senders = sum(i in sampled for i in part.ids)
            # Replies of one architecture have equal size, so any `senders` rows count the same.
            traffic.add(count_up(part.replies[:senders], buffers))
        run.traffic.add(traffic)


class WorkCount(RoundHook):
    """The clients' work."""

    def after_round(self, run: FederatedRun, current: RoundState) -> None:
        """Count gradients, answers of sampled clients, and the seconds of a round in a simulated system."""
        run.gradients += current.gradients
        run.turns += len(current.answered & set(current.sampled))
        if current.trace is not None:
            run.clock += current.trace.seconds or 0.0


class PrivacyAccount(RoundHook):
    """The ledger of privacy."""

    def after_round(self, run: FederatedRun, current: RoundState) -> None:
        """Book training, updates that left a client, and updates that clients may have sent without being heard."""
        for part in current.parts:
            run.ledger.book("training", part.uses)
        if run.updates is not None:
            for part in current.counted:
                run.ledger.book("updates", run.updates.used(part.ids, part.replies))
        if current.trace is not None:
            unheard = uses_unheard(run, current.message, current.trace, current.answered)
            run.ledger.book("training", unheard)


HOOKS: tuple[RoundHook, ...] = (
    SimulatedSystem(),
    Attacks(),
    PrivateReplies(),
    RobustRule(),
    TrafficCount(),
    WorkCount(),
    PrivacyAccount(),
)
"""All hooks, in the order in which each step calls them."""
