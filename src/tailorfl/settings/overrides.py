"""Changes of settings: `key=value` texts and values from Python, put where their dotted path says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from tailorfl.errors import ConfigError, unknown
from tailorfl.modules import name_in
from tailorfl.printable import shown
from tailorfl.settings.errors import dotted
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.places import takes_list, written
from tailorfl.settings.reading import Loader, parsed

GROUPS = ("data", "model", "train", "engine", "eval")
NAMING = {
    *((key,) for key in ("model", "data", "method", "methods")),
    *(("model", "name"), ("data", "name"), ("data", "public")),
}
"""Settings that name something, which may be of a module of the user's."""
SHORT_FORMS = ("data", "model", "engine")
"""Groups that may be given as a name alone."""


def name_modules(overrides: Sequence[str] | Mapping[str, Any]) -> None:
    """Lets an experiment name the modules in changes that the person who runs it wrote, see `tailorfl.modules`.

    Never to be called with what comes from a file.
    """
    for path, value in _changes(overrides):
        if tuple(path) in NAMING:
            name_in(value)


def apply(raw: dict[str, Any], overrides: Sequence[str] | Mapping[str, Any]) -> None:
    """Changes settings in place, in order; whole groups and another model's name before what belongs to them.

    Raises:
        ConfigError: a text is no setting, or its path leads nowhere.
    """

    def rank(change: tuple[list[str], Any]) -> tuple[bool, bool]:
        path, _ = change
        return len(path) > 1, path != ["model", "name"]

    for path, value in sorted(_changes(overrides), key=rank):
        _set(raw, path, value)


def _changes(overrides: Sequence[str] | Mapping[str, Any]) -> Iterator[tuple[list[str], Any]]:
    """(dotted path, value) of every override."""
    if not isinstance(overrides, Mapping):
        yield from map(_split, overrides)
        return
    for key, value in overrides.items():
        if isinstance(value, Mapping) and key in GROUPS:
            yield from (
                ([key, inner], _separated([key, inner], deepcopy(item))) for inner, item in value.items()
            )
        else:
            yield [key], _separated([key], deepcopy(value))


_LIST = re.compile(r"([^,\[\]{}'\"]+,)+[^,\[\]{}'\"]*$")
"""`16,16`, `local,fedavg`, and `16,` for a list of one."""


def _split(override: str) -> tuple[list[str], Any]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        meant = written(override) or "for example train.lr=0.1"
        raise ConfigError(f"'{override}' is not a setting; write key=value, {meant}")
    path = key.strip().split(".")
    what = f"the value of '{override[:80]}'"
    value = parsed(text, Loader, what)
    return path, _separated(path, value) if value == text.strip() else value


def _separated(path: list[str], value: Any) -> Any:
    """Return the list that a text such as `local,fedavg` is where a list may stand; any other value as it is."""
    if not (isinstance(value, str) and _LIST.match(value) and takes_list(path)):
        return value
    return [parsed(part, Loader, f"the value of {dotted(path)}") for part in value.split(",") if part]


def _set(raw: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets one dotted path; groups that are missing or in short form are made on the way."""
    if path[0] == "method":
        _set_method(raw, path, value)
        return
    if path == ["model", "name"] and _current_name(raw.get("model")) != value:
        raw["model"] = {"name": value}  # another model starts from its own defaults
        return
    group: Any = raw
    for number, step in enumerate(path[:-1]):
        group = _enter(group, path[:number], step)
    _put(group, path, value)


def _enter(group: Any, place: list[str], step: str) -> Any:
    """The group `step` inside the group at `place`."""
    if isinstance(group, list):
        return group[_position(group, place, step)]
    if not place and step == "methods" and step not in group:
        group[step] = [method.name for method in ExperimentConfig().methods]
    inner = group.setdefault(step, {})
    if inner is None:
        inner = group[step] = {}
    if isinstance(inner, str) and not place and step in SHORT_FORMS:
        inner = group[step] = {"name": inner}
    if not place and step == "methods":
        inner = group[step] = [{"name": m} if isinstance(m, str) else m for m in as_list(inner)]
    if not isinstance(inner, dict | list):
        raise ConfigError(
            f"{dotted([*place, step])} = {shown(inner)} has no settings inside it that could be changed"
        )
    return inner


def _put(group: Any, path: list[str], value: Any) -> None:
    last = path[-1]
    if isinstance(group, list):
        group[_position(group, path[:-1], last)] = value
        return
    if path[-2:-1] == ["train"] and last in ("epochs", "steps") and value is not None:
        group.pop("epochs" if last == "steps" else "steps", None)  # the later of two lengths wins
    group[last] = value


def _set_method(raw: dict[str, Any], path: list[str], value: Any) -> None:
    if len(path) == 1:
        raw["methods"] = as_list(value)
        return
    chosen = _enter(raw, [], "methods")
    if len(chosen) != 1:
        some = _titles(chosen)[0] if chosen else "ditto"
        raise ConfigError(
            f"{dotted(path)}: the experiment has {len(chosen)} methods; say which, as in "
            f"methods.{some}.{dotted(path[1:])}"
        )
    _set(raw, ["methods", "0", *path[1:]], value)


def _position(items: list[Any], place: list[str], step: str) -> int:
    """Where in a list a path goes: a number, the label of a method, or its name if no other has it."""
    if step.isdigit() and int(step) < len(items):
        return int(step)
    titles, names = _titles(items), [_current_name(item) for item in items]
    for known in (titles, names):
        if known.count(step) == 1:
            return known.index(step)
    raise unknown(f"entry of {dotted(place)}", step, {*titles, *map(str, range(len(items)))})


def _titles(items: Sequence[Any]) -> list[str]:
    return [str(m.get("label") or m.get("name")) if isinstance(m, dict) else str(m) for m in items]


def _current_name(group: Any) -> Any:
    return group.get("name") if isinstance(group, dict) else group


def as_list(value: Any) -> list[Any]:
    """A list stays one; anything else is the list of itself."""
    return list(value) if isinstance(value, list | tuple) else [value]
