"""Errors for people to read: they say what was given, what was expected, and what to do."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any


class TailorflError(Exception):
    """Base of every error that tailorfl raises on purpose; the command line prints it without a traceback."""

    exit_code = 1


class ConfigError(TailorflError):
    """A setting is unknown, has the wrong type or contradicts another one."""

    exit_code = 2


class DataError(TailorflError):
    """The data or a partition of it cannot be used as requested."""


class ModelError(TailorflError):
    """The model does not fit the data, or a split or weight file does not fit the model."""


class RunError(TailorflError):
    """A run cannot be written, read or resumed."""


class DivergenceError(TailorflError):
    """Every sampled client of a round diverged, so there is nothing to aggregate; or the server itself diverged."""


class MessageError(TailorflError):
    """A message between a server and a client is refused: damaged, of another version, or not as agreed."""


class PolicyError(TailorflError):
    """A client's own policy forbids a release."""


class WorkerError(TailorflError):
    """A worker process or machine was lost, or could not be started."""


class MemoryLimitError(TailorflError):
    """A single client does not fit into memory."""


class MissingExtraError(TailorflError):
    """A required optional package is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        packages = " ".join(f"'{name}'" for name in _needed(extra) or [package])
        super().__init__(
            f"this needs the package '{package}', which is not installed; install it with: pip install {packages} "
            f"(the extra '{extra}' of tailorfl)"
        )

    def __reduce__(self) -> Any:
        return type(self), (self.package, self.extra)


@contextlib.contextmanager
def needs_extra(package: str, extra: str) -> Iterator[None]:
    """Name the extra to install if an import in this block fails.

    Args:
        package: the package that the block imports, by its name for `pip install`.
        extra: the extra of tailorfl that installs it.

    Raises:
        MissingExtraError: an import failed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(package, extra) from error


def _needed(extra: str) -> list[str]:
    """Return the requirements of an extra, which can be installed wherever tailorfl was installed from."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("tailorfl") or ()
    except PackageNotFoundError:
        return []
    pairs = (line.partition(";") for line in lines)
    return [need.strip() for need, _, marker in pairs if re.search(rf"extra == ['\"]{extra}['\"]", marker)]


def nearest(name: str, options: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the option most similar to `name`, or None if all similarities (1: equal) are below `cutoff`."""
    matches = difflib.get_close_matches(name, sorted(options), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(name: str, options: Iterable[str], prefix: str = "") -> str:
    """Return the question whether the most similar option was meant, after a space, or "" if none is close.

    >>> did_you_mean("dito", ["ditto", "fedavg"])
    " Did you mean 'ditto'?"
    """
    hint = nearest(name, options)
    return f" Did you mean {prefix}'{hint}'?" if hint else ""


def unknown(kind: str, name: str, options: Iterable[str], command: str | None = None) -> ConfigError:
    """Return a ConfigError for a name that does not exist, with the nearest valid name and all of them.

    Args:
        kind: the kind of thing that has such a name.
        name: the given name.
        options: the valid names.
        command: a command of tailorfl that lists the valid names, if they are too many for a message.
    """
    valid = sorted(options)
    listed = f"Valid: {', '.join(valid) or 'none'}."
    if command is not None:
        return ConfigError(f"unknown {kind} '{name}'.{did_you_mean(name, valid)} See them all: {command}")
    if not isinstance(name, str):
        return ConfigError(f"{kind} should be a text, but is a {type(name).__name__}. {listed}")
    if "\n" in name:  # perhaps rows of a table, which must not appear in a message
        return ConfigError(f"{kind} is a text of {len(name):,} characters. {listed}")
    return ConfigError(f"unknown {kind} '{name}'.{did_you_mean(name, valid)} {listed}")


def check_known(kind: str, name: str, options: Collection[str]) -> None:
    """Check that a name is one of the valid ones. Raises ConfigError with the nearest of them, and all."""
    if name not in options:
        raise unknown(kind, name, options)


def first_few(words: Sequence[str], most: int, between: str = ", ") -> str:
    """Return the first `most` of many words for a message, and the number of further ones."""
    more = len(words) - most
    return between.join(words[:most]) + (f"{between.strip(', ')} and {more} more" if more > 0 else "")


class ClientError(TailorflError):
    """Client code failed; the message names the clients, the round and the stage."""
