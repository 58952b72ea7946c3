"""What commands are told to run: `[CONFIG] [KEY=VALUE]...`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailorfl.experiments.schema import ExperimentConfig


def experiment(arguments: Sequence[str] | None, methods: Sequence[str] | None = None) -> ExperimentConfig:
    """Returns the experiment of a command's arguments: a file or recipe if the first is none KEY=VALUE, and changes.

    Raises:
        ConfigError: as `tailorfl.experiments.config.load`.
    """
    from tailorfl.experiments.config import load

    given = list(arguments or [])
    named = bool(given) and "=" not in given[0]
    return load(given[0] if named else None, given[1:] if named else given, methods=methods)
