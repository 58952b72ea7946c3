"""The command `tailorfl export`: models as folders that need no tailorfl."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tailorfl.cli.arguments import Imports
from tailorfl.cli.screen import say, stdout


def command(
    folder: Annotated[Path, typer.Argument(help="Result folder of an experiment.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the models, each in one of its name.")],
    client: Annotated[
        list[str] | None,
        typer.Option(help="Whose model: a client's name or number; more than once for several."),
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="The models of all clients.")] = False,
    shared: Annotated[bool, typer.Option("--global", help="The global model.")] = False,
    method: Annotated[str | None, typer.Option(help="Label of the line; by default the first.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the job; by default the first.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Batches that held-out clients train on before; by default the most that were evaluated."
        ),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="LoRA added to the weights of its base.")] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write ONNX too (extra export).")] = False,
    torchscript: Annotated[bool, typer.Option("--torchscript", help="Write TorchScript too.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace exports of these names.")] = False,
    imports: Imports = None,
) -> None:
    """Write trained models so that plain PyTorch loads them: weights, code, labels, scaling, metrics, origin."""
    from tailorfl.export.folder import export

    found = export(
        folder,
        out,
        clients=client,
        everyone=everyone,
        shared=shared,
        method=method,
        seed=seed,
        steps=steps,
        merge=merge,
        onnx=onnx,
        torchscript=torchscript,
        overwrite=overwrite,
    )
    console = stdout()
    for one in found:
        off = ", ".join(f"{name} differs by {worst:.1g}" for name, worst in one.off.items())
        say(console, f"{one.path}: {off}")
    say(console, "\nIt is loaded, without tailorfl, by:\n")
    for line in found[0].lines.splitlines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
