"""Everything there is to choose from as plain values: methods, data, models, partitions and recipes with options.

What a method keeps and sends, and which settings make it another one, is in methods.json, which docs/methods_table.py
writes: it lets every method run, and reads the table of reductions that the tests prove.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from importlib.resources import files
from typing import Any

from tailorfl.errors import unknown
from tailorfl.settings.listing import type_text, value_text

Entry = dict[str, Any]
"""Its `name`, `what` it is in a line, its `options`; of a method title, paper, family and other facts."""
UNKNOWN = "–"
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):\n", re.MULTILINE)
SAME = re.compile(r"as for `([\w.]+)`(.*)")
"""Text of an argument that has the meaning of another function's argument of that name, and what it adds."""


def entries(kind: str) -> list[Entry]:
    """Return everything of a kind, in order of names."""
    return list(KINDS[kind]())


def described(name: str, kind: str | None = None) -> list[Entry]:
    """Return what is called so, with its `kind` and text; several where kinds share the name.

    Raises:
        ConfigError: nothing is called so; names the nearest.
    """
    kinds = [*KINDS] if kind is None else [kind]
    named = {kind: {entry["name"]: entry for entry in entries(kind)} for kind in kinds}
    matches = [(kind, by_name[name]) for kind, by_name in named.items() if name in by_name]
    if not matches:
        what = f"name in the list of {kind}" if kind else "method, data, model, partition or recipe"
        raise unknown(what, name, {name for by_name in named.values() for name in by_name})
    return [{"kind": kind.removesuffix("s"), **entry, **_more(kind, name)} for kind, entry in matches]


def _more(kind: str, name: str) -> Entry:
    """Return what only `show` has: texts, and of methods what proves what."""
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


def _methods() -> Iterator[Entry]:
    from tailorfl.core.method import all_methods

    for name, method in all_methods().items():
        facts = _facts().get(name, {})
        plain = method()
        needs = {"public set": plain.needs_public, "LoRA": plain.of_adapters}
        models = {"personal": method.has_personal, "global": method.has_global}
        yield {
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


def _data() -> Iterator[Entry]:
    import pandas as pd

    from tailorfl.data.registry import loader_of, options_of, sources

    for name, description in sources().items():
        hints = typing.get_type_hints(loader_of(name), localns={"pd": pd})  # loaders import it when they run
        yield _entry(name, description, options_of(name), hints, _meanings(loader_of(name)))


def _models() -> Iterator[Entry]:
    from tailorfl.models.adapters import PeftConfig
    from tailorfl.models.registry import FACTORIES, available, options_of

    peft_options = {field.name for field in fields(PeftConfig)}
    for name, description in available().items():
        hints = {**typing.get_type_hints(FACTORIES[name]), **typing.get_type_hints(PeftConfig)}
        options = sorted(options_of(name).items(), key=lambda option: option[0] in peft_options)
        yield _entry(name, description, dict(options), hints, _meanings(FACTORIES[name]))


OF_ALL = {
    "group": "kind of the groups that clients are made of",
    "bins": "for a regression: so many ranges of the target, with equally many samples, stand for classes",
}
"""Meanings of the options that the library adds to those of a partition's function."""


def _partitions() -> Iterator[Entry]:
    from tailorfl.data.dealing import DEFAULT_BINS
    from tailorfl.partition import RECIPES

    for name, recipe in sorted(RECIPES.items()):
        parameters = inspect.signature(recipe.function).parameters
        options: dict[str, Any] = {option: parameters[option].default for option in recipe.options()}
        if recipe.group is not None:
            options["group"] = recipe.group
        if recipe.classes:
            options["bins"] = DEFAULT_BINS
        hints = {"group": str, "bins": int, **typing.get_type_hints(recipe.function)}
        yield _entry(name, _summary(recipe.function), options, hints, OF_ALL | _meanings(recipe.function))


def _recipes() -> Iterator[Entry]:
    from tailorfl.settings.loading import read, recipes

    for name in recipes():
        yield _entry(name, " ".join(str(read(name).get("description", "")).split()), {}, {}, {})


KINDS: Mapping[str, Callable[[], Iterator[Entry]]] = {
    "methods": _methods,
    "data": _data,
    "models": _models,
    "partitions": _partitions,
    "recipes": _recipes,
}


def _entry(
    name: str, what: str, options: Mapping[str, Any], hints: Mapping[str, Any], meanings: Mapping[str, str]
) -> Entry:
    """Return the entry of a function; an option without a default is needed."""
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
    """Return what was measured of the library's methods."""
    text = files("tailorfl.cli").joinpath("methods.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def _sections(described: Any) -> dict[str, str]:
    """Return the sections of a docstring by title, and as "" the text before them."""
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
            with suppress(ImportError, AttributeError):  # of docstrings of others' code
                others = _meanings(getattr(importlib.import_module(module or described.__module__), function))
        for name in names.split(", "):
            other = others.get(name)
            meanings[name] = text if same is None or other is None else other.rstrip(".") + same[2]
    return {name: text.rstrip(".") for name, text in meanings.items()}


def _summary(described: Any) -> str:
    return (inspect.getdoc(described) or "").split("\n\n")[0].replace("\n", " ")
