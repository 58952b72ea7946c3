"""The commands that read result folders: `tailorfl report`, `gains`, `check`, `export` and `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tailorfl.cli.arguments import AsJson, Imports, Label, ResultFolder, Seed, only_result
from tailorfl.cli.screen import fits, print_json, say, show_table, stderr, stdout
from tailorfl.errors import ConfigError, RunError
from tailorfl.printable import quoted

if TYPE_CHECKING:
    from tailorfl.report.matrix import Matrix
    from tailorfl.report.result import ExperimentResult

GAINS = 5
"""Columns of `gains` that are always shown: client, method, test samples, metric and gain."""


def report(
    folders: list[Path],
    out: Path | None = None,
    target: float | None = None,
    latex: Path | None = None,
    columns: str | None = None,
    pdf: Path | None = None,
    csv: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Print the table of an experiment, or of several together, and write its report: a page, plots, report.md.

    Args:
        folders (RESULTS...): Result folder of an experiment, or several.
        out (RESULTS|FILE.html): A folder for the report, or a file for the page alone; needed to merge several.
        target: Also print the rounds and the traffic until the mean metric reaches this value, such as 0.9.
        latex (FILE): Also write the table for LaTeX (booktabs).
        columns (NAME,...): The columns of the LaTeX table, by their names in comparison.csv: mean,worst10,bytes.
        pdf (PICTURES): Also write the pictures as PDF, into this folder.
        csv (FILE): Also write the table's plain numbers, not rounded.
    """
    from tailorfl.cli.results import result_lines, show_matrix, show_result
    from tailorfl.report.document import latex as latex_of
    from tailorfl.report.document import write_report
    from tailorfl.report.page.page import page
    from tailorfl.report.progress import messages
    from tailorfl.report.tables import csv as csv_of

    keys = [] if columns is None else columns.split(",")
    if keys and latex is None:
        raise ConfigError("--columns chooses columns of the LaTeX table; add --latex FILE")
    page_file = out if out is not None and out.suffix.lower() == ".html" else None
    with messages(stderr()):
        federations = None if out is None else _federations(folders)
        results = {} if federations is not None else _results(folders, out, page_file)
    if federations is not None and out is not None:
        if keys or target is not None:
            raise ConfigError(
                "--columns and --target are for the table of one experiment; leave them out for several federations"
            )
        written = _write_matrix(federations, out, page_file, latex, csv, pdf)
        if as_json:
            print_json(federations.rows)
            return
        show_matrix(stdout(), federations.displayed)
        say(stdout(), f"report: {', '.join(map(str, written))}")
        return
    if files := [file for file in (page_file, latex, csv, pdf) if file is not None]:
        only_result(folders[0], results, f", which one file ('{files[0]}') cannot hold")
    lines = []
    for name, result in results.items():
        texts = {} if page_file is None else {page_file: page(result, target)}
        written = write_report(result, target) if page_file is None else []
        if latex is not None:
            texts[latex] = latex_of(result, keys)
        if csv is not None:
            texts[csv] = csv_of(result.table, result.columns)
        written += _write(texts)
        if pdf is not None:
            written += result.plot(pdf, ".pdf")
        if as_json:
            lines += result_lines(name, result)
            continue
        show_result(result, target)
        say(stdout(), f"report: {', '.join(map(str, written))}")
    if as_json:
        print_json(lines)


def _write(texts: dict[Path, str]) -> list[Path]:
    from tailorfl.runs.files import write_text

    for file, text in texts.items():
        write_text(file, text)
    return list(texts)


def _results(
    folders: Sequence[Path], out: Path | None, page_file: Path | None
) -> dict[str, ExperimentResult]:
    """Return the results of folders by name of the variant, merged over folders."""
    from tailorfl.report.merging import merge
    from tailorfl.report.result import results

    if len(folders) > 1 and out is None:
        raise ConfigError(
            f"a report of {len(folders)} result folders needs --out; use --out RESULTS or --out FILE.html"
        )
    if out is None or (len(folders) == 1 and page_file is not None):
        return results(folders[0])
    return dict(merge(folders, out if page_file is None else None))


def _federations(folders: Sequence[Path]) -> Matrix | None:
    """Return the matrix of folders, or of a folder's variants, with different data; None if all have the same."""
    from tailorfl.report.matrix import by_federation, matrix
    from tailorfl.report.result import results

    parts = [results(folder) for folder in folders]
    if len(folders) > 1 and any(list(part) != [""] for part in parts):
        return None
    by_folder = {result.path: result for part in parts for result in part.values()}
    groups = by_federation(by_folder)
    return matrix(by_folder, groups) if len(groups) > 1 else None


def _write_matrix(
    federations: Matrix,
    out: Path,
    page_file: Path | None,
    latex: Path | None,
    csv: Path | None,
    pdf: Path | None,
) -> list[Path]:
    """Write the page of several federations; into a folder also its table, diagram and numbers."""
    from tailorfl.report.matrix import draw
    from tailorfl.report.page.page import matrix_page
    from tailorfl.settings.loading import load

    # A folder of variants has no report of its own.
    if page_file is None and (file := out / "config.yaml").is_file() and not load(file).variants:
        raise ConfigError(
            f"'{out}' already holds an experiment, and the page of several federations would replace its report; "
            "choose another --out"
        )
    displayed = federations.displayed
    texts = {out if page_file is not None else out / "report.html": matrix_page(displayed)}
    if page_file is None:
        _made(out)
        texts |= {out / "matrix.csv": federations.csv, out / "matrix.tex": displayed.latex}
    texts |= {file: displayed.latex for file in (latex,) if file is not None}
    texts |= {file: federations.csv for file in (csv,) if file is not None}
    written, diagram = _write(texts), displayed.picture("nemenyi")
    if diagram is not None:
        pictures = [out / "ranks.png"] if page_file is None else []
        pictures += [] if pdf is None else [_made(pdf) / "ranks.pdf"]
        for picture in pictures:
            draw(diagram, picture)
        written += pictures
    return written


def _made(folder: Path) -> Path:
    """Create a folder, which may exist already, and return it."""
    from tailorfl.runs.files import reporting

    with reporting(folder, "create the folder"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def gains(
    folder: ResultFolder,
    client: list[str] | None = None,
    method: list[str] | None = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Show what every client gains from each method over LocalTrain, by its name, with intervals.

    Args:
        client (NAME): A client's name; may be repeated. By default all.
        method (LABEL): Label of a method; may be repeated. By default all.
    """
    from tailorfl.report.clients import clients_of
    from tailorfl.report.progress import messages
    from tailorfl.report.result import results

    with messages(stderr()):
        result = only_result(folder, results(folder))
    names = {} if as_json else result.display_names
    clients = clients_of(
        result if as_json else result.displayed,
        seed,
        methods=[names.get(label, label) for label in method or ()],
        clients=client or (),
    )
    if as_json:
        print_json([line.to_dict() for line in clients.lines])
        return
    table, console = clients.table, stdout()
    least, most = GAINS, len(table.head)
    count = next(
        (n for n in range(most, least, -1) if fits(table.pick(range(n)).rich(), console.width)), least
    )
    show_table(console, table.pick(range(count)).rich())
    if count < most:
        say(console, f"further columns are in --json: {', '.join(table.head[count:])}", style="dim")
    for note in clients.notes:
        say(console, note, style="dim")
    if len(clients.seeds) > 1:
        seeds = ", ".join(map(str, clients.seeds))
        say(console, f"Numbers are for seed {clients.seed}; --seed chooses another of {seeds}.", style="dim")


def check(folder: ResultFolder, as_json: AsJson = False) -> None:
    """Check that every file of a result folder is present and unchanged."""
    from tailorfl.runs.folders import experiment_in, status_sentence
    from tailorfl.runs.job import job_problems, jobs_of

    status = status_sentence(folder)
    problems_of = {name: job_problems(path) for name, path in jobs_of(folder, experiment_in(folder))}
    jobs = [
        {"job": name, "damaged": any(bad for bad, _ in problems), "problems": [text for _, text in problems]}
        for name, problems in problems_of.items()
    ]
    damaged = sum(bool(job["damaged"]) for job in jobs)
    if as_json:
        print_json({"experiment": status, "damaged": damaged, "jobs": jobs})
    else:
        if status:
            say(stdout(), f"experiment: {status}")
        for name, problems in problems_of.items():
            say(stdout(), f"{name}: {'; '.join(text for _, text in problems) or 'whole'}")
    if damaged:
        raise RunError(
            f"{damaged} jobs of '{folder}' are damaged; restore them from a copy, or run them again with --resume "
            f"{quoted(folder)} (first move away the folders of unfinished ones)"
        )


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
        client (NAME): The client whose model to export, by name or number; may be repeated.
        everyone (--all): Export the models of all clients.
        shared (--global): Export the global model.
        steps: Batches on which held-out clients train first; by default the largest evaluated number.
        merge: Add LoRA to the weights of its base.
        onnx: Write ONNX too (extra export).
        torchscript: Write TorchScript too.
        license_id (--license): The licence that the model card states, as the Hugging Face hub names it.
        push (--push, OWNER/NAME): Upload the model to this repository of the hub, private if it is new.
        overwrite: Replace exports of these names.
    """
    from tailorfl.export.folder import export
    from tailorfl.report.progress import messages

    with messages(stderr()):
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
    """Write a trained model's predictions for new data: classes with probabilities, numbers, or risks.

    Args:
        folder (RESULTS): A result folder, or the folder of one exported model.
        data (--data, DATA): A table, a folder of images or one image, or JSON lines.
        out (FILE): The CSV file to write.
        client (NAME): For a result folder: the client whose model to apply, by name or number, or global (with several
            architectures global-ARCHITECTURE).
        steps: Batches on which held-out clients train first.
        ids (--id, COLUMN): A column of the table to keep; may be repeated.
    """
    from tailorfl.export.predict import predict, write_predictions
    from tailorfl.report.progress import messages

    if out.resolve() == data.resolve():
        raise ConfigError(f"the predictions would replace the data in '{data}'; choose another file (-o)")
    with messages(stderr()):
        rows = predict(folder, data, client=client, method=method, seed=seed, steps=steps, ids=ids or ())
    write_predictions(rows, out)
    say(stdout(), f"{len(rows)} rows: {out}")
