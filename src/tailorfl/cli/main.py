"""The command `tailorfl`: parse, call, print. Heavy packages are imported where a command needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

import tailorfl
from tailorfl.cli import (
    advise,
    bench,
    data,
    deploy,
    gains,
    listing,
    pretrain,
    theory,
    watching,
)
from tailorfl.cli.arguments import Imports, Quiet, given, hint
from tailorfl.cli.export import command as export_command
from tailorfl.cli.predict import command as predict_command
from tailorfl.cli.running import RunRequest, perform
from tailorfl.cli.screen import remark, stderr, stdout
from tailorfl.cli.state import State
from tailorfl.cli.tune import Before, before
from tailorfl.cli.tune import command as tune
from tailorfl.errors import TailorflError, nearest
from tailorfl.runs.faults import told
from tailorfl.runs.signals import Terminated, ended_in_order, why

INTERRUPTED = 130
"""Exit code of a process stopped by Ctrl-C, as shells have it."""


class Commands(TyperGroup):
    """The group of all commands; the only place where errors become messages and exit codes."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; raises click's UsageError, with the nearest command, if there is none."""
        try:
            return click.Group.resolve_command(self, ctx, args)
        except click.UsageError as error:
            # Newer versions of click suggest by themselves, older ones do not.
            near, word = nearest(args[0], self.commands), args[0]
            setting = None if nearest(word, self.commands, cutoff=0.8) else hint(word, *args[1:2])
            if setting is not None and ctx.parent is None:
                near = f"tailorfl run {setting}"
            if near is None:
                raise
            message = f"{error.message.partition(' Did you mean')[0].rstrip('.')}. Did you mean '{near}'?"
            raise click.UsageError(message, ctx) from error

    def invoke(self, ctx: Any) -> Any:
        """Run a command; raises typer.Exit with the error's code once its message is printed."""
        state = ctx.ensure_object(State)
        words = [*ctx._protected_args, *ctx.args]  # what the command is given, for messages
        try:
            with told(), ended_in_order():
                return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise _as_setting(error, words) from error
        except TailorflError as error:
            if state.debug:
                raise
            stderr().print(remark("error:", str(error), "bold red"), soft_wrap=True)
            raise typer.Exit(error.exit_code) from error
        except (KeyboardInterrupt, Terminated) as stop:
            message = why(stop)
            if state.begun is not None and state.begun.is_file():
                message += f"; continue with: {state.again}"
            stderr().print(remark("\ninterrupted:", message, ""), soft_wrap=True)
            raise typer.Exit(stop.exit_code if isinstance(stop, Terminated) else INTERRUPTED) from stop


app = typer.Typer(
    name="tailorfl",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Personalized federated learning: each client ends with a model of its own.",
    epilog="First steps: tailorfl compare | tailorfl run method=ditto train.lr=0.1 | tailorfl list methods",
)
app.add_typer(theory.app, name="theory", cls=Commands)
app.add_typer(data.app, name="data", cls=Commands)
app.add_typer(deploy.app, name="deploy", cls=Commands)
app.command("advise")(advise.command)
app.command("pretrain")(pretrain.command)
app.command("bench")(bench.command)
app.command("tune")(tune)
app.command("export")(export_command)
app.command("predict")(predict_command)
app.command("server")(deploy.server)
app.command("client")(deploy.client)
app.command("gains")(gains.command)
app.command("list")(listing.list_command)
app.command("show")(listing.show_command)
app.command("watch")(watching.watch)
app.command("board")(watching.board)

Arguments = Annotated[
    list[str] | None,
    given("A YAML file or the name of a recipe; then settings, such as method=ditto train.lr=0.1."),
]
Out = Annotated[
    Path | None, typer.Option(help="Result folder; by default runs/NAME, or the next free runs/NAME-2, ...")
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Continue the experiment in this result folder; with CONFIG or KEY=VALUE, begin it there if need be.",
    ),
]
Extend = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Add to the experiment in this result folder: seeds=5, methods=fedrep,apfl or rounds=100.",
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Go on though settings, data or versions are others; the report says so."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the experiment in the result folder.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show sizes, costs and an estimate; train nothing.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tailorfl {tailorfl.__version__}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of every command."""
    ctx.ensure_object(State).debug = debug


@app.command("compare", help="Compare several methods fairly: same data, same seeds, one table with plots.")
@app.command("run", help="Run an experiment: one method (Ditto if not told), or all that its file names.")
def run_command(
    ctx: typer.Context,
    arguments: Arguments = None,
    out: Out = None,
    resume: Resume = None,
    extend: Extend = None,
    force: Force = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    imports: Imports = None,
    quiet: Quiet = False,
    as_json: listing.AsJson = False,
    budget: Before = None,
) -> None:
    """Run an experiment; `compare` has several methods where none are named."""
    from tailorfl.settings.experiment import COMPARED

    methods = COMPARED if ctx.info_name == "compare" else None
    request = RunRequest(arguments, methods, out, resume, extend, overwrite, force)
    if budget is not None:
        request = before(ctx.ensure_object(State), request, budget, dry_run, quiet, as_json)
    perform(ctx.ensure_object(State), request, dry_run, quiet, as_json)


@app.command()
def reproduce(
    ctx: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help="A packaged recipe (see: tailorfl list recipes), or a file like one.")
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it.", show_default=False)
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="SCALE",
            help="smoke, small or paper, of recipes that have them; by default as they stand.",
        ),
    ] = None,
    out: Out = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Continue the recipe in this result folder, or begin it there."),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    imports: Imports = None,
    quiet: Quiet = False,
    as_json: listing.AsJson = False,
) -> None:
    """Run a recipe and show a paper's numbers beside ours."""
    from tailorfl.settings.loading import read

    read(recipe)  # refuses what is neither a recipe nor a file, KEY=VALUE too
    request = RunRequest([recipe, *(settings or ())], None, out, resume, overwrite=overwrite, scale=scale)
    perform(ctx.ensure_object(State), request, dry_run, quiet, as_json)


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Result folder of an experiment, or several.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="A file NAME.html for the page alone, or a folder for all; needed where several are put together.",
        ),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Also the rounds and bytes until the mean metric is this good: 0.9.")
    ] = None,
    latex: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also the table for LaTeX (booktabs).")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also the table's plain numbers, nothing rounded.")
    ] = None,
    as_json: listing.AsJson = False,
) -> None:
    """Print the table of an experiment, or of several together, and write its report: a page, plots, report.md."""
    from tailorfl.cli.reports import Wanted, write

    write(folders, Wanted(out, target, latex, csv, as_json))


@app.command("check")
def check_command(
    folder: Annotated[Path, typer.Argument(help="Result folder of an experiment.")],
    as_json: listing.AsJson = False,
) -> None:
    """Look whether every file of a result folder is there and is what was written."""
    from tailorfl.cli.integrity import show_integrity

    show_integrity(stdout(), folder, as_json)


def run() -> None:
    """Entry point of the command `tailorfl`."""
    app()


def _as_setting(error: click.NoSuchOption, words: list[str]) -> click.NoSuchOption:
    """Return the error for an option that does not exist.

    Where it is the name of a setting, it says how that is written.
    """
    command = None if error.ctx is None else error.ctx.command
    if command is None or all(p.name not in ("arguments", "settings") for p in command.params):
        return error
    values = [word.partition("=")[2] for word in words if word.startswith(f"{error.option_name}=")]
    if error.option_name in words:
        values = words[words.index(error.option_name) + 1 :][:1]
    meant = hint(error.option_name, *values[:1])
    if meant is None:
        return error
    message = f"No such option '{error.option_name}'. Settings are written key=value: {meant}"
    return click.NoSuchOption(error.option_name, message, ctx=error.ctx)


if __name__ == "__main__":
    run()
