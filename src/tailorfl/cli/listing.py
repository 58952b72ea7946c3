"""The commands `tailorfl list` and `tailorfl show`: what there is, and all about one of it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tailorfl.cli.screen import PROSE, print_json, say, show_table, stdout
from tailorfl.errors import unknown

if TYPE_CHECKING:
    from tailorfl.cli.descriptions import Entry

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LISTS = ("methods", "data", "models", "partitions", "recipes")
HEAD = {"name": "Method", "family": "Family", "kept": "On the client", "sent": "Travels", "needs": "Needs"}
ROOM = {"kept": 16, "sent": 20}
"""Columns of the cells that are cut short, at a comma, in the list of methods; `show` has them whole."""
GAP = 2


def list_command(
    what: Annotated[
        str | None,
        typer.Argument(
            help="methods, data, models, partitions, recipes or settings; by default all but settings."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(help="One of them, as `tailorfl show`; or a group of settings, such as train."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what there is: methods with a line each, or data, models, partitions, recipes, every setting."""
    if what is not None and what not in (*LISTS, "settings"):
        raise unknown("list", what, [*LISTS, "settings"])
    if what == "settings":
        _settings(name, as_json)
        return
    if name is not None:
        _show(name, what, as_json)
        return
    from tailorfl.cli.descriptions import entries

    kinds = LISTS if what is None else (what,)
    if as_json:
        print_json({kind: entries(kind) for kind in kinds} if what is None else entries(kinds[0]))
        return
    for kind in kinds:
        if kind == "methods":
            _methods(stdout(), entries(kind))
        else:
            show_table(stdout(), _table(kind, entries(kind)))


def show_command(
    name: Annotated[
        str, typer.Argument(help="A method, data source, model, partition or recipe, such as ditto.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show one thing: what it is, where it is from, its options, and of a method its algorithm and its reductions."""
    _show(name, None, as_json)


def _show(name: str, kind: str | None, as_json: bool) -> None:
    from tailorfl.cli.descriptions import described

    found = described(name, kind)
    if as_json:
        print_json(found)
        return
    for entry in found:
        _one(stdout(), entry)


def _settings(group: str | None, as_json: bool) -> None:
    """Print all settings, or those of one group. Raises ConfigError: there is no such group or key."""
    from tailorfl.settings.listing import settings

    found = settings(group)
    if not found:
        raise unknown("setting or group of settings", str(group), [s.key for s in settings()])
    if as_json:
        print_json([vars(setting) for setting in found])
        return
    console = stdout()
    for setting in found:
        default = f" = {setting.default}" if setting.default else ""
        console.print(Text.assemble((setting.key, "bold"), default, (f"   {setting.type}", "dim")))
        console.print(Padding(Text(setting.meaning), (0, 0, 0, 4), expand=False))


def _methods(console: Console, found: list[Entry]) -> None:
    """Print a line a method where they fit, and lists where the console is narrower."""
    rows = [[_short(entry, key) for key in HEAD] for entry in found]
    widths = [max(map(len, column)) for column in zip([*HEAD.values()], *rows, strict=True)]
    if sum(widths) + GAP * (len(widths) - 1) > console.width:
        table = Table(title="methods")
        for title in HEAD.values():
            table.add_column(title)
        for row in rows:
            table.add_row(*map(Text, row))
        show_table(console, table)
    else:
        for number, row in enumerate([[*HEAD.values()], *rows]):
            cells = "".join(f"{cell:{wide + GAP}}" for cell, wide in zip(row, widths, strict=True))
            console.print(Text(cells.rstrip(), style="italic" if number == 0 else ""), highlight=False)
    say(console, "tailorfl show METHOD has the options and the algorithm", style="dim")


def _short(entry: Entry, key: str) -> str:
    """Return a cell in few words.

    A model for a whole model, and how many more things where there is no room for all.
    """
    text = re.sub(r"^nothing: ", "", entry[key]).replace("whole model", "model")
    text = text.replace("all data in one place", "all data")
    if key not in ROOM or len(text) <= ROOM[key]:
        return text
    parts = text.partition(", up ")[2].split(", ") if ", up " in text else text.split(", ")
    for count in range(len(parts) - 1, 0, -1):
        short = f"{', '.join(parts[:count])} + {len(parts) - count}"
        if len(short) <= ROOM[key]:
            return short
    return parts[0]


def _table(kind: str, found: list[Entry]) -> Table:
    """Names, what they are, and options with their defaults."""
    has_options = any(entry["options"] for entry in found)
    table = Table(title=kind, show_lines=has_options)
    table.add_column("Name", style="bold", no_wrap=True)
    table.add_column("What it is", ratio=PROSE)
    if has_options:
        table.add_column("Options and defaults", ratio=PROSE)
    for entry in found:
        options = "\n".join(
            f"{option['name']} (needed)"
            if option["default"] is None
            else f"{option['name']} = {option['default']}"
            for option in entry["options"]
        )
        table.add_row(*map(Text, (entry["name"], entry["what"], *([options] if has_options else []))))
    return table


def _one(console: Console, entry: Entry) -> None:
    title = (
        f"{entry['title']}: method={entry['name']}"
        if "title" in entry
        else f"{entry['name']}: {entry['kind']}"
    )
    say(console, title, style="bold")
    say(console, entry["what"])
    if "title" in entry:
        for word, key in (
            ("paper", "paper"), ("family", "family"), ("good for", "use"), ("on the client", "kept"),
            ("travels", "sent"), ("needs", "needs"), ("evaluated", "evaluated"),
        ):  # fmt: skip
            say(console, f"{word}: {entry[key].replace('`', '')}")
    if entry["options"]:
        show_table(console, _option_table(entry["options"]))
    if entry.get("text") and entry["text"] != entry["what"]:
        say(console, "")
        for paragraph in _paragraphs(entry["text"]):
            _print(console, paragraph)
    if entry.get("reductions"):
        say(console, "")
        say(console, "with these settings it is another method", style="bold")
        for one in entry["reductions"]:
            say(console, f"- {one['with']}: {one['is']}")
    if entry.get("tests"):
        say(console, f"proved by: {', '.join(entry['tests'])}", style="dim")


def _print(console: Console, line: str) -> None:
    """Print a line of a text; where it is too long, its further lines are indented."""
    inner = " " * (len(line) - len(line.lstrip()) + 4) if line.startswith((" ", "|", "-")) else ""
    folded = textwrap.fill(
        line, console.width, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False
    )
    console.print(Text(folded), highlight=False, soft_wrap=True)


def _option_table(options: list[dict[str, Any]]) -> Table:
    table = Table(show_lines=True)
    described = any(option["meaning"] for option in options)
    for title in ("Option", "Type and range", "Default", *(["Meaning"] if described else [])):
        table.add_column(
            title, ratio=None if title == "Option" else PROSE, style="bold" if title == "Option" else ""
        )
    for option in options:
        cells = (option["name"], option["type"], option["default"] or "")
        table.add_row(*map(Text, (*cells, *([option["meaning"]] if described else []))))
    return table


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the lines of a text; those of running text as one, which is wrapped where it is printed."""
    for block in text.split("\n\n"):
        lines = block.split("\n")
        if any(line.startswith((" ", "|", "-")) for line in lines):
            yield from lines
        else:
            yield " ".join(lines)
        yield ""
