"""How a kernel is timed, and the table it goes to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

BATCH, RATE = 10, 0.01
"""Samples a batch and the rate of descent, everywhere."""

Cell = str | int | float
Table = list[dict[str, Cell]]


def in_turn(
    ways: Mapping[str, Callable[[], object]], repeat: int = 7, least: float = 0.02
) -> dict[str, float]:
    """Return seconds a call of each way: the minimum over repetitions of at least `least` seconds."""
    counts, best = {}, {}
    for name, way in ways.items():
        way()
        begin = time.process_time()
        way()
        best[name] = time.process_time() - begin
        counts[name] = max(1, int(least / max(best[name], 1e-5)))
    for _ in range(repeat):
        for name, way in ways.items():
            begin = time.process_time()
            for _ in range(counts[name]):
                way()
            best[name] = min(best[name], (time.process_time() - begin) / counts[name])
    return best


def show(title: str, table: Table) -> None:
    """Print a table in Markdown."""
    heads = list(table[0])
    print(f"\n**{title}**\n\n| {' | '.join(heads)} |\n| --- |{' ---: |' * (len(heads) - 1)}")
    for row in table:
        cells = (row[h] if isinstance(row[h], str | int) else f"{row[h]:.3g}" for h in heads)
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
