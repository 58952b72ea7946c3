"""Settings as they come in: text to values, and the bounds that hold for values whoever they come from.

What is too large, too deep or cannot be printed is refused here, before anything is made of it. Aliases of YAML are
counted as often as they stand, since a few lines of them can mean more values than any memory holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tailorfl.errors import ConfigError
from tailorfl.printable import harmful

MOST_CHARACTERS = 2**20
"""Of a file of settings."""
LONGEST_TEXT = 10_000
"""Characters of one text among the settings."""
MOST_VALUES = 100_000
DEEPEST = 50
LARGEST = 2**63 - 1
"""Whole numbers lie in ±this, which is what torch and numpy count with."""
SEVERAL_LINES = "\n\t"
"""Characters of texts that may have several lines: descriptions, and notes among published numbers."""


class Loader(yaml.SafeLoader):
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
Loader.yaml_implicit_resolvers = {mark: list(rules) for mark, rules in _RULES.items()}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parsed(text: str, loader: type[yaml.SafeLoader], what: str) -> Any:
    """Returns the value of a YAML text; `what` names the text in messages.

    Raises:
        ConfigError: it is not valid, too long, nested too deeply, or means too many values.
    """
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"{what} has {len(text):,} characters; settings have at most {MOST_CHARACTERS:,}, so this is another file"
        )
    try:
        _check_size(text, loader, what)
        return yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"{what} is not valid YAML: {error.problem or error.context}{place}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not valid YAML: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Values of a kind that YAML knows and Python cannot make: a date 2001-99-99, a number of 5,000 digits.
        raise ConfigError(f"{what} holds a value that cannot be read: {error}") from error


def _check_size(text: str, loader: type[yaml.SafeLoader], what: str) -> None:
    """Raises ConfigError where reading a text would take too much; looks at it once, from left to right."""
    sizes: dict[str, int] = {}
    open_: list[list[Any]] = [[None, 0]]
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_.pop()
            if anchor:
                sizes[anchor] = size
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append([event.anchor, 1])
            if len(open_) > DEEPEST + 1:
                raise ConfigError(_too_deep(what))
            continue
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in open_):
                raise ConfigError(f"in {what}: '*{event.anchor}' stands inside what it stands for")
            size = sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if event.anchor:
                sizes[event.anchor] = 1
        else:
            continue
        open_[-1][1] += size
        if open_[-1][1] > MOST_VALUES:
            raise ConfigError(_too_many(what))


def check_values(given: Any, where: str) -> None:
    """Nothing if settings are within the bounds of this module; `where` says in messages where they came from.

    Raises:
        ConfigError: one is not; names its place.
    """
    waiting: list[tuple[tuple[str, ...], Any]] = [((), given)]
    for count in range(MOST_VALUES + 1):
        if not waiting:
            return
        place, value = waiting.pop()
        if len(place) > DEEPEST:
            raise ConfigError(_too_deep(where))
        if count == MOST_VALUES:
            raise ConfigError(_too_many(where))
        problem = _problem(value, SEVERAL_LINES if _may_have_lines(place) else "")
        if problem is not None:
            raise ConfigError(f"in {where}: {'.'.join(place) or 'the value'} {problem}")
        if isinstance(value, Mapping):
            for key, inner in value.items():
                problem = _problem(key, "")
                if problem is not None:
                    raise ConfigError(f"in {where}: a key in {'.'.join(place) or 'the settings'} {problem}")
                waiting.append(((*place, str(key)), inner))
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += [((*place, str(number)), inner) for number, inner in enumerate(value)]


def _problem(value: Any, allowed: str) -> str | None:
    """What is wrong with one value by itself."""
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            return f"is a text of {len(value):,} characters; the longest may have {LONGEST_TEXT:,}"
        found = harmful(value, but=allowed)
        if found is not None:
            return f"holds the character {found!r}, which would change how a terminal or a page shows it; leave it out"
    elif isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        return f"is a whole number of {value.bit_length()} bits; numbers here lie within ±{LARGEST}"
    elif hasattr(value, "__len__") and not isinstance(
        value, Mapping | list | tuple | set | frozenset | bytes
    ):
        return (
            f"is a {type(value).__name__}, and no setting can be that; hand data over as tailorfl.run(data=..., "
            "label=..., client=...), or make a Source of them by a function of tailorfl.data.own"
        )
    elif isinstance(value, complex):
        return f"is {value}, a complex number; numbers here are real"
    return None


def _may_have_lines(place: tuple[str, ...]) -> bool:
    return place[-1:] == ("description",) or "published" in place


def _too_deep(what: str) -> str:
    return (
        f"{what} nests values more than {DEEPEST} deep; no setting is that deep, so a bracket may be missing"
    )


def _too_many(what: str) -> str:
    return f"{what} holds more than {MOST_VALUES:,} values, aliases counted as often as they stand; leave some out"
