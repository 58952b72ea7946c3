"""The command `tailorfl landscape`: the loss around trained models, as a picture and as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tailorfl.cli.arguments import Imports
from tailorfl.cli.listing import AsJson
from tailorfl.cli.screen import print_json, say, stdout


def command(
    folder: Annotated[Path, typer.Argument(help="Result folder of an experiment.")],
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="global (the default) or a client's number; three of them: the plane through them."
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Label of the line; by default the first.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the job; by default the first.")] = None,
    part: Annotated[str, typer.Option(help="Samples: train, val or local (the own test part).")] = "train",
    radius: Annotated[float, typer.Option(help="Reach of the grid, in norms of the weights.")] = 1.0,
    points: Annotated[int, typer.Option(help="Places along each direction.")] = 21,
    samples: Annotated[int, typer.Option(help="At most so many samples.")] = 1000,
    out: Annotated[Path, typer.Option("--out", "-o", help="The PNG file; numbers go beside it.")] = Path(
        "landscape.png"
    ),
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """Draw the loss around a model of a run, or on the plane through three of them."""
    from typing import Any, cast

    from tailorfl.experiments.landscape import landscape

    found = landscape(
        folder,
        tuple(model or ("global",)),
        method=method,
        seed=seed,
        part=cast(Any, part),
        radius=radius,
        points=points,
        samples=samples,
    )
    files = found.write(out)
    if as_json:
        numbers = {"a": found.a.tolist(), "b": found.b.tolist(), "loss": found.loss.tolist()}
        print_json({"title": found.title, **numbers, "marks": found.marks, "files": [*map(str, files)]})
        return
    console = stdout()
    say(console, found.title)
    say(console, f"lowest {found.loss.min():.4g}, highest {found.loss.max():.4g}")
    written = ", ".join(map(str, files))
    say(console, f"written: {written}")
