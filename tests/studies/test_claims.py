"""Verdicts and gates of claims, of made-up evidence whose differences and intervals are computed beside them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from claimed import BETTER, NOISELESS, evidence, outcome_of, paper, together, with_facts
from studies.claims import words
from studies.claims.evidence import Evidence
from studies.claims.judging import judge_paper
from studies.claims.noise import measured_on
from studies.claims.verdicts import judge, sampling_error

SAMPLES = {"fact.samples.local": 10_000.0, "fact.samples.global": 400.0}
NUMBERS = {"a": [0.70, 0.71, 0.69, 0.70], "b": [0.64, 0.65, 0.64, 0.63], "c": [0.699, 0.709, 0.691, 0.7]}
WORSE = {"a": [0.5, 0.51, 0.5], "b": [0.7, 0.71, 0.7]}


def test_differences_are_paired_by_seed_and_have_the_error_of_the_test_set() -> None:
    found = evidence(NUMBERS, **SAMPLES)
    differences = np.subtract(NUMBERS["a"], NUMBERS["b"])
    expected = judge(differences.tolist(), 0.05, math.sqrt(0.2 / 10_000))
    assert outcome_of(BETTER, found).judged == expected
    low, high = stats.t.interval(0.95, 3, differences.mean(), stats.sem(differences))
    assert expected.low < low
    assert expected.high > high
    missing = Evidence("r", "small", (), "d", found.rows[:-1])  # seed 3 of c, and of it alone, is gone
    of_c = outcome_of({**BETTER, "second": "c"}, missing).judged
    assert of_c is not None
    assert of_c.seeds == 3


def test_every_kind() -> None:
    expected = [
        (BETTER, "holds"),
        ({"kind": "at most", "first": "c", "second": "a", "gap": 0.02}, "holds"),
        ({"kind": "sign", "first": "b", "second": "a"}, "reversed"),
        ({"kind": "ordered", "published": {"a": 0.9, "b": 0.8}}, "holds"),
        ({"kind": "exact", "check": "ckt_costs", "apart": "formula"}, "holds"),
        ({"kind": "exact", "check": "plgu_least_gain", "apart": "print"}, "does not hold"),
        ({"kind": "at least", "gap": 0.1, "impossible": "no data"}, "impossible"),
        ({"kind": "sign", "elsewhere": "a study"}, "elsewhere"),
        ({"kind": "sign", "missing": "not built"}, "not run"),
        ({**BETTER, "second": "absent"}, "not run"),
    ]
    outcomes = judge_paper(paper(*(claim for claim, _ in expected)), [evidence(NUMBERS, **SAMPLES)])
    assert [outcome.status for outcome in outcomes] == [status for _, status in expected]


def test_of_several_the_worst_counts() -> None:
    published = {"a": 0.9, "b": 0.85, "c": 0.8}
    claim = {"kind": "at least", "first": "a", "second": ["b", "c"], "published": published}
    outcome = outcome_of(claim, evidence(NUMBERS, **SAMPLES))
    assert (outcome.against, outcome.status) == ("c", "does not hold")


def test_the_test_set_of_the_metric_counts() -> None:
    found = evidence(NUMBERS, **SAMPLES)
    own, common = (outcome_of({**BETTER, "metric": m}, found).judged for m in ("mean", "deployed.global"))
    assert own is not None
    assert common is not None
    assert own.estimate == pytest.approx(common.estimate)
    width = stats.t.ppf(0.975, 3) * stats.sem(np.subtract(NUMBERS["a"], NUMBERS["b"]))
    wide = math.hypot(width, stats.norm.ppf(0.975) * sampling_error(0.2, 400))
    assert common.high - common.estimate == pytest.approx(wide)
    assert measured_on("personal.local.accuracy.worst5") == ("local", 0.05)
    assert measured_on("deployed.fog-3") == ("fog-3", 1.0)
    assert measured_on("worst10") == ("local", 0.1)


SMALL, PAPER = evidence(NUMBERS, **SAMPLES), evidence(WORSE, "paper", **SAMPLES)
TUNED = evidence(WORSE, **SAMPLES, **{"fact.inside_grid": 0.0})


@pytest.mark.parametrize(
    ("claim", "found", "status", "scale"),
    [
        (BETTER, [evidence(NUMBERS)], "undecided", "small"),  # without the size of a test set
        (NOISELESS, [evidence(NUMBERS)], "holds", "small"),  # the truth is known
        (BETTER, [evidence(NUMBERS, "smoke", **SAMPLES)], "not run", ""),
        (BETTER, [SMALL, PAPER], "reversed", "paper"),
        (BETTER, [SMALL, TUNED], "reversed", "small"),
        (BETTER, [TUNED, SMALL], "reversed", "small"),
    ],
    ids=["no size", "noiseless", "smoke", "paper first", "tuned second", "tuned first"],
)
def test_what_is_evidence_and_which_comes_first(
    claim: dict[str, Any], found: list[Evidence], status: str, scale: str
) -> None:
    outcome = outcome_of(claim, *found)
    assert (outcome.status, outcome.scale) == (status, scale)


def test_variants_are_averaged_seed_by_seed_or_named_by_a_label() -> None:
    both = together(
        evidence({"a": [0.8, 0.9, 0.7]}, variant="x"), evidence({"a": [0.6, 0.7, 0.51]}, variant="y")
    )
    sign = {"kind": "sign", "first": "a @ x", "second": "a @ y", "noiseless": True}
    mean = {**NOISELESS, "kind": "at most", "variants": ["x", "y"], "second": "a @ x", "gap": 0.0}
    for claim, estimate in ((sign, (0.2 + 0.2 + 0.19) / 3), (mean, -(0.2 + 0.2 + 0.19) / 6)):
        judged = outcome_of(claim, both).judged
        assert judged is not None
        assert judged.estimate == pytest.approx(estimate)


def test_a_difference_of_two_lines_is_compared_with_another() -> None:
    """Of two places: gains are paired by seed, and their test sets err twice as much in squares."""
    few = evidence({"a": [0.5, 0.6, 0.55], "b": [0.4, 0.45, 0.42, 0.4]}, variant="few", **SAMPLES)
    many = evidence({"a": [0.9, 0.91, 0.9], "b": [0.88, 0.9, 0.87]}, variant="many", **SAMPLES)
    claim = {"kind": "sign", "first": "a - b @ few", "second": "a - b @ many"}
    outcome = outcome_of(claim, together(few, many))
    gains = [0.5 - 0.4 - (0.9 - 0.88), 0.6 - 0.45 - (0.91 - 0.9), 0.55 - 0.42 - (0.9 - 0.87)]
    expected = judge(gains, 0.0, math.sqrt(2 * 0.2 / 10_000))
    assert outcome.judged is not None
    assert outcome.status == expected.verdict
    assert outcome.judged.estimate == pytest.approx(expected.estimate)
    assert outcome.judged.p_value == pytest.approx(expected.p_value)
    assert outcome_of(claim, few).status == "not run"
    same = outcome_of({**NOISELESS, "metric": "mean - deployed.global"}, evidence(NUMBERS)).judged
    assert same is not None
    assert same.estimate == pytest.approx(0.0)


def test_what_is_no_share_is_told_as_it_is() -> None:
    claim = {**NOISELESS, "gap": 0.0018}
    plain, points = (outcome_of({**claim, "points": p}, evidence(NUMBERS)) for p in (False, True))
    assert words.published(plain) == "+0.0018"
    assert words.found(plain) == "+0.06 [+0.047, +0.073]"
    assert words.found(points) == "+6.0 [+4.7, +7.3]"


GOOD = {
    "fact.took_part.mean": 20.0, "fact.took_part.least": 8.0, "fact.change": 0.001, "fact.change_val": 0.001,
    "fact.pull.each": 3.5, "fact.pull.all": 70.0, "fact.inside_grid": 1.0, **SAMPLES,
}  # fmt: skip
ALL = ("learned", "took part", "trained", "pulled", "settled", "inside grid")
LINES = {"a": [0.7, 0.71, 0.69], "b": [0.6, 0.61, 0.6], "FedAvg": [0.5] * 3, "LocalTrain": [0.4] * 3}


@pytest.mark.parametrize(
    ("line", "facts", "why"),
    [
        ("a", {}, ""),
        ("a", {"took_part.mean": 9.0}, "took part: clients took part 9.0 times"),
        ("b", {"took_part.mean": 9.0}, "took part: clients took part 9.0 times"),
        ("a", {"took_part.least": 4.0}, "took part: a client took part 4.0 times"),
        ("b", {"took_part.least": 4.0}, "took part: a client took part 4.0 times"),
        ("a", {"inside_grid": 0.0}, "inside grid: a tuned value lies at the edge"),
        ("b", {"inside_grid": 0.0}, "inside grid: a tuned value lies at the edge"),
        ("LocalTrain", {"change_val": 0.02}, "trained: "),
        ("LocalTrain", {"change": 0.03}, ""),  # which is not asked where validation data were looked at
        ("a", {"change": 0.03}, "settled: "),
        ("b", {"change": -0.03}, "settled: "),
        ("a", {"pull.each": 0.5, "pull.all": 10.0}, ""),  # enough in all
        ("a", {"pull.each": 3.0, "pull.all": 6.0}, ""),  # enough in a participation
        ("b", {"pull.each": 2.9, "pull.all": 9.9}, "pulled: "),
    ],
)
def test_one_line_that_fails_a_gate_is_enough(line: str, facts: dict[str, float], why: str) -> None:
    changes = {line: {f"fact.{name}": value for name, value in facts.items()}}
    outcome = outcome_of(BETTER, with_facts(evidence(LINES, **GOOD), changes), gates=ALL)
    assert outcome.status == ("not tested" if why else "holds")
    assert [reason.startswith(why) for reason in outcome.why] == [True] * bool(why)


FAR, NEAR, ABOVE = [0.7, 0.71, 0.69], [0.6060, 0.6065, 0.6055], [0.62, 0.6205, 0.6195]


@pytest.mark.parametrize(
    ("a", "gap", "moved", "left", "why"),
    [
        (FAR, 0.05, (0.03, 0.03), (0.1, 0.1), None),
        (FAR, 0.05, (0.03, 0.03), (0.2, 0.1), "moved by"),  # a line whose rate has not fallen should not move
        (FAR, 0.05, (0.03, 0.03), (0.1, 0.2), "moved by"),
        # a is .006 above b, within .0005 of it in every seed, and falls while b rises
        (NEAR, 0.01, (-0.0015, 0.0015), None, None),
        (NEAR, 0.01, (-0.0045, 0.0045), None, "if every curve went on"),
        # where the rate has fallen curves may move, but no part of its fall may decide
        (ABOVE, 0.01, (0.03, 0.03), (1.0, 1.0), "moved by"),
        (ABOVE, 0.01, (0.03, 0.03), (0.1, 0.1), None),
        (ABOVE, 0.01, (0.04, 0.01), (0.1, 0.1), "before the last fifth"),
    ],
)  # fmt: skip
def test_what_must_have_settled(
    a: list[float],
    gap: float,
    moved: tuple[float, float],
    left: tuple[float, float] | None,
    why: str | None,
) -> None:
    facts = {label: {"fact.change": change} for label, change in zip("ab", moved, strict=True)}
    for label, rate in zip("ab", left or (), strict=False):
        facts[label]["fact.rate_left"] = rate
    found = with_facts(evidence({"a": a, "b": [0.6, 0.6, 0.6]}, **GOOD), facts)
    outcome = outcome_of({**NOISELESS, "gap": gap}, found, gates=["settled"])
    assert outcome.status == ("not tested" if why else "holds")
    assert [why in reason for reason in outcome.why if why] == [True] * bool(why)


def test_what_was_not_recorded_does_not_pass_unless_a_claim_needs_less() -> None:
    found = evidence({label: LINES[label] for label in "ab"}, **SAMPLES)
    outcome = outcome_of(BETTER, found, gates=ALL)
    assert (outcome.status, len(outcome.why)) == ("not tested", 6)
    assert outcome_of({**BETTER, "gates": []}, found, gates=ALL).status == "holds"


@pytest.mark.parametrize(
    ("row", "times", "expected"),
    [
        # a metric of a kind of model goes on with the curve of that kind
        (
            {"global.local.accuracy.mean": 0.4, "mean": 0.7, "shared.global": 0.4,
             "fact.change.global": -0.05, "fact.change.personal": 0.1},
            -1.0,
            {"global.local.accuracy.mean": 0.45, "mean": 0.6, "shared.global": 0.45},
        ),
        # numbers of another unit do not go on
        (
            {"mean": 0.5, "deployed.global": 0.4, "personal.local.sharpness.mean": 0.03,
             "personal.local.accuracy.mean": 0.2},
            1.0,
            {"mean": 0.6, "deployed.global": 0.5, "personal.local.accuracy.mean": 0.3},
        ),
    ],
    ids=["by kind of model", "by unit"],
)  # fmt: skip
def test_numbers_go_on_with_their_curve(
    row: dict[str, float], times: float, expected: dict[str, float]
) -> None:
    row = {"label": "a", "variant": "", "seed": 0, "fact.change": 0.1, **row}  # type: ignore[dict-item]
    (moved,) = Evidence("r", "small", (), "d", (row,)).moved_on(times).rows
    assert moved == {**row, **{name: pytest.approx(value) for name, value in expected.items()}}
