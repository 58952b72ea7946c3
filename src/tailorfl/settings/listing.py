"""All keys of an experiment with type, range, default and meaning, as `tailorfl list settings` prints them."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tailorfl.settings.experiment import ExperimentConfig, MethodConfig
from tailorfl.settings.names import known

WORDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Any: "anything",
}
RULE = "server.robust.rule"
BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


@dataclass(frozen=True)
class Setting:
    """One key."""

    key: str
    type: str
    """Type and range."""
    default: str
    meaning: str


def settings(group: str | None = None) -> list[Setting]:
    """Return all keys of an experiment, with those of a method's line as `method`; or a group's, such as `train`."""
    everything = []
    for setting in _of(ExperimentConfig, ""):
        everything.append(setting)
        if setting.key == "methods":
            everything += [s for s in _of(MethodConfig, "method.") if not s.key.startswith("method.train.")]
    chosen = [s for s in everything if group is None or s.key == group or s.key.startswith(f"{group}.")]
    # The type of the rule lists the registered names.
    return [replace(s, type=" or ".join(known("rules"))) if s.key == RULE else s for s in chosen]


def keys_of(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted keys of a group and of the groups in it, but not those of lists of groups."""
    for name, field in schema.model_fields.items():
        key = f"{prefix}{name}"
        yield key, field
        inner = groups_in(field.annotation)
        if inner and key not in ("methods", "model.larger"):
            yield from keys_of(inner[0], f"{key}.")


def groups_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the groups of settings that an annotation names."""
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    ):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, tuple) or get_args(annotation):
        return [group for part in get_args(annotation) for group in groups_in(part)]
    return []


def value_text(default: Any) -> str:
    """Return a default as in a YAML file."""
    if hasattr(default, "model_dump"):
        default = default.model_dump()
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, Mapping):
        return "{" + ", ".join(f"{key}: {value_text(value)}" for key, value in default.items()) + "}"
    if isinstance(default, list | tuple):
        return "[" + ", ".join(value_text(value) for value in default) + "]"
    return str(default)


def _of(schema: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for key, field in keys_of(schema, prefix):
        inner = groups_in(field.annotation)
        default = field.get_default(call_default_factory=True, validated_data={})
        plain = default is not PydanticUndefined and not isinstance(default, BaseModel)
        nested = plain and isinstance(default, tuple) and any(isinstance(d, BaseModel) for d in default)
        text = "" if not plain or default == "" or nested else value_text(default)
        of_group = (inner[0].__doc__ or "" if inner else "").split("\n")[0].partition(";")[0].rstrip(".")
        meaning = field.description or of_group
        yield Setting(key, type_text(field.annotation, field.metadata), text, meaning)


def type_text(annotation: Any, metadata: Any = ()) -> str:
    """Return the type of a field in words, with the range from its `metadata`, such as "number (≥ 0)"."""
    limits = [f"{sign} {getattr(m, name):g}" for m in metadata for name, sign in BOUNDS if hasattr(m, name)]
    return _name(annotation) + (f" ({', '.join(limits)})" if limits else "")


def _name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inside = [m for part in parts[1:] for m in getattr(part, "metadata", [part])]
        return type_text(parts[0], inside)
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin in (Union, types.UnionType):
        return " or ".join(_name(part) for part in parts)
    if origin in (tuple, list, Sequence):
        return f"list of {_name(parts[0]).replace('number', 'numbers')}"
    if origin in (dict, Mapping) or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "group"
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", getattr(annotation, "__name__", str(annotation)))
    return WORDS.get(annotation, words.lower())


def takes_list(path: Sequence[str]) -> bool:
    """Return whether the setting at a dotted path may be a list, so that `a,b` is read as one."""
    schema, inside = _inside(path)
    return not inside or _holds_list(schema, inside)


def short_form(path: Sequence[str]) -> str | None:
    """Return the setting that a text in place of the group at a dotted path stands for, None without such a group."""
    schema, inside = _inside(path)
    for step in inside:
        field = schema.model_fields.get(step)
        groups = [] if field is None else groups_in(field.annotation)
        if not groups:
            return None
        schema = groups[0]
    return getattr(schema, "short_form", None)


def _inside(path: Sequence[str]) -> tuple[type[BaseModel], list[str]]:
    """Return the group that a dotted path starts in, and the path inside it: a method's line, or the experiment."""
    if path[0] in ("method", "methods"):
        return MethodConfig, list(path[1 if path[0] == "method" else 2 :])
    return ExperimentConfig, list(path)


def _holds_list(schema: type[BaseModel], path: Sequence[str]) -> bool:
    step, *inner_path = path
    field = schema.model_fields.get(step)
    if field is None:  # an option next to the name of its thing
        return "options" in schema.model_fields and step not in ("path", "checkpoint")
    if not inner_path:
        return _has_tuple(field.annotation)
    inner = groups_in(field.annotation)
    if inner:
        return _holds_list(inner[0], inner_path)
    return get_origin(field.annotation) is dict and inner_path[-1] not in ("path", "checkpoint")


def _has_tuple(annotation: Any) -> bool:
    if annotation is tuple or get_origin(annotation) is tuple:
        return True
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(_has_tuple(part) for part in get_args(annotation))
    return False
