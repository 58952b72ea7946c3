"""`python -m studies.claims`: what papers claim, and whether result folders confirm it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from studies.claims.claim import chosen
from studies.claims.evidence import keep as keep_numbers
from studies.claims.folders import gathered, keep_records
from studies.claims.judging import Outcome, judge_paper, metrics_of
from studies.claims.words import basis, found, line, page, published, sections, summary
from studies.program import program, run
from tailorfl.cli.arguments import AsJson
from tailorfl.cli.screen import PROSE, print_json, say, show_table, stderr, stdout
from tailorfl.errors import ConfigError
from tailorfl.report.document import write_report
from tailorfl.report.result import ExperimentResult

app = program()
KEPT = Path("results/evidence")
"""Where a checkout of the project has what was kept of its runs."""


@app.command()
def command(
    paper: Annotated[
        str | None,
        typer.Argument(help="One of the papers, such as perada; by default all.", show_default=False),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--runs",
            metavar="FOLDER",
            help="Result folder of a recipe, or a folder of such; may be given again. By default results/evidence.",
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write all as a Markdown page.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FOLDER",
            help="Keep the numbers of the runs there, a folder a recipe and scale.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the report of this result folder with the claims about its recipe, and judge nothing else.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Judge the claims of papers by result folders: holds, does not hold, undecided, not tested."""
    if report is not None:
        files = write_report(ExperimentResult.load(report), further=sections)
        say(stdout(), f"written: {', '.join(map(str, files))}")
        return
    judged_papers = chosen(paper)
    if keep is not None and not runs:
        raise ConfigError("--keep keeps the numbers of result folders; name them with --runs FOLDER")
    evidence = gathered(runs or ([KEPT] if KEPT.is_dir() and any(KEPT.iterdir()) else []))
    outcomes = {name: (one, judge_paper(one, evidence)) for name, one in judged_papers.items()}
    if not evidence:
        say(
            stderr(),
            f"No results were given, and {KEPT} is not in this folder, so no claim that needs runs is judged. The "
            "project's repository has the numbers of its runs there: call this in a clone of it, or with "
            f"--runs CLONE/{KEPT}. Results of your own are named with --runs FOLDER.",
        )
    if keep is not None:
        claims = [claim for one in chosen(None).values() for claim in one.claims]
        for one in evidence:
            place = keep_numbers(one, keep, metrics_of(claims, one.recipe))
            keep_records(one, place, [claim for claim in claims if claim.recipe == one.recipe])
            say(stderr(), f"kept: {place}")
    if write is not None:
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(page(outcomes), encoding="utf-8")
    if as_json:
        print_json([{"paper": name, **line(one)} for name, (_, some) in outcomes.items() for one in some])
        return
    out = stdout()
    for paper_, some in outcomes.values():
        _show(out, paper_.title, some)


def _show(console: Console, title: str, outcomes: Sequence[Outcome]) -> None:
    table = Table(title=Text(title), show_lines=True)
    table.add_column("Claim")
    table.add_column("What the paper says", ratio=PROSE)
    table.add_column("Verdict", ratio=PROSE)
    for outcome in outcomes:
        said: list[str] = [outcome.status]
        if outcome.judged is not None:
            said += [found(outcome), f"published {published(outcome)}", basis(outcome)]
        text = f"{outcome.claim.text} ({outcome.claim.source})"
        table.add_row(
            Text(outcome.claim.id), Text(text), Text("\n".join(filter(None, [*said, *outcome.why])))
        )
    show_table(console, table)
    say(console, f"{len(outcomes)} claims: {summary(outcomes)}")


if __name__ == "__main__":
    run(app)
