"""Results and costs of a tuning for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from tailorfl.cli.screen import make_table, say, show_table, status
from tailorfl.report.tables import human_seconds
from tailorfl.runs.tuned import written
from tailorfl.tuning.run import Watch
from tailorfl.tuning.search import Tuned

if TYPE_CHECKING:
    from tailorfl.tuning.plan import Plan
    from tailorfl.tuning.run import Tuning
    from tailorfl.tuning.trials import Trial

SHARES = (1 / 8, 1 / 4, 1 / 2, 1)
"""Of the budget, for the table of what to expect of it."""


class TuningLines(Watch):
    """One line a trial; for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def ended(self, label: str, trial: Trial, used: float) -> None:
        """Say what a trial came to."""
        self._console.print(Text(line(label, trial)), soft_wrap=True)


class Bar(Watch):
    """One bar for all methods, in samples, and a line a trial above it."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._used = progress, dict[str, float]()
        self._task = progress.add_task("tuning", total=None, facts="")
        self._before, self._trials = 0.0, 0

    def began(self, samples: int, used: float) -> None:
        """Set the number that makes the whole."""
        self._before = used
        self._progress.update(self._task, total=samples, completed=used)

    def ended(self, label: str, trial: Trial, used: float) -> None:
        """Move the bar."""
        self._progress.console.print(Text(line(label, trial)))
        self._trials += 1
        self._before += used - self._used.get(label, used - trial.samples)
        self._used[label] = used
        self._progress.update(self._task, completed=self._before, facts=f"{self._trials} trials · {label}")


def line(label: str, trial: Trial) -> str:
    """Return what a trial came to, in one line."""
    state = "" if trial.state == "complete" else f" {trial.state}"
    score, seconds = _score(trial.score), human_seconds(trial.seconds)
    return f"[{label} #{trial.number}] {score}{state} {written(trial.values)} {seconds}"


def show_tuning(console: Console, tuning: Tuning) -> None:
    """Print what was chosen of every method, what lies at an edge, and what to expect of smaller budgets."""
    config = tuning.plan.config
    names = {method.label: method.display_name for method in config.methods}
    rank_of, higher = tuning.ranks(), tuning.methods[0].higher_is_better
    metric = tuning.metric.replace("_", " ")
    ordered = sorted(tuning.methods, key=lambda method: rank_of[method.label] or len(rank_of) + 1)
    title = f"{config.name}: chosen by validation {metric}, {tuning.samples:,} samples a method"
    heads = ["Method", "Rank", "Validation", "Trials", "Chosen"]
    rows = [(names[method.label], *_row(method, rank_of[method.label])) for method in ordered]
    show_table(console, make_table(title, heads, rows, prose=("Chosen",)))
    shares = [share for share in SHARES if share * tuning.plan.budget.trials >= 1]
    expected = [
        (names[method.label], *map(_score, method.expected_of([share * tuning.samples for share in shares])))
        for method in tuning.methods
    ]
    title = f"expected best validation {metric} after a share of the budget"
    heads = ["Method", *(f"{share:.3g}".replace("0.", ".") for share in shares)]
    show_table(console, make_table(title, heads, expected))
    _show_edges(console, tuning, names)
    for method in tuning.methods:
        failed = [trial for trial in method.trials if trial.state == "failed"]
        if method.best is None:
            say(
                console,
                f"{names[method.label]}: no trial came to its end, so its settings are those of the experiment",
            )
        if failed:
            count = f"{len(failed)} of {len(method.trials)} trials failed"
            say(console, f"{names[method.label]}: {count}, the first: {failed[0].reason}")
    if config.train.dp is not None:
        say(console, "The ε of a comparison does not count what tuning reveals of validation data.")
    say(console, f"{'higher' if higher else 'lower'} is better; no test sample was looked at", style="dim")


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _row(method: Tuned, rank: int | None) -> tuple[str, ...]:
    states = [trial.state for trial in method.trials]
    unfinished = [f"{count} {state}" for state in ("pruned", "failed") if (count := states.count(state))]
    return (
        "–" if rank is None else str(rank),
        _score(None if method.best is None else method.best.score),
        str(len(states)) + (f" ({', '.join(unfinished)})" if unfinished else ""),
        written(method.chosen) or "as given",
    )


def _show_edges(console: Console, tuning: Tuning, names: Mapping[str, str]) -> None:
    """Say which chosen values are the smallest or largest that were tried, where the method takes others."""
    ends = {1: "largest", -1: "smallest"}
    edges = [
        f"{names[method.label]} {written({key: method.chosen[key]})} ({ends[side]})"
        for method in tuning.methods
        for key, side in tuning.edges(method).items()
    ]
    if edges:
        is_widened = tuning.plan.request.widen
        advice = "a larger budget goes further" if is_widened else "--widen tries values beyond them"
        say(console, f"At the edge of what was tried: {', '.join(edges)}; {advice}.")


def show_plan(console: Console, plan: Plan, workers: int, quiet: bool) -> None:
    """Print what a tuning would search and take."""
    from tailorfl.tuning.run import foreseen
    from tailorfl.tuning.samplers import size

    with status(quiet, "") as watch:
        costs = foreseen(plan, None if quiet else watch)
    say(console, f"{plan.asked.name}: nothing was trained (--dry-run)")
    rows, names = [], {method.label: method.display_name for method in plan.config.methods}
    for label, space in plan.spaces.items():
        points = size(space)
        values = " ".join(f"{key}={_values(domain.plain())}" for key, domain in space.items())
        count = "∞" if points == float("inf") else f"{int(points):,}"
        seconds = costs[label].seconds / workers
        rows.append((names[label], values, count, str(costs[label].trials), human_seconds(seconds)))
    heads = ("Method", "Settings", "Points", "Trials", "Time")
    show_table(console, make_table(None, heads, rows, prose=("Settings",)))
    budget, total = plan.budget, sum(costs[label].seconds / workers for label in plan.spaces)
    say(
        console,
        f"{budget.trials} trials of {budget.rounds} rounds, seeds {', '.join(map(str, budget.seeds))}, "
        f"{plan.request.sampler}: about {human_seconds(total)} with {workers} worker{'s' * (workers > 1)}",
    )


def _values(plain: object) -> str:
    if isinstance(plain, list):
        return ",".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in plain)
    return str(plain)
