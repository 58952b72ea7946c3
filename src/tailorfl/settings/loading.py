"""From a YAML file, a recipe's name, `key=value` overrides or Python values to an `ExperimentConfig`.

Light on purpose: nothing here imports torch, so that a typo is reported at once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tailorfl.arguments import check_kind
from tailorfl.errors import ConfigError, nearest, unknown
from tailorfl.printable import shown
from tailorfl.settings.errors import Elsewhere, explain
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.overrides import SHORT_FORMS, apply, as_list
from tailorfl.settings.places import meant, written
from tailorfl.settings.reading import MOST_CHARACTERS, Loader, check_values, parsed

log = logging.getLogger(__name__)


def load(
    given: str | Path | Mapping[str, Any] | ExperimentConfig | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    methods: Sequence[str] | None = None,
    scale: str | None = None,
) -> ExperimentConfig:
    """The experiment of a YAML file, a packaged recipe or plain values, changed by overrides.

    Args:
        given: a file, the name of a recipe, settings, or None for the default experiment (digits, 20 clients,
            Dirichlet 0.3, a small MLP, 3 seeds).
        overrides: `key=value` texts, applied in order; the key is a dotted path, the value is read as YAML, and
            `a,b` is a list where one may stand. `method.lam=1` is for an experiment with one method,
            `methods.ditto.lam=1` for one with several. What another name puts out of force is said in a warning.
            Or a mapping from Python, whose groups are merged key by key.
        methods: what to compare where neither names a method.
        scale: one of its `scales`, whose changes are made before the overrides.

    Raises:
        ConfigError: the settings have mistakes; names the place of each, what was expected, the nearest key.
    """
    check_kind("config", given, str, Path, Mapping, ExperimentConfig, None)
    for values in (given, overrides):
        if isinstance(values, Mapping):
            check_values(values, "the settings")  # before they are copied
    if isinstance(overrides, Mapping):
        check_values(overrides, "the settings")
    raw = _plain(given)
    where = f"'{given}'" if isinstance(given, str | Path) and not overrides else "the settings"
    _use_plural(raw, where)
    if scale is not None:
        _use_scale(raw, scale, where)
    before = deepcopy(raw)
    raw.setdefault("model", ExperimentConfig().to_dict()["model"])
    if methods is not None:
        raw.setdefault("methods", list(methods))
    apply(raw, overrides)
    _say_dropped(before, raw)
    return _parse(raw, where, overrides if isinstance(overrides, Mapping) else {})


def parse(raw: Mapping[str, Any], where: str = "the settings") -> ExperimentConfig:
    """An experiment from plain values; `where` says in messages where they came from. Raises ConfigError."""
    plain = dict(raw)
    _use_plural(plain, where)
    return _parse(plain, where, {})


def read(path: str | Path) -> dict[str, Any]:
    """The content of a YAML file or of the recipe of that name. Raises ConfigError if it cannot be read."""
    file = Path(path)
    if not _is_file(file):
        known = recipes()
        if str(path) not in known:
            hint = nearest(str(path), known)
            suggestion = f" Did you mean the recipe '{hint}'?" if hint else ""
            raise ConfigError(
                f"'{path}' is neither a file nor a recipe.{suggestion} "
                f"Recipes: {', '.join(known) or 'none'}. "
                f"Settings are written key=value, for example {written(str(path)) or 'method=ditto'}"
            )
        file = known[str(path)]
    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{file}' cannot be read: {error}") from error
    content = parsed(text, Loader, f"'{file}'")
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"'{file}' should hold settings as `key: value` lines, but is {_kind(content)}")
    return content


def _is_file(path: Path) -> bool:
    """Whether there is a file; not so where the file system takes no such name at all."""
    try:
        return path.is_file()
    except OSError:
        return False


def recipes() -> dict[str, Path]:
    """The packaged recipes: name -> file."""
    folder = Path(str(files("tailorfl"))) / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def _plain(given: str | Path | Mapping[str, Any] | ExperimentConfig | None) -> dict[str, Any]:
    """Settings as nested dicts of their own, which overrides may write to."""
    if given is None:
        return {}
    if isinstance(given, str | Path):
        return read(given)
    return given.to_dict() if isinstance(given, ExperimentConfig) else deepcopy(dict(given))


def _use_plural(raw: dict[str, Any], where: str) -> None:
    """`method: x` becomes `methods: [x]`."""
    if "method" not in raw:
        return
    if "methods" in raw:
        raise ConfigError(f"in {where}: both 'method' and 'methods' are given; give one of them")
    raw["methods"] = as_list(raw.pop("method"))


def _use_scale(raw: dict[str, Any], scale: str, where: str) -> None:
    """Makes the changes of one of the `scales` of settings."""
    known = raw.get("scales") or {}
    if not isinstance(known, Mapping) or not known:
        raise ConfigError(f"{where} has no scales, so scale={scale} means nothing; leave it out")
    if scale not in known:
        raise unknown("scale", scale, list(known))
    found = known[scale]
    apply(raw, (found.get("settings") or {}) if isinstance(found, Mapping) else {})
    raw["scale"] = scale


def _parse(raw: Mapping[str, Any], where: str, python: Mapping[str, Any]) -> ExperimentConfig:
    """As `parse`; `python` are settings that were given as keyword arguments."""
    check_values(raw, where)
    try:
        return ExperimentConfig.model_validate(raw)
    except ValidationError as error:
        raise explain(error, ExperimentConfig, raw, where, _elsewhere(raw, python)) from None


def _elsewhere(plain: Mapping[str, Any], python: Mapping[str, Any]) -> Elsewhere:
    """Where a key belongs to, as the command line and files write it; for keyword arguments also as Python does."""
    lines = {title: str(_flat(method).get("name")) for title, method in _lines(plain).items()}

    def place(key: str) -> str | None:
        found = meant(key, lines or {"": "ditto"})
        if found is None or key not in python or found.startswith("method"):
            return found
        group, *inside = found.split(".")
        value = repr(python[key])
        for step in reversed(inside):
            value = f"{{{json.dumps(step)}: {value}}}"
        return f"{found}', in Python '{group}={value}"

    return place


def _say_dropped(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Warns of settings of a file that are out of force because the thing that they belong to was replaced."""
    named = [(group, before.get(group), after.get(group)) for group in SHORT_FORMS]
    named = [(g, old, new) for g, old, new in named if _flat(old).get("name") != _flat(new).get("name")]
    lines = _lines(after)
    named += [(f"methods.{t}", old, lines[t]) for t, old in _lines(before).items() if t in lines]
    for place, old, new in named:
        kept = _flat(new)
        lost = {key: value for key, value in _flat(old).items() if key not in (*kept, "name", "label")}
        if lost:
            listed = ", ".join(
                f"{place}.{key}={json.dumps(value, default=str)}" for key, value in lost.items()
            )
            log.warning(
                "%s=%s starts from its own defaults, without what the file sets: %s; write again what should stay",
                place,
                kept.get("name"),
                listed,
            )


def _lines(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The lines of `methods` by their title."""
    lines = as_list(raw.get("methods") or [])
    return {str(_flat(m).get("label") or _flat(m).get("name")): m for m in lines}


def _flat(group: Any) -> dict[str, Any]:
    """The settings of a group, its options among them."""
    if not isinstance(group, Mapping):
        return {} if group is None else {"name": group}
    options = group.get("options")
    inner = options if isinstance(options, Mapping) else {}
    return {**{key: value for key, value in group.items() if key != "options"}, **inner}


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else shown(value)
