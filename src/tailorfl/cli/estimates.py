"""Costs of an experiment for the terminal."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tailorfl.cli.screen import make_table, say, show_table
from tailorfl.report.tables import MARK, human_bytes, human_seconds

if TYPE_CHECKING:
    from tailorfl.runs.cost_estimate import Estimate
    from tailorfl.settings.experiment import ExperimentConfig

FIRST = ("name", "seconds", "seconds_per_round", "bytes_per_round", "trained_scalars")
"""Columns that stand first: time and traffic, which a dry run is for, before the sizes that they come from."""

LONG = 1800.0
"""Seconds from which on an estimate comes with what to do about it."""


def show_estimate(console: Console, config: ExperimentConfig, estimate: Estimate) -> None:
    """Print an estimate: single numbers in one table, and a table for every field with rows of its own."""
    say(console, f"{config.name}: nothing was trained (--dry-run)")
    facts = [
        ("methods", ", ".join(method.label for method in config.methods)),
        ("seeds", ", ".join(map(str, config.seeds))),
        ("rounds", str(config.rounds)),
    ]
    tables = []
    for field in dataclasses.fields(estimate):
        value = getattr(estimate, field.name)
        if field.name == "reductions":
            continue
        rows = _rows(value)
        if rows is None:
            facts.append((_words(field.name), _text(field.name, value)))
        else:
            tables.append(_table(_words(field.name), rows))
    single = make_table(None, ("", " "), facts, prose=(" ",), show_header=False)
    single.columns[0].style = "bold"
    for table in (single, *tables):
        show_table(console, table)
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
    """Print which lines are other methods with their settings."""
    for label, sentences in reductions.items():
        for sentence in sentences:
            say(console, f"{MARK} {label}: {sentence}")


def _rows(value: Any) -> list[Mapping[str, Any]] | None:
    """Rows of a table, if the value is one: a mapping of mappings (by name) or a list of mappings."""
    if isinstance(value, Mapping) and value and all(isinstance(row, Mapping) for row in value.values()):
        return [{"name": name, **row} for name, row in value.items()]
    if isinstance(value, Sequence) and value and all(isinstance(row, Mapping) for row in value):
        return list(value)
    return None


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(key for row in rows for key in row))
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    texts = [
        _words(name) for name in names if not all(isinstance(row.get(name, 0), int | float) for row in rows)
    ]
    cells = [[_text(name, row.get(name, "")) for name in names] for row in rows]
    prose = [head for head in texts if head != "name"]
    return make_table(title, [_words(name) for name in names], cells, left=texts, prose=prose)


def _words(name: str) -> str:
    """Return a field's name for people; its unit stands with the value."""
    titles = {"seconds": "time", "memory_bytes": "memory", "epsilon": "epsilon (zero-out)"}
    return titles.get(name, name.replace("_", " "))


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
