"""The evaluation contract of every method: sets, test data and models.

| set | test data | models |
|---|---|---|
| val | each client's own validation part (model selection uses nothing else) | personal, global |
| local | each client's own test part | personal, global |
| participants | `local` of only the clients that the round sampled | personal, global |
| global | union of all training clients' test parts | personal (each on the union), global |
| heldout | test parts of clients that never trained; `heldout+k`: after k steps of training | personal, global |
| shifted | every shifted set of the federation, by its own name | personal, global |
| malicious | `local` of malicious clients (`system.malicious`), who are in no other set | personal, global |

All clients are evaluated, not only the sampled ones (which `participants` shows separately), in evaluation mode and
without gradients; the run does not change. The personal models of training clients are the current ones, or with
`eval.select: val` each client's from its best validation round (`tailorfl.evaluation.selection`). Records of the global
model on data that belong to no single client have client −1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.evaluation.further_measures import feature_distances, features, sharpness
from tailorfl.evaluation.judges import Portions, make_judge
from tailorfl.evaluation.leading import further
from tailorfl.evaluation.metrics import primary
from tailorfl.evaluation.predictions import Kept
from tailorfl.evaluation.selection import Selection
from tailorfl.evaluation.summary import OF_RECORD, Record
from tailorfl.models.functional import Model
from tailorfl.partition.rows import Ints, Rows
from tailorfl.rounds.groups import by_group
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.eval import GenerationConfig
from tailorfl.settings.experiment import DEFAULT
from tailorfl.training.cohort import Cohort
from tailorfl.training.keys import generator

SERVER = -1
"""The `client` of a record that belongs to no single client."""
MALICIOUS = "malicious"
"""The set of malicious clients: means, tails and the worst client of all other sets are of benign clients only."""


@dataclass(frozen=True)
class Protocol:
    """The sets and metrics of an evaluation.

    Attributes:
        sets: names of `tailorfl.settings.eval.SETS`.
        adapt_steps: numbers of adaptation steps of held-out clients, each evaluated; 0: no adaptation.
        max_samples: largest number of samples of the global and of each shifted test set, a fixed random subset;
            None: all.
        feature_distance: whether records of personal models have the metric of that name, see
            `tailorfl.evaluation.further_measures`.
        sharpness: ρ of the metric `sharpness` of records, see there; None: without it.
        generation: settings of the responses in a generation task.
        metrics: further metrics of classes, see `tailorfl.evaluation.calibration`; a task's default metrics have no
            effect here.
    """

    sets: tuple[str, ...] = DEFAULT.eval.sets
    adapt_steps: tuple[int, ...] = DEFAULT.eval.adapt_steps
    max_samples: int | None = DEFAULT.eval.max_samples
    feature_distance: bool = DEFAULT.eval.feature_distance
    sharpness: float | None = DEFAULT.eval.sharpness
    generation: GenerationConfig = DEFAULT.eval.generation
    metrics: tuple[str, ...] = DEFAULT.eval.metrics


def evaluate(
    sim: Simulation,
    protocol: Protocol,
    participants: Sequence[int] = (),
    selection: Selection | None = None,
    kept: Kept | None = None,
    clients: Sequence[int] | None = None,
) -> list[Record]:
    """Return one record per client, set and model, of the simulation's current state.

    `clients` are the evaluated training clients, by default all. `participants` are the clients that the last round
    sampled, for the set of that name (all clients if training is pooled). With `selection`, which is updated with the
    current personal models, those of training clients are the ones that it has chosen. `kept` records predictions of
    deployed models on clients' own samples.
    """
    measure = _Measure(sim, protocol, kept)
    hostile = tuple(sorted(sim.malicious.clients.intersection(sim.federation.members)))
    everyone = sim.federation.members if clients is None else clients
    training = tuple(i for i in everyone if i not in sim.malicious.clients)
    heldout = tuple(range(sim.federation.num_clients, len(sim.federation.train)))
    own_parts = [s for s in ("val", "local") if s in protocol.sets]
    common = common_sets(sim.federation, protocol, training)
    if sim.method.has_personal and (own_parts or common or selection is not None):
        parts = own_parts if selection is None else [*own_parts, "val"]
        for ids, models in sim.personal_models(training, measure.at_once(training, parts, common)):
            if selection is not None:
                models = selection.update(ids, models, measure.validation(ids, models), sim.round)
            measure.clients("personal", ids, models, own_parts, common)
    measure.shared(training, own_parts, common)
    if "participants" in protocol.sets:
        benign = tuple(i for i in participants if i not in sim.malicious.clients)
        measure.participants(training if sim.method.pooled else benign, selection)
    if hostile and "local" in protocol.sets:
        measure.hostile(hostile, selection)
    if "heldout" in protocol.sets and heldout:
        at_once = measure.at_once(heldout, ["local"], {})
        for steps in protocol.adapt_steps if sim.method.has_personal else ():
            name = "heldout" if steps == 0 else f"heldout+{steps}"
            for ids, models in sim.newcomer_models(heldout, steps, at_once):
                measure.clients("personal", ids, models, ["local"], {}, name)
        measure.shared(heldout, ["local"], {}, name="heldout")
    return list(itertools.chain.from_iterable(measure.records.values()))


def common_sets(
    federation: Federation, protocol: Protocol, clients: Sequence[int] | None = None
) -> dict[str, tuple[Source, Tensor]]:
    """Return the test sets of no single client: name -> (source, rows); `global` is that of `clients`, or of all."""
    out: dict[str, tuple[Source, Tensor]] = {}
    if "global" in protocol.sets:
        out["global"] = federation.source, _subset("global", federation.global_test(clients), protocol)
    if "shifted" in protocol.sets:
        for name, source in federation.shifted.items():
            out[name] = source, _subset(name, np.arange(len(source), dtype=np.int64), protocol)
    return out


def _subset(name: str, rows: Any, protocol: Protocol) -> Tensor:
    most = protocol.max_samples
    if most is not None and len(rows) > most:
        rows = np.sort(generator(0, "evaluate", name).choice(rows, size=most, replace=False))
    return torch.from_numpy(np.asarray(rows, dtype=np.int64))


def headline(sim: Simulation) -> tuple[str, str]:
    """Return the (model, metric) that represents a method: its deployable model and the task's primary metric."""
    return ("personal" if sim.method.has_personal else "global"), primary(sim.federation.source.task)[0]


class _Measure:
    def __init__(self, sim: Simulation, protocol: Protocol, kept: Kept | None = None) -> None:
        self.sim, self.protocol, self.kept = sim, protocol, kept
        self.portions = Portions(sim)
        source = sim.federation.source
        more = further(source, protocol.metrics)
        self.judge = make_judge(sim.engine, source.task, protocol.generation, self.portions, sim.method, more)
        self.records: dict[tuple[str, str], list[Record]] = {}
        """Records by (model, set)."""

    def at_once(
        self, ids: Sequence[int], own: Sequence[str], common: Mapping[str, tuple[Source, Tensor]]
    ) -> int:
        """Return the number of clients whose models are made and evaluated together."""
        sizes = [self._rows(part, ids).sizes.mean() for part in own]
        return self.portions.clients(
            max(sizes, default=0.0), max((len(r) for _, r in common.values()), default=0)
        )

    def _rows(self, part: str, ids: Sequence[int]) -> Rows:
        """Return the validation or test rows of clients."""
        return self.sim.federation.part("val" if part == "val" else "test").of_clients(np.asarray(ids))

    def _parts(self, part: str, ids: Sequence[int]) -> tuple[list[Tensor], Ints]:
        """Return the distinct lists of rows of clients, and each client's position among them."""
        distinct, which = self._rows(part, ids).once()
        return [torch.from_numpy(rows) for rows in distinct], which

    def validation(self, ids: Sequence[int], models: TensorDict) -> dict[str, list[float]]:
        """Return the loss and metrics of some clients' models [clients, ...] on their own validation parts."""
        cohort, source = self.sim.cohort(ids, own=True), self.sim.federation.source
        parts, which = self._parts("val", ids)
        rows = [parts[k] for k in which]
        with torch.no_grad():
            return self.judge.numbers(self.judge.own(cohort, models, rows), source, rows)

    def clients(
        self,
        model: str,
        ids: Sequence[int],
        models: TensorDict,
        own: Sequence[str],
        common: Mapping[str, tuple[Source, Tensor]],
        name: str | None = None,
    ) -> None:
        """Add the records of some clients' models [clients, ...] on their own parts and on common sets."""
        cohort, source = self.sim.cohort(ids, own=True), self.sim.federation.source
        with torch.no_grad():
            for part in own:
                parts, which = self._parts(part, ids)
                rows = [parts[k] for k in which]
                if len(parts) == 1 < len(ids):  # a test set that all share
                    outputs = self.judge.common(cohort, models, source, parts[0])
                else:
                    outputs = self.judge.own(cohort, models, rows)
                if self.kept is not None:
                    self.kept.note(model, name or part, ids, outputs, source, rows)
                more = self._further(cohort, models, source, rows)
                self._add(model, name or part, ids, outputs, source, rows, more)
            for set_name, (source, r) in common.items():
                outputs, rows = self.judge.common(cohort, models, source, r), [r] * len(ids)
                more = self._further(cohort, models, source, rows)
                self._add(model, set_name, ids, outputs, source, rows, more)

    def _further(
        self, cohort: Cohort, models: TensorDict, source: Source, rows: Sequence[Tensor]
    ) -> dict[str, list[float]]:
        """Return requested metrics besides the task's, for every client's model on its own rows."""
        states = [models[k] for k in range(len(rows))]
        return {
            **self._apart(cohort, models, source, rows),
            **self._sharp(cohort.model, states, source, rows),
        }

    def _sharp(
        self, model: Model, states: Sequence[TensorDict], source: Source, rows: Sequence[Tensor]
    ) -> dict[str, list[float]]:
        """Return the sharpness of models on rows of each; empty if it is not requested."""
        rho = self.protocol.sharpness
        if rho is None:
            return {}
        values = [sharpness(model, s, source, r, rho) for s, r in zip(states, rows, strict=True)]
        return {"sharpness": values}

    def participants(self, ids: tuple[int, ...], selection: Selection | None) -> None:
        """Add the set `participants`: copies of these clients' records of `local` if there are any, else new ones."""
        is_measured, chosen = "local" in self.protocol.sets, set(ids)
        for model in ("personal", "global") if is_measured else ():
            rows = self.records.get((model, "local"), [])
            copies = [{**row, "set": "participants"} for row in rows if row["client"] in chosen]
            if copies:
                self.records[model, "participants"] = copies
        if is_measured or not ids:
            return
        if self.sim.method.has_personal:
            for part, models in self.sim.personal_models(ids, self.at_once(ids, ["local"], {})):
                models = models if selection is None else selection.models(part)
                self.clients("personal", part, models, ["local"], {}, "participants")
        self.shared(ids, ["local"], {}, "participants")

    def hostile(self, ids: tuple[int, ...], selection: Selection | None) -> None:
        """Add the set `malicious`: models on the own test parts of malicious clients, who are in no other set."""
        if self.sim.method.has_personal:
            parts = ["local"] if selection is None else ["local", "val"]
            for part, models in self.sim.personal_models(ids, self.at_once(ids, parts, {})):
                if selection is not None:
                    models = selection.update(part, models, self.validation(part, models), self.sim.round)
                self.clients("personal", part, models, ["local"], {}, MALICIOUS)
        self.shared(ids, ["local"], {}, MALICIOUS)

    def _apart(
        self, cohort: Cohort, models: TensorDict, source: Source, rows: Sequence[Tensor]
    ) -> dict[str, list[float]]:
        """Return feature distances of models to the global model of their architecture, on rows of each.

        Empty if they are not requested or there is no global model.
        """
        if not self.protocol.feature_distance:
            return {}
        ((group, _),) = by_group(self.sim.groups, cohort.ids)
        shared = self.sim.global_model(group.name)
        if shared is None:
            return {}
        centres = {id(r): features(cohort.model, shared, source, r) for r in rows}
        distances = [
            feature_distances(features(cohort.model, models[k], source, r), centres[id(r)])
            for k, r in enumerate(rows)
        ]
        return {
            "feature_distance": [float(of_rows.mean()) for of_rows in distances]
        }  # NaN for an empty part, as for all metrics

    def shared(
        self,
        ids: Sequence[int],
        own: Sequence[str],
        common: Mapping[str, tuple[Source, Tensor]],
        name: str | None = None,
    ) -> None:
        """Add the records of the global model on clients' own parts and on common sets, if there is one.

        If clients have different architectures, each client uses the global model of its own, and common sets are
        evaluated with all of them.
        """
        for group, positions in by_group(self.sim.groups, ids):
            model = self.sim.global_model(group.name)
            if model is not None:
                self._shared(model, [ids[k] for k in positions], own, common, name)

    def _shared(
        self,
        model: TensorDict,
        ids: Sequence[int],
        own: Sequence[str],
        common: Mapping[str, tuple[Source, Tensor]],
        name: str | None,
    ) -> None:
        source, cohort = self.sim.federation.source, self.sim.cohort(ids[:1], own=True)
        with torch.no_grad():
            for part in own:
                rows, which = self._parts(part, ids)
                outputs = self.judge.shared(cohort, model, source, rows)
                sharp = self._sharp(cohort.model, [model] * len(rows), source, rows)
                if self.kept is not None:
                    of_clients = [outputs[k] for k in which]
                    self.kept.note("global", name or part, ids, of_clients, source, [rows[k] for k in which])
                self._add("global", name or part, ids, outputs, source, rows, sharp, which)
            for set_name, (source, r) in common.items():
                outputs = self.judge.shared(cohort, model, source, [r])
                sharp = self._sharp(cohort.model, [model], source, [r])
                self._add("global", set_name, [SERVER], outputs, source, [r], sharp)

    def _add(
        self,
        model: str,
        name: str,
        ids: Sequence[int],
        outputs: Sequence[Tensor],
        source: Source,
        rows: Sequence[Tensor],
        further: Mapping[str, list[float]] = MappingProxyType({}),
        which: Ints | None = None,
    ) -> None:
        """Add a record for every client; `which` is each client's position in `outputs`, by default its own."""
        columns: dict[str, Sequence[Any]] = {
            "samples": [len(f) for f in outputs],
            **self.judge.numbers(outputs, source, rows),
            **further,
        }
        measured = list(zip(*columns.values(), strict=True))
        names = (*OF_RECORD, *list(columns)[1:])
        indices = range(len(ids)) if which is None else which.tolist()
        self.records.setdefault((model, name), []).extend(
            dict(zip(names, (self.sim.round, i, name, model, *measured[k]), strict=True))
            for i, k in zip(ids, indices, strict=True)
        )
