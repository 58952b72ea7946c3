"""From a YAML file, a recipe's name, `key=value` overrides or Python values to an `ExperimentConfig`.

Light on purpose: nothing here imports torch, so that a typo is reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tailorfl.errors import ConfigError, nearest, unknown
from tailorfl.experiments.data_settings import DataConfig
from tailorfl.experiments.evaluation_settings import EvalConfig
from tailorfl.experiments.mistakes import dotted, explain
from tailorfl.experiments.model_settings import ModelConfig
from tailorfl.experiments.reading import MOST_CHARACTERS, check_values, parsed
from tailorfl.experiments.schema import COMPARED, EngineConfig, ExperimentConfig, MethodConfig
from tailorfl.experiments.training_settings import TrainSettings

__all__ = [
    "COMPARED",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "ExperimentConfig",
    "MethodConfig",
    "ModelConfig",
    "TrainSettings",
    "load",
    "parse",
    "read",
    "recipes",
]

GROUPS = ("data", "model", "train", "engine", "eval")
SHORT_FORMS = ("data", "model", "engine")
"""Groups that may be given as a name alone."""


def load(
    given: str | Path | Mapping[str, Any] | ExperimentConfig | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    methods: Sequence[str] | None = None,
) -> ExperimentConfig:
    """The experiment of a YAML file, a packaged recipe or plain values, changed by overrides.

    Args:
        given: a file, the name of a recipe, settings, or None for the default experiment (digits, 20 clients,
            Dirichlet 0.3, a small MLP, 3 seeds).
        overrides: `key=value` texts, applied in order; the key is a dotted path, the value is read as YAML.
            `method.lam=1` is for an experiment with one method, `methods.ditto.lam=1` for one with several.
            Or a mapping from Python, whose groups are merged key by key.
        methods: what to compare where neither names a method.

    Raises:
        ConfigError: the settings have mistakes; names the place of each, what was expected, the nearest key.
    """
    if isinstance(given, Mapping):
        check_values(given, "the settings")  # before they are copied
    if isinstance(overrides, Mapping):
        check_values(overrides, "the settings")
    raw = _plain(given)
    where = f"'{given}'" if isinstance(given, str | Path) and not overrides else "the settings"
    _use_plural(raw, where)
    raw.setdefault("model", ExperimentConfig().to_dict()["model"])
    if methods is not None:
        raw.setdefault("methods", list(methods))
    for path, value in _changes(overrides):
        _set(raw, path, value)
    return parse(raw, where)


def parse(raw: Mapping[str, Any], where: str = "the settings") -> ExperimentConfig:
    """An experiment from plain values; `where` says in messages where they came from. Raises ConfigError."""
    check_values(raw, where)
    plain = dict(raw)
    _use_plural(plain, where)
    try:
        return ExperimentConfig.model_validate(plain)
    except ValidationError as error:
        raise explain(error, ExperimentConfig, plain, where) from error


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
                "Settings are written key=value, for example method=ditto"
            )
        file = known[str(path)]
    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{file}' cannot be read: {error}") from error
    content = parsed(text, _Loader, f"'{file}'")
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
    folder = Path(str(files("tailorfl.experiments"))) / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


class _Loader(yaml.SafeLoader):
    """YAML with 1e-3 as a number (YAML 1.1 takes it for text), and with duplicate keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; raises where a key comes twice: YAML would silently keep the last."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key == "<<":
                continue
            if key in seen:
                problem = f"the key '{key}' comes twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_RULES = yaml.SafeLoader.yaml_implicit_resolvers
_Loader.yaml_implicit_resolvers = {mark: list(rules) for mark, rules in _RULES.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _plain(given: str | Path | Mapping[str, Any] | ExperimentConfig | None) -> dict[str, Any]:
    """Settings as nested dicts of their own, which overrides may write to."""
    if given is None:
        return {}
    if isinstance(given, str | Path):
        return read(given)
    return given.to_dict() if isinstance(given, ExperimentConfig) else deepcopy(dict(given))


def _changes(overrides: Sequence[str] | Mapping[str, Any]) -> Iterator[tuple[list[str], Any]]:
    """(dotted path, value) of every override."""
    if not isinstance(overrides, Mapping):
        yield from map(_split, overrides)
        return
    for key, value in overrides.items():
        if isinstance(value, Mapping) and key in GROUPS:
            yield from (([key, inner], deepcopy(item)) for inner, item in value.items())
        else:
            yield [key], deepcopy(value)


def _split(override: str) -> tuple[list[str], Any]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"'{override}' is not a setting; write key=value, for example train.lr=0.1")
    return key.strip().split("."), parsed(text, _Loader, f"the value of '{override[:80]}'")


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
        inner = group[step] = [{"name": m} if isinstance(m, str) else m for m in _as_list(inner)]
    if not isinstance(inner, dict | list):
        raise ConfigError(
            f"{dotted([*place, step])} = {inner!r} has no settings inside it that could be changed"
        )
    return inner


def _put(group: Any, path: list[str], value: Any) -> None:
    last = path[-1]
    if isinstance(group, list):
        group[_position(group, path[:-1], last)] = value
        return
    if path[-2:-1] == ["train"] and last in ("epochs", "steps"):
        group.pop("epochs" if last == "steps" else "steps", None)  # what is set later wins
    group[last] = value


def _set_method(raw: dict[str, Any], path: list[str], value: Any) -> None:
    if len(path) == 1:
        raw["methods"] = _as_list(value)
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


def _use_plural(raw: dict[str, Any], where: str) -> None:
    """`method: x` becomes `methods: [x]`."""
    if "method" not in raw:
        return
    if "methods" in raw:
        raise ConfigError(f"in {where}: both 'method' and 'methods' are given; give one of them")
    raw["methods"] = _as_list(raw.pop("method"))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"{value!r}"[:60]
