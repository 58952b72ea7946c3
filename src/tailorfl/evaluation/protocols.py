"""What is measured on what: the evaluation contract of every method.

| set | test data | models |
|---|---|---|
| val | each client's own validation part (model selection uses nothing else) | personal, global |
| local | each client's own test part | personal, global |
| global | union of all training clients' test parts | personal (each on the union), global |
| heldout | test parts of clients that never trained; `heldout+k`: after k steps of training | personal, global |
| shifted | every shifted set of the federation, by its own name | personal, global |

Every client is evaluated, not only the sampled ones, in evaluation mode and without gradients; nothing of the
run changes.
A record of the global model on data of no single client has client −1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.keys import generator
from tailorfl.data.source import Source
from tailorfl.engines.groups import by_group
from tailorfl.engines.simulation import Simulation
from tailorfl.evaluation.features import feature_distances, features
from tailorfl.evaluation.generation import Generation
from tailorfl.evaluation.judges import make_judge
from tailorfl.evaluation.metrics import LOWER_IS_BETTER, primary
from tailorfl.evaluation.summary import summarize
from tailorfl.models.functional import Model

SETS = ("val", "local", "global", "heldout", "shifted")
SERVER = -1
"""The `client` of a record that belongs to no single client."""

Record = dict[str, Any]
"""{round, client, set, model, samples, loss, metric values}."""
OF_RECORD = ("round", "client", "set", "model", "samples")
"""What a record says about itself; all else in it is measured."""
Summaries = dict[str, dict[str, dict[str, dict[str, float]]]]
"""{model: {set: {metric: statistics over clients}}}."""


@dataclass(frozen=True)
class Protocol:
    """What to evaluate.

    Attributes:
        sets: names out of `SETS`.
        adapt_steps: steps of adaptation of held-out clients, each evaluated; 0 is without.
        max_samples: at most so many samples of the global and of each shifted test set, a fixed random subset;
            None: all.
        feature_distance: whether records of personal models have the metric of that name, see
            `tailorfl.evaluation.features`.
        generation: how the responses of a generation task are made.
    """

    sets: tuple[str, ...] = ("val", "local")
    adapt_steps: tuple[int, ...] = (0, 10)
    max_samples: int | None = None
    feature_distance: bool = False
    generation: Generation = field(default_factory=Generation)


def evaluate(sim: Simulation, protocol: Protocol) -> list[Record]:
    """Returns one record per client, set and model, of the simulation as it stands."""
    measure = _Measure(sim, protocol)
    training = tuple(range(sim.federation.num_clients))
    heldout = tuple(range(sim.federation.num_clients, len(sim.federation.train)))
    own = [s for s in ("val", "local") if s in protocol.sets]
    common = measure.common_sets()
    if sim.method.has_personal:
        for ids, models in sim.personal_models(training):
            measure.clients("personal", ids, models, own, common)
    measure.shared(training, own, common)
    if "heldout" in protocol.sets and heldout:
        for steps in protocol.adapt_steps if sim.method.has_personal else ():
            for ids, models in sim.newcomer_models(heldout, steps):
                measure.clients(
                    "personal",
                    ids,
                    models,
                    ["local"],
                    {},
                    name="heldout" if steps == 0 else f"heldout+{steps}",
                )
        measure.shared(heldout, ["local"], {}, name="heldout")
    return measure.records


def summaries(records: Iterable[Record]) -> Summaries:
    """Returns {model: {set: {metric: statistics over clients}}} of the records of one evaluation, the loss last."""
    grouped: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        grouped.setdefault((record["model"], record["set"]), []).append(record)
    out: Summaries = {}
    for (model, name), rows in grouped.items():
        samples = [row["samples"] for row in rows]
        out.setdefault(model, {})[name] = {
            metric: summarize(
                [row[metric] for row in rows], samples, higher_is_better=metric not in LOWER_IS_BETTER
            )
            for metric in (*(name for name in rows[0] if name not in (*OF_RECORD, "loss")), "loss")
        }
    return out


def headline(sim: Simulation) -> tuple[str, str]:
    """Returns (model, metric) that stands for a method: its deployable model and the task's primary metric."""
    return ("personal" if sim.method.has_personal else "global"), primary(sim.federation.source.task)[0]


class _Measure:
    def __init__(self, sim: Simulation, protocol: Protocol) -> None:
        self.sim, self.protocol = sim, protocol
        self.judge = make_judge(sim.engine, sim.federation.source.task, protocol.generation)
        self.records: list[Record] = []

    def common_sets(self) -> dict[str, tuple[Source, Tensor]]:
        """Test sets that belong to no single client: name -> (source, rows)."""
        federation, out = self.sim.federation, {}
        if "global" in self.protocol.sets:
            out["global"] = (federation.source, self._subset("global", federation.global_test()))
        if "shifted" in self.protocol.sets:
            for name, source in federation.shifted.items():
                out[name] = (source, self._subset(name, np.arange(len(source), dtype=np.int64)))
        return out

    def _subset(self, name: str, rows: Any) -> Tensor:
        most = self.protocol.max_samples
        if most is not None and len(rows) > most:
            rows = np.sort(generator(0, "evaluate", name).choice(rows, size=most, replace=False))
        return torch.from_numpy(np.asarray(rows, dtype=np.int64))

    def clients(
        self,
        model: str,
        ids: Sequence[int],
        models: TensorDict,
        own: Sequence[str],
        common: Mapping[str, tuple[Source, Tensor]],
        name: str | None = None,
    ) -> None:
        """Adds the records of some clients' models [clients, ...] on their own parts and on common sets."""
        sim, federation = self.sim, self.sim.federation
        cohort = sim.cohort(ids, own=True)
        with torch.no_grad():
            for part in own:
                held = federation.val if part == "val" else federation.test
                rows = [torch.from_numpy(held[i]) for i in ids]
                outcomes = self.judge.own(cohort, models, rows)
                for k, (i, found, r) in enumerate(zip(ids, outcomes, rows, strict=True)):
                    centre = self._centre(cohort.model, ids, federation.source, r)
                    apart = self._apart(cohort.model, models[k], centre, federation.source, r)
                    self._add(model, name or part, i, found, federation.source, r, apart)
            for set_name, (source, r) in common.items():
                centre = self._centre(cohort.model, ids, source, r)
                for k, (i, found) in enumerate(
                    zip(ids, self.judge.common(cohort, models, source, r), strict=True)
                ):
                    apart = self._apart(cohort.model, models[k], centre, source, r)
                    self._add(model, set_name, i, found, source, r, apart)

    def _centre(self, model: Model, ids: Sequence[int], source: Source, rows: Tensor) -> Tensor | None:
        """The features of the global model of some clients' architecture; None where nobody asks, or there is none."""
        if not self.protocol.feature_distance:
            return None
        ((group, _),) = by_group(self.sim.groups, ids)
        shared = self.sim.global_model(group.name)
        return None if shared is None else features(model, shared, source, rows)

    def _apart(
        self, model: Model, state: TensorDict, centre: Tensor | None, source: Source, rows: Tensor
    ) -> dict[str, float]:
        """How far the features of one model lie from `centre`."""
        if centre is None:
            return {}
        found = feature_distances(features(model, state, source, rows), centre)
        return {"feature_distance": float(found.mean())}  # NaN of an empty part, as all metrics

    def shared(
        self,
        ids: Sequence[int],
        own: Sequence[str],
        common: Mapping[str, tuple[Source, Tensor]],
        name: str | None = None,
    ) -> None:
        """Adds the records of the global model on clients' own parts and on common sets, if there is one.

        Where clients have different architectures, each client's is the global model of its own, and common sets
        see all of them.
        """
        for group, where in by_group(self.sim.groups, ids):
            model = self.sim.global_model(group.name)
            if model is not None:
                self._shared(model, [ids[k] for k in where], own, common, name)

    def _shared(
        self,
        model: TensorDict,
        ids: Sequence[int],
        own: Sequence[str],
        common: Mapping[str, tuple[Source, Tensor]],
        name: str | None,
    ) -> None:
        federation, cohort = self.sim.federation, self.sim.cohort(ids[:1], own=True)
        with torch.no_grad():
            for part in own:
                held = federation.val if part == "val" else federation.test
                rows = [torch.from_numpy(held[i]) for i in ids]
                outcomes = self.judge.shared(cohort, model, federation.source, rows)
                for i, found, r in zip(ids, outcomes, rows, strict=True):
                    self._add("global", name or part, i, found, federation.source, r)
            for set_name, (source, r) in common.items():
                (found,) = self.judge.shared(cohort, model, source, [r])
                self._add("global", set_name, SERVER, found, source, r)

    def _add(
        self,
        model: str,
        name: str,
        client: int,
        found: Tensor,
        source: Source,
        rows: Tensor,
        further: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.records.append(
            {
                "round": self.sim.round,
                "client": client,
                "set": name,
                "model": model,
                "samples": len(found),
                **self.judge.numbers(found, source, rows),
                **further,
            }
        )
