"""The rounds: sample a cohort, broadcast, train, check, aggregate."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from tensordict import TensorDict

from tailorfl.core.messages import Broadcast, PerClient, Replies, Traffic
from tailorfl.engines.base import CohortTask
from tailorfl.engines.precision import at_server
from tailorfl.engines.results import CohortUpdates
from tailorfl.errors import ConfigError
from tailorfl.rounds.client_code import WORK
from tailorfl.rounds.divergence import check_server, rejected_clients
from tailorfl.rounds.federated_run import FederatedRun
from tailorfl.rounds.groups import Group, by_group, gather, message_for
from tailorfl.rounds.method_errors import changed_replies_named, check_replies_used, shapes_of_replies
from tailorfl.rounds.one_round import Collected, RoundResult, Trained, count_traffic, means_of
from tailorfl.rounds.participation import NOT_FINITE, TOO_FEW, RoundTrace
from tailorfl.rounds.private_updates import nobody
from tailorfl.rounds.sampling import sample_clients
from tailorfl.rounds.work import simulated_trace, uses_unheard
from tailorfl.training import tree
from tailorfl.training.ledger import PrivacyRecord


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
        system: devices and availability that are simulated, and what the server does about them.
        trace: a recorded run whose rounds are played again; clients that did not answer then do not answer now.
        robust: what takes the place of the mean of the clients' updates.
        features: whether what frozen layers give out is computed once for each sample, and where it is kept.

    Attribute `federation` has the samples as models read them, `given` as they were given: they differ where frozen
    layers are computed once; `features` then says what is kept (else None), and `features_note` why or why not.
    Attributes `gradients` (of single samples) is what all clients computed so far, `turns` how often one that was
    sampled answered, `clock` how many seconds its rounds have taken in a simulated system, or had when recorded.
    Attributes `model`, `split`, `init`, `start` and `states` are those of the first architecture; `groups` has all.

    Raises:
        ConfigError: `fraction` outside (0, 1]; the method needs a public set or one architecture, or does what the
            wanted privacy does not cover; the trace is of other data; the method, or so few clients a round, cannot
            have the rule `robust`.
    """

    def step(
        self,
        sampled: tuple[int, ...] | None = None,
        training: tuple[int, ...] | None = None,
        trace: RoundTrace | None = None,
    ) -> RoundResult:
        """Runs the next round and returns what it did.

        `sampled` are the clients whose replies count, in rising order, by default drawn; `training` those that
        train, by default as the method's participation says. `trace` plays a round again as it was recorded: all
        who were asked are sent to, those whose reply was accepted train.

        Raises:
            DivergenceError: no client that answered returned a finite update, or the server's state is not finite.
            ConfigError: `trace` is of another round or federation.
        """
        if trace is None and sampled is None and training is None and self.trace is not None:
            trace = self.trace.of(self.round + 1)
        if trace is not None:
            if trace.round != self.round + 1:
                raise ConfigError(
                    f"round {self.round + 1} cannot be played again as round {trace.round} was recorded"
                )
            self.check_asked(trace)
            sampled, training = trace.sampled, trace.asked
        try:
            return self._step(sampled, training, trace)
        except BaseException:  # Ctrl-C too: a round takes place as a whole or not at all
            for group in self.groups:
                group.states.rollback()
            raise

    def _step(
        self,
        sampled: tuple[int, ...] | None,
        training: tuple[int, ...] | None,
        trace: RoundTrace | None,
    ) -> RoundResult:
        begin = time.perf_counter()
        simulated = trace is None and sampled is None and training is None
        sampled = self.sample(self.round) if sampled is None else sampled
        training = self.trainees(sampled) if training is None else training
        message = self.method.broadcast(self.server, training)
        if simulated and self.system is not None:
            trace = simulated_trace(self, self.system, message, sampled, training)
        collected = self._collect(message, sampled, training, trace)
        done, trace = collected.parts, collected.trace
        rejected = rejected_clients(self, done)
        wanted = set(sampled)
        accepted = [t.of([int(k) for k in t.finite.nonzero()[:, 0]]) for t in done]
        # Under client-level privacy an update that is not finite counts as none: that there was one must not show.
        counted = accepted if self.client_dp is None else done
        enough = sum(i in wanted for t in counted for i in t.ids) >= self.min_replies
        enough = enough and (trace is None or not trace.too_few)
        if trace is not None:
            trace = trace.refused(() if self.client_dp else rejected, NOT_FINITE)
            trace = trace if enough else trace.refused(trace.asked, TOO_FEW)
        if not enough:  # the round has not taken place for anybody
            accepted = counted = []
        asked = self._with_the_absent([t.among(wanted) for t in counted])
        refused = {t.group.name: int((~t.among(wanted).finite).sum()) for t in done}
        shown = {part.group.name: self._shown(part, refused) for part in asked}
        arrived = {name: replies for name, replies in shown.items() if replies is not None}
        traffic = self._count(message, done, wanted, trace)
        middle = time.perf_counter()
        server = self.server
        if arrived:  # else the server keeps what it has: of those that were asked nobody has an update
            server = tree.contiguous(self._aggregated(server, gather(arrived)))
            check_server(self.server, server, self.round + 1, self.method.server_settings)
        end = time.perf_counter()
        losses = means_of([part.metrics for part in accepted if part.ids])
        for part in accepted:
            part.group.states.commit(part.ids)
        self.server = server
        self._book(done, asked)
        if collected.trace is not None:
            self.clock += collected.trace.seconds or 0.0
            heard = {i for part in done for i in part.ids}
            self.ledger.book("training", uses_unheard(self, message, collected.trace, heard))
        self.traffic.add(traffic)
        gradients = sum(part.gradients for part in done)
        self.gradients += gradients
        self.turns += sum(i in wanted for t in done for i in t.ids)
        result = RoundResult(
            self.round, sampled, rejected, losses, end - begin, traffic, gradients, end - middle, trace
        )
        self.round += 1
        return result

    def _collect(
        self,
        message: Broadcast,
        sampled: tuple[int, ...],
        training: tuple[int, ...],
        trace: RoundTrace | None,
    ) -> Collected:
        """Returns what comes back of a message to the clients `training`, of whom `sampled` would count.

        Here those that answer train at once: all of them, or as `trace` has it. Who collects otherwise, from real
        clients, overrides this, and may return fewer clients than were asked: whoever is missing took no part. It then
        says in the trace what became of each, and makes parts with `trained`.
        """
        here = set(training if trace is None else trace.answered)
        parts = []
        for group, where in by_group(self.groups, training):
            where = tuple(k for k in where if training[k] in here)
            if where:
                ids = tuple(training[k] for k in where)
                parts.append(self._train(group, ids, message_for(message, group, where)))
        return Collected(parts, trace)

    def _train(
        self,
        group: Group,
        ids: tuple[int, ...],
        message: TensorDict | PerClient,
        older: tuple[int, TensorDict] | None = None,
    ) -> Trained:
        """Returns what clients make of a message; `older` is the (version, server's state) it is of, if not of now."""
        round, server = (self.round, self.server) if older is None else older
        record = self._record()
        cohort = self.population.cohort(ids, round, self.train)
        visit = CohortTask.of(self.local, replace(cohort, record=record), message)
        with torch.no_grad():
            found = self.engine.train(visit, group.states)
        part = self.trained(group, ids, found, message, record)
        return self.malicious.sent(self.method, server, part, round)

    def trained(
        self,
        group: Group,
        ids: tuple[int, ...],
        found: CohortUpdates,
        message: TensorDict | PerClient,
        record: PrivacyRecord | None,
    ) -> Trained:
        """Returns the part of a round that clients of a group are, from what their training returned.

        Raises:
            ClientError: the replies are shaped otherwise than those of earlier rounds.
        """
        before = self._replied.get(group.name, {})
        self._replied[group.name] = shapes_of_replies(self.method, found.replies, ids, self.round, before)
        uses = {} if record is None else record.uses
        gradients = int(found.metrics[WORK].double().sum())
        metrics = found.metrics.exclude(WORK)
        return Trained(group, ids, found.replies, metrics, found.finite, message, uses, gradients)

    def _aggregated(self, server: TensorDict, replies: Replies) -> TensorDict:
        now = [path for path, _ in tree.leaves(replies.stack)]
        check_replies_used(self.method, now)
        before = set[str]().union(*self._replied.values())
        with changed_replies_named(self.method, self.round, now, before), at_server(self.engine.precision):
            return self.method.aggregate(server, replies)

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

    def _shown(self, part: Trained, refused: Mapping[str, int]) -> Replies | None:
        """What the server's half of the method gets of a part of a round; None where too few replied for its rule.

        `refused` says of how many clients of each architecture the reply was no number.
        """
        if self.robust is not None:
            found = self.robust.shown(self.method, self.server, part, self.round, refused[part.group.name])
            return None if found is None else self.replies(found)
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
            self.fraction if self.system is None else self.system.asked(self.fraction),
            self.sampling,
            may_be_empty=self.cohort_is_secret,
        )

    def trainees(self, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the clients that train where `sampled` are those that are aggregated."""
        return tuple(range(self.participants)) if self.method.participation == "all" else sampled

    def _count(
        self, message: Broadcast, done: Sequence[Trained], sampled: set[int], trace: RoundTrace | None
    ) -> Traffic:
        """Returns the traffic of a round: who was asked has received (or everyone), the sampled that answer send."""
        if self.method.pooled:
            return Traffic()
        reached: Sequence[int] = [i for t in done for i in t.ids]
        if trace is not None:
            reached = trace.reached
            if isinstance(message, PerClient):
                place = {i: k for k, i in enumerate(trace.asked)}
                rows = torch.tensor([place[i] for i in reached], dtype=torch.int64)
                message = PerClient(message.payloads, message.rows[rows])
        everyone = range(self.participants) if self.method.reaches_all else reached
        return count_traffic(message, self.groups, done, sampled, everyone)
