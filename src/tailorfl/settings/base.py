"""Building blocks of settings: strict numbers, frozen groups, and things chosen by name with options.

This package declares every setting once, with its type, range, default and meaning, and needs no torch. `Client.fit`,
engines and evaluation take their defaults from it; `tailorfl list settings` prints it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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

LARGEST_FLOAT = 3.4e38


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
    """Return names as a list; refuse other iterables, such as a series of a frame, whose items could pass as names."""
    if not isinstance(value, str | int | list | tuple):
        raise ValueError("should be a name, or a list of names")
    return listed(value)


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
        options = plain.pop("options")
        # An option with the name of a setting (`weights` of a user's own model) stays inside `options`.
        inner = {key: value for key, value in options.items() if key in fields}
        outer = {key: value for key, value in options.items() if key not in fields}
        changed = {
            key: value
            for key, value in plain.items()
            if key == "name" or value not in (fields[key].default, [])
        }
        return {**changed, **outer, **({"options": inner} if inner else {})}
