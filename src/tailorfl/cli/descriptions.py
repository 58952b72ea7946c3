"""What there is to choose from, in plain values: methods, data, models, partitions and recipes, each with its options.

What a method keeps and sends, and which settings make it another one, is in methods.json, which docs/methods_table.py
writes: it lets every method run, and reads the table of reductions that the tests prove.
"""

from __future__ import annotations

import inspect
import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from importlib.resources import files
from typing import Any

from tailorfl.errors import unknown
from tailorfl.settings.listing import type_text, value_text

Entry = dict[str, Any]
"""Its `name`, `what` it is in a line, its `options`, and for methods what stands in `METHOD`."""
METHOD = ("title", "paper", "family", "use", "kept", "sent", "needs", "evaluated")
UNKNOWN = "–"


def entries(kind: str) -> list[Entry]:
    """Return everything of a kind, in order of names.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind not in KINDS:
        raise unknown("list", kind, KINDS)
    return list(KINDS[kind]())


def described(name: str, kind: str | None = None) -> list[Entry]:
    """Return what is called so, with `kind` and all that is known of it; several where kinds share the name.

    Raises:
        ConfigError: nothing is called so; names the nearest.
    """
    kinds = [*KINDS] if kind is None else [kind]
    known = {one: {entry["name"]: entry for entry in entries(one)} for one in kinds}
    found = [{"kind": _one(one), **names[name]} for one, names in known.items() if name in names]
    if not found:
        what = f"name in the list of {kind}" if kind else "method, data, model, partition or recipe"
        raise unknown(what, name, {one for names in known.values() for one in names})
    return [{**entry, **_more(entry)} for entry in found]


def _one(kind: str) -> str:
    return kind.removesuffix("s")


def _more(entry: Entry) -> Entry:
    """Return what only `show` has: texts, and of methods what proves what."""
    if entry["kind"] == "method":
        from tailorfl.core.method import methods

        facts = _facts().get(entry["name"], {})
        text = inspect.cleandoc(sys.modules[methods()[entry["name"]].__module__].__doc__ or "")
        return {"text": text, "reductions": facts.get("reductions", []), "tests": facts.get("tests", [])}
    if entry["kind"] in ("data", "model", "partition"):
        return {"text": inspect.getdoc(_function(entry)) or ""}
    return {}


def _function(entry: Entry) -> Callable[..., Any]:
    from tailorfl.data.partition import RECIPES
    from tailorfl.data.registry import loader_of
    from tailorfl.models.registry import FACTORIES

    name = entry["name"]
    if entry["kind"] == "partition":
        return RECIPES[name].function
    return FACTORIES[name] if entry["kind"] == "model" else loader_of(name)


def _methods() -> Iterator[Entry]:
    from tailorfl.core.method import methods

    for name, method in methods().items():
        facts = _facts().get(name, {})
        models = (("personal", method.has_personal), ("global", method.has_global))
        yield {
            "name": name,
            "what": _summary(method),
            "title": method.title,
            "paper": method.paper,
            "family": method.family or UNKNOWN,
            "use": method.use or UNKNOWN,
            "kept": facts.get("kept", UNKNOWN),
            "sent": facts.get("sent", UNKNOWN),
            "needs": ", ".join(_needs(method())) or UNKNOWN,
            "evaluated": " and ".join(word for word, there in models if there),
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


def _needs(method: Any) -> Iterator[str]:
    if method.needs_public:
        yield "public set"
    if method.of_adapters:
        yield "LoRA"


def _data() -> Iterator[Entry]:
    import pandas as pd

    from tailorfl.data.registry import loader_of, options_of, sources

    for name, description in sources().items():
        hints = typing.get_type_hints(loader_of(name), localns={"pd": pd})  # loaders import it when they run
        yield {"name": name, "what": description, "options": _options(options_of(name), hints)}


def _models() -> Iterator[Entry]:
    from tailorfl.models.peft_config import PeftConfig
    from tailorfl.models.registry import FACTORIES, available, options_of

    own = {field.name for field in fields(PeftConfig)}
    for name, description in available().items():
        hints = {**typing.get_type_hints(FACTORIES[name]), **typing.get_type_hints(PeftConfig)}
        found = options_of(name)
        ordered = {key: found[key] for key in sorted(found, key=lambda key: key in own)}
        yield {"name": name, "what": description, "options": _options(ordered, hints)}


def _partitions() -> Iterator[Entry]:
    from tailorfl.data.dealing import DEFAULT_BINS
    from tailorfl.data.partition import RECIPES

    for name, recipe in sorted(RECIPES.items()):
        defaults = {p.name: p.default for p in inspect.signature(recipe.function).parameters.values()}
        options: dict[str, Any] = {option: defaults[option] for option in recipe.options()}
        if recipe.group is not None:
            options["group"] = recipe.group
        if recipe.classes:
            options["bins"] = DEFAULT_BINS
        hints = {"group": str, "bins": int, **typing.get_type_hints(recipe.function)}
        yield {"name": name, "what": _summary(recipe.function), "options": _options(options, hints)}


def _recipes() -> Iterator[Entry]:
    from tailorfl.settings.loading import read, recipes

    for name in recipes():
        yield {
            "name": name,
            "what": " ".join(str(read(name).get("description", "")).split()),
            "options": [],
        }


KINDS: Mapping[str, Callable[[], Iterator[Entry]]] = {
    "methods": _methods,
    "data": _data,
    "models": _models,
    "partitions": _partitions,
    "recipes": _recipes,
}


def _options(options: Mapping[str, Any], hints: Mapping[str, Any]) -> list[Entry]:
    """Options of a function; one without a default is needed, which is said in place of it."""
    return [
        {
            "name": name,
            "type": type_text(hints[name]) if name in hints else "",
            "default": None if default is inspect.Parameter.empty else value_text(default),
            "meaning": "needed" if default is inspect.Parameter.empty else "",
        }
        for name, default in options.items()
    ]


@cache
def _facts() -> dict[str, dict[str, Any]]:
    """Return what was measured of the library's methods."""
    text = files("tailorfl.cli").joinpath("methods.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def _summary(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
