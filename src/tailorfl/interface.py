"""Checks of users' Python code: the types of arguments, and the hooks that a subclass overrides by name.

Hooks are checked when the class is created, so that a misspelt one is not ignored.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from tailorfl.errors import ConfigError
from tailorfl.printable import shown

_NAMES = {
    str: "a text",
    Integral: "a whole number",
    Real: "a number",
    type(None): "None",
    bool: "True or False",
    Path: "a path",
    Mapping: "a mapping",
}
ALIKE = 0.88
"""Least similarity to a hook's name at which another name counts as its misspelling (1: equal)."""
RATHER_ALIKE = 0.75
"""The same for a function that can be called like the hook."""


def check_kind(name: str, value: Any, *kinds: type | None) -> None:
    """Check that an argument is of one of these kinds, where None stands for itself; True and False are not numbers.

    A string counts as a path unless it has several lines, which may be a table.

    Raises:
        ConfigError: it is of none of them; the message says of what kind it is, and shows no data.
    """
    types = tuple(type(None) if kind is None else kind for kind in kinds)
    is_flag = isinstance(value, bool) and bool not in types
    is_no_path = isinstance(value, str) and Path in types and value.count("\n") > 1
    if is_flag or is_no_path or not isinstance(value, types):
        expected = " or ".join(_NAMES.get(kind) or f"of type {kind.__name__}" for kind in types)
        raise ConfigError(f"{name} should be {expected}, but is {shown(value)}")


def check_texts(name: str, values: Any, *kinds: type | None) -> None:
    """Check that an argument is a sequence of strings, or of one of the other kinds. Raises ConfigError."""
    if isinstance(values, list | tuple) and not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{name} should hold texts, but is {shown(values)}")
    check_kind(name, values, list, tuple, *kinds)


def check_hooks(cls: type, base: type, constants: Iterable[str] = ()) -> None:
    """Check the attributes of a class against the hooks of its base class: their names and arguments.

    Names that begin with an underscore are not checked.

    Args:
        cls: the new class.
        base: the class whose public functions, properties and constants are the hooks.
        constants: names that `base` declares, with a value or without.

    Raises:
        ConfigError: an attribute has nearly the name of a hook, or a hook does not accept the arguments that it gets.
    """
    hooks = {name: value for name, value in vars(base).items() if not name.startswith("_")}
    hooks |= {name: None for name in constants if name not in hooks}
    for name, value in vars(cls).items():
        if name in hooks:
            _check_hook(cls, name, value, hooks[name])
        elif not name.startswith("_") and (hook := _misspelt(cls, name, value, hooks)):
            raise ConfigError(
                f"{cls.__qualname__} defines '{name}', which nothing calls or reads. Did you mean '{hook}'? If not, "
                f"give it another name, such as _{name}"
            )
    for name in getattr(cls, "model_fields", ()):
        if name in hooks:
            raise ConfigError(
                f"{cls.__qualname__} has a hyper-parameter '{name}', which is the name of a hook; write {name} = ... "
                "without a type for a constant of the class, or rename the hyper-parameter"
            )


def _misspelt(cls: type, name: str, value: Any, hooks: Mapping[str, Any]) -> str:
    """Return the hook that an attribute was probably meant to be and the class does not define, "" if none."""
    for hook in sorted(hooks.keys() - vars(cls).keys(), key=lambda hook: -_likeness(name, hook)):
        if _likeness(name, hook) >= ALIKE:
            return hook
        could_be_called = inspect.isroutine(hooks[hook]) and not _obstacle(cls, value, hooks[hook])
        if could_be_called and _likeness_of_words(name, hook) >= RATHER_ALIKE:
            return hook
    return ""


def _likeness(name: str, hook: str) -> float:
    return difflib.SequenceMatcher(None, name.replace("_", ""), hook.replace("_", "")).ratio()


def _likeness_of_words(name: str, hook: str) -> float:
    """Return the least similarity between corresponding words of two names: server_step is not server_state."""
    words, hook_words = name.split("_"), hook.split("_")
    if len(words) != len(hook_words):
        return 0.0
    return min(_likeness(word, hook_word) for word, hook_word in zip(words, hook_words, strict=True))


def _check_hook(cls: type, name: str, value: Any, hook: Any) -> None:
    """Raise ConfigError if a called hook is not a function, a read one is, or its arguments differ."""
    if isinstance(hook, property) and inspect.isroutine(value):
        raise ConfigError(f"{cls.__qualname__}.{name} is read, not called; put @property before its def")
    if inspect.isroutine(hook) and (obstacle := _obstacle(cls, value, hook)):
        taken = ", ".join(_parameters(hook))
        raise ConfigError(
            f"{cls.__qualname__}.{name} {obstacle}, but is called as {name}({taken}); write def {name}(self, {taken})"
        )


def _obstacle(cls: type, value: Any, hook: Any) -> str:
    """Return why an attribute cannot be called like a hook, with its arguments in order, "" if it can."""
    if isinstance(value, property | cached_property) or not (callable(value) or hasattr(value, "__get__")):
        return f"is a {type(value).__name__}"
    try:
        signature = inspect.signature(value.__get__(object(), cls) if hasattr(value, "__get__") else value)
    except (TypeError, ValueError):  # Python cannot inspect it
        return ""
    try:
        signature.bind(*_parameters(hook))
    except TypeError:
        return f"takes {', '.join(signature.parameters) or 'nothing'} besides self"
    return ""


def _parameters(hook: Any) -> list[str]:
    """Return the names of a hook's required arguments, without self."""
    return [p.name for p in inspect.signature(hook).parameters.values() if p.default is p.empty][1:]
