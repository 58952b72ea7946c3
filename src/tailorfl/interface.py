"""Checks of what Python code passes: the kinds of arguments, and the hooks that a subclass overrides by name.

Hooks are checked when the class is made, so that a misspelt one is not silent.
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
"""How like a hook's name another name is that is taken for a misspelling of it, 1 being equal."""
RATHER_ALIKE = 0.75
"""The same for a function that can be called as that hook is."""


def check_kind(name: str, value: Any, *kinds: type | None) -> None:
    """Check that an argument is of one of some kinds, of which None stands for itself; True and False are no numbers.

    Where a path may stand, a text is one, and not several lines, which may be a table.

    Raises:
        ConfigError: it is of none; the message says of what kind it is, and shows no data.
    """
    types = tuple(type(None) if kind is None else kind for kind in kinds)
    is_flag = isinstance(value, bool) and bool not in types
    is_no_path = isinstance(value, str) and Path in types and value.count("\n") > 1
    if is_flag or is_no_path or not isinstance(value, types):
        expected = " or ".join(_NAMES.get(kind) or f"of type {kind.__name__}" for kind in types)
        raise ConfigError(f"{name} should be {expected}, but is {shown(value)}")


def check_texts(name: str, values: Any, *kinds: type | None) -> None:
    """Check that an argument is a sequence of texts, or of one of some other kinds. Raises ConfigError."""
    if isinstance(values, list | tuple) and not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{name} should hold texts, but is {shown(values)}")
    check_kind(name, values, list, tuple, *kinds)


def check_hooks(cls: type, base: type, constants: Iterable[str] = ()) -> None:
    """Check what a class defines against the hooks of its base class: their names, and how they are called.

    A name that begins with an underscore is the subclass's own business.

    Args:
        cls: the class that was made.
        base: the class whose public functions, properties and constants are the hooks.
        constants: names that `base` declares, with a value or without.

    Raises:
        ConfigError: an attribute has nearly the name of a hook, or a hook cannot be called as it will be.
    """
    hooks = {name: value for name, value in vars(base).items() if not name.startswith("_")}
    hooks |= {name: None for name in constants if name not in hooks}
    for name, value in vars(cls).items():
        if name in hooks:
            _check_hook(cls, name, value, hooks[name])
        elif not name.startswith("_") and (hook := _misspelt(cls, name, value, hooks)):
            raise ConfigError(
                f"{cls.__qualname__} defines '{name}', which nothing calls or reads. Did you mean '{hook}'? If it is "
                f"something of your own, give it another name, such as _{name}"
            )
    for name in getattr(cls, "model_fields", ()):
        if name in hooks:
            raise ConfigError(
                f"{cls.__qualname__} has a hyper-parameter '{name}', which is the name of a hook; a constant of the "
                f"class is written {name} = ..., and a hyper-parameter needs another name"
            )


def _misspelt(cls: type, name: str, value: Any, hooks: Mapping[str, Any]) -> str:
    """Return the hook that an attribute was probably meant to be, none that the class itself defines; "" if none."""
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
    """Return how alike the least alike words of two names are: server_step is another word than server_state."""
    words, hook_words = name.split("_"), hook.split("_")
    if len(words) != len(hook_words):
        return 0.0
    return min(_likeness(word, hook_word) for word, hook_word in zip(words, hook_words, strict=True))


def _check_hook(cls: type, name: str, value: Any, hook: Any) -> None:
    """Raise ConfigError where a hook is no function though it is called, or one that is read, or takes other things."""
    if isinstance(hook, property) and inspect.isroutine(value):
        raise ConfigError(f"{cls.__qualname__}.{name} is read and not called; put @property before its def")
    if inspect.isroutine(hook) and (obstacle := _obstacle(cls, value, hook)):
        taken = ", ".join(_parameters(hook))
        raise ConfigError(
            f"{cls.__qualname__}.{name} {obstacle}, but is called as {name}({taken}); write def {name}(self, {taken})"
        )


def _obstacle(cls: type, value: Any, hook: Any) -> str:
    """Return why an attribute cannot be called as a hook is, with its arguments in order; "" where it can."""
    if isinstance(value, property | cached_property) or not (callable(value) or hasattr(value, "__get__")):
        return f"is a {type(value).__name__}"
    try:
        signature = inspect.signature(value.__get__(object(), cls) if hasattr(value, "__get__") else value)
    except (TypeError, ValueError):  # of a kind that Python cannot look into
        return ""
    try:
        signature.bind(*_parameters(hook))
    except TypeError:
        return f"takes {', '.join(signature.parameters) or 'nothing'} beside self"
    return ""


def _parameters(hook: Any) -> list[str]:
    """Return the names of what a hook is always called with, without self."""
    return [p.name for p in inspect.signature(hook).parameters.values() if p.default is p.empty][1:]
