"""The commands `tailorfl list` and `tailorfl show`: all choices, and the details of one.

Methods, data, models, partitions and recipes are first collected as plain values with their options, then printed. The
kept and sent state of methods, and the settings that reduce them to others, are in methods.json. docs/methods_table.py
writes it: it runs every method, and reads the table of reductions that the tests prove.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tailorfl.cli.arguments import AsJson
from tailorfl.cli.screen import make_table, print_json, say, show_table, stdout
from tailorfl.errors import unknown

Entry = dict[str, Any]
"""`name`, `what` (a description in a line) and `options`; for a method also title, paper, family and other facts."""
UNKNOWN = "–"
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):\n", re.MULTILINE)
SAME = re.compile(r"as for `([\w.]+)`(.*)")
"""Text of an argument with the meaning of another function's argument of that name, and an addition."""
METHOD = {"name": "Method", "family": "Family", "kept": "On the client", "sent": "Travels", "needs": "Needs"}
ROOM = {"kept": 16, "sent": 20}
"""Width of the cells that are shortened, at a comma, in the list of methods; `show` has them complete."""
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
"""Facts of a method that `show` prints -> their keys in its entry."""


def entries(kind: str) -> list[Entry]:
    """Return everything of a kind, in the order of `names`."""
    return [KINDS[kind](name) for name in names(kind)]


def names(kind: str) -> Collection[str]:
    """Return the names of everything of a kind."""
    from tailorfl.settings.loading import recipes

    if kind == "recipes":  # without torch
        return recipes()
    from tailorfl.core.method import all_methods
    from tailorfl.data.registry import sources
    from tailorfl.models.registry import FACTORIES
    from tailorfl.partition import RECIPES

    registered: Mapping[str, Collection[str]] = {
        "methods": all_methods(),
        "data": sources(),
        "models": FACTORIES,
        "partitions": sorted(RECIPES),
    }
    return registered[kind]


def described(name: str, kind: str | None = None) -> list[Entry]:
    """Return the entries with this name, with their `kind` and text; several if kinds share the name.

    Raises:
        ConfigError: nothing has this name; names the nearest.
    """
    kinds = [*KINDS] if kind is None else [kind]
    matches = [kind for kind in kinds if name in names(kind)]
    if not matches:
        valid = {name for kind in kinds for name in names(kind)}
        if kind is None:
            from tailorfl.settings.listing import settings

            what = "method, data, model, partition, recipe or setting"
            valid |= {setting.key for setting in settings()}
            raise unknown(what, name, valid, "tailorfl list, tailorfl list settings")
        raise unknown(f"name in the list of {kind}", name, valid)
    return [{"kind": kind.removesuffix("s"), **KINDS[kind](name), **_more(kind, name)} for kind in matches]


def _more(kind: str, name: str) -> Entry:
    """Return the parts of an entry that only `show` has: texts, and for methods the reductions and their tests."""
    from tailorfl.core.method import all_methods
    from tailorfl.data.registry import loader_of
    from tailorfl.models.registry import FACTORIES
    from tailorfl.partition import RECIPES

    if kind == "methods":
        facts = _facts().get(name, {})
        text = inspect.cleandoc(sys.modules[all_methods()[name].__module__].__doc__ or "")
        return {"text": text, "reductions": facts.get("reductions", []), "tests": facts.get("tests", [])}
    if kind == "recipes":
        return {}
    if kind == "partitions":
        return {"text": _sections(RECIPES[name].function)[""]}
    return {"text": _sections(FACTORIES[name] if kind == "models" else loader_of(name))[""]}


def _method(name: str) -> Entry:
    from tailorfl.core.method import all_methods
    from tailorfl.settings.listing import type_text, value_text

    method, facts = all_methods()[name], _facts().get(name, {})
    plain = method()
    needs = {"public set": plain.needs_public, "LoRA": plain.of_adapters}
    models = {"personal": method.has_personal, "global": method.has_global}
    return {
        "name": name,
        "what": _summary(method),
        "title": method.title,
        "paper": method.paper,
        "family": method.family or UNKNOWN,
        "use": method.use or UNKNOWN,
        "kept": facts.get("kept", UNKNOWN),
        "sent": facts.get("sent", UNKNOWN),
        "needs": ", ".join(word for word, is_needed in needs.items() if is_needed) or UNKNOWN,
        "evaluated": " and ".join(word for word, exists in models.items() if exists),
        "options": [
            {
                "name": option,
                "type": type_text(field.annotation, field.metadata),
                "default": value_text(field.get_default(call_default_factory=True, validated_data={})),
                "meaning": field.description or "",
            }
            for option, field in method.model_fields.items()
        ],
    }


def _data(name: str) -> Entry:
    import pandas as pd

    from tailorfl.data.registry import loader_of, options_of, sources

    hints = typing.get_type_hints(loader_of(name), localns={"pd": pd})  # loaders import it lazily
    return _entry(name, sources()[name], options_of(name), hints, _meanings(loader_of(name)))


def _model(name: str) -> Entry:
    from tailorfl.models.adapters import PeftConfig
    from tailorfl.models.registry import FACTORIES, available, options_of

    peft_options = {field.name for field in fields(PeftConfig)}
    hints = {**typing.get_type_hints(FACTORIES[name]), **typing.get_type_hints(PeftConfig)}
    options = sorted(options_of(name).items(), key=lambda option: option[0] in peft_options)
    return _entry(name, available()[name], dict(options), hints, _meanings(FACTORIES[name]))


OF_ALL = {
    "group": "kind of the groups that clients are made of",
    "bins": "for a regression: number of equally filled ranges of the target that stand for classes",
}
"""Descriptions of the options that the library adds to those of a partition's function."""


def _partition(name: str) -> Entry:
    from tailorfl.data.dealing import DEFAULT_BINS
    from tailorfl.partition import RECIPES

    recipe = RECIPES[name]
    parameters = inspect.signature(recipe.function).parameters
    options: dict[str, Any] = {option: parameters[option].default for option in recipe.options()}
    if recipe.group is not None:
        options["group"] = recipe.group
    if recipe.classes:
        options["bins"] = DEFAULT_BINS
    hints = {"group": str, "bins": int, **typing.get_type_hints(recipe.function)}
    return _entry(name, _summary(recipe.function), options, hints, OF_ALL | _meanings(recipe.function))


def _recipe(name: str) -> Entry:
    from tailorfl.settings.loading import read

    return _entry(name, " ".join(str(read(name).get("description", "")).split()), {}, {}, {})


KINDS: Mapping[str, Callable[[str], Entry]] = {
    "methods": _method,
    "data": _data,
    "models": _model,
    "partitions": _partition,
    "recipes": _recipe,
}
"""Kind -> the function that describes one of it."""


def _entry(
    name: str, what: str, options: Mapping[str, Any], hints: Mapping[str, Any], meanings: Mapping[str, str]
) -> Entry:
    """Return the entry of a function; an option without a default is required."""
    from tailorfl.settings.listing import type_text, value_text

    needed = inspect.Parameter.empty
    rows = [
        {
            "name": option,
            "type": type_text(hints[option]) if option in hints else "",
            "default": None if default is needed else value_text(default),
            "meaning": meanings.get(option, ""),
        }
        for option, default in options.items()
    ]
    return {"name": name, "what": what, "options": rows}


@cache
def _facts() -> dict[str, dict[str, Any]]:
    """Return the measured facts of the library's methods."""
    text = files("tailorfl.cli").joinpath("methods.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def _sections(described: Any) -> dict[str, str]:
    """Return the sections of a docstring by title, with the text before them under ""."""
    text, *parts = SECTION.split(inspect.getdoc(described) or "")
    return {"": text.rstrip(), **dict(zip(parts[::2], parts[1::2], strict=True))}


def _meanings(described: Any) -> dict[str, str]:
    """Return argument -> its text in a docstring; "as for `function`" is replaced by that function's text."""
    sections, meanings = _sections(described), dict[str, str]()
    entries_text = (sections.get("Args") or sections.get("Attributes") or "").strip()
    for line in re.split(r"\n(?=    \w)", entries_text):
        names, _, text = " ".join(line.split()).partition(": ")
        same = SAME.fullmatch(text)
        others: dict[str, str] = {}
        if same is not None:
            module, _, function = same[1].rpartition(".")
            with suppress(ImportError, AttributeError):  # for docstrings in users' code
                others = _meanings(getattr(importlib.import_module(module or described.__module__), function))
        for name in names.split(", "):
            other = others.get(name)
            meanings[name] = text if same is None or other is None else other.rstrip(".") + same[2]
    return {name: text.rstrip(".") for name, text in meanings.items()}


def _summary(described: Any) -> str:
    return (inspect.getdoc(described) or "").split("\n\n")[0].replace("\n", " ")


def list_command(
    kind: Annotated[str | None, typer.Argument(metavar="[WHAT]")] = None,
    name: Annotated[str | None, typer.Argument()] = None,
    as_json: AsJson = False,
) -> None:
    """List all methods with a line each, or data, models, partitions, recipes, every setting.

    Args:
        kind: methods, data, models, partitions, recipes or settings; by default all but settings.
        name ([NAME]): One of them, as in `tailorfl show`; or a group of settings, such as train.
    """
    if kind is not None and kind not in (*KINDS, "settings"):
        raise unknown("list", kind, [*KINDS, "settings"])
    if kind == "settings":
        _show_settings(name, as_json)
        return
    if name is not None:
        _show(name, kind, as_json)
        return
    kinds = KINDS if kind is None else (kind,)
    if as_json:
        print_json({kind: entries(kind) for kind in kinds} if kind is None else entries(kind))
        return
    for kind in kinds:
        if kind == "methods":
            _show_methods(stdout(), entries(kind))
        else:
            show_table(stdout(), _table(kind, entries(kind)))


def show_command(name: str, as_json: AsJson = False) -> None:
    """Show one thing: its description, origin and options, and for a method its algorithm and its reductions.

    Args:
        name (NAME): A method, data source, model, partition or recipe, such as ditto; or settings, such as train.lr.
    """
    from tailorfl.settings.listing import settings

    if settings(name):
        _show_settings(name, as_json)
    else:
        _show(name, None, as_json)


def _show(name: str, kind: str | None, as_json: bool) -> None:
    entries = described(name, kind)
    if as_json:
        print_json(entries)
        return
    for entry in entries:
        _show_entry(stdout(), entry)


def _show_settings(group: str | None, as_json: bool) -> None:
    """Print all settings, or those of one group. Raises ConfigError if there is no such group or key."""
    from tailorfl.settings.listing import settings

    chosen = settings(group)
    if not chosen:
        keys = [setting.key for setting in settings()]
        raise unknown("setting or group of settings", str(group), keys, "tailorfl list settings")
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
    """Print a line per method if they fit, and lists if the console is narrower."""
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
    """Return a short cell: "model" for a whole model, and the number of items that do not fit."""
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
    """Return a table of names, descriptions, and options with their defaults."""
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
    """Print a line of a text; if it is too long, the continuation lines are indented."""
    inner = " " * (len(line) - len(line.lstrip()) + 4) if line.startswith((" ", "|", "-")) else ""
    folded = textwrap.fill(
        line, console.width, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False
    )
    console.print(Text(folded), highlight=False, soft_wrap=True)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the lines of a text; running text as one line, which is wrapped when it is printed."""
    for block in text.split("\n\n"):
        lines = block.split("\n")
        if any(line.startswith((" ", "|", "-")) for line in lines):
            yield from lines
        else:
            yield " ".join(lines)
        yield ""
