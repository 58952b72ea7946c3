"""The command `tailorfl pretrain`: a backbone trained in one place, as a file that experiments start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tailorfl.cli.arguments import Imports, Quiet, again, experiment, like_run
from tailorfl.cli.listing import AsJson
from tailorfl.cli.screen import print_json, say, stdout
from tailorfl.cli.state import State
from tailorfl.errors import ConfigError
from tailorfl.printable import quoted


def command(
    ctx: typer.Context,
    arguments: Annotated[
        list[str] | None, like_run("its rounds are epochs, its clients and methods are not used")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The .safetensors file to write; by default runs/DATA-MODEL.safetensors."),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the pretraining of this file.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    quiet: Quiet = False,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Train a backbone on a labelled data set in one place, for model.weights of experiments."""
    if resume is not None and (arguments or out is not None or overwrite):
        raise ConfigError(
            "--resume continues a pretraining with the settings it was started with; leave out CONFIG, KEY=VALUE, "
            "--out and --overwrite, or start a new one without --resume"
        )
    config = None if resume else experiment(arguments)

    from tailorfl.cli.epochs import watcher  # from here on torch is needed, which takes a second to import
    from tailorfl.runs.build import check
    from tailorfl.runs.pretrain import central, default_file, experiment_of, pretrain, running

    if config is not None:
        config = central(config)
        check(config)
        file = out if out is not None else default_file(config)
    else:
        assert resume is not None
        config, file = experiment_of(resume), resume
    state = ctx.ensure_object(State)
    state.under_way(running(file) / "config.yaml", f"tailorfl pretrain{again()} --resume {quoted(file)}")
    with watcher(Console(stderr=True), quiet=quiet) as watch:
        found = pretrain(config, file, resume=resume is not None, overwrite=overwrite, watch=watch)
    state.done()
    if as_json:
        print_json({"weights": str(found.weights), "report": str(found.report), "scalars": found.scalars})
        return
    for line in (
        f"weights: {found.weights} ({found.scalars:,} scalars)",
        f"report: {found.report}",
        f"start from them: model.weights={quoted(found.weights)}, with other classes also model.skip_head=true",
    ):
        say(stdout(), line)
