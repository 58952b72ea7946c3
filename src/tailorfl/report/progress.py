"""Progress of an experiment: live bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from tailorfl.interface import check_kind
from tailorfl.printable import visible
from tailorfl.report.tables import human_seconds
from tailorfl.runs.job import Observer, Several

if TYPE_CHECKING:
    from tailorfl.rounds.one_round import RoundResult
    from tailorfl.runs.job import Job
    from tailorfl.settings.experiment import ExperimentConfig

Watched = TypeVar("Watched")
BAR = 10
BESIDE = BAR + 4
"""Columns of a line besides a task's name and facts: spinner, bar and the spaces between."""


@contextmanager
def display(
    console: Console,
    quiet: bool,
    silent: Callable[[], Watched],
    live: Callable[[Progress], Watched],
    lines: Callable[[Console], Watched],
) -> Iterator[Watched]:
    """Yield a display for a console: live bars in a terminal, plain lines elsewhere, nothing if `quiet`.

    Log messages of the library go to the same console meanwhile.
    """
    with messages(console):
        if quiet:
            yield silent()
        elif console.is_terminal:
            with bars(console) as progress:
                yield live(progress)
        else:
            yield lines(console)


@contextmanager
def observer(console: Console, config: ExperimentConfig, *, quiet: bool = False) -> Iterator[Observer]:
    """Yield an observer for a console; log messages of the library go to the same console meanwhile."""
    jobs = len(config.seeds) * len(config.methods)
    with display(console, quiet, Observer, lambda progress: Live(progress, jobs), ProgressLines) as watch:
        yield watch


@contextmanager
def watching(config: ExperimentConfig, given: Observer | None, progress: bool | None) -> Iterator[Observer]:
    """Yield the observer of a call from Python: the given one, a display on stderr, or both.

    `progress` is whether to display; None: only if a person is watching and no observer is given.
    """
    check_kind("observer", given, Observer, None)
    shown = (given is None and looked_at()) if progress is None else progress
    if not shown:
        yield given if given is not None else Observer()
        return
    with observer(Console(stderr=True), config) as display:
        yield display if given is None else Several((given, display))


def looked_at() -> bool:
    """Return whether a person sees this process's output: in a terminal, an interactive Python or a notebook."""
    in_ipython = "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None
    return in_ipython or sys.stderr.isatty() or hasattr(sys, "ps1")


@contextmanager
def messages(console: Console | logging.Handler) -> Iterator[None]:
    """Print log messages of the library on a console meanwhile, above its bars if there are any.

    If a handler is given instead of a console, it receives them. Messages with an `extra={"once": key}` are printed
    once for each key, whatever their text, for instance a warning that every seed gives. All others are printed each
    time.
    """
    handler = console if isinstance(console, logging.Handler) else _Messages(console)
    printed = set[object]()

    def is_new(record: logging.LogRecord) -> bool:
        key = getattr(record, "once", None)
        is_repeated = key is not None and key in printed
        printed.add(key)
        return not is_repeated

    handler.addFilter(is_new)
    log = logging.getLogger("tailorfl")
    passed_on = log.propagate
    log.addHandler(handler)
    log.propagate = (
        False  # packages of transformers add a handler to the root logger, which would print messages again
    )
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.removeFilter(is_new)
        log.propagate = passed_on


class _Messages(logging.Handler):
    """Prints messages as `warning: ...`, like the command line's `error: ...`."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        style = "bold yellow" if record.levelno >= logging.WARNING else "dim"
        message = visible(self.format(record), but="\n\t")
        text = Text.assemble((f"{record.levelname.lower()}:", style), f" {message}")
        self._console.print(text, soft_wrap=True)


def headline(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the (name, value) to show, from means by "model/set/metric": personal before global, local first."""
    for model in ("personal", "global"):
        for key, value in metrics.items():
            if key.startswith(f"{model}/local/"):
                return key.rsplit("/", 1)[-1], value
    return next(iter(metrics.items()), None)


def title(job: Job) -> str:
    """Return the name of a job for display."""
    return f"{job.method.display_name} seed {job.seed}"


def _out_of(job: Job, rounds: int) -> str:
    """Return the number of rounds as the second part of "2/30"; empty if it shows only at the end."""
    return "" if job.has_budget else f"/{rounds}"


class ProgressLines(Observer):
    """One line when a job starts, at each evaluation and at its end, to a console or a log."""

    def __init__(self, target: Console | Callable[[str], None]) -> None:
        self._target = target
        self._where = self._out_of = ""
        self._speed = 0.0

    def job_started(self, job: Job, position: int, total: int, rounds: int, resumed_from: int) -> None:
        """Print the job that starts."""
        self._where, self._out_of = f"[{position}/{total}] {title(job)}", _out_of(job, rounds)
        resumed = f", resumed after round {resumed_from}" if resumed_from else ""
        length = (
            f"the {job.config.budget} of {rounds} rounds of FedAvg" if job.has_budget else f"{rounds} rounds"
        )
        self._print(f"{self._where}: {length}{resumed}")

    def round_done(self, job: Job, done: RoundResult) -> None:
        """Remember the speed; rejected clients are named by the log."""
        self._speed = done.clients_per_second

    def evaluated(self, job: Job, round: int, metrics: dict[str, float]) -> None:
        """Print the score of the models."""
        score = headline(metrics)
        shown = "" if score is None else f", {score[0]} {score[1]:.4f}"
        speed = f", {self._speed:.0f} clients/s" if self._speed else ""
        self._print(f"{self._where}: round {round}{self._out_of}{shown}{speed}")

    def job_done(self, job: Job, summary: dict[str, Any]) -> None:
        """Print the time of the job."""
        self._print(f"{self._where}: done in {summary['seconds']:.1f} s")

    def _print(self, text: str) -> None:
        if isinstance(self._target, Console):
            self._target.print(Text(text), soft_wrap=True)
        else:
            self._target(text)


class Live(Observer):
    """Two bars: the experiment with the time left, and the current job with round, clients/s and metric."""

    def __init__(self, progress: Progress, jobs: int) -> None:
        self._progress = progress
        self._all = progress.add_task("experiment", total=jobs, facts=f"0/{jobs} jobs")
        self._job = progress.add_task("", total=None, facts="", visible=False)
        self._jobs, self._position, self._out_of, self._score = jobs, 0, "", ""
        self._rounds: float = 1

    def job_started(self, job: Job, position: int, total: int, rounds: int, resumed_from: int) -> None:
        """Start the job's bar."""
        self._position, self._out_of, self._score = position, _out_of(job, rounds), ""
        self._rounds = math.inf if job.has_budget else rounds  # what is done of it is not known
        self._progress.reset(
            self._job, total=rounds, completed=resumed_from, description=title(job), visible=True
        )
        self._progress.update(self._job, facts=f"round {resumed_from}{self._out_of}")
        self._advance(resumed_from / self._rounds)

    def round_done(self, job: Job, done: RoundResult) -> None:
        """Move both bars."""
        turned_away = f" · {len(done.rejected)} rejected" if done.rejected else ""
        round = done.round + 1
        speed = f"{done.clients_per_second:.0f} clients/s"
        facts = f"round {round}{self._out_of} · {speed}{self._score}{turned_away}"
        self._progress.update(self._job, completed=round, facts=facts)
        self._advance(round / self._rounds)

    def evaluated(self, job: Job, round: int, metrics: dict[str, float]) -> None:
        """Remember the metric to show."""
        score = headline(metrics)
        self._score = "" if score is None else f" · {score[0]} {score[1]:.3f}"

    def job_done(self, job: Job, summary: dict[str, Any]) -> None:
        """Leave one line above the bars."""
        line = f"{title(job)}{self._score or ' ·'} in {summary['seconds']:.1f} s"
        self._progress.console.print(Text(line))
        self._advance(1.0)

    def _advance(self, share: float) -> None:
        """Show the jobs before this one and the finished share of it."""
        done = self._position - 1 + share
        self._progress.update(self._all, completed=done, facts=f"{int(done)}/{self._jobs} jobs")


class JobFacts(ProgressColumn):
    """Facts of a task, with the time left for the whole experiment; if space is short, the second is dropped first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def render(self, task: Task) -> Text:
        """Return a cell with as many facts as fit into a line of the terminal."""
        facts = str(task.fields["facts"]).split(" · ")
        if task.id == 0 and task.time_remaining is not None:
            facts.append(f"{human_seconds(task.time_remaining)} left")
        room = self._width - BESIDE - len(task.description)
        while len(facts) > 1 and len(" · ".join(facts)) > room:
            del facts[1]
        return Text(" · ".join(facts), no_wrap=True)


def bars(console: Console) -> Progress:
    """Return progress bars for a console, which vanish at the end; every task needs a field `facts`."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold", no_wrap=False)),
        BarColumn(bar_width=BAR),
        JobFacts(console.width),
        console=console,
        transient=True,
    )
