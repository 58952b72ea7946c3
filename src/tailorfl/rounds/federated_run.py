"""A federated run between two rounds: its clients' states, the resulting models, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.messages import Broadcast, PerArchitecture, PerClient, Replies, Traffic
from tailorfl.core.method import Method, check_aggregates
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.base import ClientFunction, CohortTask, Engine, Parts, Stored
from tailorfl.engines.choice import Auto, keep_choice
from tailorfl.engines.memory import keep_freed_memory
from tailorfl.errors import ConfigError, check_known
from tailorfl.interface import check_kind, check_texts
from tailorfl.models.functional import Model
from tailorfl.privacy import PrivacyLedger, PrivacyRecord, Purpose
from tailorfl.rounds.client_privacy import ClientDP, PrivateUpdates
from tailorfl.rounds.frozen_front import FEATURES, FeatureSettings, frozen_front
from tailorfl.rounds.groups import Group, by_group, in_parts, make_groups, message_for, trained_models
from tailorfl.rounds.malicious import drawn
from tailorfl.rounds.one_round import DeploymentFunction, Trained, TrainingFunction
from tailorfl.rounds.participation import (
    Population,
    RoundTrace,
    Trace,
    round_half_up,
    sample_clients,
    sampled_clients,
)
from tailorfl.rounds.requirements import check_fraction, check_private, check_samples
from tailorfl.rounds.robust import Robust, check_robust
from tailorfl.rounds.system import System
from tailorfl.settings.experiment import CYCLIC, DEFAULT, Sampling, Weights
from tailorfl.settings.system import RobustConfig, SystemConfig
from tailorfl.settings.train import PrivacyLevel
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort, TrainConfig


class FederatedRun:
    """One method on one federation after some rounds; `Simulation` documents the arguments and runs the rounds."""

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
        system: SystemConfig = DEFAULT.system,
        trace: Trace | None = None,
        robust: RobustConfig = DEFAULT.server.robust,
        features: FeatureSettings = FEATURES,
    ) -> None:
        _check_kinds(method, federation, model, train, assignment, seed, fraction)
        _check_names(sampling, weights)
        keep_freed_memory()
        check_aggregates(method)
        check_fraction(fraction, sampling)
        self.method, self.train = method, train
        self.engine: Engine = engine if engine is not None else Auto()
        self.seed, self.fraction, self.sampling = seed, fraction, method.sampled(sampling)
        self.client_dp, self.trace = client_dp, trace
        self.min_replies = 0 if method.pooled else system.min_replies
        self.robust = Robust.of(robust, seed)
        is_counted_alike = self.robust is not None and not self.robust.rule.keeps_weights
        self.weights: Weights = "uniform" if is_counted_alike else method.weighting(weights)
        if self.level is not None:
            check_private(method, self.level, self.weights)
        check_samples(federation.source, train.class_weights, train.balanced, self.level)
        check_robust(method, robust, self.level)
        self.malicious = drawn(system.malicious, federation, method, seed)
        models = trained_models(method, federation, model, assignment)
        self.features, self.features_note = frozen_front(models, federation, seed, features)
        self.given = self.federation = federation
        if self.features is not None:
            models = dict.fromkeys(models, self.features.model)
            self.federation = self.features.federation

        def see(source: Source | None) -> Source | None:
            return source if source is None or self.features is None else self.features.see(source)

        groups = make_groups(method, federation, models, assignment, train, seed, state_folder, see)
        self.groups = tuple(replace(g, states=self.engine.hold(g.states)) for g in groups)
        first = self.groups[0]
        self.context = first.context
        self.model, self.split, self.init = first.model, first.context.split, first.context.init
        self.start, self.states = first.start, first.states
        self.server = method.server_state(self.context)
        self.traffic = Traffic()
        self.ledger = PrivacyLedger()
        self.gradients = self.turns = self.round = 0
        self._replied: dict[str, tree.Shapes] = {}  # by group: of every entry of its replies so far
        self.is_blamed = False  # whether the first divergence was already searched for the term to blame
        poisoned = see(self.malicious.poisoned(federation))
        self.population = Population(
            self.federation, self.groups, seed, method.pooled, poisoned, system.malicious.from_round
        )
        if self.sampling in CYCLIC:
            self.fraction = 1 / self.participants
        self.updates: PrivateUpdates | None = None
        if client_dp is not None:
            cohorts = self.sampling, self.fraction, len(self.population.present)
            self.updates = PrivateUpdates(client_dp, method.averages_replies, seed, *cohorts)
        self._check_enough(sampled_clients(self.fraction, self.participants))
        # A trace records the outcomes, and with pooled data there are no devices to simulate.
        simulated = system.is_simulated and trace is None and not self.population.pooled
        self.system = System.of(system, seed, federation.names) if simulated else None
        self.clock = 0.0
        self._check_system(system)
        self._check_trace(system)

    def _check_system(self, system: SystemConfig) -> None:
        """Raise ConfigError if outcomes reveal a secret cohort, or no round can have as many replies as it needs."""
        if self.cohort_is_secret and (system.min_replies or system.is_simulated or self.trace is not None):
            raise ConfigError(
                "the epsilon of this privacy assumes that nobody sees who takes part in a round, but the settings of "
                "system reveal it; leave them out, or set sampling=uniform"
            )
        fraction = self.fraction if self.system is None else self.system.asked(self.fraction)
        most = len(self.population.present)
        if self.sampling != "bernoulli":
            most = min(most, sampled_clients(fraction, self.participants))
        if self.trace is None and self.min_replies > most:  # recorded rounds may have any size
            raise ConfigError(
                f"system.min_replies={self.min_replies} is more than the {most} clients of a round, so no round would "
                f"have an effect; set system.min_replies={most} at most"
            )

    def _check_trace(self, system: SystemConfig) -> None:
        """Raise ConfigError if a recorded run has other clients or another mode of rounds."""
        for round_trace in self.trace or ():
            self.check_asked(round_trace)
            if any(a.version is not None for a in round_trace.answers) != (system.mode == "buffered"):
                recorded_mode = "synchronous" if system.mode == "buffered" else "buffered"
                raise ConfigError(
                    f"the trace was recorded with {recorded_mode} rounds; set system.mode={recorded_mode}"
                )

    def _check_enough(self, clients: int) -> None:
        """Raise ConfigError if a rule needs more clients of an architecture than a round of `clients` can have."""
        if self.robust is None:
            return
        for group in self.groups:
            members = len(self.population.members(group))
            self.robust.rule.check(self.robust.settings, min(members, clients))

    def check_asked(self, trace: RoundTrace) -> None:
        """Check that the clients of a recorded round exist. Raises ConfigError."""
        strange = [i for i in trace.asked if i >= self.participants]
        if strange:
            raise ConfigError(
                f"the trace has client {strange[0]} in round {trace.round}, but there are {self.participants} clients, "
                "counted from 0; the trace was recorded with different data"
            )

    @property
    def is_traced(self) -> bool:
        """Whether the outcome of every sampled client is recorded; false if all clients always answer."""
        return self.trace is not None or self.system is not None

    @property
    def level(self) -> PrivacyLevel | None:
        """The level of privacy: sample, client, or None without privacy."""
        return "sample" if self.train.dp is not None else "client" if self.client_dp is not None else None

    @property
    def local(self) -> TrainingFunction:
        """The client function of a round."""
        return TrainingFunction(self.method)

    @property
    def participants(self) -> int:
        """Number of clients that may be sampled: those of the federation, or one that holds all data (pooled)."""
        return len(self.population)

    @property
    def cohort_is_secret(self) -> bool:
        """Whether privacy relies on a secret cohort: nobody may see who takes part in a round."""
        return self.updates is not None and self.updates.secret

    @property
    def trained_scalars(self) -> int:
        """Scalars that one client optimises in a round: d for one model, 2d for two; parts trained twice count twice.

        If clients have different architectures, the mean over clients.
        """
        method, total = self.method, 0
        for group in self.groups:
            names = group.context.split.trainable
            twice = set(group.model.split(method.trained_twice).personal) if method.trained_twice else set()
            sizes = [group.model.sizes[n] * (method.models_trained + (n in twice)) for n in names]
            total += len(group.clients) * sum(sizes)
        return round_half_up(total / sum(len(group.clients) for group in self.groups))

    def cohort(self, ids: Sequence[int], limit: int | None = None, own: bool = False) -> Cohort:
        """Return the cohort `ids` of this round, clients of one architecture.

        `own` selects clients as they deploy: those of the federation even if training is pooled, at the learning rate
        of deployment.
        """
        return self.population.cohort(ids, self.round, self.train, limit, own)

    def run(
        self, ids: Sequence[int], states: TensorDict, message: Broadcast, function: ClientFunction
    ) -> Parts:
        """Return the stacked results of a client function for `ids`, clients of one architecture; store nothing."""
        if isinstance(message, PerArchitecture):
            ((group, _),) = by_group(self.groups, ids)
            message = message[group.name]
        with torch.no_grad():
            return self.engine.map(CohortTask.of(function, self.cohort(ids), message), states)

    def new_record(self) -> PrivacyRecord | None:
        """Return a record for the uses of private data in a training; None without sample-level privacy."""
        return PrivacyRecord() if self.train.dp is not None else None

    # -- who takes part -------------------------------------------------------------------------------------

    def sample(self, round: int) -> tuple[int, ...]:
        """Return the clients of a round in rising order.

        They depend on (seed, round) only, so all methods see the same cohorts. Leaving a client out of the federation
        only removes it from the cohorts it would have been drawn for.
        """
        drawn = sample_clients(
            self.seed,
            round,
            self.population.sizes,
            self.fraction if self.system is None else self.system.asked(self.fraction),
            self.sampling,
            may_be_empty=self.cohort_is_secret,
        )
        return tuple(i for i in drawn if self.population.sizes[i])

    def trainees(self, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """Return the clients that train in a round that aggregates `sampled`."""
        return self.population.present if self.method.participation == "all" else sampled

    def replies(self, part: Trained) -> Replies:
        """Return the replies of a part of a round for the server."""
        return Replies(
            stack=part.replies,
            clients=part.ids,
            samples=self.population.sizes[list(part.ids)],
            weighting=self.weights,
            context=part.group.context,
            round=self.round,
            metrics=part.metrics,
            rate=self.fraction if self.cohort_is_secret else None,
        )

    # -- resulting models -----------------------------------------------------------------------------------

    def personal_models(
        self, ids: Sequence[int], at_once: int = 32
    ) -> Iterator[tuple[tuple[int, ...], TensorDict]]:
        """Yield (clients, their deployable models [clients, ...]); all personal metrics evaluate these models."""
        for group, part in in_parts(self.groups, ids, at_once):
            yield part, self._deployed(group, part, None)

    def newcomer_models(
        self, ids: Sequence[int], steps: int, at_once: int = 32
    ) -> Iterator[tuple[tuple[int, ...], TensorDict]]:
        """Yield models of clients that never trained, after at most `steps` batches in each fit.

        With 0 steps, the models that such clients can deploy at once. Nothing is stored or sent.
        """
        for group, part in in_parts(self.groups, ids, at_once):
            yield part, self._deployed(group, part, steps)

    def _deployed(self, group: Group, ids: tuple[int, ...], steps: int | None) -> TensorDict:
        message = self.deployment_message(group, ids, steps)
        record = self.new_record()
        cohort = replace(self.cohort(ids, steps, True), record=record)
        visit = CohortTask.of(DeploymentFunction(self.method, steps), cohort, message)
        with torch.no_grad():
            (models,) = self.engine.map(visit, Stored(group.states, fresh=steps is not None))
        if record is not None:
            # Of all evaluated models only one is deployed: the last, or the one that adapted longest.
            purpose: Purpose = "deployment" if steps is None else "newcomer"
            self.ledger.settle(purpose, record.uses, keep_larger=steps is not None)
        return models

    def deployment_message(
        self, group: Group, ids: Sequence[int], steps: int | None
    ) -> TensorDict | PerClient:
        """Return the message to clients of a group before they deploy; `steps` as in `DeploymentFunction`."""
        if steps is None and not self.method.personal_receives:
            return tree.empty()
        send = self.method.broadcast if steps is None else self.method.welcome
        return message_for(send(self.server, tuple(ids)), group, range(len(ids)))

    def global_model(self, architecture: str | None = None) -> TensorDict | None:
        """Return the global model, or None for a method that has none.

        `architecture` names one of several; by default the first.
        """
        if not self.method.has_global:
            return None
        shared = self.method.shared(self.server)
        name = self.groups[0].name if architecture is None else architecture
        return shared[name] if isinstance(shared, PerArchitecture) else shared

    # -- checkpoints ----------------------------------------------------------------------------------------

    def dump(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, facts) from which `load` continues exactly.

        The tensors are those of the run, not copies: write or load them before the next round.
        """
        facts = {
            "round": self.round,
            "engine": self.engine.name,
            "traffic": self.traffic.as_dict(),
            "gradients": self.gradients,
            "turns": self.turns,
        }
        tensors = {f"server/{p}": t for p, t in tree.leaves(self.server)}
        for group in self.groups:
            tensors |= {f"{_place(group)}{p}": t for p, t in group.states.dump().items()}
        if self.is_traced:
            facts["clock"] = self.clock
        return tensors, {**facts, "ledger": self.ledger.dump()} if self.ledger else facts

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore the run from what `dump` returned."""
        # Copies: matrix products on a tensor inside a file's buffer may use other instructions, because of its
        # alignment, and round differently.
        server_tensors = {
            p.removeprefix("server/"): t.clone() for p, t in tensors.items() if p.startswith("server/")
        }
        # Entries that the state has got since its beginning are in the tensors only.
        self.server = tree.fill(self.method.server_state(self.context), server_tensors)
        for group in self.groups:
            prefix = _place(group)
            group.states.load({p.removeprefix(prefix): t for p, t in tensors.items() if p.startswith(prefix)})
        self.round, self.traffic = int(facts["round"]), Traffic(**facts["traffic"])
        self.gradients, self.turns = int(facts["gradients"]), int(facts["turns"])
        self.clock = float(facts.get("clock", 0.0))
        self.ledger = PrivacyLedger.restore(facts["ledger"]) if "ledger" in facts else PrivacyLedger()
        keep_choice(self.engine, str(facts["engine"]))


def _place(group: Group) -> str:
    """Return the prefix of the private states of a group's clients in a checkpoint."""
    return f"clients/{group.name}/" if group.name else "clients/"


def _check_kinds(
    method: Any, federation: Any, model: Any, train: Any, assignment: Any, seed: Any, fraction: Any
) -> None:
    """Check the types of a run's arguments. Raises ConfigError."""
    check_kind("method", method, Method)
    check_kind("federation", federation, Federation)
    check_kind("model", model, Model, Mapping)
    check_kind("train", train, TrainConfig)
    check_texts("assignment", assignment)
    check_kind("seed", seed, Integral)
    check_kind("fraction", fraction, Real)


def _check_names(sampling: str, weights: str) -> None:
    """Check the names among a run's arguments. Raises ConfigError."""
    check_known("sampling", sampling, get_args(Sampling))
    check_known("weights", weights, get_args(Weights))
