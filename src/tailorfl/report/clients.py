"""Results of every client of an experiment, by name: alone and with each method, its gain, and their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.errors import ConfigError, unknown
from tailorfl.evaluation.bootstrap import Interval, interval, resampled
from tailorfl.evaluation.calibration import error_by_chance, measures, probabilities
from tailorfl.evaluation.metrics import LOWER_IS_BETTER
from tailorfl.evaluation.predictions import Predictions
from tailorfl.report.page.charts import Look, named
from tailorfl.report.result import REFERENCES, company
from tailorfl.report.tables import MISSING, Cell, Table
from tailorfl.runs.records import TASKS, load_predictions, temperature_of
from tailorfl.training.keys import generator

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult
    from tailorfl.runs.store import RunStore


@dataclass(frozen=True)
class ClientLine:
    """One client with one method. Unknown or undefined values are None.

    Attributes:
        client, name: number and name.
        label: of the method; `alone` is whether it is LocalTrain.
        seed: of the run.
        samples: number of samples in the client's test part.
        metric, value: the leading metric and its value on the test part, with its 95 % `interval`.
        gain: value minus that of LocalTrain with the same seed, with its paired `gain_interval`.
        ece, ece_by_chance, brier: of the uncalibrated probabilities; the second is expected of true probabilities.
        temperature, ece_calibrated, brier_calibrated: if temperatures were fitted.
    """

    client: int
    name: str
    label: str
    alone: bool
    seed: int
    samples: int
    metric: str
    value: float | None
    interval: Interval | None = None
    gain: float | None = None
    gain_interval: Interval | None = None
    ece: float | None = None
    ece_by_chance: float | None = None
    brier: float | None = None
    temperature: float | None = None
    ece_calibrated: float | None = None
    brier_calibrated: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all values for JSON; intervals as [low, high]."""
        ends = {
            key: None if bounds is None else [bounds.low, bounds.high]
            for key, bounds in (("interval", self.interval), ("gain_interval", self.gain_interval))
        }
        return {**asdict(self), **ends}


@dataclass(frozen=True)
class ClientReport:
    """Lines of one seed, client by client, with notes on them; `seeds` are all seeds of the result."""

    look: Look
    seed: int
    seeds: list[int]
    lines: list[ClientLine]
    notes: list[str]

    @property
    def table(self) -> Table:
        """A table with a row for each line; gains beyond the noise of the test part are bold, unknown values are –."""
        gains = "gain over LocalTrain"
        if self.look.metric in LOWER_IS_BETTER:
            gains = "difference to LocalTrain (lower is better)"
        head = ["client", "method", "test samples", self.look.name, gains]
        further = {
            "ECE": "ece",
            "ECE if calibrated": "ece_by_chance",
            "T": "temperature",
            "ECE with T": "ece_calibrated",
        }
        shown = {
            title: key
            for title, key in further.items()
            if any(getattr(line, key) is not None for line in self.lines)
        }
        rows = []
        for line in self.lines:
            is_sure = line.gain_interval is not None and line.gain_interval.leaves_out_zero
            gain = MISSING if line.alone else self._spread(line.gain, line.gain_interval, "+")
            more = [getattr(line, key) for key in shown.values()]
            rows.append(
                [
                    line.name,
                    line.label,
                    Cell(str(line.samples), line.samples),
                    Cell(self._spread(line.value, line.interval), line.value),
                    Cell(gain, line.gain, is_sure),
                    *(Cell(MISSING if number is None else f"{number:.2f}", number) for number in more),
                ]
            )
        return Table.of(
            f"clients: {self.look.name} of the test part{self.look.unit}", [*head, *shown], rows, left=2
        )

    def _spread(self, number: float | None, ends: Interval | None, sign: str = "") -> str:
        """Return a number with digits suited to some hundred test samples; bounds have one less unless near 0."""
        if number is None:
            return MISSING
        scale, digits = (100, 1) if self.look.is_share else (1, 3)
        text = f"{scale * number:{sign}.{digits}f}"
        if ends is None:
            return text
        bounds = [round(scale * bound, digits) + 0.0 for bound in (ends.low, ends.high)]  # -0 becomes 0
        near = 10 ** (1 - digits) / 2
        short = [f"{b:{sign}.{digits if 0 < abs(b) <= near else digits - 1}f}" for b in bounds]
        return f"{text} [{', '.join(short)}]"


def clients_of(
    result: ExperimentResult,
    seed: int | None = None,
    *,
    methods: Sequence[str] = (),
    clients: Sequence[str] = (),
    intervals: bool = True,
) -> ClientReport:
    """Return the report of a result's clients for one seed, by default the first.

    `methods` (labels) and `clients` (names) select some of them; without `intervals` no predictions are read.

    Raises:
        ConfigError: there is no such seed, method or client.
        RunError: a file of predictions is damaged.
    """
    seeds = sorted({int(summary["seed"]) for summary in result.summaries})
    chosen = seeds[0] if seed is None else seed
    if chosen not in seeds:
        raise ConfigError(
            f"'{result.path}' has no finished job with seed {chosen}; choose one of {', '.join(map(str, seeds))}"
        )
    jobs = [_Job(result, *job, intervals) for job in result.jobs if job[0]["seed"] == chosen]
    for label in methods:
        if label not in (labels := [job.label for job in jobs]):
            raise unknown("method of the run", label, labels)
    bases = {job.company: job for job in reversed(jobs) if job.alone}
    jobs = [job for job in jobs if not methods or job.label in methods]
    names = {client: name_of(job.names, client) for job in jobs for client in job.records}
    for name in clients:
        if name not in names.values():
            raise unknown("client of the run", name, list(names.values()))
    lines = [
        job.line(client, bases.get(job.company))
        for client, name in sorted(names.items())
        if not clients or name in clients
        for job in jobs
        if client in job.records
    ]
    return ClientReport(Look.of(result), chosen, seeds, lines, _notes(jobs, bases))


def _notes(jobs: list[_Job], bases: Mapping[tuple[int, str], _Job]) -> list[str]:
    notes = []
    if not bases:
        notes.append(
            "Clients' gains are unknown, because LocalTrain was not run; add it with tailorfl run --extend RESULTS "
            "methods=local."
        )
    without = [job.label for job in jobs if job.predictions is None]
    if without:
        notes.append(
            f"No intervals for {', '.join(without)}: predictions of test samples were not stored (more samples than "
            "eval.predictions, private training, generated text, or an older run)."
        )
    if len(without) < len(jobs):
        notes.append(
            "In brackets: 95 % bootstrap interval over the client's test samples, for a gain paired sample by sample; "
            "it shows the noise of a small test part, not of training."
        )
    alike = sorted({name for job in jobs for name in job.of_one_class})
    if alike:
        notes.append(
            f"The test part of {named(alike)} has only one class: always predicting it is perfect there, and AUC is "
            "undefined."
        )
    return notes


def name_of(names: Sequence[Any], client: int) -> str:
    """Return the name of a client from `names`, the `clients` in a job's config."""
    return str(names[client]) if client < len(names) else f"client {client}"


class _Job:
    """The records and predictions of one job's clients."""

    def __init__(
        self, result: ExperimentResult, summary: dict[str, Any], store: RunStore, intervals: bool
    ) -> None:
        self.label, self.seed, self.metric = str(summary["label"]), int(summary["seed"]), result.metric
        self.alone, self.company = summary["method"] in REFERENCES, company(summary)
        self.store, self.names = store, store.config.get("clients") or ()
        self.records = {int(r["client"]): r for r in result.own(summary, store).to_dict("records")}
        """The record of each client's test part, by client."""
        self.predictions = load_predictions(store.path) if intervals else None
        self.resampled = cache(self._resampled)

    @property
    def of_one_class(self) -> list[str]:
        """Names of the clients whose test part has one class only."""
        if self.predictions is None or self.predictions.task not in TASKS:
            return []
        return [name_of(self.names, k) for k in self.records if len(np.unique(self.predictions.of(k).y)) == 1]

    def of(self, client: int) -> Predictions | None:
        """Return a client's predictions, or None if there are none."""
        predictions = None if self.predictions is None else self.predictions.of(client)
        return None if predictions is None or not len(predictions.y) else predictions

    def _resampled(self, client: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        predictions = self.of(client)
        assert predictions is not None
        return resampled(self.metric, predictions, self.seed)

    def line(self, client: int, base: _Job | None) -> ClientLine:
        record, predictions = self.records[client], self.of(client)
        line: dict[str, Any] = {"value": _defined(record[self.metric])}
        if predictions is not None:
            line["interval"] = interval(self.resampled(client))
            line |= self._calibration(client, predictions)
        if base is not None and not self.alone and client in base.records:
            line["gain"] = _defined(record[self.metric] - base.records[client][self.metric])
            local = base.of(client)
            if predictions is not None and local is not None and np.array_equal(predictions.row, local.row):
                line["gain_interval"] = interval(self.resampled(client) - base.resampled(client))
        facts = (self.label, self.alone, self.seed, int(record["samples"]), self.metric)
        return ClientLine(client, name_of(self.names, client), *facts, **line)

    def _calibration(self, client: int, predictions: Predictions) -> dict[str, float | None]:
        if predictions.task not in TASKS:
            return {}
        p = probabilities(predictions.task, predictions.outputs)
        numbers = measures(predictions) | {
            "ece_by_chance": error_by_chance(p, generator(self.seed, "calibration", client))
        }
        temperature = temperature_of(self.store, client)
        if temperature is not None:
            after = measures(predictions, temperature)
            numbers |= {"temperature": temperature} | {f"{k}_calibrated": after[k] for k in ("ece", "brier")}
        fields = ClientLine.__dataclass_fields__
        return {key: _defined(number) for key, number in numbers.items() if key in fields}


def _defined(number: float) -> float | None:
    return None if math.isnan(number) else float(number)
