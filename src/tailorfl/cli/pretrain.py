"""The command `tailorfl pretrain`: a backbone trained in one place, as a file that experiments start from."""

from __future__ import annotations

from pathlib import Path

import typer

from tailorfl.cli.arguments import (
    Arguments,
    AsJson,
    Imports,
    Quiet,
    State,
    experiment,
    import_options,
    typed,
)
from tailorfl.cli.screen import print_json, say, stderr, stdout
from tailorfl.errors import ConfigError
from tailorfl.printable import quoted


def command(
    ctx: typer.Context,
    arguments: Arguments = None,
    out: Path | None = None,
    resume: Path | None = None,
    overwrite: bool = False,
    quiet: Quiet = False,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Train a backbone on a labelled data set in one place, for model.weights of experiments.

    Args:
        arguments: An experiment as for `tailorfl run`; its rounds are epochs, its clients and methods are not used.
        out (FILE): The .safetensors file to write; by default runs/DATA-MODEL.safetensors.
        resume (FILE): Continue the pretraining of this file.
        overwrite: Replace the file.
    """
    if resume is not None and (arguments or typed(ctx, "out", "overwrite")):
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
    continuation = f"tailorfl pretrain{import_options()} --resume {quoted(file)}"
    state.under_way(running(file) / "config.yaml", continuation)
    with watcher(stderr(), quiet=quiet) as watch:
        backbone = pretrain(config, file, resume=resume is not None, overwrite=overwrite, watch=watch)
    state.done()
    weights = backbone.weights
    if as_json:
        print_json({"weights": str(weights), "report": str(backbone.report), "scalars": backbone.scalars})
        return
    console = stdout()
    say(console, f"weights: {weights} ({backbone.scalars:,} scalars)")
    say(console, f"report: {backbone.report}")
    say(
        console,
        f"start from them: model.weights={quoted(weights)}, with other classes also model.skip_head=true",
    )
