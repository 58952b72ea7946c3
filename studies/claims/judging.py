"""From claims and evidence to verdicts, corrected for how many a paper has (Holm, Shaffer)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from studies.claims.claim import MINUS, Claim, Paper, Q
from studies.claims.evidence import Evidence
from studies.claims.exact import CHECKS
from studies.claims.gates import failed
from studies.claims.noise import measured_on, pairs
from studies.claims.verdicts import (
    POINT,
    Judged,
    Order,
    Verdict,
    judge,
    judge_at_most,
    judge_cells,
    judge_order,
    sampling_error,
)
from tailorfl.errors import MissingExtraError, unknown
from tailorfl.evaluation.comparisons import LEVEL

Status = Verdict | Literal["not tested", "not tested at this scale", "elsewhere", "not run", "impossible"]
"""`not tested`: what the comparison needs was not there, see the gates of `studies.claims`."""
WORST_FIRST: tuple[Verdict, ...] = ("reversed", "does not hold", "undecided", "holds in sign", "holds")
SCALES = ("paper", "small", "")
"""What is judged where several scales were run: the one nearest to the paper. A smoke says nothing."""
OWN_PARTS = ("val", "local", "participants")


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
        holm: p-value that the verdict rests on, corrected over the tests of the paper (or the claim's family); NaN
            without one.
        why: why it was not tested, or what else there is to say.
        scale: of the recipe.
        elsewhere: how the setting differs from the paper's, where the status is "not tested at this scale".
        shown: what the run shows there.
    """

    claim: Claim
    status: Status
    judged: Judged | None = None
    order: Order | None = None
    against: str = ""
    holm: float = math.nan
    why: tuple[str, ...] = ()
    scale: str = ""
    elsewhere: str = ""
    shown: Status | None = None


def judge_paper(paper: Paper, evidence: Sequence[Evidence], only: str | None = None) -> list[Outcome]:
    """Return the outcome of every claim of a paper, in order; of one recipe where `only` names it."""
    claims = [c for c in paper.claims if only is None or c.recipe == only]
    outcomes = _corrected([_outcome(claim, paper, evidence) for claim in claims])
    return [
        replace(o, status="not tested at this scale", shown=o.status) if o.elsewhere else o for o in outcomes
    ]


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
    outcome = _compared(claim, paper, found)
    later, before = (_compared(claim, paper, found.moved_on(times)).status for times in (1.0, -1.0))
    problems = failed(claim, paper, found, _places(claim), (outcome.status, later, before))
    said = tuple(f"{gate}: {problem}" for gate, problem in problems.items())
    if problems.keys() == {"faithful"}:
        return replace(outcome, elsewhere=problems["faithful"])
    return replace(outcome, status="not tested", why=said) if problems else outcome


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


def _compared(claim: Claim, paper: Paper, evidence: Evidence) -> Outcome:
    scale = evidence.scale
    point = POINT if claim.points else 0.0  # of what is no share there is no point
    if claim.kind == "cells":
        values = {label: list(_numbers(claim, evidence, label).values()) for label in claim.published}
        judged, against = judge_cells(values, claim.published, claim.repeats, claim.gap, point)
        return Outcome(claim, judged.verdict, judged, against=against, scale=scale)
    error = _error(claim, paper, evidence)
    if claim.kind == "ordered":
        found = {label: _numbers(claim, evidence, label) for label in claim.published}
        common = sorted(set.intersection(*(set(numbers) for numbers in found.values())))
        order = judge_order(
            {label: [numbers[s] for s in common] for label, numbers in found.items()},
            claim.published,
            error,
            point,
        )
        return Outcome(claim, order.judged.verdict, order.judged, order, scale=scale)
    several: list[tuple[Judged, str]] = []
    first = _numbers(claim, evidence, claim.first)
    for second in claim.second:
        other = _numbers(claim, evidence, second)
        differences = [first[seed] - other[seed] for seed in sorted(set(first) & set(other))]
        if claim.kind == "at most":
            several.append((judge_at_most(differences, claim.gap, error), second))
        else:
            gap = claim.gap_to(second) if claim.kind == "at least" else 0.0
            several.append((judge(differences, gap, error, point), second))
    sign = -1.0 if claim.kind == "at most" else 1.0
    judged, against = min(
        several, key=lambda pair: (WORST_FIRST.index(pair[0].verdict), sign * pair[0].estimate)
    )
    whole = _of_several(judged, [one for one, _ in several])
    return Outcome(claim, judged.verdict, whole, against=against, scale=scale)


def _of_several(worst: Judged, several: Sequence[Judged]) -> Judged:
    """Return the worst of several comparisons with the p-values of all together.

    A claim holds if each of them does, so the largest p-value counts; one of them is enough for it not to hold, so that
    p-value counts times their number.
    """
    refuted = worst.verdict in ("does not hold", "reversed")
    p = min(len(several) * worst.p_value, 1.0) if refuted else max(one.p_value for one in several)
    return replace(worst, p_value=p, p_against=min(len(several) * worst.p_against, 1.0))


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


def _error(claim: Claim, paper: Paper, evidence: Evidence) -> float:
    """Return the error of the test samples in a difference that seeds do not average away.

    Measured on the models where that was done (of several differences the largest), else √(q/N); 0 where nothing
    stands between the number and the truth.
    """
    if claim.noiseless:
        return 0.0
    keys = [key for key, _ in pairs(claim)]
    if keys and all(key in evidence.noise for key in keys):
        return math.sqrt(max(evidence.noise[key] for key in keys))
    declared = paper.noise.get(claim.recipe)
    discordance = declared.discordance if declared else Q
    squares = 0.0
    for metric in claim.metric.split(MINUS):
        part, share = measured_on(metric)
        if (
            declared and part in declared.samples
        ):  # each counted once, whoever tests it and with whichever seed
            inverse = 1 / declared.samples[part]
        else:
            inverse = _inverse(claim, evidence, part)
        squares += sampling_error(discordance, share / inverse) ** 2 if inverse > 0 else math.nan
    return math.sqrt(squares)


def _inverse(claim: Claim, evidence: Evidence, part: str) -> float:
    """Return 1/N of a comparison, where places have test sets of their own; NaN where sizes are not known.

    1/N is averaged and not N; variances of variants that are averaged, or of two gains, add.
    """
    found: dict[str, list[float]] = {}
    for label, variant in _places(claim):
        sizes = evidence.of(label, variant, f"fact.samples.{part}").values()
        found.setdefault(variant, []).extend(1 / size for size in sizes)
    if not found or not all(found.values()):
        return math.nan
    means = [sum(inverses) / len(inverses) for inverses in found.values()]
    if len(means) == 1:
        return means[0]
    if any(" @ " in label for label in claim.labels):
        return sum(means) if MINUS in claim.first else sum(means) / len(means)
    return sum(means) / len(means) ** 2


def metrics_of(claims: Iterable[Claim], recipe: str) -> list[str]:
    """Return the metrics that claims about a recipe look at, and those that gates do."""
    asked = [m for c in claims if c.recipe == recipe for m in c.metric.split(MINUS)]
    return list(dict.fromkeys(["mean", *asked]))


def _corrected(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes after a correction over the tests of their family, in both directions.

    Every claim is tested twice: against no difference, which "holds" and "reversed" rest on, and against one that is
    just large enough to hold, which "does not hold" rests on. What was significant by itself alone is taken back.
    """
    nothing = (math.nan, math.nan)
    tests = [
        (o.judged.p_value, o.judged.p_against) if o.judged and o.status in WORST_FIRST else nothing
        for o in outcomes
    ]
    corrected = dict[int, tuple[float, float]]()
    for family in dict.fromkeys(o.claim.family for o in outcomes):
        where = [k for k, o in enumerate(outcomes) if o.claim.family == family]
        corrected |= zip(where, step_down([tests[k] for k in where]), strict=True)
    return [_demoted(outcome, *corrected[k]) for k, outcome in enumerate(outcomes)]


def step_down(tests: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return adjusted p-values of claims with two hypotheses each, of which at most one can be true.

    Holm's procedure with Shaffer's multipliers (1986): the smallest p-value that is left is multiplied by how many
    hypotheses can still be true together, which is how many claims have one that was not rejected. NaN are no tests.
    With one hypothesis a claim it is Holm's.
    """
    found = [[math.nan, math.nan] for _ in tests]
    left = sorted(
        (p, k, which) for k, pair in enumerate(tests) for which, p in enumerate(pair) if not math.isnan(p)
    )
    least = 0.0
    for place, (p, k, which) in enumerate(left):
        can_be_true = len({claim for _, claim, _ in left[place:]})
        least = max(least, min(1.0, can_be_true * p))
        found[k][which] = least
    return [(difference, against) for difference, against in found]


def _demoted(outcome: Outcome, difference: float, against: float) -> Outcome:
    """Return the outcome with its corrected p-value, and the verdict that this leaves of it."""
    judged, status = outcome.judged, outcome.status
    if judged is None or status not in WORST_FIRST or status == "undecided" or outcome.claim.kind == "cells":
        return replace(outcome, holm=difference)
    rests_on = _rests_on(outcome)
    p = difference if rests_on == "p_value" else against
    if status == "reversed" and p >= LEVEL > against:
        return replace(
            outcome, status="does not hold", holm=against, why=(*outcome.why, _taken_back(judged.p_value, p))
        )
    if p >= LEVEL:
        said = _taken_back(getattr(judged, rests_on), p)
        return replace(outcome, status="undecided", holm=p, why=(*outcome.why, said))
    return replace(outcome, holm=p)


def _rests_on(outcome: Outcome) -> str:
    """Return the p-value that a verdict rests on: of no difference, or of one that is just large enough to hold."""
    if outcome.claim.kind == "at most" or outcome.status in ("holds", "holds in sign"):
        return "p_value"
    return "p_value" if outcome.status == "reversed" and outcome.order is None else "p_against"


def _taken_back(raw: float, corrected: float) -> str:
    return f"p = {raw:.3f}, after Holm's correction over the paper's tests {corrected:.3f}"
