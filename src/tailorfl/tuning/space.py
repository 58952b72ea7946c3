"""Search spaces: the settings and values that are tried for a line of an experiment.

A space maps settings (`train.lr`, `method.lam`, `method.distil.lr`) to a `Choice` or a `Range`. It combines the common
learning rates of all methods, the grid of the line's method (`Method.grid`), the line's own values, and the
experiment's `search`, which overrides the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from tailorfl.core.method import find_method, make_method
from tailorfl.errors import ConfigError
from tailorfl.printable import shown
from tailorfl.runs.build import train_config
from tailorfl.runs.folders import value_of
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig

log = logging.getLogger(__name__)

RATES = {
    "sgd": (0.001, 0.005, 0.01, 0.05, 0.1, 0.5),
    "adamw": (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03),
}
"""`train.lr` of every method, by optimizer."""
MARGIN = 0.05
"""Share of a range's width within which a value lies at its edge."""


@dataclass(frozen=True)
class Choice:
    """A choice between values, with numbers in ascending order."""

    values: tuple[Any, ...]

    @property
    def numeric(self) -> bool:
        """Whether all values are numbers, so that others lie beyond the first and the last."""
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values that a method must accept for all to be valid: all of them."""
        return self.values

    def has(self, value: Any) -> bool:
        """Return whether a value is one of them."""
        return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self.values)

    def plain(self) -> list[Any]:
        """Return the values as JSON can hold them."""
        return list(self.values)

    def side(self, value: Any) -> int:
        """Return -1 at the lower edge, 1 at the upper one, 0 between them or without edges."""
        return int(value == self.values[-1]) - int(value == self.values[0]) if self.numeric else 0

    def beyond(self, side: int) -> Choice:
        """Return the choice with one more value on a side, at the last two's distance (as a factor if positive)."""
        last, before = (self.values[-1], self.values[-2]) if side > 0 else self.values[:2]
        further: float = last * last / before if before > 0 and last > 0 else 2 * last - before
        are_whole = all(isinstance(v, int) for v in self.values)
        further = round(further) if are_whole else _shortened(further, last)
        return Choice((*self.values, further) if side > 0 else (further, *self.values))


@dataclass(frozen=True)
class Range:
    """The numbers between two bounds, inclusive, drawn uniformly or log-uniformly."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values that a method must accept for all to be valid."""
        return self.low, self.high

    def has(self, value: Any) -> bool:
        """Return whether a value lies in the range."""
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high
        )

    def plain(self) -> dict[str, Any]:
        """Return the values as JSON can hold them."""
        return {"low": self.low, "high": self.high, "log": self.log}

    def side(self, value: Any) -> int:
        """Return -1 near the lower edge, 1 near the upper one, else 0."""
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        position = (at - low) / (high - low)
        return (position >= 1 - MARGIN) - (position <= MARGIN)

    def beyond(self, side: int) -> Range:
        """Return the range extended on one side by half of its width."""
        if self.log:
            factor = math.sqrt(self.high / self.low)
            low, high = self.low / factor, self.high * factor
        else:
            low, high = self.low - (self.high - self.low) / 2, self.high + (self.high - self.low) / 2
        end, last = (high, self.high) if side > 0 else (low, self.low)
        end = (round(end) if round(end) != last else last + side) if self.whole else _shortened(end, last)
        return replace(self, high=end) if side > 0 else replace(self, low=end)


Dimension = Choice | Range
Space = Mapping[str, Dimension]


def spaces(config: ExperimentConfig) -> dict[str, dict[str, Dimension]]:
    """Return the space of every line of an experiment, by label.

    Entries of `search` for a line that `methods=[...]` has left out have no effect; a warning names them.

    Raises:
        ConfigError: `search` names a setting that no method has, an entry is neither a list nor a range, or a method
            refuses a value.
    """
    # Entries for one line come before entries for all.
    entries = sorted(_leaves(config.search, ""), key=lambda leaf: leaf[0].startswith("methods."))
    space_of: dict[str, dict[str, Dimension]] = {}
    used: set[str] = set()
    for line in config.methods:
        space = _shipped(config, line)
        for key, entry in entries:
            setting = _setting_of(config, line, key)
            if setting is None:
                continue
            used.add(key)
            if entry is None:
                space.pop(setting, None)
            else:
                space[setting] = _parsed(key, entry, _is_whole(config, line, setting, entry))
        check(config, line, space)
        space_of[line.label] = space
    unused = [key for key, _ in entries if key not in used]
    absent = [key for key in unused if _of_another_line(config, key)]
    for key in unused:
        if key not in absent:
            raise _misplaced(config, key)
    if absent:
        log.warning(
            "search: %s %s without effect, because no line of this experiment has that label; its lines are %s",
            ", ".join(f"'{key}'" for key in absent),
            "is" if len(absent) == 1 else "are",
            ", ".join(line.label for line in config.methods),
        )
    return space_of


def _is_whole(config: ExperimentConfig, line: MethodConfig, setting: str, entry: Any) -> bool:
    """Return whether a setting is a whole number; one that is null is if it refuses what lies between two of them."""
    value = value_of(config, line, setting)
    low = entry.get("low") if value is None and isinstance(entry, Mapping) else None
    if isinstance(low, int):
        return accepts(config, line, {setting: low}) and not accepts(config, line, {setting: low + 0.5})
    return isinstance(value, int) and not isinstance(value, bool)


def start(config: ExperimentConfig, line: MethodConfig, space: Space) -> dict[str, Any] | None:
    """Return the experiment's own values for the first trial, or None if they are not in the space."""
    values = {key: value_of(config, line, key) for key in space}
    return values if all(space[key].has(value) for key, value in values.items()) else None


def changed(config: ExperimentConfig, line: MethodConfig, values: Mapping[str, Any]) -> MethodConfig:
    """Return a line with other values of its settings.

    Raises:
        ConfigError: the method, or local training, refuses one.
    """
    groups: dict[str, Any] = {"train": dict(**line.train), "method": deepcopy(line.options)}
    for key, value in values.items():
        group, *path = key.split(".")
        options = groups[group]
        # A group of training in the line replaces the experiment's as a whole.
        if group == "train" and len(path) > 1 and path[0] not in options:
            options[path[0]] = value_of(config, line, f"train.{path[0]}")
        for step in path[:-1]:
            options = options.setdefault(step, {})
        options[path[-1]] = value
    try:
        new = MethodConfig(
            name=line.name,
            label=line.label,
            rounds=line.rounds,
            model=line.model,
            train=groups["train"],
            options=groups["method"],
        )
    except ValidationError as error:
        first = error.errors()[0]
        key_path = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{line.label}: {key_path} = {first['input']!r}: {first['msg']}") from error
    make_method(new.name, new.options)
    train_config(Job(config, new, config.seeds[0]))
    return new


def accepts(config: ExperimentConfig, line: MethodConfig, values: Mapping[str, Any]) -> bool:
    """Return whether a line may have these values."""
    try:
        changed(config, line, values)
    except ConfigError:
        return False
    return True


def check(config: ExperimentConfig, line: MethodConfig, space: Space) -> None:
    """Raise ConfigError if a line does not accept a value of its space."""
    for key, dimension in space.items():
        for value in dimension.ends:
            try:
                changed(config, line, {key: value})
            except ConfigError as error:
                raise ConfigError(
                    f"search: {line.label} cannot be tuned with {key} = {shown(value)}: {error}; change its values "
                    f"with search.methods.{line.label}.{key.removeprefix('method.')}, or leave the setting as it is "
                    "(null)"
                ) from error


def edges(
    config: ExperimentConfig, line: MethodConfig, space: Space, chosen: Mapping[str, Any]
) -> dict[str, int]:
    """Return the settings chosen at an edge beyond which the method accepts values: -1 lower, 1 upper."""
    sides = {key: space[key].side(value) for key, value in chosen.items()}
    return {
        key: side
        for key, side in sides.items()
        if side and accepts(config, line, {key: space[key].beyond(side).ends[-1 if side > 0 else 0]})
    }


def _shipped(config: ExperimentConfig, line: MethodConfig) -> dict[str, Dimension]:
    """Return the library's space of a line, with the line's own values in it."""
    optimizer, method = value_of(config, line, "train.optimizer"), find_method(line.name)
    grids = {"train.lr": RATES[optimizer]} if method.of_networks else {}
    grids |= {f"method.{key}": tuple(values) for key, values in method.grid.items()}
    space: dict[str, Dimension] = {}
    for key, values in grids.items():
        try:
            current = value_of(config, line, key)
        except KeyError:  # a length in epochs, but the line has one in steps
            continue
        choice = Choice(values)
        if not choice.has(current):
            choice = Choice((*values, current))
        space[key] = Choice(tuple(sorted(choice.values))) if choice.numeric else choice
    return space


def _shortened(value: float, last: float) -> float:
    """Return a value beyond the last one in three digits, if it still lies beyond it then."""
    short = float(f"{value:.3g}")
    return short if (short > last) == (value > last) and short != last else value


def _leaves(group: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, entry) of `search`."""
    for key, value in group.items():
        if isinstance(value, Mapping) and not {"low", "high"} & value.keys():
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _setting_of(config: ExperimentConfig, line: MethodConfig, key: str) -> str | None:
    """Return the setting of a line for a key of `search`, or None if the key means none of this line."""
    of_line = f"methods.{line.label}."
    if key.startswith(of_line):
        setting = key.removeprefix(of_line).removeprefix("method.")
        key = setting if setting.startswith("train.") else f"method.{setting}"
    if not key.startswith(("train.", "method.")):
        return None
    try:
        value_of(config, line, key)
    except KeyError:
        return None
    return key


def _of_another_line(config: ExperimentConfig, key: str) -> bool:
    """Return whether a key methods.LABEL.SETTING is for a line that this experiment does not have."""
    ours = tuple(f"methods.{line.label}." for line in config.methods)
    return key.startswith("methods.") and key.count(".") > 1 and not key.startswith(ours)


def _misplaced(config: ExperimentConfig, key: str) -> ConfigError:
    return ConfigError(
        f"search: '{key}' is not a setting of a method of this experiment. Write settings as train.lr, method.lam (for "
        f"every method that has it) or methods.{config.methods[0].label}.lam (for one line); `tailorfl list methods` "
        "lists the options"
    )


def _parsed(key: str, entry: Any, is_whole: bool) -> Dimension:
    """Return the values of a setting from its entry in `search`."""
    if isinstance(entry, list | tuple) and entry and all(_is_plain(value) for value in entry):
        choice = Choice(tuple(dict.fromkeys(entry)))
        return Choice(tuple(sorted(choice.values))) if choice.numeric else choice
    if (
        isinstance(entry, Mapping)
        and entry.keys() <= {"low", "high", "log"}
        and {"low", "high"} <= entry.keys()
    ):
        low, high, log = entry["low"], entry["high"], entry.get("log", False)
        numbers = (
            Choice((low, high)).numeric
            and isinstance(log, bool)
            and math.isfinite(low)
            and math.isfinite(high)
        )
        if not numbers or not low < high or (log and low <= 0):
            raise ConfigError(
                f"search: {key} = {dict(entry)} is not a range; low and high must be numbers with low below high (and "
                "above 0 with log), and log true or false"
            )
        both_whole = is_whole and low == round(low) and high == round(high)
        return Range(low, high, log, both_whole)
    raise ConfigError(
        f"search: {key} = {shown(entry)} should be a list of values such as [0.01, 0.1], a range such as {{low: 0.01, "
        "high: 1, log: true}, or null to leave the setting as it is"
    )


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or (isinstance(value, bool | int | str))
        or (isinstance(value, float) and math.isfinite(value))
    )
