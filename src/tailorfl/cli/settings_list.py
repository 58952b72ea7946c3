"""`tailorfl list settings`: every key with its type, default and meaning."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from tailorfl.cli.listing import value_text
from tailorfl.errors import unknown
from tailorfl.experiments.mistakes import models_in
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig

WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


@dataclass(frozen=True)
class Setting:
    """One key."""

    key: str
    type: str
    default: str
    meaning: str


def settings() -> Iterator[Setting]:
    """Yields every key of an experiment, `methods` as `method` of one line."""
    for setting in _of(ExperimentConfig, ""):
        yield setting
        if setting.key == "methods":
            yield from (s for s in _of(MethodConfig, "method.") if not s.key.startswith("method.train."))


def show_settings(console: Console, group: str | None = None) -> None:
    """Prints all settings, or those of one group such as `train`.

    Raises:
        ConfigError: there is no such group or key.
    """
    found = list(settings())
    if group is not None:
        chosen = [s for s in found if s.key == group or s.key.startswith(f"{group}.")]
        if not chosen:
            raise unknown("setting or group of settings", group, [s.key for s in found])
        found = chosen
    for setting in found:
        default = f" = {setting.default}" if setting.default else ""
        console.print(Text.assemble((setting.key, "bold"), default, (f"   {setting.type}", "dim")))
        console.print(Padding(Text(setting.meaning), (0, 0, 0, 4), expand=False))


def _of(schema: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, field in schema.model_fields.items():
        key = f"{prefix}{name}"
        inner = models_in(field.annotation)
        default = field.get_default(call_default_factory=True, validated_data={})
        plain = default is not PydanticUndefined and not isinstance(default, BaseModel)
        nested = plain and isinstance(default, tuple) and any(isinstance(d, BaseModel) for d in default)
        text = "" if not plain or default == "" or nested else value_text(default)
        meaning = (
            field.description or (inner[0].__doc__ or "" if inner else "").split("\n")[0].partition(";")[0]
        )
        yield Setting(key, _type(field.annotation, field.metadata), text, meaning)
        if inner and key not in ("methods", "model.larger"):
            yield from _of(inner[0], f"{key}.")


def _type(annotation: Any, metadata: Any = ()) -> str:
    limits = [f"{sign} {getattr(m, name):g}" for m in metadata for name, sign in BOUNDS if hasattr(m, name)]
    return _name(annotation) + (f" ({', '.join(limits)})" if limits else "")


def _name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inside = [m for part in parts[1:] for m in getattr(part, "metadata", [part])]
        return _type(parts[0], inside)
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin in (Union, types.UnionType):
        return " or ".join(_name(part) for part in parts)
    if origin is tuple:
        return f"list of {_name(parts[0]).replace('number', 'numbers')}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "group"
    return WORDS.get(annotation, str(annotation))
