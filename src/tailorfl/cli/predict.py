"""The command `tailorfl predict`: what a client's model says of a file of new data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tailorfl.cli.arguments import Imports
from tailorfl.cli.screen import say, stdout


def command(
    folder: Annotated[Path, typer.Argument(help="Folder of one exported model, or a result folder.")],
    data: Annotated[Path, typer.Option(help="A table, a folder of images or one image, or JSON lines.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The CSV file to write.")] = Path(
        "predictions.csv"
    ),
    client: Annotated[
        str | None,
        typer.Option(help="Of a result folder: whose model, a client's name or number, or global."),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Label of the line; by default the first.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the job; by default the first.")] = None,
    steps: Annotated[int | None, typer.Option(help="Batches that held-out clients train on before.")] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option(
            "--id", metavar="COLUMN", help="A column of the table to keep; may be given several times."
        ),
    ] = None,
    imports: Imports = None,
) -> None:
    """Write what a trained model says of new data: classes with probabilities, numbers, or risks."""
    from tailorfl.export.predict import predict, write_predictions

    found = predict(folder, data, client=client, method=method, seed=seed, steps=steps, ids=ids or ())
    write_predictions(found, out)
    say(stdout(), f"{len(found)} rows: {out}")
