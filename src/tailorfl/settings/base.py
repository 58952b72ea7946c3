"""Building blocks of settings: bounds, strict numbers, frozen groups, and things chosen by name with options.

This package declares every setting once, with its type, range, default and meaning, and needs no torch. `Client.fit`,
engines and evaluation take their defaults from it; `tailorfl list settings` prints it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from tailorfl.errors import ConfigError
from tailorfl.printable import harmful

LARGEST_FLOAT = 3.4e38
MOST_CHARACTERS = 2**20
"""Largest number of characters in a settings file."""
LONGEST_TEXT = 10_000
"""Largest number of characters in one text among the settings."""
MOST_VALUES = 100_000
DEEPEST = 50
LARGEST = 2**63 - 1
"""Whole numbers are within ±this, the range of torch and numpy integers."""
DECIMAL = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
"""The rule that numbers such as 1e-3, which YAML 1.1 reads as text, are numbers in a settings file."""
SEVERAL_LINES = "\n\t"
"""Characters of texts that may have several lines: descriptions, and notes among published numbers."""


def _whole(value: Any) -> Any:
    """Accept only whole numbers: YAML's `true` and quoted digits are mistakes, 1e3 is not."""
    if isinstance(value, bool | str) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("should be a whole number")
    return value


def number(value: Any) -> Any:
    """Accept only numbers within the range of float32: YAML's `true` and quoted digits are mistakes."""
    if isinstance(value, bool | str):
        raise ValueError("should be a number")
    if isinstance(value, int | float) and LARGEST_FLOAT < abs(value) < math.inf:
        raise ValueError(f"should be a number within ±{LARGEST_FLOAT:g}, which is what models calculate with")
    return value


def listed(value: Any) -> Any:
    """Return a single name or number as a list of one; other values are unchanged."""
    return [value] if isinstance(value, str | int) else value


def _names(value: Any) -> Any:
    """Return names as a list, and numbers, as YAML reads `3`, as names.

    Other iterables are refused, such as a series of a frame, whose items could pass as names.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | list | tuple):
        raise ValueError("should be a name, or a list of names")
    return [str(name) if type(name) is int else name for name in listed(value)]


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(number)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class Settings(BaseModel):
    """Base of all groups of settings: frozen, and without unknown keys."""

    # An infinite number in a free mapping, such as a method's own clip, stays infinite.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    short_form: ClassVar[str | None] = None
    """The setting that gets the value if a text is given instead of the group."""

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, values: Any) -> Any:
        return {cls.short_form: values} if cls.short_form and isinstance(values, str) else values

    def check_owner(self, owner: str, owners: Mapping[str, Sequence[str]]) -> None:
        """Check that no setting was changed that `owner`'s value does not have.

        Args:
            owner: the setting that decides.
            owners: setting -> the values of `owner` that have it.

        Raises:
            ValueError: such a setting was changed; names it.
        """
        value = getattr(self, owner)
        for name, values in owners.items():
            if value not in values and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"has {name}, which needs {owner}={' or '.join(values)}, but {owner}={value}"
                )


class Named(Settings):
    """A thing chosen by name, with its options written next to the name: `{name: mlp, hidden: [64]}`.

    The name alone is a short form. The thing itself defines its options.
    """

    name: str = Field(description="its name; the name alone is a short form")
    options: dict[str, Any] = Field(
        default={}, description="its options; they may also be written next to the name"
    )

    short_form: ClassVar[str | None] = "name"

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        fields = {key: value for key, value in values.items() if key in cls.model_fields}
        beside_name = {str(key): value for key, value in values.items() if key not in cls.model_fields}
        options = fields.get("options", {})
        if not beside_name or not isinstance(options, dict):
            return fields
        twice = beside_name.keys() & options.keys()
        if twice:
            raise ValueError(f"gives '{min(twice)}' twice, next to the name and in options; keep one of them")
        return {**fields, "options": {**options, **beside_name}}

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields, plain = type(self).model_fields, handler(self)
        options = plain.pop("options", {})  # absent where defaults are left out
        # An option with the name of a setting (`weights` of a user's own model) stays inside `options`.
        inner = {key: value for key, value in options.items() if key in fields}
        outer = {key: value for key, value in options.items() if key not in fields}
        changed = {
            key: value
            for key, value in plain.items()
            if key == "name" or value not in (fields[key].default, [])
        }
        return {**changed, **outer, **({"options": inner} if inner else {})}


def copied(value: Any) -> Any:
    """Return a deep copy of settings, with NumPy's numbers as Python's, which files of settings can hold."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [copied(inner) for inner in value]
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else deepcopy(value)


def check_values(settings: Any, origin: str) -> None:
    """Check that settings are within the bounds of this module; `origin` names their source in messages.

    Raises:
        ConfigError: a setting is not; names its place.
    """
    waiting: list[tuple[tuple[str, ...], Any]] = [((), settings)]
    for count in range(MOST_VALUES + 1):
        if not waiting:
            return
        path, value = waiting.pop()
        if len(path) > DEEPEST:
            raise ConfigError(too_deep(origin))
        if count == MOST_VALUES:
            raise ConfigError(too_many(origin))
        problem = _problem(value, SEVERAL_LINES if _may_have_lines(path) else "")
        if problem is not None:
            raise ConfigError(f"in {origin}: {'.'.join(path) or 'the value'} {problem}")
        if isinstance(value, Mapping):
            for key, inner in value.items():
                problem = _problem(key, "")
                if problem is not None:
                    raise ConfigError(f"in {origin}: a key in {'.'.join(path) or 'the settings'} {problem}")
                waiting.append(((*path, str(key)), inner))
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += [((*path, str(number)), inner) for number, inner in enumerate(value)]


def _problem(value: Any, allowed: str) -> str | None:
    """Return the mistake in a single value, or None."""
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            return f"is a text of {len(value):,} characters; at most {LONGEST_TEXT:,} are allowed"
        sign = harmful(value, but=allowed)
        if sign is not None:
            return f"holds the character {sign!r}, which would change how a terminal or a page shows it; leave it out"
    elif isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        return f"is a whole number of {value.bit_length()} bits; numbers must be within ±{LARGEST}"
    elif hasattr(value, "__len__") and not isinstance(
        value, Mapping | list | tuple | set | frozenset | bytes
    ):
        return (
            f"is a {type(value).__name__}, which no setting accepts; pass data as tailorfl.run(data=..., label=..., "
            "client=...), or turn them into a Source with a function of tailorfl.data.own"
        )
    elif isinstance(value, complex):
        return f"is {value}, a complex number; use a real number"
    return None


def _may_have_lines(path: tuple[str, ...]) -> bool:
    return path[-1:] == ("description",) or "published" in path


def too_deep(source: str) -> str:
    """Return the message for settings that are nested too deep."""
    return (
        f"{source} nests values more than {DEEPEST} levels deep; no setting is that deep, so check for a missing "
        "bracket"
    )


def too_many(source: str) -> str:
    """Return the message for settings with too many values."""
    return f"{source} holds more than {MOST_VALUES:,} values, counting an alias each time it is used; leave some out"
