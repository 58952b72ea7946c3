"""What commands are told to run: `[CONFIG] [KEY=VALUE]...`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailorfl import modules
from tailorfl.errors import ConfigError

if TYPE_CHECKING:
    from tailorfl.settings.experiment import ExperimentConfig


def _load(names: list[str] | None) -> list[str] | None:
    modules.load(names or ())
    return names


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        callback=_load,
        metavar="MODULE",
        help="A module or FILE.py of your own, whose models, methods and data the experiment may name.",
    ),
]


def given(help: str) -> Any:
    """Return what says that a command takes `[CONFIG] [KEY=VALUE]...`, and with which help."""
    return typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help=help, show_default=False)


def like_run(but: str) -> Any:
    """Return `given` of a command that takes what `tailorfl run` does; `but` says what it makes of that."""
    return given(f"An experiment as for `tailorfl run`; {but}.")


Quiet = Annotated[bool, typer.Option("--quiet", help="No progress display.")]


def experiment(
    arguments: Sequence[str] | None,
    methods: Sequence[str] | None = None,
    base: ExperimentConfig | None = None,
    scale: str | None = None,
) -> ExperimentConfig:
    """Return the experiment of a command's arguments: a file or recipe if the first is none KEY=VALUE, and changes.

    Without a file or recipe, changes are those of `base`, or of the default experiment; `methods` are what is compared
    where neither names any, `scale` one of the scales of a recipe.

    Modules that stand in KEY=VALUE it may name, those of a file only if they were imported.

    Raises:
        ConfigError: as `tailorfl.settings.loading.load`, or a name does not exist.
    """
    from tailorfl.settings.errors import CATALOGUE, check_names
    from tailorfl.settings.loading import load, recipes

    given = list(arguments or [])
    named = bool(given) and "=" not in given[0]
    if named and not Path(given[0]).exists() and given[0] not in recipes():
        _refuse_words(given[:2])
    for number, word in enumerate(given[1:], start=1):
        if "=" not in word:
            _refuse_words(given[number : number + 2])
    changes = given[1:] if named else given
    config = load(given[0] if named else base, changes, methods=methods, scale=scale, may_import=True)
    if "torch" not in sys.modules and CATALOGUE.is_file():  # else the registries themselves are as quick
        check_names(config)
    return config


def again() -> str:
    """Return the options that name again the modules that were named, for a command that goes on."""
    return "".join(f" --import {shlex.quote(name)}" for name in modules.named())


def hint(option: str, value: str | None = None) -> str | None:
    """Return the setting that somebody who wrote an option such as `--rounds` meant, or None."""
    from tailorfl.settings.errors import written

    return written(option.lstrip("-").replace("-", "_"), value)


def _refuse_words(words: Sequence[str]) -> None:
    """Raise ConfigError if the first word is a setting without its `=`, or something to be chosen by a setting."""
    from tailorfl.settings.errors import written

    meant = written(words[0], words[1] if len(words) > 1 else None)
    if meant is not None:
        raise ConfigError(f"'{words[0]}' alone is not a setting; settings are written key=value: {meant}")
