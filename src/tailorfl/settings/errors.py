"""Error messages for mistakes in an experiment's settings, in the words of the settings file, with suggestions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from pydantic import BaseModel, ValidationError

from tailorfl.errors import ConfigError, did_you_mean, nearest, unknown
from tailorfl.hub import no_such_folder
from tailorfl.printable import shown
from tailorfl.settings.experiment import ExperimentConfig, OneModelConfig
from tailorfl.settings.listing import groups_in, keys_of
from tailorfl.settings.names import Kind, known

SYNONYMS = {
    "learning_rate": "train.lr",
    "local_epochs": "train.epochs",
    "local_steps": "train.steps",
    "num_clients": "data.clients",
    "n_clients": "data.clients",
    "dataset": "data",
    "seed": "seeds",
    "num_seeds": "seeds",
    "n_rounds": "rounds",
    "lambda": "method.lam",
    "algorithm": "method",
    "compare": "methods",
}
"""Words of other tools."""
NAMES: tuple[tuple[Kind, str], ...] = (("methods", "method"), ("data", "data"), ("models", "model"))
"""Kinds of things that are chosen by name, and the setting for each."""
OPTIONS: tuple[tuple[Kind, str], ...] = (
    ("partitions", "data.partition_options"),
    ("data", "data.options"),
    ("models", "model"),
    ("methods", "method"),
)
"""Kinds of things that have options, and the place of the options."""
Place = tuple[str | int, ...]

Elsewhere = Callable[[str], str | None]
"""Returns the dotted place that a key belongs to, if any."""

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
    settings: Mapping[str, Any],
    origin: str,
    elsewhere: Elsewhere | None = None,
) -> ConfigError:
    """Return a ConfigError with a line for every mistake: dotted place, value, expectation, nearest key.

    `settings` were validated against `schema`, and `origin` names their source. `elsewhere` returns the right place for
    a key that is unknown in its place.
    """
    mistakes: dict[Place, list[str]] = {}
    for mistake in error.errors(include_url=False):
        path = _place(mistake["loc"], settings, str(mistake["type"]))
        start, expected = _say(mistake, path, schema, elsewhere)
        mistakes.setdefault(path, [start]).append(expected)
    # A value that fits no alternative of a union is reported once for every alternative; an alternative whose error
    # is further inside is the intended one.
    deepest = [
        path
        for path in mistakes
        if not any(longer != path and longer[: len(path)] == path for longer in mistakes)
    ]
    lines = [
        dotted(path) + mistakes[path][0] + ", or ".join(dict.fromkeys(mistakes[path][1:])) for path in deepest
    ]
    if len(lines) == 1:
        return ConfigError(f"in {origin}: {lines[0]}")
    return ConfigError("\n  ".join([f"{len(lines)} mistakes in {origin}:", *lines]))


def dotted(path: Sequence[str | int]) -> str:
    """Return a path with dots, such as `train.lr` or `methods.0.lam`."""
    return ".".join(str(step) for step in path)


def unknown_key(
    path: Sequence[str | int], key: str, valid: Sequence[str], elsewhere: Elsewhere | None = None
) -> str:
    """Return the message for a key that does not exist.

    It names the place where the key would be right, or the nearest valid key.
    """
    hint, destination = nearest(key, valid), elsewhere(key) if elsewhere is not None else None
    meant = destination if destination is not None and not nearest(key, valid, cutoff=0.8) else None
    meant = meant or (dotted((*path, hint)) if hint else None)
    suggestion = f" Did you mean '{meant}'?" if meant else ""
    return f": unknown key.{suggestion} Valid here: {', '.join(sorted(valid))}."


def _say(mistake: Any, path: Place, schema: type[BaseModel], elsewhere: Elsewhere | None) -> tuple[str, str]:
    """Return the text after the place: the given value, and what was expected."""
    kind, value, context = str(mistake["type"]), mistake["input"], mistake.get("ctx") or {}
    if kind == "extra_forbidden":
        valid = list(_group(schema, path[:-1]).model_fields)
        return "", unknown_key(path[:-1], str(path[-1]), valid, elsewhere)
    if kind == "missing":
        return " ", "is missing"
    if kind == "literal_error":
        options = [part.strip("' ") for part in str(context["expected"]).replace(" or ", ", ").split(",")]
        hint = did_you_mean(value, options) if isinstance(value, str) else ""
        expected = f"should be one of {', '.join(options)}" + (f".{hint}" if hint else "")
    else:
        plain = str(mistake["msg"]).removeprefix("Value error, ").replace("Input should", "should")
        expected = EXPECTED.get(kind, plain)
    if isinstance(value, Mapping | BaseModel):
        return (" " if path else ""), expected
    return f" = {shown(value)}: ", expected


def _place(loc: Sequence[str | int], settings: Any, kind: str) -> Place:
    """Return the part of pydantic's location that is in the file; the rest are names of alternatives."""
    path: list[str | int] = []
    for number, step in enumerate(loc):
        if _has(settings, step):
            settings = settings[step]
        elif kind != "missing" or number < len(loc) - 1:
            continue
        path.append(step)
    return tuple(path)


def _has(settings: Any, step: str | int) -> bool:
    if isinstance(settings, Mapping):
        return step in settings
    return isinstance(settings, list | tuple) and isinstance(step, int) and step < len(settings)


def _group(schema: type[BaseModel], path: Place) -> type[BaseModel]:
    """Return the settings class at a place of the schema."""
    for step in path:
        if isinstance(step, str):
            schema = groups_in(schema.model_fields[step].annotation)[0]
    return schema


@functools.cache
def places() -> Mapping[str, tuple[str, ...]]:
    """Return key -> its dotted places in the schema, the least deep first."""
    by_key: dict[str, list[str]] = {}
    for path in sorted((key for key, _ in keys_of(ExperimentConfig)), key=lambda path: path.count(".")):
        by_key.setdefault(path.rpartition(".")[2], []).append(path)
    return {key: tuple(at) for key, at in by_key.items()}


def meant(key: str, labels: Mapping[str, str] | None = None) -> str | None:
    """Return the right dotted place for a misplaced key, or None.

    `labels` are the experiment's methods, label -> name; a method's option is placed in a line that has it.

    >>> meant("lr"), meant("alpha"), meant("learning_rate")
    ('train.lr', 'data.partition_options.alpha', 'train.lr')
    """
    if key in SYNONYMS:
        return SYNONYMS[key]
    if key in places():
        return places()[key][0]
    lines = labels or {"": "ditto"}
    having = [label for label, name in lines.items() if key in known("methods").get(name, ())]
    if having:
        return f"method.{key}" if len(lines) == 1 else f"methods.{having[0]}.{key}"
    for kind, path in OPTIONS:
        if any(key in options for options in known(kind).values()):
            return f"{path}.{key}"
    close = nearest(key, places(), cutoff=0.75)
    return None if close is None else places()[close][0]


def written(word: str, value: str | None = None) -> str | None:
    """Return the setting that a word without `=` stands for, such as `train.lr=0.1` for `lr`; None if there is none.

    `value` is the next word, if there is one.
    """
    for kind, setting in NAMES:
        if word in known(kind):
            return f"{setting}={word}"
    if word in known("partitions"):
        return f"data.partition={word}"
    key = word.rpartition(".")[2]
    if word in SYNONYMS or word in ("method", "methods", "data", "model", "engine"):
        setting = SYNONYMS.get(word, word)
    elif any(word in at for at in places().values()):
        setting = word
    elif key in places():
        setting = places()[key][0]
    else:
        return None
    return f"{setting}={'...' if value is None or '=' in value else value}"


@functools.cache
def others_add_methods() -> bool:
    """Return whether an installed package adds methods."""
    return any(
        e.value.partition(":")[0] != "tailorfl.methods" for e in entry_points(group="tailorfl.methods")
    )


def check_names(config: ExperimentConfig) -> None:
    """Check that methods, models, data sources and partitions, and the options of each, exist.

    `tailorfl.runs.build` checks again, with the registries themselves. Names that another package or a user's module
    may have added are accepted.

    Raises:
        ConfigError: a name does not exist; names the nearest.
    """
    if not others_add_methods():
        for method in config.methods:
            _check_name("methods", method.name, method.options, "method", f"option of {method.name}")
    for method in config.methods:
        for model in config.model_of(method).architectures.values():
            _check_name("models", model.name, model.options, "model", f"option of model '{model.name}'")
            check_checkpoint(model)
    data = config.data
    _check_name("data", data.name, data.options, "data source", f"option of data source '{data.name}'")
    if data.public is not None:
        _check_name("data", data.public, {}, "data source", "")
    if data.partition is not None:
        option_of = f"option of partition '{data.partition}'"
        _check_name("partitions", data.partition, data.partition_options, "partition", option_of)
    _check_name("rules", config.server.robust.rule, {}, "rule of server.robust", "")


def check_checkpoint(model: OneModelConfig) -> None:
    """Raise ConfigError for a checkpoint that must be a folder but is not."""
    checkpoint = model.options.get("checkpoint")
    problem = no_such_folder(checkpoint) if isinstance(checkpoint, str) and ":" not in model.name else ""
    if problem:
        raise ConfigError(f"model.checkpoint: {problem}; give a folder that save_pretrained wrote")


def _check_name(
    kind: Kind, name: str, options: dict[str, object], kind_words: str, option_words: str
) -> None:
    names = known(kind)
    if ":" in name:  # from a user's module
        return
    if name not in names:
        raise unknown(kind_words, name, names)
    for option in options:
        if option not in names[name]:
            raise unknown(option_words, option, names[name])
