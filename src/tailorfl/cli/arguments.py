"""Arguments of commands: their help, the shared ones, and the experiment that they name."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import click
import typer
from click.core import ParameterSource

from tailorfl import modules
from tailorfl.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])
ENTRY = re.compile(r"(\w+)(?: \(([^)]*)\))?: (.*)")

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult
    from tailorfl.settings.experiment import ExperimentConfig


@dataclass
class State:
    """State of a command for the handler of errors and interruptions; shared by all commands of a process."""

    debug: bool = False
    begun: Path | None = None
    """The file whose existence shows that the present work can be continued."""
    resume_command: str = ""
    """The command that continues it."""

    def under_way(self, begun: Path, resume_command: str) -> None:
        """Note the work in progress."""
        self.begun, self.resume_command = begun, resume_command

    def done(self) -> None:
        """Note that no work is in progress."""
        self.begun = None


@dataclass(frozen=True)
class RunRequest:
    """An experiment by a command's arguments, the folder for it, and how much is printed."""

    arguments: list[str] | None
    methods: Sequence[str] | None = None
    """The methods to compare if the arguments name none."""
    out: Path | None = None
    resume: Path | None = None
    extend: Path | None = None
    overwrite: bool = False
    force: bool = False
    scale: str | None = None
    """The scale of the recipe to run."""
    dry_run: bool = False
    quiet: bool = False
    as_json: bool = False


def documented(command: Command) -> Command:
    """Take the help of a command's parameters from the Args of its docstring, and leave the rest to the command.

    An entry is `name: help`, or `name (--option, -o, METAVAR): help` for other names than the parameter's or another
    word for its value; `out` is --out and -o. Parameters without a default are arguments, all others options, unless
    their type has details.
    """
    summary, _, arguments = (inspect.getdoc(command) or "").partition("\n\nArgs:\n")
    command.__doc__ = summary
    parameters, hints = inspect.signature(command).parameters, get_type_hints(command, include_extras=True)
    for entry in re.split(r"\n(?=    \w)", arguments.strip()) if arguments else ():
        name, words, help = ENTRY.fullmatch(" ".join(entry.split())).groups(default="")  # type: ignore[union-attr]
        names = [word for word in words.split(", ") if word.startswith("-")] or (
            ["--out", "-o"] if name == "out" else []
        )
        metavar = next((word for word in words.split(", ") if word and word not in names), None)
        kind, *details = (getattr(hints[name], "__metadata__", ()) and get_args(hints[name])) or (
            hints[name],
        )
        if details:
            info = copy(details[0])
        elif names or parameters[name].default is not inspect.Parameter.empty:
            info = typer.Option(*(names or [f"--{name.replace('_', '-')}"]))
        else:
            info = typer.Argument()
        info.help, info.metavar = help, metavar or info.metavar
        hints[name] = Annotated[kind, info]
    command.__annotations__ = hints
    return command


def _load(names: list[str] | None) -> list[str] | None:
    modules.load(names or ())
    return names


Arguments = Annotated[list[str] | None, typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", show_default=False)]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        callback=_load,
        metavar="MODULE",
        help="Your own module or FILE.py; the experiment may name its models, methods and data.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress display.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the experiment in RESULTS.")]
ResultFolder = Annotated[Path, typer.Argument(metavar="RESULTS", help="Result folder of an experiment.")]
Label = Annotated[
    str | None, typer.Option("--method", metavar="LABEL", help="Label of the method; by default the first.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of the run; by default the first.")]


def experiment(
    arguments: Sequence[str] | None,
    methods: Sequence[str] | None = None,
    base: ExperimentConfig | None = None,
    scale: str | None = None,
) -> ExperimentConfig:
    """Return the experiment of a command's arguments: a file or recipe if the first is not KEY=VALUE, and changes.

    Without a file or recipe, changes apply to `base`, or to the default experiment; `methods` are compared if neither
    names any, `scale` is one of a recipe's scales.

    Modules named in KEY=VALUE are allowed, those named in a file only if they were imported.

    Raises:
        ConfigError: see `tailorfl.settings.loading.load`, or a name does not exist.
    """
    from tailorfl.settings.errors import check_names
    from tailorfl.settings.loading import is_file, load, recipes

    words = list(arguments or [])
    has_file = bool(words) and ("=" not in words[0] or is_file(Path(words[0])))
    if has_file and not Path(words[0]).exists() and words[0] not in recipes():
        _refuse_words(words[:2])
    for number, word in enumerate(words[1:], start=1):
        if "=" not in word:
            _refuse_words(words[number : number + 2])
    changes = words[1:] if has_file else words
    config = load(words[0] if has_file else base, changes, methods=methods, scale=scale, may_import=True)
    if "torch" not in sys.modules:  # otherwise the registries are just as fast
        check_names(config)
    return config


def neighbour(folder: Path, ending: str) -> Path:
    """Return the path beside a folder, also beside the present one (.), with an ending added to its name."""
    named = folder if folder.name not in ("", "..") else folder.resolve()
    return named.with_name(f"{named.name}{ending}")


def without_variants(config: ExperimentConfig, each: str, do: str) -> None:
    """Raise ConfigError for an experiment with variants; `each` describes them, `do` is the verb for one of them."""
    if config.variants:
        raise ConfigError(
            f"'{config.name}' has variants ({', '.join(config.variants)}), {each}; {do} one of them: give its settings "
            "as KEY=VALUE, and variants={}"
        )


def only_result(folder: Path, results: Mapping[str, ExperimentResult], why: str = "") -> ExperimentResult:
    """Return the result of a folder. Raises ConfigError if it holds several variants."""
    if len(results) > 1:
        raise ConfigError(
            f"'{folder}' has {len(results)} variants ({', '.join(results)}){why}; give the folder of one of them"
        )
    return next(iter(results.values()))


def typed(ctx: click.Context, *names: str) -> list[str]:
    """Return those of a command's options that were typed, such as `--out`."""
    return [f"--{name}" for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def import_options() -> str:
    """Return the --import options of the named modules, for a command that continues."""
    return "".join(f" --import {shlex.quote(name)}" for name in modules.named())


def hint(option: str, value: str | None = None) -> str | None:
    """Return the setting that is meant by an option such as `--rounds`, or None."""
    from tailorfl.settings.errors import written

    return written(option.lstrip("-").replace("-", "_"), value)


def _refuse_words(words: Sequence[str]) -> None:
    """Raise ConfigError if the first word is a setting without its `=`, or a value for a setting."""
    meant = hint(*words[:2])
    if meant is not None:
        raise ConfigError(f"'{words[0]}' alone is not a setting; settings are written key=value: {meant}")
