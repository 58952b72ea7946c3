"""From claims and evidence to verdicts, with Holm's correction over the tests of a paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from studies.claims.claim import MINUS, Claim, Paper
from studies.claims.evidence import Evidence
from studies.claims.exact import CHECKS
from studies.claims.gates import failed
from studies.claims.verdicts import (
    Judged,
    Order,
    Verdict,
    judge,
    judge_at_most,
    judge_order,
    sampling_error,
)
from tailorfl.errors import MissingExtraError, unknown
from tailorfl.evaluation.ranks import LEVEL, holm

Status = Verdict | Literal["elsewhere", "not run", "impossible"]
WORST_FIRST: tuple[Verdict, ...] = ("reversed", "does not hold", "undecided", "holds in sign", "holds")
SCALES = ("paper", "small", "")
"""What is judged where several scales were run: the one nearest to the paper. A smoke says nothing."""
OWN_PARTS = ("val", "local", "participants")
TAILS = {"worst5": 0.05, "best5": 0.05, "worst10": 0.1, "best10": 0.1}


@dataclass(frozen=True)
class Outcome:
    """What was found of a claim.

    Attributes:
        claim: of which.
        status: the verdict; `elsewhere` where a study that writes no records judges it, `not run` without evidence,
            `impossible` where nothing here can tell.
        judged: the difference; None where there is none.
        order: the pairs of an ordered claim.
        against: of several, the method that the claim is judged against.
        holm: p-value after Holm's correction over the tests of the paper (or the claim's family), NaN without one.
        why: why it was not tested, or what else there is to say.
        scale: of the recipe.
    """

    claim: Claim
    status: Status
    judged: Judged | None = None
    order: Order | None = None
    against: str = ""
    holm: float = math.nan
    why: tuple[str, ...] = ()
    scale: str = ""


def judge_paper(paper: Paper, evidence: Sequence[Evidence], only: str | None = None) -> list[Outcome]:
    """Return the outcome of every claim of a paper, in order; of one recipe where `only` names it."""
    claims = [c for c in paper.claims if only is None or c.recipe == only]
    return _corrected([_outcome(claim, paper, evidence) for claim in claims])


def _outcome(claim: Claim, paper: Paper, evidence: Sequence[Evidence]) -> Outcome:
    without: tuple[tuple[Status, str], ...] = (
        ("impossible", claim.impossible),
        ("elsewhere", claim.elsewhere),
        ("not run", claim.missing),
    )
    for status, why in without:
        if why:
            return Outcome(claim, status, why=(why,))
    if claim.kind == "exact":
        if claim.check not in CHECKS:
            raise unknown(f"check of claim '{claim.id}'", claim.check, CHECKS)
        try:
            return Outcome(claim, "holds" if CHECKS[claim.check]() else "does not hold")
        except MissingExtraError as error:
            return Outcome(claim, "not run", why=(str(error),))
    found = _nearest(claim, evidence)
    if found is None:
        return Outcome(claim, "not run")
    outcome = _compared(claim, found)
    later, before = (_compared(claim, found.moved_on(times)).status for times in (1.0, -1.0))
    verdicts = (outcome.status, later, before)
    problems = failed(claim, paper, found, _places(claim), verdicts)
    if problems:
        return replace(outcome, status="not tested", why=tuple(problems))
    return outcome


def _nearest(claim: Claim, evidence: Iterable[Evidence]) -> Evidence | None:
    """Return the evidence of a claim's recipe with all its methods.

    Of the scale that comes first, tuned before untuned.
    """
    able = [
        one
        for one in evidence
        if one.recipe == claim.recipe and one.scale in SCALES and all(one.has(*p) for p in _places(claim))
    ]
    return min(able, key=lambda one: (SCALES.index(one.scale), not one.tuned), default=None)


def _places(claim: Claim) -> list[tuple[str, str]]:
    """(label, variant) of all methods of a claim."""
    return [
        (name, variant)
        for label in claim.labels
        for names, variants in [_split(claim, label)]
        for variant in variants
        for name in names
    ]


def _split(claim: Claim, label: str) -> tuple[list[str], tuple[str, ...]]:
    """Return a line, or two whose difference is meant, and the variants that they are averaged over."""
    lines, at, variant = label.partition(" @ ")
    return lines.split(MINUS), (variant,) if at else (claim.variants or ("",))


def _compared(claim: Claim, evidence: Evidence) -> Outcome:
    error, scale = _error(claim, evidence), evidence.scale
    if claim.kind == "ordered":
        values = {label: _numbers(claim, evidence, label) for label in claim.published}
        common = sorted(set.intersection(*(set(found) for found in values.values())))
        order = judge_order(
            {label: [found[s] for s in common] for label, found in values.items()}, claim.published, error
        )
        return Outcome(claim, order.judged.verdict, order.judged, order, scale=scale)
    pairs: list[tuple[Judged, str]] = []
    first = _numbers(claim, evidence, claim.first)
    for second in claim.second:
        other = _numbers(claim, evidence, second)
        differences = [first[seed] - other[seed] for seed in sorted(set(first) & set(other))]
        if claim.kind == "at most":
            pairs.append((judge_at_most(differences, claim.gap, error), second))
        else:
            gap = claim.gap_to(second) if claim.kind == "at least" else 0.0
            pairs.append((judge(differences, gap, error), second))
    judged, against = min(pairs, key=lambda pair: (WORST_FIRST.index(pair[0].verdict), pair[0].estimate))
    return Outcome(claim, judged.verdict, judged, against=against, scale=scale)


def _numbers(claim: Claim, evidence: Evidence, label: str) -> dict[int, float]:
    """Seed -> a method's number, the mean over variants; a metric `a - b` is a difference, and so is a label."""
    (line, *less), variants = _split(claim, label)
    metric, *taken = claim.metric.split(MINUS)
    parts = []
    for variant in variants:
        found = _apart(evidence.of(line, variant, name) for name in (metric, *taken))
        parts.append(
            _apart([found, *(_apart(evidence.of(o, variant, n) for n in (metric, *taken)) for o in less)])
        )
    seeds = set.intersection(*(set(part) for part in parts))
    return {seed: sum(part[seed] for part in parts) / len(parts) for seed in seeds}


def _apart(found: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Seed -> the first number without all others, of seeds that have each."""
    first, *others = found
    seeds = set(first).intersection(*others)
    return {seed: first[seed] - sum(other[seed] for other in others) for seed in sorted(seeds)}


def _error(claim: Claim, evidence: Evidence) -> float:
    """Return the error of the test set in a difference; 0 where the truth is known (`discordance: 0`)."""
    if not claim.discordance:
        return 0.0
    squares = 0.0
    for metric in claim.metric.split(MINUS):
        part, share = measured_on(metric)
        sizes = [
            size
            for label, variant in _places(claim)
            for size in evidence.of(label, variant, f"fact.samples.{part}").values()
        ]
        # Of several variants, each has a test set of its own.
        samples = sum(sizes) / len(sizes) * share * max(1, len(claim.variants)) if sizes else math.nan
        each = sampling_error(claim.discordance, samples) ** 2 if samples > 0 else math.nan
        squares += each * (2 if MINUS in claim.first else 1)  # a difference of two differences
    return math.sqrt(squares)


def measured_on(metric: str) -> tuple[str, float]:
    """Return the test set of a metric, and the share of its clients that it is about."""
    steps = metric.split(".")
    if len(steps) >= 4:
        return steps[1], TAILS.get(steps[-1], 1.0)
    if steps[0] in ("deployed", "shared"):
        return ".".join(steps[1:]), 1.0
    return "local", TAILS.get(metric, 1.0)


def metrics_of(claims: Iterable[Claim], recipe: str) -> list[str]:
    """Return the metrics that claims about a recipe look at, and those that gates do."""
    asked = [m for c in claims if c.recipe == recipe for m in c.metric.split(MINUS)]
    return list(dict.fromkeys(["mean", *asked]))


def _corrected(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes with Holm's p-values of their family; what was significant by itself alone is undecided."""
    tested = [o.judged.p_value if o.judged and o.status in WORST_FIRST else math.nan for o in outcomes]
    corrected = dict[int, float]()
    for family in dict.fromkeys(o.claim.family for o in outcomes):
        where = [k for k, o in enumerate(outcomes) if o.claim.family == family]
        corrected |= zip(where, holm([tested[k] for k in where]), strict=True)
    found = []
    for k, (outcome, raw) in enumerate(zip(outcomes, tested, strict=True)):
        p = corrected[k]
        outcome = replace(outcome, holm=p)
        if outcome.status in ("holds", "holds in sign") and raw < LEVEL <= p:
            said = f"p = {raw:.3f}, after Holm's correction over the paper's tests {p:.3f}"
            outcome = replace(outcome, status="undecided", why=(*outcome.why, said))
        found.append(outcome)
    return found


def counted(outcomes: Iterable[Outcome]) -> Mapping[str, int]:
    """Return how many outcomes there are of each status."""
    found: dict[str, int] = {}
    for outcome in outcomes:
        found[outcome.status] = found.get(outcome.status, 0) + 1
    return found
