"""The commands `tailorfl list` and `tailorfl show`: what there is, and all about one of it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tailorfl.cli.arguments import AsJson
from tailorfl.cli.screen import make_table, print_json, say, show_table, stdout
from tailorfl.errors import unknown

if TYPE_CHECKING:
    from tailorfl.cli.descriptions import Entry

LISTS = ("methods", "data", "models", "partitions", "recipes")
METHOD = {"name": "Method", "family": "Family", "kept": "On the client", "sent": "Travels", "needs": "Needs"}
ROOM = {"kept": 16, "sent": 20}
"""Columns of the cells that are cut short, at a comma, in the list of methods; `show` has them whole."""
GAP = 2
FACTS = {
    "paper": "paper",
    "family": "family",
    "good for": "use",
    "on the client": "kept",
    "travels": "sent",
    "needs": "needs",
    "evaluated": "evaluated",
}
"""Facts of a method that `show` prints, and how they are called in its entry."""


def list_command(
    kind: Annotated[str | None, typer.Argument(metavar="[WHAT]")] = None,
    name: Annotated[str | None, typer.Argument()] = None,
    as_json: AsJson = False,
) -> None:
    """List what there is: methods with a line each, or data, models, partitions, recipes, every setting.

    Args:
        kind: methods, data, models, partitions, recipes or settings; by default all but settings.
        name ([NAME]): One of them, as `tailorfl show`; or a group of settings, such as train.
    """
    if kind is not None and kind not in (*LISTS, "settings"):
        raise unknown("list", kind, [*LISTS, "settings"])
    if kind == "settings":
        _show_settings(name, as_json)
        return
    if name is not None:
        _show(name, kind, as_json)
        return
    from tailorfl.cli.descriptions import entries

    kinds = LISTS if kind is None else (kind,)
    if as_json:
        print_json({kind: entries(kind) for kind in kinds} if kind is None else entries(kind))
        return
    for kind in kinds:
        if kind == "methods":
            _show_methods(stdout(), entries(kind))
        else:
            show_table(stdout(), _table(kind, entries(kind)))


def show_command(name: str, as_json: AsJson = False) -> None:
    """Show one thing: what it is, where it is from, its options, and of a method its algorithm and its reductions.

    Args:
        name (NAME): A method, data source, model, partition or recipe, such as ditto.
    """
    _show(name, None, as_json)


def _show(name: str, kind: str | None, as_json: bool) -> None:
    from tailorfl.cli.descriptions import described

    entries = described(name, kind)
    if as_json:
        print_json(entries)
        return
    for entry in entries:
        _show_entry(stdout(), entry)


def _show_settings(group: str | None, as_json: bool) -> None:
    """Print all settings, or those of one group. Raises ConfigError: there is no such group or key."""
    from tailorfl.settings.listing import settings

    chosen = settings(group)
    if not chosen:
        raise unknown("setting or group of settings", str(group), [s.key for s in settings()])
    if as_json:
        print_json([vars(setting) for setting in chosen])
        return
    console = stdout()
    for setting in chosen:
        default = f" = {setting.default}" if setting.default else ""
        heading = Text.assemble((setting.key, "bold"), default)
        if len(heading) + 3 + len(setting.type) <= console.width:
            console.print(heading + Text(f"   {setting.type}", style="dim"))
        else:
            console.print(heading)
            console.print(Padding(Text(setting.type, style="dim"), (0, 0, 0, 4), expand=False))
        console.print(Padding(Text(setting.meaning), (0, 0, 0, 4), expand=False))


def _show_methods(console: Console, entries: list[Entry]) -> None:
    """Print a line a method where they fit, and lists where the console is narrower."""
    rows = [[_short(entry, key) for key in METHOD] for entry in entries]
    widths = [max(map(len, column)) for column in zip(METHOD.values(), *rows, strict=True)]
    if sum(widths) + GAP * (len(widths) - 1) > console.width:
        show_table(console, make_table("methods", list(METHOD.values()), rows, left=METHOD.values()))
    else:
        for number, row in enumerate([METHOD.values(), *rows]):
            cells = "".join(f"{cell:{wide + GAP}}" for cell, wide in zip(row, widths, strict=True))
            console.print(Text(cells.rstrip(), style="italic" if number == 0 else ""), highlight=False)
    say(console, "tailorfl show METHOD has the options and the algorithm", style="dim")


def _short(entry: Entry, key: str) -> str:
    """Return a cell in few words: "model" for a whole model, and how many more things where not all have room."""
    text = re.sub(r"^nothing: ", "", entry[key]).replace("whole model", "model")
    text = text.replace("all data in one place", "all data").replace("all but the ", "all but ")
    if key not in ROOM or len(text) <= ROOM[key]:
        return text
    parts = text.partition(", up ")[2].split(", ") if ", up " in text else text.split(", ")
    for count in range(len(parts) - 1, 0, -1):
        short = f"{', '.join(parts[:count])} + {len(parts) - count}"
        if len(short) <= ROOM[key]:
            return short
    return parts[0]


def _table(kind: str, entries: list[Entry]) -> Table:
    """Return names, what they are, and options with their defaults."""
    heads = ["Name", "What it is"]
    rows = [[entry["name"], entry["what"]] for entry in entries]
    has_options = any(entry["options"] for entry in entries)
    if has_options:
        heads.append("Options and defaults")
        for row, entry in zip(rows, entries, strict=True):
            defaults = [(option["name"], option["default"]) for option in entry["options"]]
            row.append("\n".join(f"{n} (needed)" if d is None else f"{n} = {d}" for n, d in defaults))
    table = make_table(kind, heads, rows, prose=heads[1:], show_lines=has_options)
    table.columns[0].style = "bold"
    return table


def _show_entry(console: Console, entry: Entry) -> None:
    is_method = "title" in entry
    title = f"{entry['title']}: method={entry['name']}" if is_method else f"{entry['name']}: {entry['kind']}"
    say(console, title, style="bold")
    say(console, entry["what"])
    if is_method:
        for title, key in FACTS.items():
            say(console, f"{title}: {entry[key].replace('`', '')}")
    if entry["options"]:
        keys = {"name": "Option", "type": "Type and range", "default": "Default", "meaning": "Meaning"}
        if not any(option["meaning"] for option in entry["options"]):
            del keys["meaning"]
        rows = [
            ["(needed)" if option[key] is None else option[key] for key in keys]
            for option in entry["options"]
        ]
        heads = list(keys.values())
        table = make_table(None, heads, rows, prose=heads[1:], show_lines=True)
        table.columns[0].style = "bold"
        show_table(console, table)
    if entry.get("text") and entry["text"] != entry["what"]:
        say(console, "")
        for paragraph in _paragraphs(entry["text"]):
            _print(console, paragraph)
    if entry.get("reductions"):
        say(console, "")
        say(console, "with these settings it is another method", style="bold")
        for reduction in entry["reductions"]:
            say(console, f"- {reduction['with']}: {reduction['is']}")
    if entry.get("tests"):
        say(console, f"proved by: {', '.join(entry['tests'])}", style="dim")


def _print(console: Console, line: str) -> None:
    """Print a line of a text; where it is too long, its further lines are indented."""
    inner = " " * (len(line) - len(line.lstrip()) + 4) if line.startswith((" ", "|", "-")) else ""
    folded = textwrap.fill(
        line, console.width, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False
    )
    console.print(Text(folded), highlight=False, soft_wrap=True)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the lines of a text; those of running text as one, which is wrapped where it is printed."""
    for block in text.split("\n\n"):
        lines = block.split("\n")
        if any(line.startswith((" ", "|", "-")) for line in lines):
            yield from lines
        else:
            yield " ".join(lines)
        yield ""
