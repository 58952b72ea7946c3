"""Terminal output for experiments, cost estimates and tunings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tailorfl.cli.screen import fits, make_table, remark, say, show_table, status, stderr, stdout
from tailorfl.report.tables import MARK, human_bytes, human_seconds
from tailorfl.runs.folders import as_words

if TYPE_CHECKING:
    from tailorfl.report.matrix import Matrix
    from tailorfl.report.result import ExperimentResult
    from tailorfl.runs.cost_estimate import Estimate
    from tailorfl.settings.experiment import ExperimentConfig
    from tailorfl.tuning.plan import Plan
    from tailorfl.tuning.run import Tuning
    from tailorfl.tuning.search import Tuned

FIRST = ("name", "seconds", "seconds_per_round", "bytes_per_round", "epsilon", "gradients_per_round")
"""The first columns of an estimate: time and traffic, the purpose of a dry run, before the quantities behind them."""
ZEROS = {"0", "0 B", "0.0 s"}
"""Values that mean none; facts and columns with only these are left out."""
TITLES = {
    "name": "",
    "seconds": "time",
    "seconds_per_round": "time / round",
    "bytes_per_round": "traffic / round",
    "gradients_per_round": "gradients / round",
    "memory_bytes": "memory",
    "epsilon": "epsilon (zero-out)",
}
"""Titles of fields that differ from their names."""
LONG = 1800.0
"""Seconds from which an estimate includes advice on shortening the run."""
MATRIX_COLUMNS = 3
"""Largest number of federations side by side in a terminal."""
DETAILS = ("std", "best10", "weighted_mean", "gradients_each")
"""Columns that a narrow terminal leaves out, the least important first; all others stay."""
SHARES = (1 / 8, 1 / 4, 1 / 2, 1)
"""Shares of the budget in the table of expected scores."""


def show_estimate(console: Console, config: ExperimentConfig, estimate: Estimate) -> None:
    """Print an estimate: single numbers in one table, and one table for every field with rows of its own."""
    say(console, f"{config.name}: nothing was trained (--dry-run)")
    names = {method.label: method.display_name for method in config.methods}
    facts = [
        ("methods", ", ".join(names.values())),
        ("seeds", ", ".join(map(str, config.seeds))),
        ("rounds", str(config.rounds)),
    ]
    tables, left_out = [], []
    for field in dataclasses.fields(estimate):
        value = getattr(estimate, field.name)
        if field.name == "reductions":
            continue
        if isinstance(value, Mapping):
            rows = [{"name": names.get(name, name), **row} for name, row in value.items()]
            table, heads = _table(_words(field.name), rows, console.width)
            tables.append(table)
            left_out += heads
        elif (text := _text(field.name, value)) not in ZEROS:
            facts.append((_words(field.name), text))
    single = make_table(None, ("", " "), facts, prose=(" ",), show_header=False)
    single.columns[0].style = "bold"
    for table in (single, *tables):
        show_table(console, table)
    if left_out:
        say(console, f"further columns are in --json: {', '.join(left_out)}", style="dim")
    show_reductions(console, estimate.reductions)
    for line in shorter(config, estimate.seconds):
        say(console, line)


def shorter(config: ExperimentConfig, seconds: float) -> list[str]:
    """Return advice on shortening a run that takes long; none for others."""
    if seconds < LONG:
        return []
    cores = os.cpu_count() or 1
    remedies = []
    if cores > 1 and config.engine.workers < 2 and config.engine.device == "cpu":
        remedies.append(f"engine.workers={cores} (processes that run clients, with the same results)")
    if config.data.samples is None:
        remedies.append("data.samples=N (fewer samples) for a first look")
    if len(config.seeds) > 1:
        remedies.append("seeds=1 for a first look")
    remedies.append("fraction=0.2 (fewer clients per round)" if config.fraction == 1 else "fewer rounds")
    return [
        f"That is long. To shorten it: {'; '.join(remedies)}.",
        "tailorfl bench with the same settings measures which engine settings are fastest.",
    ]


def show_reductions(console: Console, reductions: Mapping[str, Sequence[str]]) -> None:
    """Print which methods reduce to others with their settings."""
    for label, sentences in reductions.items():
        for sentence in sentences:
            say(console, f"{MARK} {label}: {sentence}")


def _table(title: str, rows: Sequence[Mapping[str, Any]], room: int) -> tuple[Table, list[str]]:
    """Return the table of the columns that fit, without those of zeros, and the titles of the others."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    cells = {name: [_text(name, row.get(name, "")) for row in rows] for name in names}
    names = [name for name in names if not ZEROS.issuperset(cells[name])]
    texts = [
        _words(name) for name in names if not all(isinstance(row.get(name, 0), int | float) for row in rows)
    ]

    def table(count: int) -> Table:
        lines = zip(*(cells[name] for name in names[:count]), strict=True)
        prose = [head for head in texts if head]
        return make_table(title, [_words(name) for name in names[:count]], lines, left=texts, prose=prose)

    least = min(2, len(names))
    count = next((n for n in range(len(names), least, -1) if fits(table(n), room)), least)
    return table(count), [_words(name) for name in names[count:]]


def _words(name: str) -> str:
    """Return a field's readable name; its unit is with the value."""
    return TITLES.get(name, name.replace("_", " "))


def _text(name: str, value: Any) -> str:
    """Return a value with the unit in its name."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "bytes" in name or "memory" in name:
        return human_bytes(value)
    if "seconds" in name:
        return human_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def show_result(result: ExperimentResult, target: float | None = None) -> None:
    """Print the findings, the comparison table, its additions, and the folder of the results."""
    from tailorfl.report.curves import sections
    from tailorfl.report.findings import findings
    from tailorfl.report.published import notes, published_table

    config, console, displayed = result.config, stdout(), result.displayed
    for line in findings(displayed):
        say(console, line, style="bold")
    show_comparison(console, displayed, config.name)
    for folder, difference in result.unlike:
        _warn("not the same experiment:", f"{folder}: {difference}")
    for reason in result.missing:
        _warn("not in the table:", reason)
    target = config.eval.target if target is None else target
    if target is not None:
        section = sections(displayed, target)[0]
        show_table(console, section.rich())
        say(console, section.note, style="dim")
    if config.published:
        numbers = published_table(result)
        if numbers.rows:
            show_table(console, numbers.rich())
        for note in notes(config.published):
            say(console, note, style="dim")
    say(console, f"results: {result.path}")


def _warn(mark: str, text: str) -> None:
    stderr().print(remark(mark, text, "bold yellow"), soft_wrap=True)


def show_comparison(console: Console, result: ExperimentResult, name: str) -> None:
    """Print the comparison table; in a narrow console without details, and in several parts if need be."""
    from tailorfl.report.tables import as_table, without_seeds

    frame, spread = without_seeds(result.marked(result.table))
    columns = list(result.columns)
    left_out = []
    for key in DETAILS:
        if fits(as_table(frame, columns).rich(), console.width):
            break
        left_out += [column.title for column in columns if column.key == key]
        columns = [column for column in columns if column.key != key]
    table = as_table(frame, columns, f"{name}: {spread}").rich()
    for line in result.without_effect:
        say(console, line, style="bold yellow")
    show_table(console, table)
    show_reductions(console, result.reductions)
    for line in result.worst_clients:
        say(console, line, style="dim")
    if left_out:
        say(console, f"further columns are in comparison.md: {', '.join(left_out)}", style="dim")


def show_matrix(console: Console, matrix: Matrix) -> None:
    """Print methods by federations with their average ranks, in several tables if there are many."""
    table, count = matrix.table, len(matrix.results)
    for begin in range(0, count, MATRIX_COLUMNS):
        shown = range(begin + 1, min(begin + MATRIX_COLUMNS, count) + 1)
        title = "methods by federations" if begin == 0 else "further federations"
        show_table(console, table.pick([0, count + 1, *shown], title).rich())
    ranking = matrix.ranking
    if ranking is not None:
        say(
            console,
            f"Friedman: F = {ranking.f:.3g}, p = {ranking.f_p:.3g}; ranks differ from {ranking.critical:.2f} apart "
            "(Nemenyi)",
        )


def result_lines(variant: str, result: ExperimentResult) -> list[dict[str, Any]]:
    """Return the comparison table as plain values: a row per method, with the columns of comparison.csv."""
    frame = result.table.reset_index()
    rows = [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
    return [{"variant": variant, "folder": str(result.path), **row} for row in rows]


def show_tuning(console: Console, tuning: Tuning) -> None:
    """Print every method's chosen settings, those at an edge, and the expected scores of smaller budgets."""
    config = tuning.plan.config
    names = {method.label: method.display_name for method in config.methods}
    rank_of, higher = tuning.ranks(), tuning.methods[0].higher_is_better
    metric = tuning.metric.replace("_", " ")
    ordered = sorted(tuning.methods, key=lambda method: rank_of[method.label] or len(rank_of) + 1)
    title = f"{config.name}: chosen by validation {metric}, {tuning.samples:,} samples per method"
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
                f"{names[method.label]}: no trial was completed, so its settings are those of the experiment",
            )
        if failed:
            count = f"{len(failed)} of {len(method.trials)} trials failed"
            say(console, f"{names[method.label]}: {count}, the first: {failed[0].reason}")
    if config.train.dp is not None:
        say(console, "The ε of a comparison does not count what tuning reveals about validation data.")
    say(console, f"{'higher' if higher else 'lower'} is better; no test sample was used", style="dim")


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _row(method: Tuned, rank: int | None) -> tuple[str, ...]:
    states = [trial.state for trial in method.trials]
    unfinished = [f"{count} {state}" for state in ("pruned", "failed") if (count := states.count(state))]
    return (
        "–" if rank is None else str(rank),
        _score(None if method.best is None else method.best.score),
        str(len(states)) + (f" ({', '.join(unfinished)})" if unfinished else ""),
        as_words(method.chosen) or "as given",
    )


def _show_edges(console: Console, tuning: Tuning, names: Mapping[str, str]) -> None:
    """Print the chosen values that are the smallest or largest tried, if the method accepts values beyond them."""
    ends = {1: "largest", -1: "smallest"}
    edges = [
        f"{names[method.label]} {as_words({key: method.chosen[key]})} ({ends[side]})"
        for method in tuning.methods
        for key, side in tuning.edges(method).items()
    ]
    if edges:
        is_widened = tuning.plan.request.widen
        advice = (
            "a larger budget tries values beyond them" if is_widened else "--widen tries values beyond them"
        )
        say(console, f"At the edge of the values tried: {', '.join(edges)}; {advice}.")


def show_plan(console: Console, plan: Plan, workers: int, quiet: bool) -> None:
    """Print the search spaces and the costs of a tuning."""
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
