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
    from tailorfl.benchmark.result import Bench, Profile, Way


def command(
    arguments: Annotated[
        list[str] | None,
        like_run("its first method and seed are measured"),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="How long to measure, beside building data and model.")
    ] = 20.0,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Also the operators of torch, and how near the machine's limits."),
    ] = False,
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
        found = bench(config, {}, seconds=seconds, profile=profile, source=None, watch=watch)
    console = stdout()
    show(console, found)
    if file is not None:
        write_text(file, encode(found.to_dict(), indent=1) + "\n")
        say(console, f"json: {file}")


def show(console: Console, found: Bench) -> None:
    """Prints what was measured, a table of the ways, the profile if there is one, and what to set."""
    for line in _facts(found):
        say(console, line)
    show_table(console, _table(found))
    if found.profile is not None:
        _show_profile(console, found.profile)
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
        f"{found.scalars:,} scalars, {found.steps:,} steps on {found.samples:,} samples in all"
    )
    if part:
        yield "a round of all clients takes too long for --seconds, so times are those of a part of them"
    if found.features:
        yield found.features
    if found.beyond:
        yield (
            f"the method also has {', '.join(found.beyond)}; the plain loop does without: plain training of as many "
            "steps, a lower bound of the method's work"
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
        "padding",
        "memory",
    ):
        table.add_column(column, justify="left" if column == "way" else "right")
    table.add_column("", ratio=PROSE)
    for way in found.ways:
        note = way.note if way.workers == 1 else f"{way.note}; by the clock on the wall".lstrip("; ")
        table.add_row(Text(way.name), *_cells(way), Text(note))
    table.caption = "memory: growth of resident memory at the peak of a round, results included"
    return table


def _cells(way: Way) -> tuple[str, ...]:
    from tailorfl.report.tables import human_bytes

    memory = "–" if way.memory_bytes is None else human_bytes(way.memory_bytes)
    if not way.seconds:
        return ("–",) * 6 + (memory,)
    low, high = way.spread
    return (
        f"{way.seconds_min:.4g}",
        f"{way.seconds_median:.4g}",
        f"{way.clients_per_second:,.0f}"
        if way.clients_per_second >= 100
        else f"{way.clients_per_second:.3g}",
        f"{way.times_faster:.2f}",
        f"{low:.2f}-{high:.2f}",
        f"{way.padding:.1%}",
        memory,
    )


def _show_profile(console: Console, found: Profile) -> None:
    table = Table(title=Text(f"operators of torch in a round of {found.way}, by their own time"))
    for column in ("operator", "calls", "seconds", "share"):
        name = column == "operator"
        table.add_column(column, justify="left" if name else "right", ratio=PROSE if name else None)
    for one in found.operators:
        table.add_row(Text(one.name), f"{one.calls:,}", f"{one.seconds:.4f}", f"{one.share:.1%}")
    table.caption = (
        "names that begin with _Cohort are this library's own code around the operators, in Python"
    )
    show_table(console, table)
    lines = (
        f"arithmetic: {found.flops / 1e9:,.3g} GFLOP a round, {found.flops_per_second / 1e9:.3g} GFLOP/s of "
        f"{found.machine_flops_per_second / 1e9:.3g} in a large matrix product "
        f"({found.flops_per_second / found.machine_flops_per_second:.1%})",
        f"memory: {found.moved_bytes / 1e9:,.3g} GB of weights and gradients that plain steps move in a round, "
        f"{found.moved_per_second / 1e9:.3g} GB/s of {found.machine_bytes_per_second / 1e9:.3g} in a large copy "
        f"({found.moved_per_second / found.machine_bytes_per_second:.1%})",
    )
    for line in lines:
        say(console, line)
