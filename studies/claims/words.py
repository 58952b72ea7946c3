"""Outcomes in words: cells of tables, a section of a report, the page results/claims.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from studies.claims.claim import Claim, Paper, papers
from studies.claims.evidence import of_results
from studies.claims.judging import Outcome, Status, judge_paper
from tailorfl.report.tables import Table

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult

STATUSES: tuple[Status, ...] = (
    "holds",
    "holds in sign",
    "does not hold",
    "reversed",
    "undecided",
    "reproduced",
    "not reproduced",
    "not tested at this scale",
    "not tested",
    "elsewhere",
    "not run",
    "impossible",
)
PLURAL = {"holds": "hold", "holds in sign": "hold in sign", "does not hold": "do not hold"}
"""Statuses that read otherwise of several claims."""
JUDGED = STATUSES[: STATUSES.index("not tested at this scale")]
"""Verdicts on the paper itself."""
NOTE = (
    "Verdicts on the paper's own claims from paired seeds, in points: first minus second with its 95 % interval, in "
    "which is the noise of the test set, too. docs/evidence.md says how they are made."
)
INTRODUCTION = (
    "Made by `python -m studies.claims --write results/claims.md` from the numbers in `results/evidence`, which were "
    "kept from the result folders of recipes by `python -m studies.claims --runs FOLDER --keep results/evidence`. [How "
    "claims are judged](../docs/evidence.md). Differences are in points (of errors and distances in units of their "
    "own), first minus second, with 95 % intervals. `not run`: there are no results yet. "
    "`not tested`: a gate failed, so the comparison does not count whatever it says. `not tested at this scale`: the "
    "setting is not the paper's, so nothing is said of the paper; what the run shows stands beside it. "
    "[What changed, and by which rule](claims-changes.md)."
)
APART = {
    "twin": "read in another way",
    "trivial": "could hardly be otherwise",
    "print": "whether printed numbers agree with one another",
    "formula": "formulas and counts",
}
"""What is counted apart, in words."""
HEAD = ("Claim", "What the paper says", "Published", "Found", "Verdict")


def number(claim: Claim, value: float, sign: str = "+") -> str:
    """Return a difference in points, or of what is no share as it is."""
    return f"{100 * value:{sign}.1f}" if claim.points else f"{value:{sign}.2g}"


def published(outcome: Outcome) -> str:
    """Return the published gap, or the number that the difference may be at most."""
    claim = outcome.claim
    if claim.kind == "at least":
        gaps = [claim.gap_to(second) for second in ([outcome.against] if outcome.against else claim.second)]
        return number(claim, min(gaps, default=claim.gap))
    return {
        "at most": f"≤ {number(claim, claim.gap, '')}",
        "sign": "> 0",
        "ordered": "an order",
        "cells": f"{len(claim.published)} number{'s' * (len(claim.published) != 1)}",
        "exact": "exact",
    }[claim.kind]


def found(outcome: Outcome) -> str:
    """Estimate and interval; for an order what share of its pairs stands in it, and Kendall's τ."""
    claim, judged, order = outcome.claim, outcome.judged, outcome.order
    if judged is None:
        return ""
    if order is not None:
        return (
            f"{order.in_order:.0%} of {len(order.pairs)} pairs, {order.backwards} reversed; "
            f"τ {order.tau:.2f} (p {order.tau_p:.2f})"
        )
    if claim.kind == "cells":
        noise = number(claim, (judged.high - judged.low) / 2, "")
        return f"farthest {outcome.against}: {number(claim, judged.estimate)} (noise ± {noise})"
    if math.isinf(judged.low) or math.isnan(judged.low):
        return "" if math.isnan(judged.estimate) else f"{number(claim, judged.estimate)} (no interval)"
    low, high = number(claim, judged.low), number(claim, judged.high)
    return f"{number(claim, judged.estimate)} [{low}, {high}]"


def basis(outcome: Outcome) -> str:
    """Seeds, scale, against whom, and what an undecided one lacks."""
    judged = outcome.judged
    if judged is None:
        return ""
    said = [f"{judged.seeds} seed{'s' * (judged.seeds != 1)}", outcome.scale, f"p {outcome.holm:.2g} (Holm)"]
    if len(outcome.claim.second) > 1:
        said.insert(0, f"against {outcome.against}")
    if outcome.status == judged.verdict == "undecided":
        said.append(
            f"decided by {judged.needed} seeds" if judged.needed else "no number of seeds would decide"
        )
    return ", ".join(one for one in said if one and not one.startswith("p nan"))


def line(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain values, for JSON."""
    judged, claim = outcome.judged, outcome.claim
    numbers = (
        {}
        if judged is None
        else {
            "estimate": judged.estimate,
            "low": judged.low,
            "high": judged.high,
            "p": judged.p_value,
            "p_against": judged.p_against,
            "p_holm": outcome.holm,
            "seeds": judged.seeds,
            "needed": judged.needed,
        }
    )
    return {
        "claim": claim.id,
        "text": claim.text,
        "source": claim.source,
        "kind": claim.kind,
        "recipe": claim.recipe,
        "scale": outcome.scale,
        "published": published(outcome),
        "apart": claim.apart,
        "verdict": outcome.status,
        "shown": outcome.shown,
        "unlike": outcome.elsewhere,
        "against": outcome.against,
        **numbers,
        "why": list(outcome.why),
    }


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many statements there are of each status, and what is counted apart: `3 hold, ...`."""
    parts = []
    for apart in ("", *APART):
        some = [outcome for outcome in outcomes if outcome.claim.apart == apart]
        if some:
            said = _numbered(outcome.status for outcome in some)
            parts.append(f"{len(some)} {APART[apart]} ({said})" if apart else said)
    return "; ".join(parts)


def headline(outcomes: Mapping[str, tuple[Paper, Sequence[Outcome]]]) -> str:
    """How many statements hold where the paper's setting was run, and what became of each paper's central ones."""
    stated = [o for _, some in outcomes.values() for o in some if not o.claim.apart]
    tested = [o for o in stated if o.judged is not None and o.status in JUDGED]
    of_cells = [o.status for o in tested if o.claim.kind == "cells"]
    compared = [o.status for o in tested if o.claim.kind != "cells"]
    shown = [o.shown for o in stated if o.shown is not None]
    central = [
        f"{paper.title}: {_numbered(o.status for o in some if o.claim.central)}"
        for paper, some in outcomes.values()
        if any(o.claim.central for o in some)
    ]
    return (
        f"**Of {len(stated)} statements {len(compared)} were measured in the paper's setting: {_numbered(compared)}.** "
        f"Published numbers, {len(of_cells)} groups of them: {_numbered(of_cells)}. {len(shown)} statements were "
        f"measured in another setting alone, which tests no paper ({_numbered(shown)} there). Central claims: "
        f"{'; '.join(central)}. What is marked in brackets is counted apart: "
        f"{', '.join(f'[{name}] {text}' for name, text in APART.items())}."
    )


def _numbered(statuses: Iterable[Status]) -> str:
    counts = Counter(statuses)
    many = {status: status if counts[status] == 1 else PLURAL.get(status, status) for status in counts}
    return ", ".join(f"{counts[status]} {many[status]}" for status in STATUSES if status in counts)


def row(outcome: Outcome) -> tuple[str, str, str, str, str]:
    """Return the cells of an outcome, as `HEAD` names them."""
    claim = outcome.claim
    shown = () if outcome.shown is None else (outcome.elsewhere, f"the run here: {outcome.shown}")
    verdict = "; ".join(
        filter(None, (outcome.status, *shown, *outcome.why, claim.note if outcome.judged else ""))
    )
    cell = "; ".join(part for part in (found(outcome), basis(outcome)) if part)
    text = f"{claim.text} ({claim.source})"
    return claim.id, text if not claim.apart else f"[{claim.apart}] {text}", published(outcome), cell, verdict


def sections(result: ExperimentResult) -> list[Table]:
    """Return what a report says of the claims about its experiment.

    Nothing where there are none, or no seeds to judge by.
    """
    config = result.config
    recipe, _, variant = config.name.partition(", ")
    about = papers(recipe)
    if not about:
        return []
    evidence = [of_results({variant: result}, config.model_copy(update={"name": recipe}), result.path)]
    rows = [
        row(outcome)
        for paper in about.values()
        for outcome in judge_paper(paper, evidence, only=recipe)
        if outcome.status not in ("elsewhere", "not run", "impossible") and outcome.claim.kind != "exact"
    ]
    return [Table.of("Claims of the paper", HEAD, rows, NOTE)] if rows else []


def page(outcomes: Mapping[str, tuple[Paper, Sequence[Outcome]]]) -> str:
    """Return the Markdown page of all papers."""
    lines = [
        "# Claims of the papers, and what became of them",
        "",
        INTRODUCTION,
        "",
        headline(outcomes),
    ]
    for paper, some in outcomes.values():
        lines += ["", f"## {paper.title}", "", f"{len(some)} claims: {summary(some)}.", ""]
        lines += [f"| {' | '.join((*HEAD, 'Recipe'))} |", "| --- | --- | --- | --- | --- | --- |"]
        for outcome in some:
            where = outcome.claim.recipe or outcome.claim.test or outcome.claim.check
            cells = [cell.replace("|", "\\|") for cell in (*row(outcome), f"`{where}`" if where else "")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
