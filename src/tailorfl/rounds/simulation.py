"""The rounds: sample a cohort, broadcast, train, check, aggregate; and the models that come out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.client_privacy import ClientDP
from tailorfl.core.cohort import Cohort, TrainConfig
from tailorfl.core.ledger import Ledger, Purpose, Record
from tailorfl.core.messages import (
    Broadcast,
    PerArchitecture,
    PerClient,
    Replies,
    Traffic,
)
from tailorfl.core.method import Method
from tailorfl.core.objective import LOSSES
from tailorfl.data.federation import Federation
from tailorfl.data.rows import Rows
from tailorfl.engines.auto import Auto
from tailorfl.engines.base import ClientFunction, Engine, Stored, Visit
from tailorfl.engines.memory import keep_freed_memory
from tailorfl.engines.results import Parts
from tailorfl.errors import ConfigError, DivergenceError
from tailorfl.models.functional import Model
from tailorfl.rounds.client_code import WORK, Deployment, Training, deployment_message, in_parts
from tailorfl.rounds.continuing import dump, load
from tailorfl.rounds.divergence import check_server, listed, why_all_diverged
from tailorfl.rounds.groups import Group, by_group, gather, make_groups, message_for
from tailorfl.rounds.one_round import RoundResult, Trained, count_traffic, means_of
from tailorfl.rounds.private_updates import (
    check_data,
    check_private,
    cohort_is_secret,
    hidden,
    updates_used,
    with_the_absent,
)
from tailorfl.rounds.sampling import round_half_up, sample_clients
from tailorfl.settings.experiment import DEFAULT, Sampling, Weights
from tailorfl.settings.privacy import PrivacyLevel

log = logging.getLogger(__name__)


class Simulation:
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

    def __init__(
        self,
        method: Method,
        federation: Federation,
        model: Model | Mapping[str, Model],
        train: TrainConfig,
        *,
        assignment: Sequence[str] = (),
        engine: Engine | None = None,
        seed: int = 0,
        fraction: float = DEFAULT.fraction,
        sampling: Sampling = DEFAULT.sampling,
        weights: Weights = DEFAULT.weights,
        state_folder: Path | None = None,
        client_dp: ClientDP | None = None,
    ) -> None:
        keep_freed_memory()
        if not 0 < fraction <= 1:
            raise ConfigError(f"fraction must lie in (0, 1], but is {fraction}")
        self.method, self.federation, self.train = method, federation, train
        self.engine: Engine = engine if engine is not None else Auto()
        self.seed, self.fraction, self.sampling = seed, fraction, sampling
        self.client_dp = client_dp
        self.weights = method.weighting(weights)
        if self.level is not None:
            check_private(method, self.level, self.weights)
        check_data(federation.source, self.level)
        groups = make_groups(method, federation, model, assignment, train, seed, state_folder)
        self.groups = tuple(replace(g, states=self.engine.hold(g.states)) for g in groups)
        first = self.groups[0]
        self.context = first.context
        self.model, self.split, self.init = first.model, first.context.split, first.context.init
        self.start, self.states = first.start, first.states
        self.server = method.server_state(self.context)
        self.traffic = Traffic()
        self.ledger = Ledger()
        self.gradients = self.turns = 0
        self.round = 0
        self._members, self._val = self._rows()
        self._sizes = self._members.sizes

    @property
    def level(self) -> PrivacyLevel | None:
        """What privacy hides: a sample, a client, or None without."""
        return "sample" if self.train.dp is not None else "client" if self.client_dp is not None else None

    @property
    def participants(self) -> int:
        """How many clients may be sampled: those of the federation, or one that holds all data where it is pooled."""
        return len(self._members)

    @property
    def trained_scalars(self) -> int:
        """Scalars that one client optimises in a round: `d` for one model, `2d` for two.

        The mean over clients where they have different architectures.
        """
        counts = [
            (len(g.clients), sum(g.model.sizes[n] for n in g.context.split.trainable)) for g in self.groups
        ]
        share = sum(clients * scalars for clients, scalars in counts) / sum(clients for clients, _ in counts)
        return self.method.models_trained * round_half_up(share)

    # -- one round ------------------------------------------------------------------------------------------

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
                "round %d: update of client %s is not finite and was rejected (learning rate too high?)",
                self.round + 1,
                listed(rejected),
            )
        # With client-level privacy a stop would tell what a single client's update was.
        if training and len(rejected) == len(training) and self.client_dp is None:
            raise DivergenceError(
                f"round {self.round + 1}: all {len(training)} clients diverged (updates are NaN or infinite); "
                + why_all_diverged(self.server, self.method.server_settings)
            )
        accepted = [t.of([int(k) for k in t.finite.nonzero()[:, 0]]) for t in done]
        wanted = set(sampled)
        # Under client-level privacy an update that is not finite counts as none: that there was one must not show.
        asked = [t.among(wanted) for t in (accepted if self.client_dp is None else done)]
        asked = with_the_absent(self, asked)
        arrived = {part.group.name: self._shown(part) for part in asked}
        traffic = self._count(message, done, wanted)
        middle = time.perf_counter()
        server = self.server
        if arrived:  # else the server keeps what it has: idle clients trained, those that were asked diverged
            server = tree.contiguous(self.method.aggregate(server, gather(arrived)))
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
        uses = {} if record is None else record.uses
        gradients = int(found.metrics[WORK].double().sum())
        metrics = found.metrics.exclude(WORK)
        return Trained(group, ids, found.replies, metrics, found.finite, message, uses, gradients)

    def _book(self, done: Sequence[Trained], asked: Sequence[Trained]) -> None:
        """Writes into the ledger what a round used: all that trained, and the updates that left a client."""
        for part in done:
            self.ledger.book("training", part.uses)
        if self.client_dp is not None:
            for part in asked:
                self.ledger.book("updates", updates_used(self, part.ids, part.replies))

    def _record(self) -> Record | None:
        return Record() if self.train.dp is not None else None

    def _shown(self, part: Trained) -> Replies:
        return self.replies(part) if self.client_dp is None else hidden(self, part)

    def replies(self, part: Trained) -> Replies:
        """Returns the replies of a part of a round for the server."""
        return Replies(
            stack=part.replies,
            clients=part.ids,
            samples=self._sizes[list(part.ids)],
            weighting=self.weights,
            context=part.group.context,
            round=self.round,
            metrics=part.metrics,
        )

    def sample(self, round: int) -> tuple[int, ...]:
        """Returns the clients of a round in rising order.

        They depend on (seed, round) only, so all methods see the same cohorts.
        """
        may_be_empty = cohort_is_secret(self)
        return sample_clients(
            self.seed, round, self._sizes, self.fraction, self.sampling, may_be_empty=may_be_empty
        )

    def trainees(self, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the clients that train where `sampled` are those that are aggregated."""
        return tuple(range(self.participants)) if self.method.participation == "all" else sampled

    # -- running client code --------------------------------------------------------------------------------

    def cohort(self, ids: Sequence[int], limit: int | None = None, own: bool = False) -> Cohort:
        """Returns the cohort `ids` of this round, clients of one architecture.

        `own` are the clients as they deploy: the federation's even where training is pooled, at the rate of tuning.
        """
        ((group, _),) = by_group(self.groups, ids)
        members = self.federation.train if own else self._members
        val = self.federation.val if own else self._val
        falls = self.train.round_schedule
        share = falls.deployed(self.round) if own else falls.share(self.round)
        return Cohort(
            ids=tuple(ids),
            members=tuple(members[i] for i in ids),
            val=tuple(val[i] for i in ids),
            source=self.federation.source,
            model=group.model,
            split=group.context.split,
            public=self.federation.public,
            loss=LOSSES[self.federation.source.task],
            config=self.train if share == 1 else self.train.decayed(share),
            seed=self.seed,
            round=self.round,
            limit=limit,
        )

    def run(
        self, ids: Sequence[int], states: TensorDict, message: Broadcast, function: ClientFunction
    ) -> Parts:
        """Returns a client function of `ids`, clients of one architecture, stacked; nothing is stored."""
        if isinstance(message, PerArchitecture):
            ((group, _),) = by_group(self.groups, ids)
            message = message[group.name]
        with torch.no_grad():
            return self.engine.map(Visit.of(function, self.cohort(ids), message), states)

    @property
    def local(self) -> Training:
        """The client function of a round."""
        return Training(self.method)

    def _count(self, message: Broadcast, done: Sequence[Trained], sampled: set[int]) -> Traffic:
        """Returns the traffic of a round: whoever trains has received (or everyone), only the sampled send."""
        if self.method.pooled:
            return Traffic()
        everyone = range(len(self._members)) if self.method.reaches_all else [i for t in done for i in t.ids]
        return count_traffic(message, self.groups, done, sampled, everyone)

    def _rows(self) -> tuple[Rows, Rows]:
        train, val = (self.federation.part(part)[: self.federation.num_clients] for part in ("train", "val"))
        if self.method.pooled:
            return Rows.of([train.flat()]), Rows.of([val.flat()])
        return train, val

    # -- the models that come out ---------------------------------------------------------------------------

    def personal_models(
        self, ids: Sequence[int], at_once: int = 32
    ) -> Iterator[tuple[tuple[int, ...], TensorDict]]:
        """Yields (clients, their deployable models [clients, ...]); every personal metric is of these."""
        for group, part in in_parts(self.groups, ids, at_once):
            yield part, self._deployed(group, part, None)

    def newcomer_models(
        self, ids: Sequence[int], steps: int, at_once: int = 32
    ) -> Iterator[tuple[tuple[int, ...], TensorDict]]:
        """Yields the models of clients that never trained, after at most `steps` batches of each training.

        0: what such a client can deploy at once. Nothing is stored and nothing is sent.
        """
        for group, part in in_parts(self.groups, ids, at_once):
            yield part, self._deployed(group, part, steps)

    def _deployed(self, group: Group, ids: tuple[int, ...], steps: int | None) -> TensorDict:
        message = deployment_message(self.method, self.server, group, ids, steps)
        record = self._record()
        cohort = replace(self.cohort(ids, steps, True), record=record)
        visit = Visit.of(Deployment(self.method, steps), cohort, message)
        with torch.no_grad():
            (found,) = self.engine.map(visit, Stored(group.states, fresh=steps is not None))
        if record is not None:
            # Of all models that evaluations look at one is deployed: the last, or the one that adapted longest.
            purpose: Purpose = "deployment" if steps is None else "newcomer"
            self.ledger.settle(purpose, record.uses, keep_larger=steps is not None)
        return found

    def global_model(self, architecture: str | None = None) -> TensorDict | None:
        """Returns the global model, or None for a method that has none.

        `architecture` names one of several; by default the first.
        """
        if not self.method.has_global:
            return None
        found = self.method.shared(self.server)
        name = self.groups[0].name if architecture is None else architecture
        return found[name] if isinstance(found, PerArchitecture) else found

    # -- checkpoints ----------------------------------------------------------------------------------------

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns (tensors, facts) from which `load` continues exactly.

        The tensors are those of the run, not copies: write or load them before the next round.
        """
        return dump(self)

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restores what `dump` returned."""
        load(self, tensors, facts)
