"""Mistakes in an experiment's settings, said in the words of the file they stand in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from tailorfl.errors import ConfigError, nearest
from tailorfl.printable import shown
from tailorfl.settings.listing import groups_in

Place = tuple[str | int, ...]

Elsewhere = Callable[[str], str | None]
"""The dotted place that a key belongs to, if any."""

EXPECTED = {
    "model_type": "should be a group of settings such as {key: value}",
    "dict_type": "should be a group of settings such as {key: value}",
    "tuple_type": "should be a list such as [a, b]",
    "int_type": "should be a whole number",
    "float_type": "should be a number",
    "string_type": "should be text",
    "too_short": "should not be empty",
}
"""Pydantic's error types in the words of a YAML file."""


def explain(
    error: ValidationError,
    schema: type[BaseModel],
    given: Mapping[str, Any],
    where: str,
    elsewhere: Elsewhere | None = None,
) -> ConfigError:
    """A ConfigError with a line for every mistake: dotted place, value, what was expected, nearest key.

    `given` is what was validated against `schema`, and `where` says where it came from. `elsewhere` knows where a key
    would be right that is unknown where it stands.
    """
    found: dict[Place, list[str]] = {}
    for mistake in error.errors(include_url=False):
        place = _place(mistake["loc"], given, str(mistake["type"]))
        said, expected = _say(mistake, place, schema, elsewhere)
        found.setdefault(place, [said]).append(expected)
    # A value that fits no alternative of a union is reported once for every alternative; where one of them
    # points further inside, it is the one that was meant.
    deepest = [
        place
        for place in found
        if not any(other != place and other[: len(place)] == place for other in found)
    ]
    lines = [
        dotted(place) + found[place][0] + ", or ".join(dict.fromkeys(found[place][1:])) for place in deepest
    ]
    if len(lines) == 1:
        return ConfigError(f"in {where}: {lines[0]}")
    return ConfigError("\n  ".join([f"{len(lines)} mistakes in {where}:", *lines]))


def dotted(place: Sequence[str | int]) -> str:
    """`train.lr`, `methods.0.lam`."""
    return ".".join(str(step) for step in place)


def unknown_key(
    place: Sequence[str | int], key: str, valid: Sequence[str], elsewhere: Elsewhere | None = None
) -> str:
    """What to say of a key that does not exist, with the place where it would be right, or the nearest valid key."""
    hint, there = nearest(key, valid), elsewhere(key) if elsewhere is not None else None
    meant = there if there is not None and not nearest(key, valid, cutoff=0.8) else None
    meant = meant or (dotted((*place, hint)) if hint else None)
    suggestion = f" Did you mean '{meant}'?" if meant else ""
    return f": unknown key.{suggestion} Valid here: {', '.join(sorted(valid))}."


def _say(mistake: Any, place: Place, schema: type[BaseModel], elsewhere: Elsewhere | None) -> tuple[str, str]:
    """What follows the place: what was given, and what was expected."""
    kind, value, context = str(mistake["type"]), mistake["input"], mistake.get("ctx") or {}
    if kind == "extra_forbidden":
        valid = list(_group(schema, place[:-1]).model_fields)
        return "", unknown_key(place[:-1], str(place[-1]), valid, elsewhere)
    if kind == "missing":
        return " ", "is missing"
    if kind == "literal_error":
        options = [part.strip("' ") for part in str(context["expected"]).replace(" or ", ", ").split(",")]
        hint = nearest(value, options) if isinstance(value, str) else None
        expected = f"should be one of {', '.join(options)}" + (f". Did you mean '{hint}'?" if hint else "")
    else:
        plain = str(mistake["msg"]).removeprefix("Value error, ").replace("Input should", "should")
        expected = EXPECTED.get(kind, plain)
    if isinstance(value, Mapping | BaseModel):
        return (" " if place else ""), expected
    return f" = {shown(value)}: ", expected


def _place(loc: Sequence[str | int], given: Any, kind: str) -> Place:
    """The part of pydantic's location that stands in the file; the rest are names of alternatives."""
    place: list[str | int] = []
    for number, step in enumerate(loc):
        if _has(given, step):
            given = given[step]
        elif kind != "missing" or number < len(loc) - 1:
            continue
        place.append(step)
    return tuple(place)


def _has(given: Any, step: str | int) -> bool:
    if isinstance(given, Mapping):
        return step in given
    return isinstance(given, list | tuple) and isinstance(step, int) and step < len(given)


def _group(schema: type[BaseModel], place: Place) -> type[BaseModel]:
    """The settings class that stands at a place of the schema."""
    for step in place:
        if isinstance(step, str):
            schema = groups_in(schema.model_fields[step].annotation)[0]
    return schema
