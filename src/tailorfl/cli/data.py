"""The commands `tailorfl data ...`: a look at clients' data before anything trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailorfl.cli.arguments import Arguments, AsJson, Imports, documented, experiment, without_variants
from tailorfl.cli.screen import BORDER, make_table, print_json, say, show_table, stderr, stdout

if TYPE_CHECKING:
    from tailorfl.data.overview import Overview
    from tailorfl.partition.rows import Ints

app = typer.Typer(no_args_is_help=True, help="Look at clients' data before anything trains.")

LEVELS = " ▁▂▃▄▅▆▇█"
PARTIAL = " ▏▎▍▌▋▊▉█"
WIDEST = 40
"""Largest number of cells in a client's chart; more classes are merged."""
BAR = 12
"""Cells of the bar of a client's size."""
NAMES = 8
"""Largest number of class names below the chart."""


@app.callback()
def options() -> None:
    """Look at clients' data before anything trains."""


@app.command()
@documented
def show(
    arguments: Arguments = None,
    out: Path | None = None,
    clients: Annotated[int, typer.Option("--clients", min=1)] = 20,
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """Show clients' numbers of samples by class, and how unlike clients are; nothing is trained.

    Args:
        arguments: An experiment as for `tailorfl run`; only its data are used, with its first seed.
        out (FILE): Also draw clients × classes: .png, .pdf or .svg.
        clients: Largest number of clients shown; --json has all.
    """
    from tailorfl.data.overview import overview
    from tailorfl.report.plots import draw_federation
    from tailorfl.report.progress import messages
    from tailorfl.runs.build import make_federation

    config = experiment(arguments)
    without_variants(config, "each with its own data", "look at")
    with messages(stderr()):
        view = overview(make_federation(config, config.data.seed_of(config.seeds[0])))
    console = stdout()
    if out is not None:
        draw_federation(view, out)
    if as_json:
        print_json(view.to_dict())
        return
    show_overview(console, view, clients)
    if out is not None:
        say(console, f"picture: {out}")


def show_overview(console: Console, view: Overview, most: int) -> None:
    """Print clients, a chart of their samples, and how unlike they are."""
    chosen = view.from_large_to_small(most)
    show_table(console, _clients(view, chosen))
    if view.cells:
        show_table(console, _chart(view, chosen, console.width))
    rows = [
        (figure.meaning, _number(figure.value), "" if figure.chance is None else _number(figure.chance))
        for figure in view.figures
    ]
    title = f"{view.num_clients:,} training clients, by their training samples"
    caption = "at random: the same samples distributed at random to clients of these sizes"
    show_table(console, make_table(title, ("", "value", "at random"), rows, prose=("",), caption=caption))
    for name, samples in view.further.items():
        say(console, f"{'public set' if name == 'public' else f'shifted set {name}'}: {samples:,} samples")


def _clients(view: Overview, chosen: Ints) -> Table:
    count, late = len(view.clients), len(view.clients) - view.num_clients
    heldout = f", {late:,} held out" if late else ""
    title = f"{view.name} ({view.task}): {count:,} client{'s' if count > 1 else ''}{heldout}"
    if len(chosen) < count:
        title += f"; {len(chosen)} of them, from the largest to the smallest"
    heads = ["client", "train", "val", "test"]
    if view.classes is not None:
        heads += ["classes", "largest class", "share"]
    elif view.quantiles is not None:
        target = "time" if view.task == "survival" else "target"
        heads += [*(["events"] if view.events is not None else []), f"{target} 5 %", "median", "95 %"]
    largest, share = view.largest() if view.cells else (None, None)
    rows = []
    for client in chosen.tolist():
        name = view.clients[client] + (" (held out)" if client >= view.num_clients else "")
        cells = [name, *(f"{sizes[client]:,}" for sizes in view.sizes.values())]
        if view.classes is not None and largest is not None and share is not None:
            cells += [f"{view.classes[client]:,}", view.cells[largest[client]], f"{share[client]:.0%}"]
        elif view.quantiles is not None:
            cells += [] if view.events is None else [f"{view.events[client]:,}"]
            cells += [f"{value:.4g}" for value in view.quantiles[client, [0, 2, 4]]]
        rows.append(cells)
    return make_table(title, heads, rows, left=("largest class",))


def _chart(view: Overview, chosen: Ints, width: int) -> Table:
    """Return a table with a row per client: a column per class, as high as its share, and a bar for its size."""
    longest = max(Text(view.clients[client]).cell_len for client in chosen.tolist())
    room = max(4, min(WIDEST, width - 1 - 3 * BORDER - longest - BAR))
    together = -(-len(view.cells) // room)
    shares = _grouped(view.shares[chosen], together)
    wide = 2 if 2 * shares.shape[1] <= room else 1
    top = float(shares.max()) or 1.0
    sizes = view.sizes["train"][chosen]
    rows = [
        (
            view.clients[client],
            "".join(_level(share / top) * wide for share in row),
            _bar(size / sizes.max()),
        )
        for client, row, size in zip(chosen.tolist(), shares, sizes, strict=True)
    ]
    names = ", ".join(view.cells[:NAMES]) + (", ..." if len(view.cells) > NAMES else "")
    if view.quantiles is not None:
        names = (
            f"low to high, with equally many of all samples in each column, {names.split(',')[0]} the first"
        )
    grouped = f", {together} in a column" if together > 1 else ""
    title = f"training samples by {view.what}{grouped}; a full column is {top:.0%} of a client's"
    heads = ("client", f"{len(view.cells)} {view.what.split()[0]}", "samples")
    return make_table(title, heads, rows, left=heads, caption=Text(f"from left to right: {names}"))


def _grouped(shares: Any, together: int) -> Any:
    """Return `[clients, columns]` with each `together` neighbouring columns added up."""
    import numpy as np

    return np.add.reduceat(shares, np.arange(0, shares.shape[1], together), axis=1)


def _level(share: float) -> str:
    """Return a column as high as a share; the lowest is reserved for small shares, to distinguish them from none."""
    return "·" if share == 0 else LEVELS[max(1, round(share * (len(LEVELS) - 1)))]


def _bar(share: float) -> str:
    whole, part = divmod(max(1, round(share * BAR * 8)), 8)
    return "█" * whole + (PARTIAL[part] if part else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
