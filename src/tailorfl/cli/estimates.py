"""Costs of an experiment for the terminal."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tailorfl.cli.screen import fits, make_table, say, show_table
from tailorfl.report.tables import MARK, human_bytes, human_seconds

if TYPE_CHECKING:
    from tailorfl.runs.cost_estimate import Estimate
    from tailorfl.settings.experiment import ExperimentConfig

FIRST = ("name", "seconds", "seconds_per_round", "bytes_per_round", "epsilon", "gradients_per_round")
"""Columns that stand first: time and traffic, which a dry run is for, before the sizes that they come from."""
ZEROS = {"0", "0 B", "0.0 s"}
"""Values of what there is nothing of; such facts and columns are left out."""
TITLES = {
    "name": "",
    "seconds": "time",
    "seconds_per_round": "time / round",
    "bytes_per_round": "traffic / round",
    "gradients_per_round": "gradients / round",
    "memory_bytes": "memory",
    "epsilon": "epsilon (zero-out)",
}
"""Titles of fields that are not simply their names."""

LONG = 1800.0
"""Seconds from which on an estimate comes with what to do about it."""


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
        rows = _rows(value, names)
        if rows is not None:
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
    """Return what to do about a run that takes long; nothing where it does not."""
    if seconds < LONG:
        return []
    cores = os.cpu_count() or 1
    remedies = []
    if cores > 1 and config.engine.workers < 2 and config.engine.device == "cpu":
        remedies.append(f"engine.workers={cores} (processes that run clients, with the same numbers)")
    if config.data.samples is None:
        remedies.append("data.samples=N (fewer samples) for a first look")
    if len(config.seeds) > 1:
        remedies.append("seeds=1 for a first look")
    remedies.append("fraction=0.2 (fewer clients a round)" if config.fraction == 1 else "fewer rounds")
    return [
        f"That is long. What helps: {'; '.join(remedies)}.",
        "tailorfl bench with the same settings measures which engine settings are fastest.",
    ]


def show_reductions(console: Console, reductions: Mapping[str, Sequence[str]]) -> None:
    """Print which methods are others with their settings."""
    for label, sentences in reductions.items():
        for sentence in sentences:
            say(console, f"{MARK} {label}: {sentence}")


def _rows(value: Any, names: Mapping[str, str]) -> list[Mapping[str, Any]] | None:
    """Rows of a table, if the value is one: a mapping of mappings (by name) or a list of mappings."""
    if isinstance(value, Mapping) and value and all(isinstance(row, Mapping) for row in value.values()):
        return [{"name": names.get(name, name), **row} for name, row in value.items()]
    if isinstance(value, Sequence) and value and all(isinstance(row, Mapping) for row in value):
        return list(value)
    return None


def _table(title: str, rows: Sequence[Mapping[str, Any]], room: int) -> tuple[Table, list[str]]:
    """Return the table of the columns that have room, without those of zeros, and the titles of the others."""
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
    """Return a field's name for people; its unit stands with the value."""
    return TITLES.get(name, name.replace("_", " "))


def _text(name: str, value: Any) -> str:
    """Return a value with the unit that its name says."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(name, item)}" for key, item in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "bytes" in name or "memory" in name:
        return human_bytes(value)
    if "seconds" in name:
        return human_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
