"""The command `tailorfl gains`: what every client has, by its name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailorfl.cli import listing
from tailorfl.cli.screen import print_json, say, show_table, stdout
from tailorfl.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from tailorfl.report.clients import ClientReport


def command(
    folder: Annotated[Path, typer.Argument(help="Result folder of an experiment.")],
    client: Annotated[
        list[str] | None, typer.Option(help="A client's name; more than once for several. By default all.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Label of a line, likewise. By default all.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the jobs; by default the first.")] = None,
    as_json: listing.AsJson = False,
) -> None:
    """Collect what every client has, by its name: alone, with each method, what it gains, and how sure of it."""
    from tailorfl.report.clients import clients_of
    from tailorfl.report.result import results

    found = results(folder)
    if len(found) > 1:
        raise ConfigError(
            f"'{folder}' has {len(found)} variants ({', '.join(found)}); give the folder of one of them"
        )
    (result,) = found.values()
    clients = clients_of(result, seed, methods=method or (), clients=client or ())
    if as_json:
        print_json([line.to_dict() for line in clients.lines])
        return
    console = stdout()
    show_table(console, table(clients))
    for note in clients.notes:
        say(console, note, style="dim")
    if len(clients.seeds) > 1:
        listed = ", ".join(map(str, clients.seeds))
        say(console, f"Numbers are of seed {clients.seed}; --seed takes another of {listed}.", style="dim")


def table(clients: ClientReport) -> Table:
    """Return the lines as a table; a gain beyond the noise of the test part is bold."""
    from rich.table import Table
    from rich.text import Text

    out = Table(title=Text(f"clients: {clients.look.name} of the test part{clients.look.unit}"))
    for name in clients.head:
        out.add_column(Text(name), justify="left" if name in ("client", "method") else "right")
    for line in clients.lines:
        bold = line.gain_interval is not None and line.gain_interval.leaves_out_zero
        cells = clients.cells(line)
        out.add_row(*(Text(c, style="bold" if bold and k == GAIN else "") for k, c in enumerate(cells)))
    return out


GAIN = 4
"""Place of the gain among the cells."""
