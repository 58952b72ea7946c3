"""The commands `tailorfl export` and `predict`: models as folders that need no tailorfl, and their answers."""

from __future__ import annotations

from pathlib import Path

from tailorfl.cli.arguments import Imports, Label, ResultFolder, Seed
from tailorfl.cli.screen import say, stdout


def export_command(
    folder: ResultFolder,
    out: Path,
    client: list[str] | None = None,
    everyone: bool = False,
    shared: bool = False,
    method: Label = None,
    seed: Seed = None,
    steps: int | None = None,
    merge: bool = False,
    onnx: bool = False,
    torchscript: bool = False,
    license_id: str = "unknown",
    push: str | None = None,
    overwrite: bool = False,
    imports: Imports = None,
) -> None:
    """Write trained models so that plain PyTorch loads them: weights, code, labels, scaling, metrics, origin.

    Args:
        out (MODELS): Folder for the models, each in a folder of its name.
        client (NAME): Whose model: a client's name or number; more than once for several.
        everyone (--all): The models of all clients.
        shared (--global): The global model.
        steps: Batches that held-out clients train on before; by default the most that were evaluated.
        merge: LoRA added to the weights of its base.
        onnx: Write ONNX too (extra export).
        torchscript: Write TorchScript too.
        license_id (--license): The licence that the model card states, as the Hugging Face hub names it.
        push (--push, OWNER/NAME): Upload the model to this repository of the hub, private if it is new.
        overwrite: Replace exports of these names.
    """
    from tailorfl.export.folder import export

    models = export(
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
        license_id=license_id,
        overwrite=overwrite,
    )
    console = stdout()
    for model in models:
        for form, worst in model.off.items():
            say(console, f"{model.path / form}: same outputs as in the run (largest difference {worst:.1g})")
    say(console, "\nLoad it without tailorfl:\n")
    for line in models[0].lines.splitlines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if push is not None:
        from tailorfl.export.model_card import upload

        say(console, f"\nuploaded: {upload({model.path: model.facts for model in models}, push)}")


def predict_command(
    folder: Path,
    data: Path,
    out: Path = Path("predictions.csv"),
    client: str | None = None,
    method: Label = None,
    seed: Seed = None,
    steps: int | None = None,
    ids: list[str] | None = None,
    imports: Imports = None,
) -> None:
    """Write what a trained model says of new data: classes with probabilities, numbers, or risks.

    Args:
        folder (RESULTS): A result folder, or the folder of one exported model.
        data (--data, DATA): A table, a folder of images or one image, or JSON lines.
        out (FILE): The CSV file to write.
        client (NAME): Of a result folder: whose model, a client's name or number, or global.
        steps: Batches that held-out clients train on before.
        ids (--id, COLUMN): A column of the table to keep; may be given several times.
    """
    from tailorfl.export.predict import predict, write_predictions

    rows = predict(folder, data, client=client, method=method, seed=seed, steps=steps, ids=ids or ())
    write_predictions(rows, out)
    say(stdout(), f"{len(rows)} rows: {out}")
