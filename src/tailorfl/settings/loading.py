"""Loading: `load` makes an `ExperimentConfig` from a YAML file, a recipe's name, `key=value` texts or Python values.

Nothing here imports torch, so that a typo is reported at once. Values that are too large, too deep or not printable are
refused before they are used. YAML aliases are counted at each use, since a few lines of them can stand for more values
than fit into memory.

A recipe may have several variants, for instance for a paper's table whose rows differ in the data. Each variant is a
separate experiment (`expand`):

    variants:
      2 classes: {data: {partition_options: {classes: 2}}, published: {...}}
      6 classes: {data: {partition_options: {classes: 6}}, published: {...}}
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tailorfl.errors import ConfigError, did_you_mean, unknown
from tailorfl.interface import check_kind
from tailorfl.modules import name_in
from tailorfl.printable import shown
from tailorfl.settings.base import (
    DECIMAL,
    DEEPEST,
    MOST_CHARACTERS,
    MOST_VALUES,
    check_values,
    copied,
    too_deep,
    too_many,
)
from tailorfl.settings.errors import Elsewhere, dotted, explain, meant, written
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.listing import short_form, takes_list

log = logging.getLogger(__name__)

GROUPS = ("data", "model", "train", "engine", "eval", "system", "server", "deploy", "track")
NAMING = {
    *((key,) for key in ("model", "data", "method", "methods")),
    *(("model", "name"), ("data", "name"), ("data", "public")),
}
"""Settings that name a thing, which may be from a user's module."""
NAMED = ("data", "model", "engine")
"""Groups of a thing that is chosen by name."""


def load(
    base: str | Path | Mapping[str, Any] | ExperimentConfig | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    methods: Sequence[str] | None = None,
    scale: str | None = None,
    may_import: bool = False,
) -> ExperimentConfig:
    """Return the experiment of a YAML file, a packaged recipe or plain values, changed by overrides.

    Args:
        base: a file, the name of a recipe, settings, or None for the default experiment (digits, 20 clients,
            Dirichlet 0.3, a small MLP, 3 seeds).
        overrides: `key=value` texts, applied in order; the key is a dotted path, the value is read as YAML, and
            `a,b` is a list if the setting may be one. `method.lam=1` is for an experiment with one method,
            `methods.ditto.lam=1` for one with several. A warning lists settings that a new name makes ineffective.
            Or a mapping from Python, whose groups are merged key by key.
        methods: methods to compare if neither `base` nor `overrides` names one.
        scale: one of the `scales`, whose changes are made before the overrides; the override `scale=small` is the same.
        may_import: whether the overrides may name modules to import (see `tailorfl.modules`): only if the person who
            runs the experiment wrote them, never if they come from a file.

    Raises:
        ConfigError: the settings have mistakes; lists the place of each, what was expected, and the nearest key.
    """
    check_kind("config", base, str, Path, Mapping, ExperimentConfig, None)
    for values in (base, overrides):
        if isinstance(values, Mapping):
            check_values(values, "the settings")  # before they are copied
    if may_import:
        for path, value in _changes(overrides):
            if tuple(path) in NAMING:
                name_in(value)
    raw = _plain(base)
    origin = f"'{base}'" if isinstance(base, str | Path) and not overrides else "the settings"
    _use_plural(raw, origin)
    scale = scale or next((value for path, value in _changes(overrides) if path == ["scale"]), None)
    if scale is not None:
        _use_scale(raw, scale, origin)
    before = deepcopy(raw)
    raw.setdefault("model", ExperimentConfig().to_dict()["model"])
    if methods is not None:
        raw.setdefault("methods", list(methods))
    _apply(raw, overrides)
    _say_dropped(before, raw)
    _drop_published(before, raw)
    check_values(raw, origin)
    try:
        return ExperimentConfig.model_validate(raw)
    except ValidationError as error:
        python = overrides if isinstance(overrides, Mapping) else {}
        raise explain(error, ExperimentConfig, raw, origin, _elsewhere(raw, python)) from None


def read(path: str | Path) -> dict[str, Any]:
    """Return the content of a YAML file or of the recipe of that name. Raises ConfigError if it cannot be read."""
    file = Path(path)
    if not is_file(file):
        packaged = recipes()
        if str(path) not in packaged:
            hint = did_you_mean(str(path), packaged, "the recipe ")
            raise ConfigError(
                f"'{path}' is neither a file nor a recipe.{hint} "
                f"Recipes: {', '.join(packaged) or 'none'}. "
                f"Settings are written key=value, for example {written(str(path)) or 'method=ditto'}"
            )
        file = packaged[str(path)]
    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{file}' cannot be read: {error}") from error
    content = parsed(text, f"'{file}'")
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"'{file}' should hold settings as `key: value` lines, but is {_kind(content)}")
    return content


def is_file(path: Path) -> bool:
    """Return whether there is a file; False if the file system does not allow such a name."""
    try:
        return path.is_file()
    except OSError:
        return False


def recipes() -> dict[str, Path]:
    """Return the packaged recipes: name -> file."""
    folder = Path(str(files("tailorfl"))) / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def _plain(base: str | Path | Mapping[str, Any] | ExperimentConfig | None) -> dict[str, Any]:
    """Return settings as new nested dicts, which overrides may write to."""
    if base is None:
        return {}
    if isinstance(base, str | Path):
        return read(base)
    return base.to_dict() if isinstance(base, ExperimentConfig) else copied(base)


def _use_plural(raw: dict[str, Any], origin: str) -> None:
    """Turn `method: x` into `methods: [x]`."""
    if "method" not in raw:
        return
    if "methods" in raw:
        raise ConfigError(f"in {origin}: both 'method' and 'methods' are given; give one of them")
    raw["methods"] = _as_list(raw.pop("method"))


def _use_scale(raw: dict[str, Any], scale: str, origin: str) -> None:
    """Apply the changes of one of the `scales` of settings."""
    scales = raw.get("scales") or {}
    if not isinstance(scales, Mapping) or not scales:
        raise ConfigError(f"{origin} has no scales, so scale={scale} has no effect; leave it out")
    if not isinstance(scale, str) or scale not in scales:
        raise unknown("scale", str(scale), list(map(str, scales)))
    changes = scales[scale].get("settings") if isinstance(scales[scale], Mapping) else None
    _apply(raw, changes if isinstance(changes, Mapping) else {})  # other kinds are refused with all mistakes
    raw["scale"] = scale


def _elsewhere(plain: Mapping[str, Any], python: Mapping[str, Any]) -> Elsewhere:
    """Return a function from a misplaced key to its right place; for keyword arguments also in the Python form."""
    lines = {title: str(_flat(method).get("name")) for title, method in _lines(plain).items()}

    def destination(key: str) -> str | None:
        path = meant(key, lines or {"": "ditto"})
        if path is None or key not in python or path.startswith("method"):
            return path
        group, *inside = path.split(".")
        # Rows of data, which may be here by mistake, are not shown.
        value = repr(python[key]) if isinstance(python[key], bool | int | float | str) else "..."
        for step in reversed(inside):
            value = f"{{{json.dumps(step)}: {value}}}"
        return f"{path}', in Python '{group}={value}"

    return destination


def _say_dropped(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Warn of settings of a file that were dropped because the thing that they belong to was replaced."""
    named = [(group, before.get(group), after.get(group)) for group in NAMED]
    named = [(g, old, new) for g, old, new in named if _flat(old).get("name") != _flat(new).get("name")]
    lines = _lines(after)
    named += [(f"methods.{t}", old, lines[t]) for t, old in _lines(before).items() if t in lines]
    for path, old, new in named:
        remaining = _flat(new)
        kept = (*remaining, "name", "label")
        lost = {key: value for key, value in _flat(old).items() if key not in kept and value != {}}
        if lost:
            listed = ", ".join(
                f"{path}.{key}={json.dumps(value, default=str)}" for key, value in lost.items()
            )
            log.warning(
                "%s=%s starts from its own defaults, without these settings of the file: %s; repeat those that you "
                "want to keep",
                path,
                remaining.get("name"),
                listed,
            )


def _drop_published(before: Mapping[str, Any], after: dict[str, Any]) -> None:
    """Leave out the published numbers of a file's methods that overrides have left out."""
    gone, published = _lines(before).keys() - _lines(after).keys(), after.get("published")
    if gone and isinstance(published, Mapping):
        after["published"] = {label: numbers for label, numbers in published.items() if label not in gone}


def _lines(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lines of `methods` by their title."""
    lines = _as_list(raw.get("methods") or [])
    return dict(zip(_titles(lines), lines, strict=True))


def _flat(group: Any) -> dict[str, Any]:
    """Return the settings of a group, including its options."""
    if not isinstance(group, Mapping):
        return {} if group is None else {"name": group}
    options = group.get("options")
    inner = options if isinstance(options, Mapping) else {}
    return {**{key: value for key, value in group.items() if key != "options"}, **inner}


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else shown(value)


def _apply(raw: dict[str, Any], overrides: Sequence[str] | Mapping[str, Any]) -> None:
    """Change settings in place, in order, but whole groups and a model's name before the settings inside them.

    Raises:
        ConfigError: a text is not a setting, or its path does not exist.
    """

    def rank(change: tuple[list[str], Any]) -> tuple[bool, bool]:
        path, _ = change
        return len(path) > 1, path != ["model", "name"]

    for path, value in sorted(_changes(overrides), key=rank):
        _set(raw, path, value)


def _changes(overrides: Sequence[str] | Mapping[str, Any]) -> Iterator[tuple[list[str], Any]]:
    """Yield (dotted path, value) of every override."""
    if not isinstance(overrides, Mapping):
        yield from map(_split, overrides)
        return
    for key, value in overrides.items():
        if isinstance(value, Mapping) and key in GROUPS:
            yield from (
                ([key, inner], _separated([key, inner], copied(item))) for inner, item in value.items()
            )
        else:
            yield [key], _separated([key], copied(value))


_LIST = re.compile(r"([^,\[\]{}'\"]+,)+[^,\[\]{}'\"]*$")
"""`16,16`, `local,fedavg`, and `16,` for a list of one."""


def _split(override: str) -> tuple[list[str], Any]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        meant = written(override) or "for example train.lr=0.1"
        raise ConfigError(f"'{override}' is not a setting; write key=value, {meant}")
    path = key.strip().split(".")
    source = f"the value of '{override[:80]}'"
    value = parsed(text, source)
    return path, _separated(path, value) if value == text.strip() else value


def _separated(path: list[str], value: Any) -> Any:
    """Return a text such as `local,fedavg` as a list if the setting may be one; other values are unchanged."""
    if not (isinstance(value, str) and _LIST.match(value) and takes_list(path)):
        return value
    return [parsed(part, f"the value of {dotted(path)}") for part in value.split(",") if part]


def _set(raw: dict[str, Any], path: list[str], value: Any) -> None:
    """Set one dotted path; missing groups and those in short form are created."""
    if path[0] == "method":
        _set_method(raw, path, value)
        return
    if path[0] == "methods":
        path = _with_whole_label(path, _titles(_as_list(raw.get("methods") or [])))
    if path == ["model", "name"] and _current_name(raw.get("model")) != value:
        raw["model"] = {"name": value}  # another model starts from its own defaults
        return
    group: Any = raw
    for number, step in enumerate(path[:-1]):
        group = _enter(group, path[:number], step)
    _put(group, path, value)


def _with_whole_label(path: list[str], titles: Sequence[str]) -> list[str]:
    """Return a path into a line of `methods` with its label as one step, also if the label has dots (Ditto 0.5)."""
    for end in range(len(path) - 1, 2, -1):
        if (label := dotted(path[1:end])) in titles:
            return [path[0], label, *path[end:]]
    return path


def _enter(group: Any, path: list[str], step: str) -> Any:
    """Return the group `step` inside the group at `path`."""
    if isinstance(group, list):
        return group[_position(group, path, step)]
    if not path and step == "methods" and step not in group:
        group[step] = [method.name for method in ExperimentConfig().methods]
    inner = group.setdefault(step, {})
    if inner is None:
        inner = group[step] = {}
    if isinstance(inner, str) and (meant_by := short_form([*path, step])):
        inner = group[step] = {meant_by: inner}
    if not path and step == "methods":
        inner = group[step] = [{"name": m} if isinstance(m, str) else m for m in _as_list(inner)]
    if not isinstance(inner, dict | list):
        raise ConfigError(
            f"{dotted([*path, step])} = {shown(inner)} is a single value, without settings inside it"
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
        raw["methods"] = _as_list(value)
        return
    chosen = _enter(raw, [], "methods")
    if len(chosen) != 1:
        some = _titles(chosen)[0] if chosen else "ditto"
        raise ConfigError(
            f"{dotted(path)}: the experiment has {len(chosen)} methods; name one, as in "
            f"methods.{some}.{dotted(path[1:])}"
        )
    _set(raw, ["methods", "0", *path[1:]], value)


def _position(items: list[Any], path: list[str], step: str) -> int:
    """Return the position of a path's step in a list: a number, a method's label, or its name if that is unique."""
    if step.isdigit() and int(step) < len(items):
        return int(step)
    titles, names = _titles(items), [_current_name(item) for item in items]
    for candidates in (titles, names):
        if candidates.count(step) == 1:
            return candidates.index(step)
    raise unknown(f"entry of {dotted(path)}", step, {*titles, *map(str, range(len(items)))})


def _titles(items: Sequence[Any]) -> list[str]:
    return [str(m.get("label") or m.get("name")) if isinstance(m, dict) else str(m) for m in items]


def _current_name(group: Any) -> Any:
    return group.get("name") if isinstance(group, dict) else group


def _as_list(value: Any) -> list[Any]:
    """Return a list unchanged, and any other value as a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml is ten times as fast
    """YAML loader that reads 1e-3 as a number (YAML 1.1 reads it as text) and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node; raise an error for duplicate keys, of which YAML silently keeps the last."""
        keys: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *base`
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                continue
            if key in keys:
                problem = f"the key '{key}' is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_RULES = yaml.SafeLoader.yaml_implicit_resolvers
Loader.yaml_implicit_resolvers = {mark: list(rules) for mark, rules in _RULES.items()}
Loader.add_implicit_resolver(*DECIMAL)


def parsed(text: str, source: str) -> Any:
    """Return the value of a YAML text; `source` names the text in messages.

    Raises:
        ConfigError: it is not valid, too long, nested too deeply, or stands for too many values.
    """
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"{source} has {len(text):,} characters, but settings have at most {MOST_CHARACTERS:,}; check that it is a "
            "settings file"
        )
    try:
        _check_size(text, source)
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(
            f"{source} is not valid YAML: {error.problem or error.context}{position}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Values that are valid YAML but not valid in Python: a date 2001-99-99, a number of 5,000 digits.
        raise ConfigError(f"{source} holds a value that cannot be read: {error}") from error


def _check_size(text: str, source: str) -> None:
    """Raise ConfigError if reading a text would take too much memory; scans it once, from left to right."""
    sizes: dict[str, int] = {}
    open_: list[list[Any]] = [[None, 0]]
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_.pop()
            if anchor:
                sizes[anchor] = size
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append([event.anchor, 1])
            if len(open_) > DEEPEST + 1:
                raise ConfigError(too_deep(source))
            continue
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in open_):
                raise ConfigError(f"in {source}: '*{event.anchor}' is used inside its own definition")
            size = sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if event.anchor:
                sizes[event.anchor] = 1
        else:
            continue
        open_[-1][1] += size
        if open_[-1][1] > MOST_VALUES:
            raise ConfigError(too_many(source))


def expand(config: ExperimentConfig) -> dict[str, ExperimentConfig]:
    """Return the experiments of a configuration by name of the variant; without variants, one under "".

    Raises:
        ConfigError: a variant has a mistake.
    """
    if not config.variants:
        return {"": config}
    plain = {key: value for key, value in config.to_dict().items() if key != "variants"}
    return {
        name: load({**plain, "name": f"{config.name}, {name}"}, changes)
        for name, changes in config.variants.items()
    }
