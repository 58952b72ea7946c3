"""The commands `tailorfl data ...`: a look at clients' data before anything trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailorfl.cli.arguments import Imports, experiment, like_run
from tailorfl.cli.screen import BORDER, PROSE, print_json, say, show_table, stdout
from tailorfl.errors import ConfigError

if TYPE_CHECKING:
    from tailorfl.data.overview import Overview
    from tailorfl.data.rows import Ints

app = typer.Typer(no_args_is_help=True, help="Look at clients' data before anything trains.")

LEVELS = " ▁▂▃▄▅▆▇█"
PARTIAL = " ▏▎▍▌▋▊▉█"
WIDEST = 40
"""Cells of a client's chart; more classes are put together."""
BAR = 12
"""Cells of the bar of a client's size."""
NAMES = 8
"""Names of classes below the chart."""


@app.callback()
def options() -> None:
    """Look at clients' data before anything trains."""


@app.command()
def show(
    arguments: Annotated[
        list[str] | None,
        like_run("only its data are used, with its first seed"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Also draw clients × classes: .png, .pdf or .svg."),
    ] = None,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Clients that are shown, at most.")] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything, of all clients, as JSON.")
    ] = False,
    imports: Imports = None,
) -> None:
    """Show who has how many samples of what, and how unlike clients are; nothing is trained."""
    from tailorfl.data.overview import overview
    from tailorfl.report.data_picture import draw_federation
    from tailorfl.report.progress import messages
    from tailorfl.runs.build import make_federation

    config = experiment(arguments)
    if config.variants:
        raise ConfigError(
            f"'{config.name}' has variants ({', '.join(config.variants)}), each with data of its own; look at one: "
            "give its settings as KEY=VALUE beside variants={}"
        )
    with messages(Console(stderr=True)):
        found = overview(make_federation(config, config.data.seed_of(config.seeds[0])))
    console = stdout()
    if out is not None:
        draw_federation(found, out)
    if as_json:
        print_json(found.to_dict())
        return
    show_overview(console, found, clients)
    if out is not None:
        say(console, f"picture: {out}")


def show_overview(console: Console, found: Overview, most: int) -> None:
    """Print clients, a chart of what they have, and how unlike they are."""
    chosen = found.from_large_to_small(most)
    show_table(console, _clients(found, chosen))
    if found.cells:
        chart = _chart(found, chosen, console.width)
        show_table(console, chart)
    show_table(console, _figures(found))
    for name, samples in found.further.items():
        say(console, f"{'public set' if name == 'public' else f'shifted set {name}'}: {samples:,} samples")


def _clients(found: Overview, chosen: Ints) -> Table:
    everyone, away = len(found.clients), len(found.clients) - found.num_clients
    held = f", {away:,} held out" if away else ""
    title = f"{found.name} ({found.task}): {everyone:,} client{'s' if everyone > 1 else ''}{held}"
    if len(chosen) < everyone:
        title += f"; {len(chosen)} of them, from the largest to the smallest"
    table = Table(title=Text(title))
    table.add_column("client")
    heads = ["train", "val", "test"]
    if found.classes is not None:
        heads += ["classes", "largest class", "share"]
    elif found.quantiles is not None:
        word = "time" if found.task == "survival" else "target"
        heads += ["events"] if found.events is not None else []
        heads += [f"{word} 5 %", "median", "95 %"]
    for head in heads:
        table.add_column(head, justify="left" if head == "largest class" else "right")
    first, share = found.largest() if found.cells else (None, None)
    for client in chosen.tolist():
        name = found.clients[client] + (" (held out)" if client >= found.num_clients else "")
        cells = [f"{sizes[client]:,}" for sizes in found.sizes.values()]
        if found.classes is not None and first is not None and share is not None:
            cells += [f"{found.classes[client]:,}", found.cells[first[client]], f"{share[client]:.0%}"]
        elif found.quantiles is not None:
            cells += [] if found.events is None else [f"{found.events[client]:,}"]
            cells += [f"{value:.4g}" for value in found.quantiles[client, [0, 2, 4]]]
        table.add_row(*map(Text, (name, *cells)))
    return table


def _chart(found: Overview, chosen: Ints, width: int) -> Table:
    """Return a line a client: a column a class, as high as the class's share, and a bar as long as its size."""
    longest = max(Text(found.clients[client]).cell_len for client in chosen.tolist())
    room = max(4, min(WIDEST, width - 1 - 3 * BORDER - longest - BAR))
    shares = _grouped(found.shares[chosen], room)
    together = -(-len(found.cells) // shares.shape[1])
    wide = 2 if 2 * shares.shape[1] <= room else 1
    top = float(shares.max()) or 1.0
    sizes = found.sizes["train"][chosen]
    each = f", {together} in a column" if together > 1 else ""
    title = f"training samples by {found.what}{each}; a full column is {top:.0%} of a client's"
    table = Table(title=Text(title))
    table.add_column("client")
    table.add_column(f"{len(found.cells)} {found.what.split()[0]}")
    table.add_column("samples")
    for row, client in enumerate(chosen.tolist()):
        columns = "".join(_level(share / top) * wide for share in shares[row])
        table.add_row(Text(found.clients[client]), Text(columns), Text(_bar(sizes[row] / sizes.max())))
    names = ", ".join(found.cells[:NAMES]) + (", ..." if len(found.cells) > NAMES else "")
    if found.quantiles is not None:
        names = (
            f"low to high, with equally many of all samples in each column, {names.split(',')[0]} the first"
        )
    table.caption = Text(f"from left to right: {names}")
    return table


def _grouped(shares: Any, room: int) -> Any:
    """`[clients, at most room]`: neighbouring columns added up where there are more."""
    together = -(-shares.shape[1] // room)
    if together == 1:
        return shares
    import numpy as np

    return np.add.reduceat(shares, np.arange(0, shares.shape[1], together), axis=1)


def _level(share: float) -> str:
    """Return a column as high as a share; the lowest is kept for little, so that nothing and little differ."""
    return "·" if share == 0 else LEVELS[max(1, round(share * (len(LEVELS) - 1)))]


def _bar(share: float) -> str:
    whole, part = divmod(max(1, round(share * BAR * 8)), 8)
    return "█" * whole + (PARTIAL[part] if part else "")


def _figures(found: Overview) -> Table:
    table = Table(title=Text(f"{found.num_clients:,} training clients, by their training samples"))
    table.add_column("", ratio=PROSE)
    table.add_column("value", justify="right")
    table.add_column("by chance", justify="right")
    for figure in found.figures:
        chance = "" if figure.chance is None else _number(figure.chance)
        table.add_row(Text(figure.meaning), _number(figure.value), chance)
    table.caption = "by chance: the same samples dealt at random to clients of these sizes"
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
