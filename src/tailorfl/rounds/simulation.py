"""The rounds: sample a cohort, broadcast, train, check, aggregate."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from tensordict import TensorDict

from tailorfl.core.messages import Broadcast, PerClient, Replies, Traffic
from tailorfl.engines.base import Stored, Visit
from tailorfl.errors import DivergenceError
from tailorfl.rounds.authors import changed_replies_named, shapes_of_replies
from tailorfl.rounds.client_code import WORK, Training
from tailorfl.rounds.diagnosis import term_to_blame
from tailorfl.rounds.divergence import check_server, listed, why_all_diverged
from tailorfl.rounds.federated_run import FederatedRun
from tailorfl.rounds.groups import Group, by_group, gather, message_for
from tailorfl.rounds.one_round import RoundResult, Trained, count_traffic, means_of
from tailorfl.rounds.private_updates import nobody
from tailorfl.rounds.sampling import sample_clients
from tailorfl.training import tree

log = logging.getLogger(__name__)


class Simulation(FederatedRun):
    """One method on one federation, round by round.

    Args:
        model: the clients' model, or several by name where clients have different architectures.
        assignment: the name of every client's architecture, held-out clients included (with several models).
        fraction: share of training clients sampled each round, in (0, 1]; at least one client.
        sampling: uniform without replacement; proportional to training samples; bernoulli (each client by
            itself, redrawn if none, but not under client-level privacy, whose rounds may be empty).
        weights: what clients count in averages, unless the method's own `weights` say something else.
        state_folder: where private states are memory-mapped; None keeps them in memory.
        client_dp: client-level privacy of what clients send (that of their samples is in `train`).

    Attributes `gradients` (of single samples) is what all clients computed so far, `turns` how often one was sampled.
    Attributes `model`, `split`, `init`, `start` and `states` are those of the first architecture; `groups` has all.

    Raises:
        ConfigError: `fraction` outside (0, 1]; the method needs a public set or one architecture, or does what the
            wanted privacy does not cover.
    """

    def step(
        self, sampled: tuple[int, ...] | None = None, training: tuple[int, ...] | None = None
    ) -> RoundResult:
        """Runs the next round and returns what it did.

        `sampled` are the clients whose replies count, in rising order, by default drawn; `training` those that
        train, by default as the method's participation says.

        Raises:
            DivergenceError: no client that trained returned a finite update, or the server's state is not finite.
        """
        try:
            return self._step(sampled, training)
        except BaseException:  # Ctrl-C too: a round takes place as a whole or not at all
            for group in self.groups:
                group.states.rollback()
            raise

    def _step(self, sampled: tuple[int, ...] | None, training: tuple[int, ...] | None) -> RoundResult:
        begin = time.perf_counter()
        sampled = self.sample(self.round) if sampled is None else sampled
        training = self.trainees(sampled) if training is None else training
        message = self.method.broadcast(self.server, training)
        done = [
            self._train(group, tuple(training[k] for k in where), message_for(message, group, where))
            for group, where in by_group(self.groups, training)
        ]
        rejected = tuple(
            sorted(c for t in done for c, ok in zip(t.ids, t.finite.tolist(), strict=True) if not ok)
        )
        if 0 < len(rejected) < len(training):
            log.warning(
                "round %d: update of client %s is not finite and was rejected (%s)",
                self.round + 1,
                listed(rejected),
                (not self._blamed and self._blamed_term(done)) or "learning rate too high?",
            )
            self._blamed = True
        # With client-level privacy a stop would tell what a single client's update was.
        if training and len(rejected) == len(training) and self.client_dp is None:
            raise DivergenceError(
                f"round {self.round + 1}: all {len(training)} clients diverged (updates are NaN or infinite); "
                + (self._blamed_term(done) or why_all_diverged(self.server, self.method.server_settings))
            )
        accepted = [t.of([int(k) for k in t.finite.nonzero()[:, 0]]) for t in done]
        wanted = set(sampled)
        # Under client-level privacy an update that is not finite counts as none: that there was one must not show.
        asked = [t.among(wanted) for t in (accepted if self.client_dp is None else done)]
        asked = self._with_the_absent(asked)
        arrived = {part.group.name: self._shown(part) for part in asked}
        traffic = self._count(message, done, wanted)
        middle = time.perf_counter()
        server = self.server
        if arrived:  # else the server keeps what it has: idle clients trained, those that were asked diverged
            server = tree.contiguous(self._aggregated(server, gather(arrived)))
            check_server(self.server, server, self.round + 1, self.method.server_settings)
        end = time.perf_counter()
        losses = means_of([part.metrics for part in accepted if part.ids])
        for part in accepted:
            part.group.states.commit(part.ids)
        self.server = server
        self._book(done, asked)
        self.traffic.add(traffic)
        gradients = sum(part.gradients for part in done)
        self.gradients, self.turns = self.gradients + gradients, self.turns + len(sampled)
        result = RoundResult(
            self.round, sampled, rejected, losses, end - begin, traffic, gradients, end - middle
        )
        self.round += 1
        return result

    def _train(self, group: Group, ids: tuple[int, ...], message: TensorDict | PerClient) -> Trained:
        record = self._record()
        visit = Visit.of(self.local, replace(self.cohort(ids), record=record), message)
        with torch.no_grad():
            found = self.engine.train(visit, group.states)
        before = self._replied.get(group.name, {})
        self._replied[group.name] = shapes_of_replies(self.method, found.replies, ids, self.round, before)
        uses = {} if record is None else record.uses
        gradients = int(found.metrics[WORK].double().sum())
        metrics = found.metrics.exclude(WORK)
        return Trained(group, ids, found.replies, metrics, found.finite, message, uses, gradients)

    def _aggregated(self, server: TensorDict, replies: Replies) -> TensorDict:
        now = [path for path, _ in tree.leaves(replies.stack)]
        before = set[str]().union(*self._replied.values())
        with changed_replies_named(self.method, self.round, now, before):
            return self.method.aggregate(server, replies)

    def _blamed_term(self, done: Sequence[Trained]) -> str:
        """Which term of the method made the update of the first client that is not finite so; "" if none did."""
        if self.client_dp is not None:
            return ""
        part, k = next((t, t.finite.tolist().index(False)) for t in done if not t.finite.all())
        message = message_for(part.message, part.group, (k,))
        visit = Visit.of(self.local, self.cohort((part.ids[k],)), message)
        with torch.no_grad():
            return term_to_blame(self.method, visit, Stored(part.group.states), self.engine)

    def _book(self, done: Sequence[Trained], asked: Sequence[Trained]) -> None:
        """Writes into the ledger what a round used: all that trained, and the updates that left a client."""
        for part in done:
            self.ledger.book("training", part.uses)
        if self.updates is not None:
            for part in asked:
                self.ledger.book("updates", self.updates.used(part.ids, part.replies))

    def _with_the_absent(self, asked: Sequence[Trained]) -> list[Trained]:
        """The parts of a round that have clients; where the cohort is secret, all architectures in order.

        A group of which nobody was drawn then has replies of no rows: what the server gets of it is noise alone.
        """
        if not self.cohort_is_secret:
            return [part for part in asked if part.ids]
        there = {part.group.name: part for part in asked}
        return [
            there[group.name] if group.name in there else self.nobody(group, self.round)
            for group in self.groups
            if self.population.members(group)
        ]

    def nobody(self, group: Group, round: int) -> Trained:
        """Returns what a round is of a group of which nobody takes part."""
        one = (self.population.members(group)[0],)
        message = message_for(self.method.broadcast(self.server, one), group, (0,))
        return nobody(group, self.local, self.population.cohort(one, round, self.train), message)

    def _shown(self, part: Trained) -> Replies:
        if self.updates is None:
            return self.replies(part)
        members = len(self.population.members(part.group))
        shown = self.replies(self.updates.hidden(part, self.server, self.round, members))
        return replace(shown, rate=self.fraction) if self.updates.secret else shown

    def replies(self, part: Trained) -> Replies:
        """Returns the replies of a part of a round for the server."""
        return Replies(
            stack=part.replies,
            clients=part.ids,
            samples=self.population.sizes[list(part.ids)],
            weighting=self.weights,
            context=part.group.context,
            round=self.round,
            metrics=part.metrics,
        )

    def sample(self, round: int) -> tuple[int, ...]:
        """Returns the clients of a round in rising order.

        They depend on (seed, round) only, so all methods see the same cohorts.
        """
        return sample_clients(
            self.seed,
            round,
            self.population.sizes,
            self.fraction,
            self.sampling,
            may_be_empty=self.cohort_is_secret,
        )

    def trainees(self, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the clients that train where `sampled` are those that are aggregated."""
        return tuple(range(self.participants)) if self.method.participation == "all" else sampled

    @property
    def local(self) -> Training:
        """The client function of a round."""
        return Training(self.method)

    def _count(self, message: Broadcast, done: Sequence[Trained], sampled: set[int]) -> Traffic:
        """Returns the traffic of a round: whoever trains has received (or everyone), only the sampled send."""
        if self.method.pooled:
            return Traffic()
        everyone = range(self.participants) if self.method.reaches_all else [i for t in done for i in t.ids]
        return count_traffic(message, self.groups, done, sampled, everyone)
