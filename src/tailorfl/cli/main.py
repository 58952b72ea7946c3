"""The command `tailorfl`: parse, call, print. Heavy packages are imported only by the commands that need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

import tailorfl
from tailorfl.cli import advice, data, deploy, listing, reports, theory, tune, watching
from tailorfl.cli import run as runs
from tailorfl.cli.arguments import State, documented, hint
from tailorfl.cli.screen import remark, stderr
from tailorfl.errors import TailorflError, nearest
from tailorfl.runs.process import Terminated, as_library_error, ended_in_order, why

INTERRUPTED = 130
"""Exit code of a process stopped by Ctrl-C, as in shells."""


class Commands(TyperGroup):
    """The group of all commands; the only place where errors become messages and exit codes."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command with the help of its arguments, which newer versions of click take from typer's."""
        command = super().get_command(ctx, cmd_name)
        hints = getattr(getattr(command, "callback", None), "__annotations__", {})
        for parameter in () if command is None else command.params:
            if isinstance(parameter, click.Argument):
                parameter.help = hints[parameter.name].__metadata__[0].help
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; raises click's UsageError, with the nearest command, if there is none."""
        try:
            return click.Group.resolve_command(self, ctx, args)
        except click.UsageError as error:
            # Newer versions of click make suggestions, older ones do not.
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
        words = [*ctx._protected_args, *ctx.args]  # the command's arguments, for messages
        try:
            with as_library_error(), ended_in_order():
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
                message += f"; continue with: {state.resume_command}"
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
COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Start": {"run": runs.command, "list": listing.list_command, "show": listing.show_command},
    "Compare": {
        "compare": runs.command,
        "reproduce": runs.reproduce,
        "tune": tune.command,
        "report": reports.report,
        "gains": reports.gains,
    },
    "Own data": {
        "data": data.app,
        "export": reports.export_command,
        "predict": reports.predict_command,
        "unlearn": runs.unlearn_command,
    },
    "Real federation": {"deploy": deploy.app, "server": deploy.server, "client": deploy.client},
    "Look": {"watch": watching.watch, "board": watching.board, "check": reports.check},
    "Advanced": {
        "advise": advice.advise_command,
        "theory": theory.app,
        "pretrain": runs.pretrain_command,
        "bench": advice.bench_command,
    },
}
"""Group of the help -> its commands by name."""
HELP = {
    "run": "Run an experiment: one method (Ditto if none is named), or all that its file names.",
    "compare": "Compare several methods fairly: same data, same seeds, one table with plots.",
}
"""Help of the two commands that share a function."""
documented(runs.command)
for group, commands in COMMANDS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, cls=Commands, rich_help_panel=group)
        else:
            described = command if name in HELP else documented(command)
            app.command(name, help=HELP.get(name), rich_help_panel=group)(described)


def _version(is_wanted: bool) -> None:
    if is_wanted:
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


def run() -> None:
    """Entry point of the command `tailorfl`."""
    app()


def _as_setting(error: click.NoSuchOption, words: list[str]) -> click.NoSuchOption:
    """Return the error for an option that does not exist.

    If it is the name of a setting, the error shows the setting's syntax.
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
