"""The command `tailorfl bench`: a round timed as a plain loop and with every engine, and what to set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from tailorfl.cli.arguments import Arguments, Imports, Quiet, experiment
from tailorfl.cli.screen import make_table, remark, say, show_table, status, stdout
from tailorfl.errors import ConfigError
from tailorfl.light_imports import import_tensordict

if TYPE_CHECKING:
    from tailorfl.benchmark.result import Bench, Way


def command(
    arguments: Arguments = None,
    seconds: float = 20.0,
    out: Path | None = None,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Time one round: a plain PyTorch loop against the engines, and say which settings are fastest.

    Args:
        arguments: An experiment as for `tailorfl run`; its first method and seed are measured.
        seconds: How long to measure, beside building data and model.
        out (FILE): Also write everything to this file, as JSON.
    """
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out '{out}' is a folder, or its folder does not exist; use the name of a file")
    config = experiment(arguments)

    import_tensordict()  # from here on torch is needed, which takes a second to import
    from tailorfl.api import bench
    from tailorfl.runs.files import encode, write_text

    with status(quiet, "bench") as watch:
        times = bench(config, seconds=seconds, watch=watch)
    console = stdout()
    show(console, times)
    if out is not None:
        write_text(out, encode(times.to_dict(), indent=1) + "\n")
        say(console, f"json: {out}")


def show(console: Console, times: Bench) -> None:
    """Print what was measured, a table of the ways, and what to set."""
    is_part = times.measured != times.clients
    part = f"{times.measured} of " if is_part else ""
    say(
        console,
        f"{times.experiment}: one round of {times.title}, {part}{times.clients} clients, {times.model} with "
        f"{times.scalars:,} scalars, {times.gradients:,} gradients of samples in all",
    )
    if is_part:
        say(
            console,
            "a round of all clients takes too long for --seconds, so times are those of a part of them",
        )
    if times.features:
        say(console, times.features)
    say(
        console,
        "the plain loop is FedAvg's: it takes as many gradients as the method and does nothing of what the method adds",
    )
    clock = (
        "process seconds of one thread" if times.clock == "process" else f"seconds, {times.threads} threads"
    )
    heads = ("way", "fastest", "median", "clients/s", "x plain loop", "(quartiles)", "")
    show_table(console, make_table(f"a round: {clock}", heads, map(_row, times.ways), prose=("",)))
    advice = times.recommendation
    console.print(Text.assemble("\nrecommended: ", (advice.settings, "bold")))
    for line in advice.why:
        say(console, f"  {line}")
    for line in advice.warnings:
        console.print(remark("note:", line, "yellow"))


def _row(engine: Way) -> tuple[str, ...]:
    """Return the cells of one way to compute the round."""
    note = engine.note if engine.workers == 1 else f"{engine.note}; by the clock on the wall".lstrip("; ")
    if not engine.seconds:
        return (engine.name, *5 * ("–",), note)
    low, high = engine.spread
    rate = engine.clients_per_second
    return (
        engine.name,
        f"{engine.seconds_min:.4g}",
        f"{engine.seconds_median:.4g}",
        f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
        f"{engine.times_faster:.2f}",
        f"{low:.2f}-{high:.2f}",
        note,
    )
