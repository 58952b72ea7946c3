"""The rounds: sample a cohort, broadcast, collect replies, accept, aggregate, record."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from tensordict import TensorDict

from tailorfl.core.messages import PerClient, Replies
from tailorfl.data.federation import Federation
from tailorfl.engines.base import CohortTask, CohortUpdates
from tailorfl.engines.devices import at_server
from tailorfl.errors import ConfigError
from tailorfl.privacy import PrivacyRecord
from tailorfl.rounds.divergence import check_server, rejected_clients
from tailorfl.rounds.federated_run import FederatedRun
from tailorfl.rounds.groups import Group, by_group, extended, gather, message_for, why_fixed
from tailorfl.rounds.hooks import HOOKS
from tailorfl.rounds.method_errors import changed_replies_named, check_replies_used, shapes_of_replies
from tailorfl.rounds.one_round import WORK, RoundResult, RoundState, Trained, means_of
from tailorfl.rounds.participation import NOT_FINITE, TOO_FEW, Population, RoundTrace
from tailorfl.settings.experiment import CYCLIC
from tailorfl.training import tree


class Simulation(FederatedRun):
    """One method on one federation, round by round.

    Args:
        model: the clients' model, or several by name if clients have different architectures.
        assignment: the name of every client's architecture, held-out clients included (with several models).
        fraction: share of training clients sampled each round, in (0, 1]; at least one client.
        sampling: uniform without replacement; proportional to training samples; bernoulli (each client independently,
            redrawn if none, but not under client-level privacy, whose rounds may be empty).
        weights: the clients' weights in averages, unless the method's own `weights` differ.
        state_folder: where private states are memory-mapped; None keeps them in memory.
        client_dp: client-level privacy of the clients' replies (sample-level privacy is in `train`).
        system: simulated devices and availability, and how the server handles them.
        trace: a recorded run whose rounds are replayed; clients that did not answer then do not answer now.
        robust: the rule that replaces the mean of the clients' updates.
        features: whether the output of frozen layers is computed once for each sample, and where it is kept.

    Attribute `federation` has the samples as models read them, `given` the original ones. They differ if frozen layers
    are computed once; `features` then holds the features (else None), and `features_note` says why or why not.
    Attribute `gradients` is the number of gradients of single samples that all clients computed so far, `turns` the
    number of answers of sampled clients, and `clock` the total seconds of the rounds, simulated or recorded.
    Attributes `model`, `split`, `init`, `start` and `states` are those of the first architecture; `groups` has all.

    Raises:
        ConfigError: `fraction` outside (0, 1]; the method needs a public set or one architecture, or uses data that
            the privacy does not cover; the trace is of other data; the method, or the number of clients a round, does
            not support the rule `robust`.
    """

    def extend(self, federation: Federation) -> None:
        """Let further clients take part from the next round on; present clients keep their numbers and states.

        Args:
            federation: of the present clients, followed by the new ones.

        Raises:
            ConfigError: the method, its privacy or the choice of architectures needs all clients from the start, or the
                simulation has malicious clients or computes frozen layers once.
        """
        if reason := why_fixed(self.method, self.level, len(self.groups)):
            raise ConfigError(reason)
        if self.malicious.clients or self.features is not None:
            raise ConfigError(
                "no client can join: malicious clients (system.malicious) and features of frozen layers "
                "(engine.features) are determined at the start; leave both out"
            )
        self.groups = (extended(self.method, self.groups[0], federation),)
        self.given = self.federation = federation
        self.context = self.groups[0].context
        self.population = Population(federation, self.groups, self.seed, pooled=False)
        if self.sampling in CYCLIC:
            self.fraction = 1 / self.participants

    def __iter__(self) -> Iterator[RoundResult]:
        """Run rounds without end and yield their results; `itertools.islice` takes some.

        Raises:
            DivergenceError, ConfigError: as `step`.
        """
        while True:
            yield self.step()

    def step(
        self,
        sampled: tuple[int, ...] | None = None,
        training: tuple[int, ...] | None = None,
        trace: RoundTrace | None = None,
    ) -> RoundResult:
        """Run the next round and return its result; `rounds/hooks.py` lists the hooks between its steps.

        Args:
            sampled: the clients whose replies count, in rising order, by default drawn.
            training: the clients that train, by default according to the method's participation.
            trace: a recorded round to replay: all clients that were asked receive the message, those that answered
                train.

        Raises:
            DivergenceError: no client that answered returned a finite update, or the server's state is not finite.
            ConfigError: `trace` is of another round or federation, or a named client does not exist.
        """
        begin = time.perf_counter()
        try:
            current = self._sample(sampled, training, trace)
            self._broadcast(current)
            current.parts = self.collect(current)
            self._accept(current)
            middle = time.perf_counter()
            server = self._aggregate(current)
            end = time.perf_counter()
            return self._record(current, server, end - begin, end - middle)
        except BaseException:  # Ctrl-C too: a round is all or nothing
            for group in self.groups:
                group.states.rollback()
            raise

    def _sample(
        self, sampled: tuple[int, ...] | None, training: tuple[int, ...] | None, trace: RoundTrace | None
    ) -> RoundState:
        """Return the next round with its clients only: drawn, named or recorded."""
        drawn = sampled is None and training is None and trace is None
        if drawn and self.trace is not None:
            trace, drawn = self.trace.of(self.round + 1), False
        if trace is not None:
            if trace.round != self.round + 1:
                raise ConfigError(
                    f"round {self.round + 1} cannot be replayed from the record of round {trace.round}"
                )
            self.check_asked(trace)
            return RoundState(self.round, trace.sampled, trace.asked, trace)
        sampled = self.sample(self.round) if sampled is None else sampled
        training = self.trainees(sampled) if training is None else training
        for client in (*sampled, *training):
            if not 0 <= client < self.participants:
                raise ConfigError(
                    f"there is no client {client} to train: the {self.participants} clients are counted from 0"
                )
        return RoundState(self.round, sampled, training, drawn=drawn)

    def _broadcast(self, current: RoundState) -> None:
        """Make the message for the clients that train; an empty one if all that were drawn have been left out."""
        if current.training:
            current.message = self.method.broadcast(self.server, current.training)
        for hook in HOOKS:
            hook.after_broadcast(self, current)

    def collect(self, current: RoundState) -> list[Trained]:
        """Return the answers to the message, a part for each architecture with clients that answer.

        Here clients that answer train at once: all of them, or those of the round's trace. A subclass that collects
        from real clients overrides this and may return fewer clients than were asked: the missing took no part. It
        then sets the round's trace, with the outcome of each client, and makes parts with `trained`.
        """
        answering = set(current.training if current.trace is None else current.trace.answered)
        parts = []
        for group, positions in by_group(self.groups, current.training):
            positions = tuple(k for k in positions if current.training[k] in answering)
            if positions:
                ids = tuple(current.training[k] for k in positions)
                parts.append(self._train(group, ids, message_for(current.message, group, positions)))
        return parts

    def _accept(self, current: RoundState) -> None:
        """Refuse updates that are not finite, and the whole round if it has fewer replies than it needs."""
        sampled = set(current.sampled)
        current.rejected = current.refused = rejected_clients(self, current.parts)
        current.accepted = [part.at(part.finite.nonzero()[:, 0].tolist()) for part in current.parts]
        counted = (part.among(sampled) for part in current.accepted)
        current.counted = [part for part in counted if part.ids]
        for hook in HOOKS:
            hook.after_acceptance(self, current)
        trace = current.trace
        enough = sum(len(part.ids) for part in current.counted) >= self.min_replies
        enough = enough and (trace is None or not trace.too_few)
        if trace is not None:
            trace = trace.refused(current.refused, NOT_FINITE)
            current.trace = trace if enough else trace.refused(trace.asked, TOO_FEW)
        if not enough:  # the round has no effect on any client
            current.accepted, current.counted = [], []

    def _aggregate(self, current: RoundState) -> TensorDict:
        """Return the server's state after the round; the old state if no reply counts."""
        replies = {}
        for part in current.counted:
            visible: Trained | None = part
            for hook in HOOKS:
                visible = None if visible is None else hook.before_aggregation(self, current, visible)
            if visible is not None:
                replies[part.group.name] = self.replies(visible)
        if not replies:
            return self.server
        server = tree.contiguous(self.aggregated(self.server, gather(replies)))
        check_server(self.server, server, self.round + 1, self.method.server_settings)
        return server

    def aggregated(self, server: TensorDict, replies: Replies) -> TensorDict:
        """Return the server's new state, as the method's `aggregate` makes it from replies."""
        names = [path for path, _ in tree.leaves(replies.stack)]
        check_replies_used(self.method, names)
        before = set[str]().union(*self._replied.values())
        with changed_replies_named(self.method, self.round, names, before), at_server(self.engine.precision):
            return self.method.aggregate(server, replies)

    def _record(
        self, current: RoundState, server: TensorDict, seconds: float, server_seconds: float
    ) -> RoundResult:
        """Store the new states and return the round's result."""
        losses = means_of([part.metrics for part in current.accepted if part.ids])
        kept = {part.group.name: part.ids for part in current.accepted}
        for group in self.groups:  # also drops what was staged in a round that has no effect
            group.states.commit(kept.get(group.name, ()))
        self.server = server
        for hook in HOOKS:
            hook.after_round(self, current)
        self.round += 1
        return RoundResult(
            current.number,
            current.sampled,
            current.rejected,
            losses,
            seconds,
            current.traffic,
            current.gradients,
            server_seconds,
            current.trace,
        )

    def _train(
        self,
        group: Group,
        ids: tuple[int, ...],
        message: TensorDict | PerClient,
        older: tuple[int, TensorDict] | None = None,
    ) -> Trained:
        """Train clients on a message; `older` is the (version, server's state) of the message if not the current."""
        number, server = (self.round, self.server) if older is None else older
        record = self.new_record()
        cohort = self.population.cohort(ids, number, self.train)
        visit = CohortTask.of(self.local, replace(cohort, record=record), message)
        with torch.no_grad():
            updates = self.engine.train(visit, group.states)
        part = self.trained(group, ids, updates, message, record, server)
        for hook in HOOKS:
            part = hook.after_training(self, part, number)
        return part

    def trained(
        self,
        group: Group,
        ids: tuple[int, ...],
        updates: CohortUpdates,
        message: TensorDict | PerClient,
        record: PrivacyRecord | None,
        server: TensorDict | None = None,
    ) -> Trained:
        """Return the part of a round that belongs to clients of a group, from the results of their training.

        `server` is the state from which the message was made, by default the current one.

        Raises:
            ClientError: the replies' shapes or dtypes differ from those of earlier rounds.
        """
        before = self._replied.get(group.name, {})
        self._replied[group.name] = shapes_of_replies(self.method, updates.replies, ids, self.round, before)
        uses = {} if record is None else record.uses
        gradients = int(updates.metrics[WORK].double().sum())
        metrics = updates.metrics.exclude(WORK)
        server = self.server if server is None else server
        return Trained(
            group,
            ids,
            updates.replies,
            metrics,
            updates.finite,
            message,
            self.method,
            server,
            uses,
            gradients,
        )
