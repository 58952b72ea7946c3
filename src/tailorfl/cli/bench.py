"""The command `tailorfl bench`: a round timed as a plain loop and with every engine, and what to set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailorfl.cli.arguments import Imports, Quiet, experiment, like_run
from tailorfl.cli.screen import PROSE, remark, say, show_table, status, stdout
from tailorfl.errors import ConfigError
from tailorfl.light_imports import import_tensordict

if TYPE_CHECKING:
    from tailorfl.benchmark.result import Bench, Way


def command(
    arguments: Annotated[
        list[str] | None,
        like_run("its first method and seed are measured"),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="How long to measure, beside building data and model.")
    ] = 20.0,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything to this file.")
    ] = None,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Time one round: a plain PyTorch loop against the engines, and say which settings are fastest."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ConfigError(
            f"--json names the file to write, but '{file}' is a folder or its folder does not exist"
        )
    config = experiment(arguments)

    import_tensordict()  # from here on torch is needed, which takes a second to import
    from tailorfl.api import bench
    from tailorfl.runs.files import encode, write_text

    with status(quiet, "bench") as watch:
        found = bench(config, {}, seconds=seconds, source=None, watch=watch)
    console = stdout()
    show(console, found)
    if file is not None:
        write_text(file, encode(found.to_dict(), indent=1) + "\n")
        say(console, f"json: {file}")


def show(console: Console, found: Bench) -> None:
    """Print what was measured, a table of the ways, and what to set."""
    for line in _facts(found):
        say(console, line)
    show_table(console, _table(found))
    advice = found.recommendation
    console.print(Text.assemble("\nrecommended: ", (advice.settings, "bold")))
    for line in advice.why:
        say(console, f"  {line}")
    for line in advice.warnings:
        console.print(remark("note:", line, "yellow"))


def _facts(found: Bench) -> Iterator[str]:
    part = "" if found.measured == found.clients else f"{found.measured} of "
    yield (
        f"{found.experiment}: one round of {found.title}, {part}{found.clients} clients, {found.model} with "
        f"{found.scalars:,} scalars, {found.gradients:,} gradients of samples in all"
    )
    if part:
        yield "a round of all clients takes too long for --seconds, so times are those of a part of them"
    if found.features:
        yield found.features
    yield (
        "the plain loop is FedAvg's: it takes as many gradients as the method and does nothing of what the method adds"
    )


def _table(found: Bench) -> Table:
    clock = (
        "process seconds of one thread" if found.clock == "process" else f"seconds, {found.threads} threads"
    )
    table = Table(title=Text(f"a round: {clock}"))
    for column in (
        "way",
        "fastest",
        "median",
        "clients/s",
        "x plain loop",
        "(quartiles)",
    ):
        table.add_column(column, justify="left" if column == "way" else "right")
    table.add_column("", ratio=PROSE)
    for way in found.ways:
        note = way.note if way.workers == 1 else f"{way.note}; by the clock on the wall".lstrip("; ")
        table.add_row(Text(way.name), *_cells(way), Text(note))
    return table


def _cells(way: Way) -> tuple[str, ...]:
    if not way.seconds:
        return ("–",) * 5
    low, high = way.spread
    rate = way.clients_per_second
    return (
        f"{way.seconds_min:.4g}",
        f"{way.seconds_median:.4g}",
        f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
        f"{way.times_faster:.2f}",
        f"{low:.2f}-{high:.2f}",
    )
