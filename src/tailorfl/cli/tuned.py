"""What tuning found, and what it would cost, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from tailorfl.cli.screen import PROSE, say, show_table
from tailorfl.report.tables import human_seconds
from tailorfl.runs.tuned import written
from tailorfl.tuning.outcome import Tuned
from tailorfl.tuning.run import Watch

if TYPE_CHECKING:
    from tailorfl.tuning.outcome import Tuning
    from tailorfl.tuning.plan import Plan
    from tailorfl.tuning.trials import Trial

SHARES = (1 / 8, 1 / 4, 1 / 2, 1)
"""Of the budget, for the table of what to expect of it."""


class TuningLines(Watch):
    """One line a trial; for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console, self._best = console, dict[str, float]()

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
    score = "–" if trial.score is None else f"{trial.score:.4f}"
    state = "" if trial.state == "complete" else f" {trial.state}"
    return f"[{label} #{trial.number}] {score}{state} {written(trial.values)} {human_seconds(trial.seconds)}"


def show_tuning(console: Console, found: Tuning) -> None:
    """Print what was chosen of every method, what lies at an edge, and what to expect of smaller budgets."""
    config = found.plan.config
    places, higher = found.ranks(), found.methods[0].higher_is_better
    metric = found.metric.replace("_", " ")
    table = Table(
        title=Text(f"{config.name}: chosen by validation {metric}, {found.samples:,} samples a method")
    )
    for name in ("Method", "Rank", "Validation", "Trials", "Chosen"):
        left = name in ("Method", "Chosen")
        table.add_column(name, justify="left" if left else "right", ratio=PROSE if name == "Chosen" else None)
    for one in sorted(found.methods, key=lambda t: places[t.label] or len(places) + 1):
        table.add_row(Text(one.label), *_row(one, places[one.label]))
    show_table(console, table)
    show_table(console, _expected(found, metric))
    _show_edges(console, found)
    for one in found.methods:
        failed = [t for t in one.trials if t.state == "failed"]
        if one.best is None:
            say(
                console, f"{one.label}: no trial came to its end, so its settings are those of the experiment"
            )
        if failed:
            say(
                console,
                f"{one.label}: {len(failed)} of {len(one.trials)} trials failed, the first: {failed[0].reason}",
            )
    if found.plan.config.train.dp is not None:
        say(console, "The ε of a comparison does not count what tuning reveals of validation data.")
    say(console, f"{'higher' if higher else 'lower'} is better; no test sample was looked at", style="dim")


def _row(one: Tuned, place: int | None) -> tuple[Text, ...]:
    score = "–" if one.best is None or one.best.score is None else f"{one.best.score:.4f}"
    states = [t.state for t in one.trials]
    other = [f"{n} {state}" for state in ("pruned", "failed") if (n := states.count(state))]
    beside = f" ({', '.join(other)})" if other else ""
    return (
        Text("–" if place is None else str(place)),
        Text(score),
        Text(f"{len(states)}{beside}"),
        Text(written(one.chosen) or "as given"),
    )


def _expected(found: Tuning, metric: str) -> Table:
    """Return the expected best score of shares of the budget, a row a method; – where a share pays for no trial."""
    shares = [share for share in SHARES if share * found.plan.budget.trials >= 1]
    table = Table(title=Text(f"expected best validation {metric} after a share of the budget"))
    for name in ("Method", *(f"{share:.3g}".replace("0.", ".") for share in shares)):
        table.add_column(name, justify="left" if name == "Method" else "right")
    for one in found.methods:
        scores = one.expected_of([share * found.samples for share in shares])
        table.add_row(Text(one.label), *(Text("–" if v is None else f"{v:.4f}") for v in scores))
    return table


def _show_edges(console: Console, found: Tuning) -> None:
    """Say which chosen values are the smallest or largest that were tried, where the method takes others."""
    lines = []
    for one in found.methods:
        ends = {1: "largest", -1: "smallest"}
        sides = found.edges(one).items()
        lines += [f"{one.label} {written({key: one.chosen[key]})} ({ends[side]})" for key, side in sides]
    if lines:
        way = (
            "--widen tries values beyond them"
            if not found.plan.request.widen
            else "a larger budget goes further"
        )
        say(console, f"At the edge of what was tried: {', '.join(lines)}; {way}.")


def show_plan(console: Console, plan: Plan, workers: int, quiet: bool) -> None:
    """Print what a tuning would search and take."""
    from tailorfl.cli.screen import stderr
    from tailorfl.report.progress import messages
    from tailorfl.tuning.run import foreseen
    from tailorfl.tuning.samplers import size

    errors = stderr()
    with messages(errors), errors.status("") as status:
        found = foreseen(plan, None if quiet else status.update)
    budget = plan.budget
    say(console, f"{plan.asked.name}: nothing was trained (--dry-run)")
    table = Table()
    for name in ("Method", "Settings", "Points", "Trials", "Time"):
        table.add_column(
            name,
            justify="left" if name in ("Method", "Settings") else "right",
            ratio=PROSE if name == "Settings" else None,
        )
    total = 0.0
    for label, space in plan.spaces.items():
        points = size(space)
        seconds = found[label].seconds / workers
        total += seconds
        shown = " ".join(f"{key}={_shown(d.plain())}" for key, d in space.items())
        count = "∞" if points == float("inf") else f"{int(points):,}"
        table.add_row(Text(label), Text(shown), count, str(found[label].trials), human_seconds(seconds))
    show_table(console, table)
    say(
        console,
        f"{budget.trials} trials of {budget.rounds} rounds, seeds {', '.join(map(str, budget.seeds))}, "
        f"{plan.request.sampler}: about {human_seconds(total)} with {workers} worker{'s' * (workers > 1)}",
    )


def _shown(plain: object) -> str:
    if isinstance(plain, list):
        return ",".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in plain)
    return str(plain)
