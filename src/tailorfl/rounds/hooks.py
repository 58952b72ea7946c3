"""The hooks of a round: what looks at it, or changes it, between its steps.

All of them, in the order in which they are asked:

| step | moment | hook | what it does |
|---|---|---|---|
| sample | | | |
| broadcast | `after_broadcast` | `SimulatedSystem` | says who answers and after how long: the round's trace |
| collect | `after_training` | `Attacks` | changes the replies of malicious clients |
| accept | `after_acceptance` | `PrivateReplies` | counts updates that are not finite as zero; hides who takes part |
| aggregate | `before_aggregation` | `PrivateReplies` | clips updates and adds noise (client-level privacy) |
| | | `RobustRule` | puts a robust rule in place of the mean |
| record | `after_round` | `TrafficCount` | counts what was sent |
| | | `WorkCount` | counts gradients, answers and seconds |
| | | `PrivacyAccount` | books what private data were used for |

Every hook is asked in every round and does nothing in runs without what it is for. Who collects replies elsewhere, in
buffered rounds or from real clients, replaces the step `collect` and leaves these as they are.
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
    """The moments of a round; a hook defines those that it needs."""

    def after_broadcast(self, run: FederatedRun, current: RoundState) -> None:
        """See the message before anybody trains."""

    def after_training(self, run: FederatedRun, part: Trained, number: int) -> Trained:
        """Return what clients of one architecture send, who trained in a round after `number` others."""
        return part

    def after_acceptance(self, run: FederatedRun, current: RoundState) -> None:
        """See whose replies count."""

    def before_aggregation(self, run: FederatedRun, current: RoundState, part: Trained) -> Trained | None:
        """Return what the server gets of the replies of one architecture; None if it gets nothing of them."""
        return part

    def after_round(self, run: FederatedRun, current: RoundState) -> None:
        """See the whole round, when its states are kept and the server has its new one."""


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
    """Attacks: changes the replies of malicious clients."""

    def after_training(self, run: FederatedRun, part: Trained, number: int) -> Trained:
        """Return a part with the replies of malicious clients changed."""
        return run.malicious.sent(part, number)


class PrivateReplies(RoundHook):
    """Client-level privacy between replies and server."""

    def after_acceptance(self, run: FederatedRun, current: RoundState) -> None:
        """Count an update that is not finite as none, and let nobody see who takes part where that is a secret."""
        if run.updates is None:
            return
        # That an update is not finite must not show, so it counts; clipping makes a zero of it.
        counted = [part.among(set(current.sampled)) for part in current.parts]
        current.counted, current.refused = [part for part in counted if part.ids], ()
        if run.updates.secret:  # a group of which nobody was drawn has replies of no rows: noise alone
            by_architecture = {part.group.name: part for part in counted}
            current.counted = [
                by_architecture[group.name]
                if group.name in by_architecture
                else nobody(run, group, current.number)
                for group in run.groups
                if run.population.members(group)
            ]

    def before_aggregation(self, run: FederatedRun, current: RoundState, part: Trained) -> Trained | None:
        """Return private replies, and nothing that clients report beside them."""
        if run.updates is None:
            return part
        members = len(run.population.members(part.group))
        replies = run.updates.visible_replies(part, current.number, members)
        ids = (EVERYONE,) if run.updates.secret else part.ids
        return replace(part, ids=ids, replies=replies, metrics=TensorDict({}, batch_size=replies.batch_size))


class RobustRule(RoundHook):
    """A robust rule in place of the mean."""

    def before_aggregation(self, run: FederatedRun, current: RoundState, part: Trained) -> Trained | None:
        """Return replies that are all equal to the rule's; None where too few came for it."""
        if run.robust is None:
            return part
        sampled = set(current.sampled)
        refused = sum(
            int((~came.among(sampled).finite).sum()) for came in current.parts if came.group is part.group
        )
        return run.robust.shown(part, current.number, refused)


class TrafficCount(RoundHook):
    """Traffic: every client that was asked received the message, and sampled clients that answered sent a reply."""

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
            # Replies of one architecture are of equal size: those of the sampled cost as many others would.
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
        """Book all that trained, the updates that left a client, and what clients may have sent in vain."""
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
"""All hooks, in the order in which each step asks them."""
