"""The command `tailorfl claims`: what papers claim, and whether result folders confirm it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailorfl.cli.listing import AsJson
from tailorfl.cli.screen import PROSE, print_json, say, show_table, stderr, stdout
from tailorfl.errors import ConfigError

if TYPE_CHECKING:
    from tailorfl.experiments.claims.judging import Outcome

KEPT = Path("results/evidence")
"""Where a checkout of the project has what was kept of its runs."""


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
    as_json: AsJson = False,
) -> None:
    """Judge the claims of papers by result folders: holds, does not hold, undecided, not tested."""
    from tailorfl.experiments.claims.claim import chosen
    from tailorfl.experiments.claims.evidence import keep as keep_numbers
    from tailorfl.experiments.claims.folders import gathered
    from tailorfl.experiments.claims.judging import judge_paper, metrics_of
    from tailorfl.experiments.claims.words import line, page

    found = chosen(paper)
    if keep is not None and not runs:
        raise ConfigError("--keep keeps the numbers of result folders; name them with --runs FOLDER")
    evidence = gathered(runs or ([KEPT] if KEPT.is_dir() and any(KEPT.iterdir()) else []))
    outcomes = {name: (one, judge_paper(one, evidence)) for name, one in found.items()}
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
            say(stderr(), f"kept: {keep_numbers(one, keep, metrics_of(claims, one.recipe))}")
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
    from tailorfl.experiments.claims.words import basis, found, published, summary

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
