"""What every client has of an experiment, by its name: alone, with each method, what it gains, and how sure of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tailorfl.errors import ConfigError, unknown
from tailorfl.evaluation.bootstrap import Interval, interval, resampled
from tailorfl.evaluation.calibration import error_by_chance, probabilities
from tailorfl.evaluation.predictions import Predictions
from tailorfl.evaluation.temperature import measures
from tailorfl.report.page.look import Look, named
from tailorfl.report.result import REFERENCES
from tailorfl.report.tables import MISSING
from tailorfl.runs.prediction_log import TASKS, load_predictions, temperature_of
from tailorfl.training.keys import generator

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult
    from tailorfl.runs.store import RunStore


@dataclass(frozen=True)
class ClientLine:
    """One client with one method. What is not known or not defined is None.

    Attributes:
        client, name: number and name.
        label: of the method; `alone` says whether it is LocalTrain.
        seed: of the run.
        samples: of the client's test part.
        metric, value: which comes first, and what it is on the test part, with its 95 % `interval`.
        gain: value minus that of LocalTrain of the same seed, with its paired `gain_interval`.
        ece, ece_by_chance, brier: of the probabilities as they come; the second is what true ones would have.
        temperature, ece_calibrated, brier_calibrated: where temperatures were fitted.
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
        """Every number as JSON has it; intervals as [low, high]."""
        ends = {key: None if (i := getattr(self, key)) is None else [i.low, i.high] for key in INTERVALS}
        return {**asdict(self), **ends}


INTERVALS = ("interval", "gain_interval")


@dataclass(frozen=True)
class ClientReport:
    """Lines of one seed, client by client, and what is to be said beside them."""

    look: Look
    seed: int
    seeds: list[int]
    """All there are."""
    lines: list[ClientLine]
    notes: list[str]

    @property
    def head(self) -> tuple[str, ...]:
        """Titles of the cells of a line."""
        calibration = ("ECE", "by chance") if any(line.ece is not None for line in self.lines) else ()
        further = ("T", "ECE with T") if any(line.temperature is not None for line in self.lines) else ()
        return ("client", "method", "test", self.look.name, "gain over alone", *calibration, *further)

    def cells(self, line: ClientLine) -> tuple[str, ...]:
        """Return the texts of a line, in the order of the head; what is not known is –."""
        cells = [
            line.name,
            line.label,
            str(line.samples),
            self._spread(line.value, line.interval),
            "alone" if line.alone else self._spread(line.gain, line.gain_interval, sign=True),
            *(_text(number) for number in (line.ece, line.ece_by_chance)),
            *(_text(number) for number in (line.temperature, line.ece_calibrated)),
        ]
        shown = len(self.head)
        return tuple(cells[:shown])

    def _spread(self, number: float | None, ends: Interval | None, sign: bool = False) -> str:
        if number is None:
            return MISSING
        own = self._short(number, sign)
        return (
            own if ends is None else f"{own} [{self._short(ends.low, sign)}, {self._short(ends.high, sign)}]"
        )

    def _short(self, number: float, sign: bool) -> str:
        """With as many digits as a test part of some hundred samples bears out."""
        form = "+" if sign else ""
        return f"{100 * number:{form}.1f}" if self.look.is_share else f"{number:{form}.3f}"


def clients_of(
    result: ExperimentResult,
    seed: int | None = None,
    *,
    methods: Sequence[str] = (),
    clients: Sequence[str] = (),
) -> ClientReport:
    """Return what the clients of a result have, of one seed: by default the first.

    `methods` (labels) and `clients` (names) leave out the others.

    Raises:
        ConfigError: there is no such seed, method or client.
        RunError: a file of predictions is damaged.
    """
    seeds = sorted({int(summary["seed"]) for summary, _ in result.jobs})
    chosen = seeds[0] if seed is None else seed
    if chosen not in seeds:
        raise ConfigError(f"'{result.path}' has no finished job with seed {chosen}, but {seeds}")
    jobs = [(summary, store) for summary, store in result.jobs if summary["seed"] == chosen]
    labels = [str(summary["label"]) for summary, _ in jobs]
    for label in methods:
        if label not in labels:
            raise unknown("method of the run", label, labels)
    reference = next((job for job in jobs if job[0]["method"] in REFERENCES), None)
    base = None if reference is None else _Job(result, *reference)
    parts = [_Job(result, *job) for job in jobs if not methods or str(job[0]["label"]) in methods]
    names = {client: part.name(client) for part in parts for client in part.values}
    for name in clients:
        if name not in names.values():
            raise unknown("client of the run", name, list(names.values()))
    lines = [
        part.line(client, base)
        for client, name in sorted(names.items())
        if not clients or name in clients
        for part in parts
        if client in part.values
    ]
    return ClientReport(Look.of(result), chosen, seeds, lines, _notes(parts, base))


def _notes(parts: list[_Job], base: _Job | None) -> list[str]:
    found = []
    if base is None:
        found.append(
            "What a client gains is not known: no LocalTrain was run beside; add it with "
            "tailorfl run --extend FOLDER methods=local."
        )
    without = [part.label for part in parts if part.said is None]
    if without:
        found.append(
            f"No intervals of {', '.join(without)}: predictions of test samples were not kept (more samples than "
            "eval.predictions, private training, generated text, or a run of before they were)."
        )
    if len(without) < len(parts):
        found.append(
            "In brackets: 95 % bootstrap interval of the client's test part, of a gain paired sample by sample: the "
            "noise of a small test part, not of training."
        )
    alike = sorted({name for part in parts for name in part.of_one_class})
    if alike:
        found.append(
            f"The test part of {named(alike)} has one class only: always guessing it is perfect there, and AUC has no "
            "value."
        )
    return found


class _Job:
    """What one job says of its clients."""

    def __init__(self, result: ExperimentResult, summary: dict[str, Any], store: RunStore) -> None:
        self.label, self.seed, self.metric = str(summary["label"]), int(summary["seed"]), result.metric
        self.alone = summary["method"] in REFERENCES
        self.store = store
        self._names = [str(name) for name in store.config.get("clients") or ()]
        own = result.own(summary, store)
        self.values = {int(r["client"]): r for r in own.to_dict("records")}
        """By client, the record of its test part."""
        self.said = load_predictions(store.path)
        self._resampled: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}

    def name(self, client: int) -> str:
        return self._names[client] if client < len(self._names) else f"client {client}"

    @property
    def of_one_class(self) -> list[str]:
        """Names of the clients whose test part has one class only."""
        if self.said is None or self.said.task not in TASKS:
            return []
        return [self.name(k) for k in self.values if len(np.unique(self.said.of(k).y)) == 1]

    def of(self, client: int) -> Predictions | None:
        """Its predictions, None where there are none."""
        if self.said is None:
            return None
        mine = self.said.of(client)
        return mine if len(mine.y) else None

    def resampled(self, client: int, mine: Predictions) -> np.ndarray[Any, np.dtype[np.float64]]:
        if client not in self._resampled:
            self._resampled[client] = resampled(self.metric, mine, self.seed)
        return self._resampled[client]

    def line(self, client: int, base: _Job | None) -> ClientLine:
        record, mine = self.values[client], self.of(client)
        line: dict[str, Any] = {
            "client": client,
            "name": self.name(client),
            "label": self.label,
            "alone": self.alone,
            "seed": self.seed,
            "samples": int(record["samples"]),
            "metric": self.metric,
            "value": _known(record[self.metric]),
        }
        if mine is not None:
            line["interval"] = interval(self.resampled(client, mine))
            line |= self._calibration(client, mine)
        if base is not None and not self.alone and client in base.values:
            line["gain"] = _known(record[self.metric] - base.values[client][self.metric])
            other = base.of(client)
            if mine is not None and other is not None and np.array_equal(mine.row, other.row):
                gains = self.resampled(client, mine) - base.resampled(client, other)
                line["gain_interval"] = interval(gains)
        return ClientLine(**line)

    def _calibration(self, client: int, mine: Predictions) -> dict[str, float | None]:
        if mine.task not in TASKS:
            return {}
        found = measures(mine)
        chance = error_by_chance(
            probabilities(mine.task, mine.outputs), generator(self.seed, "calibration", client)
        )
        line = {
            "ece": _known(found["ece"]),
            "brier": _known(found["brier"]),
            "ece_by_chance": _known(chance),
        }
        temperature = temperature_of(self.store, client)
        if temperature is None:
            return line
        after = measures(mine, temperature)
        calibrated = {f"{key}_calibrated": _known(after[key]) for key in ("ece", "brier")}
        return {**line, "temperature": temperature, **calibrated}


def _text(number: float | None) -> str:
    return MISSING if number is None else f"{number:.2f}"


def _known(number: float) -> float | None:
    return None if math.isnan(number) else float(number)
