"""Where settings stand: the dotted places of all keys, and what somebody who wrote another key has meant."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from tailorfl.errors import nearest
from tailorfl.settings.catalogue import Kind, known
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig
from tailorfl.settings.listing import groups_in, keys_of

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
"""Other tools' words."""
NAMES: tuple[tuple[Kind, str], ...] = (("methods", "method"), ("data", "data"), ("models", "model"))
"""Kinds of things that are named, and where."""
OPTIONS: tuple[tuple[Kind, str], ...] = (
    ("partitions", "data.partition_options"),
    ("data", "data.options"),
    ("models", "model"),
    ("methods", "method"),
)
"""Kinds of things that have options, and where these stand."""


@functools.cache
def places() -> Mapping[str, tuple[str, ...]]:
    """Returns key -> the dotted places where the schema has it, the least deep first."""
    found: dict[str, list[str]] = {}
    for place in sorted((key for key, _ in keys_of(ExperimentConfig)), key=lambda place: place.count(".")):
        found.setdefault(place.rpartition(".")[2], []).append(place)
    return {key: tuple(at) for key, at in found.items()}


def meant(key: str, labels: Mapping[str, str] | None = None) -> str | None:
    """Returns the dotted place that a key which is not where it was looked for belongs to, or None.

    `labels` are the experiment's methods, label -> name; a method's option is then one of a line that has it.

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
    for kind, place in OPTIONS:
        if any(key in options for options in known(kind).values()):
            return f"{place}.{key}"
    close = nearest(key, places(), cutoff=0.75)
    return None if close is None else places()[close][0]


def written(word: str, value: str | None = None) -> str | None:
    """Returns the setting that a word without `=` stands for, such as `train.lr=0.1` for `lr`; None if for none.

    `value` is the word after it, where there is one.
    """
    for kind, place in NAMES:
        if word in known(kind):
            return f"{place}={word}"
    if word in known("partitions"):
        return f"data.partition={word}"
    key = word.rpartition(".")[2]
    if word in SYNONYMS or word in ("method", "methods", "data", "model", "engine"):
        place = SYNONYMS.get(word, word)
    elif any(word in at for at in places().values()):
        place = word
    elif key in places():
        place = places()[key][0]
    else:
        return None
    return f"{place}={'...' if value is None or '=' in value else value}"


def takes_list(path: Sequence[str]) -> bool:
    """Whether a list may stand at a dotted path, so that `a,b` there is one."""
    if path[0] in ("method", "methods"):
        inside = list(path[1 if path[0] == "method" else 2 :])
        return not inside or _holds_list(MethodConfig, inside)
    return _holds_list(ExperimentConfig, list(path))


def _holds_list(schema: type[BaseModel], path: Sequence[str]) -> bool:
    step, *rest = path
    field = schema.model_fields.get(step)
    if field is None:  # an option beside the name of the thing it belongs to
        return "options" in schema.model_fields and step not in ("path", "checkpoint")
    if not rest:
        return _has_tuple(field.annotation)
    inner = groups_in(field.annotation)
    if inner:
        return _holds_list(inner[0], rest)
    return get_origin(field.annotation) is dict and rest[-1] not in ("path", "checkpoint")


def _has_tuple(annotation: Any) -> bool:
    if annotation is tuple or get_origin(annotation) is tuple:
        return True
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(_has_tuple(part) for part in get_args(annotation))
    return False
