"""The command `tailorfl unlearn`: an experiment as if a client had never been in it, with a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailorfl.cli.arguments import Imports, Quiet, ResultFolder, State, import_options
from tailorfl.cli.screen import make_table, say, show_table, stderr, stdout
from tailorfl.printable import quoted
from tailorfl.settings.names import slug

if TYPE_CHECKING:
    from tailorfl.runs.unlearning import Unlearning


def command(
    ctx: typer.Context,
    folder: ResultFolder,
    client: Annotated[str, typer.Option()],
    out: Path | None = None,
    dry_run: bool = False,
    imports: Imports = None,
    quiet: Quiet = False,
) -> None:
    """Replay finished results without a client, exactly, and certify it.

    Of a federation of real machines it writes the experiment that the remaining clients train anew; once they have,
    the same command certifies it.

    Args:
        client (NAME): The client's name or number.
        out (RESULTS): New result folder; by default RESULTS-without-NAME. The same command continues it.
        dry_run: Show how many rounds have to be replayed, and what they took; train nothing.
    """
    from tailorfl.cli.results import show_result
    from tailorfl.deploy.experiment import is_deployed, plan_unlearning
    from tailorfl.report.experiment import run_experiment
    from tailorfl.report.progress import messages, observer
    from tailorfl.runs.extension import resumed
    from tailorfl.runs.job import Several
    from tailorfl.runs.tuned import NAME as TUNING
    from tailorfl.runs.unlearning import NAME, CertificateWriter, plan

    with messages(stderr()):
        unlearning = (plan_unlearning if is_deployed(folder) else plan)(folder, client)
    if dry_run:
        _show_plan(unlearning)
        return
    out = folder.with_name(f"{folder.name}-without-{slug(unlearning.name)}") if out is None else out
    if unlearning.is_deployed:
        _by_remaining_clients(unlearning, out)
        return
    config, way = resumed(out, unlearning.without(out))
    unlearning.write_traces(out)
    state, tuning = ctx.ensure_object(State), folder / TUNING
    again = (
        f"tailorfl unlearn{import_options()} {quoted(folder)} --client {quoted(client)} --out {quoted(out)}"
    )
    state.under_way(out / "config.yaml", again)
    with observer(stderr(), config, quiet=quiet) as watch:
        result = run_experiment(
            config,
            out,
            way=way,
            observer=Several((watch, CertificateWriter(unlearning))),
            tuning=tuning if tuning.is_file() else None,
            backend=unlearning.backend,
        )
    state.done()
    show_result(result)
    say(
        stdout(),
        f"'{unlearning.name}' is unlearned: {unlearning.rounds:,} rounds were replayed without it, and {out / NAME} "
        f"certifies it. Delete {quoted(folder)}, which still holds its share.",
    )


def _by_remaining_clients(unlearning: Unlearning, out: Path) -> None:
    """Write the experiment that the clients of a deployment train anew, or certify what they have trained."""
    from tailorfl.deploy.experiment import certify, experiment_without
    from tailorfl.runs.files import write_text
    from tailorfl.runs.unlearning import NAME

    if (out / "config.yaml").is_file():
        certify(unlearning, out)
        say(
            stdout(),
            f"'{unlearning.name}' is unlearned: the remaining clients trained anew without it, and {out / NAME} "
            f"certifies it. Its share is still in {quoted(unlearning.folder)}, and at every client in "
            f"STATE/{slug(unlearning.config.name)}; delete these, but keep STATE/left.jsonl.",
        )
        return
    file = out.with_name(f"{out.name}.yaml")
    write_text(file, experiment_without(unlearning).to_yaml(brief=True))
    say(
        stdout(),
        f"The samples are with the clients, so they train anew without '{unlearning.name}'. Give them {quoted(file)}, "
        "which they accept as they did the first experiment, and start the server with its --listen and --keys:\n"
        f"tailorfl server {quoted(file)} --out {quoted(out)}\n"
        "Once it has finished, the same tailorfl unlearn command writes the certificate.",
    )


def _show_plan(unlearning: Unlearning) -> None:
    """Print what a replay costs."""
    from tailorfl.report.tables import human_seconds

    rows = [
        (
            replay.job.name,
            replay.rounds,
            len(replay.asked),
            replay.asked[0] if replay.asked else "none",
            human_seconds(replay.seconds),
        )
        for replay in unlearning.replays
    ]
    heads = ("job", "rounds to replay", "rounds with the client", "first of them", "took")
    table = make_table(None, heads, rows)
    show_table(stdout(), table)
    seconds = human_seconds(sum(replay.seconds for replay in unlearning.replays))
    say(
        stdout(),
        f"To unlearn '{unlearning.name}', {unlearning.rounds:,} rounds have to be replayed; the run took {seconds}.",
    )
