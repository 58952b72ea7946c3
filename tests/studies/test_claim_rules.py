"""Rules of verdicts on made-up numbers: corrections both ways, faithful settings, measured noise, printed cells."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from claimed import BETTER, NOISELESS, differences_of, evidence, outcome_of, paper, together
from studies.claims.claim import Claim, Setting, papers
from studies.claims.evidence import Evidence, setting_of
from studies.claims.judging import Outcome, judge_paper, step_down
from studies.claims.noise import pairs, share, shared_variance
from studies.claims.verdicts import half_width, judge, judge_cells, judge_order, sampling_error
from studies.claims.words import headline, row, summary
from tailorfl.evaluation.comparisons import holm
from tailorfl.settings.loading import load

LINES = {"a": [0.7, 0.71, 0.69], "b": [0.6, 0.61, 0.6]}


def of(mean: float, *, width: float = math.nan, p: float = math.nan) -> Evidence:
    """Evidence of differences of a mean: with this half width of their interval, or p-value against 0."""
    wide = abs(mean) / stats.t.isf(p / 2, 3) * stats.t.ppf(0.975, 3) if math.isnan(width) else width
    return evidence({"a": differences_of(mean, wide), "b": [0.0] * 4})


# -- corrections ---------------------------------------------------------------------------------------------


def test_two_hypotheses_a_claim_of_which_one_can_be_true() -> None:
    """By hand: .001 of 3 claims, .004 of 3, .01 of 2 (the first is rejected whole), .2 of 2, .3 of 1."""
    first, second, third = step_down([(0.001, 0.004), (0.01, 0.3), (math.nan, 0.2)])
    assert first == pytest.approx((0.003, 0.012))
    assert second == pytest.approx((0.02, 0.4))
    assert third == (pytest.approx(math.nan, nan_ok=True), pytest.approx(0.4))
    p = [0.04, 0.001, 0.3, 0.012, 0.9]  # with one hypothesis a claim it is Holm's
    assert [one for one, _ in step_down([(value, math.nan) for value in p])] == pytest.approx(holm(p))


def test_it_rarely_errs_where_every_claim_has_a_true_hypothesis() -> None:
    """A family of 10, half of them without a difference and half with one just large enough, 1,000 times."""
    rng, errors = np.random.default_rng(0), 0
    for _ in range(1000):
        tests = []
        for k in range(10):
            z = rng.normal(0.0 if k < 5 else 3.0)
            tests.append((2 * stats.norm.sf(abs(z)), 2 * stats.norm.sf(abs(z - 3.0))))
        wrong = [pair[0 if k < 5 else 1] for k, pair in enumerate(step_down(tests))]
        errors += min(wrong) < 0.05
    assert 0.02 < errors / 1000 < 0.06


@pytest.mark.parametrize(
    ("found", "gap", "alone", "among"),
    [
        (of(0.02, p=0.03), 0.02, "holds", "undecided"),
        (of(0.02, p=0.03), 0.09, "holds in sign", "undecided"),
        # .02 / 2 is as near to -.02 as to be .008: times ten .08
        (of(-0.02, p=0.03), 0.02, "reversed", "undecided"),
        (of(-0.02, p=0.03), 0.12, "reversed", "does not hold"),  # .06 is farther away
        (of(0.001, width=0.016), 0.04, "does not hold", "undecided"),
    ],
)
def test_every_verdict_is_taken_back_among_ten_tests_of_a_family(
    found: Evidence, gap: float, alone: str, among: str
) -> None:
    claim = {**NOISELESS, "gap": gap}
    outcome = outcome_of(claim, found)
    assert (outcome.status, outcome.why) == (alone, ())
    several = judge_paper(paper(*[claim] * 10), [found])
    assert {one.status for one in several} == {among}
    assert len(several[0].why) == 1
    apart = judge_paper(paper(*[{**claim, "family": f"table {k}"} for k in range(10)]), [found])
    assert [one.holm for one in apart] == [outcome.holm] * 10


def test_what_a_verdict_rests_on_is_its_p_value() -> None:
    found = of(0.001, width=0.016)
    differences = found.of("a", "", "mean")
    for claim, status, level in (
        ({**NOISELESS, "gap": 0.04}, "does not hold", 0.02),
        ({**NOISELESS, "kind": "at most", "gap": 0.03}, "holds", 0.03),
    ):
        outcome = outcome_of(claim, found)
        assert outcome.status == status
        expected = stats.ttest_1samp(list(differences.values()), level).pvalue
        assert outcome.holm == pytest.approx(expected, rel=1e-6)
    many = judge_paper(paper(*[{**NOISELESS, "gap": 0.02}] * 10), [of(0.02, p=0.03)])
    assert many[0].holm == pytest.approx(0.3, abs=1e-3)


def test_a_difference_that_is_large_enough_says_nothing_against() -> None:
    assert judge([0.03, 0.031, 0.029], 0.05).p_against == 1.0
    assert judge([0.003, 0.0031, 0.0029], 0.0).p_against < 1e-3  # half a point
    assert judge([0.003, 0.0031, 0.0029], 0.0, point=0.0).p_against == 1.0
    # errors have no half point: .0001 ± .0005 is no sign that a published .001 is not there
    claim = {**NOISELESS, "gap": 0.001, "points": False}
    assert outcome_of(claim, of(0.0001, width=0.0005)).status == "undecided"


def test_one_pair_of_an_order_is_enough_so_its_p_value_counts_for_all() -> None:
    values = {"a": [0.9, 0.91, 0.9], "b": [0.8, 0.8, 0.81], "c": [0.803, 0.8, 0.806]}
    order = judge_order(values, {"a": 0.9, "b": 0.85, "c": 0.8})
    single = judge(np.subtract(values["b"], values["c"]).tolist(), 0.05)
    assert order.judged.verdict == "does not hold"
    assert order.judged.p_against == pytest.approx(3 * single.p_against)


def test_of_several_all_must_hold_and_one_is_enough_not_to() -> None:
    """The smallest difference need not be the least certain one."""
    wide, narrow = differences_of(0.03, 0.025), differences_of(0.02, 0.001)
    found = evidence({"a": [0.0] * 4, "b": [-d for d in narrow], "c": [-d for d in wide]})

    def p_of(differences: list[float], level: float) -> float:
        return float(stats.ttest_1samp(differences, level).pvalue)

    for more, status, against, p in (
        ({"gap": 0.02}, "holds", "b", p_of(wide, 0.0)),
        ({"gap": 0.045}, "holds in sign", "b", p_of(wide, 0.0)),
        ({"kind": "at most", "gap": 0.06}, "holds", "c", p_of(wide, 0.06)),
        ({"kind": "at most", "gap": 0.01}, "does not hold", "b", 2 * p_of(narrow, 0.01)),
    ):
        outcome = outcome_of({**NOISELESS, "second": ["b", "c"], **more}, found)
        assert (outcome.status, outcome.against) == (status, against)
        assert outcome.holm == pytest.approx(p, rel=1e-6)
    behind = {**NOISELESS, "first": "b", "second": ["a", "c"], "gap": 0.08}
    outcome = outcome_of(behind, found)
    assert (outcome.status, outcome.against) == ("reversed", "a")
    assert outcome.holm == pytest.approx(2 * p_of(narrow, 0.0), rel=1e-6)
    low = outcome_of({**NOISELESS, "second": ["b", "c"], "gap": 0.08}, evidence({
        "a": [0.0] * 4, "b": [-d for d in differences_of(0.001, 0.016)], "c": [-d for d in wide],
    }))  # fmt: skip
    assert (low.status, low.against) == ("does not hold", "b")
    assert low.holm == pytest.approx(2 * p_of(differences_of(0.001, 0.016), 0.04), rel=1e-6)


# -- gates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "more", "why"),
    [
        ({}, {}, ""),
        ({"a": [0.24] * 3}, {}, "learned: a reaches 0.24"),
        ({"b": [0.24] * 3}, {}, "learned: b reaches 0.24"),
        ({"FedAvg": [0.24] * 3}, {}, "learned: FedAvg reaches 0.24"),
        # only FedAvg must leave something to learn, and only where it is named
        ({"FedAvg": [0.91] * 3}, {}, "learned: FedAvg reaches 0.91"),
        ({"a": [0.97, 0.98, 0.97]}, {}, ""),
        ({"a": [0.97, 0.98, 0.97], "FedAvg": [0.95] * 3}, {"floor": {"fedavg": ""}}, ""),
    ],
)
def test_every_line_of_a_claim_has_learned(
    numbers: dict[str, list[float]], more: dict[str, Any], why: str
) -> None:
    found = evidence({**LINES, "FedAvg": [0.5] * 3, **numbers})
    outcome = outcome_of(NOISELESS, found, gates=["learned"], **more)
    assert outcome.status == ("not tested" if why else "holds")
    assert [reason.startswith(why) for reason in outcome.why] == [True] * bool(why)


def faithful(
    setting: dict[str, Any], paper_has: dict[str, Any] | None = None, lam_chosen: float = 1.0
) -> Outcome:
    found = evidence(LINES, **{"fact.took_part.mean": 20.0, "fact.lam_chosen": lam_chosen})
    return outcome_of({**NOISELESS, "setting": setting}, found, gates=["faithful"], setting=paper_has or {})


@pytest.mark.parametrize(
    ("same", "other"),
    [
        ({"network": ["mlp"]}, {"network": ["resnet18", "vgg11"]}),
        ({"split": ["dirichlet alpha=0.1"]}, {"split": ["dirichlet alpha=0.01"]}),
        ({"split": ["domain", "dirichlet"]}, {"split": ["domain"]}),
        ({"turns": 20}, {"turns": 21}),
        ({"head": "trained"}, {"head": "frozen"}),
        ({"lam": "chosen"}, {"lam": "pinned"}),
    ],
)
def test_each_part_of_a_setting_decides_whether_a_run_is_faithful(
    same: dict[str, Any], other: dict[str, Any]
) -> None:
    assert faithful(same).status == "holds"
    outcome = faithful(other)
    assert (outcome.status, outcome.shown, outcome.why) == ("not tested at this scale", "holds", ())
    assert "the run here: holds" in row(outcome)[-1]


def test_a_claim_says_what_differs_from_its_paper_and_a_pinned_value_was_not_chosen() -> None:
    over = Setting(head="frozen").over(Setting(network=("vit",), turns=9))
    assert over == Setting(network=("vit",), turns=9, head="frozen")
    assert faithful({"network": ["mlp"]}, {"network": ["vit"], "turns": 20}).status == "holds"
    assert faithful({"network": ["mlp"]}, {"network": ["vit"], "turns": 30}).elsewhere.startswith("clients")
    assert faithful({"lam": "chosen"}, lam_chosen=0.0).shown == "holds"
    assert faithful({"lam": "pinned"}, lam_chosen=0.0).status == "holds"


def test_the_run_is_corrected_and_told_but_another_gate_comes_first() -> None:
    claim = {**NOISELESS, "gap": 0.02, "setting": {"network": ["vit"]}}
    several = judge_paper(paper(*[claim] * 10, gates=["faithful"]), [of(0.02, p=0.03)])
    assert {(one.status, one.shown) for one in several} == {("not tested at this scale", "undecided")}
    dead = outcome_of(claim, of(0.02, p=0.03), gates=["faithful", "took part"])
    assert (dead.status, len(dead.why), dead.shown) == ("not tested", 2, None)
    unknown = replace(of(0.06, p=0.001), settings={})  # what was not kept does not pass
    assert outcome_of(NOISELESS, unknown, gates=["faithful"]).status == "not tested at this scale"


LABELS = {"partition": "labels_per_client", "partition_options": {"classes": 2}}


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({}, {"network": "mlp", "split": "dirichlet alpha=0.3", "head": "trained"}),
        ({"model": {"name": "mlp", "trainable": "body"}}, {"head": "frozen"}),
        ({"model": {"name": "mlp", "trainable": "body+head"}}, {"head": "trained"}),
        ({"data": LABELS}, {"split": "labels_per_client classes=2"}),
    ],
)
def test_what_a_setting_is_read_from(changes: dict[str, Any], setting: dict[str, str]) -> None:
    data = {"partition": "dirichlet", "partition_options": {"alpha": 0.3, "min_size": 2}}
    read = setting_of(load({"data": data, "model": "mlp", **changes}))
    assert {name: read[name] for name in setting} == setting


def test_every_claim_that_is_measured_says_what_it_must_share() -> None:
    for one in papers().values():
        for claim in (claim for claim in one.claims if claim.recipe and not claim.elsewhere):
            setting = one.setting_of(claim)
            assert "faithful" in one.gates_of(claim), claim.id
            assert setting.network, claim.id
            assert setting.split, claim.id


# -- noise ---------------------------------------------------------------------------------------------------


def looks(scores: list[float], client: list[int] | None = None, sample: list[int] | None = None) -> Any:
    n = len(scores)
    return pd.DataFrame({"client": client or [0] * n, "sample": sample or list(range(n)), "score": scores})


def test_a_share_is_what_a_sample_adds_to_a_mean() -> None:
    scores = looks([1.0, 0.0, 0.0, 1.0], client=[0, 0, 0, 1])
    mean = (1 / 3 + 1) / 2
    by_client = [(1 - mean) / 6, -mean / 6, -mean / 6, (1 - mean) / 2]
    assert share(scores, by_client=True).tolist() == pytest.approx(by_client)
    assert share(scores, by_client=False).tolist() == pytest.approx([0.125, -0.125, -0.125, 0.125])
    of_two = looks(
        [1.0, 0.0, 1.0, 1.0], client=[0, 0, 1, 1], sample=[7, 8, 7, 9]
    )  # one sample of two clients
    expected = {7: 2 * 0.25 / 4, 8: -0.75 / 4, 9: 0.25 / 4}
    assert share(of_two, by_client=True).to_dict() == pytest.approx(expected)


def test_what_seeds_share_by_hand() -> None:
    """Of models that are the same with every seed, ±1 on a share q of N samples, it is q/N."""
    d = np.array([1.0] * 10 + [-1.0] * 10 + [0.0] * 80)
    same = share(looks(d.tolist()), by_client=False)
    assert shared_variance([same, same, same]) == pytest.approx(sampling_error(0.2, 100) ** 2)
    one, two = pd.Series({"x": 0.5, "y": -0.5}), pd.Series({"y": -0.2, "z": 0.2})
    assert shared_variance([one, two]) == pytest.approx(0.1)
    assert shared_variance([one, -two]) == 0.0
    with pytest.raises(ValueError, match="two"):
        shared_variance([one])


@pytest.mark.slow
@pytest.mark.parametrize("tested", [200, 50])
def test_with_the_spread_over_seeds_it_is_the_error_of_the_mean(tested: int) -> None:
    """Brute force: a pool of 200 samples drawn anew 200 times, of which 4 seeds test all, or 50 each."""
    rng = np.random.default_rng(tested)
    means, predicted = [], []
    for _ in range(200):
        of_samples = rng.normal(0, 1, 200)
        seeds, numbers = [], []
        for _ in range(4):
            rows = rng.choice(200, tested, replace=False)
            scores = of_samples[rows] + rng.normal(0, 0.5, tested)
            seeds.append(share(looks(scores.tolist(), sample=rows.tolist()), by_client=False))
            numbers.append(scores.mean())
        means.append(np.mean(numbers))
        whole = float((pd.concat(seeds).groupby(level=0).sum() ** 2).sum())
        signed = (whole - sum(float((s**2).sum()) for s in seeds)) / 12
        predicted.append(np.var(numbers, ddof=1) / 4 + signed)
    assert np.mean(predicted) == pytest.approx(np.var(means), rel=0.25)


def width(claim: dict[str, Any], found: Evidence, **more: Any) -> float:
    judged = outcome_of(claim, found, **more).judged
    assert judged is not None
    return judged.high - judged.estimate


@pytest.mark.parametrize(
    ("metric", "count"), [("mean", 1), ("worst10", 0), ("global.local.accuracy.best5", 0)]
)
def test_noise_is_measured_of_means_over_all_clients_alone(metric: str, count: int) -> None:
    (claim,) = paper({**BETTER, "metric": metric}).claims
    assert len(list(pairs(claim))) == count


def test_measured_noise_takes_the_place_of_what_is_assumed() -> None:
    numbers = {"a": [0.7, 0.71, 0.69], "b": [0.6, 0.61, 0.605]}
    found = evidence(numbers, **{"fact.samples.local": 400.0})
    deviation = float(np.std(np.subtract(numbers["a"], numbers["b"]), ddof=1))
    declared = {"discordance": 0.05, "source": "s"}
    pool = {**declared, "samples": {"local": 1000}}
    measured = replace(found, noise={("mean", "", "a", "b"): 1e-4})
    for one, noise, error in (
        (found, {}, math.sqrt(0.2 / 400)),
        (found, {"r": declared}, math.sqrt(0.05 / 400)),
        (found, {"r": pool}, math.sqrt(0.05 / 1000)),
        (measured, {"r": pool}, 0.01),
    ):
        assert width(BETTER, one, noise=noise) == pytest.approx(half_width(deviation, 3, error))


def test_sizes_are_turned_over_before_they_are_averaged() -> None:
    """Gains in two places of 100 (or 50) and 10,000 samples: they add, of two variants a quarter of it."""
    few, many = (
        evidence({"a": [0.5, 0.6, 0.55], "b": [0.4, 0.45, 0.42]}, variant=v, **{"fact.samples.local": n})
        for v, n in (("few", 100.0), ("many", 10_000.0))
    )
    smaller = tuple({**r, "fact.samples.local": 50.0} if r["seed"] == 1 else r for r in few.rows)
    both = together(replace(few, rows=smaller), many)
    inverse = (1 / 100 + 1 / 50 + 1 / 100) / 3 + 1 / 10_000
    gains = {"kind": "sign", "first": "a - b @ few", "second": "a - b @ many"}
    shared = {"kind": "sign", "first": "a @ few", "second": "a @ many"}
    mean = {"kind": "sign", "first": "a", "second": "b", "variants": ["few", "many"]}
    for claim, square, differences in (
        (gains, 0.2 * inverse, [0.0] * 3),
        (shared, 0.2 * inverse / 2, [0.0] * 3),
        (mean, 0.2 * inverse / 4, [0.1, 0.15, 0.13]),
    ):
        deviation = float(np.std(differences, ddof=1))
        assert width(claim, both) == pytest.approx(half_width(deviation, 3, math.sqrt(square)))


# -- cells ---------------------------------------------------------------------------------------------------

VALUES = {"a": [0.70, 0.71, 0.69, 0.70], "b": [0.5, 0.52, 0.48, 0.5]}


def wide(label: str, repeats: int) -> float:
    s = np.std(VALUES[label], ddof=1)
    return float(stats.t.ppf(1 - 0.05 / 4, 3) * s * math.sqrt(1 / 4 + 1 / repeats))


@pytest.mark.parametrize(
    ("a", "b", "widest", "verdict", "farthest"),
    [
        (0.0, 0.9, 0.1, "reproduced", "b"),
        (0.9, 0.0, 0.1, "reproduced", "a"),
        (1.1, 0.0, 0.1, "not reproduced", "a"),
        (0.0, -1.1, 0.1, "not reproduced", "b"),
        (0.5, 0.4, 0.03, "undecided", "a"),  # noise of four points says little
        (0.1, 0.05, 0.001, "reproduced", "a"),  # but half a point is what was printed
    ],
)
def test_by_how_much_of_the_noise_cells_differ(
    a: float, b: float, widest: float, verdict: str, farthest: str
) -> None:
    published = {"a": 0.7 - a * wide("a", 5), "b": 0.5 - b * wide("b", 5)}
    judged, label = judge_cells(VALUES, published, 5, widest)
    assert (judged.verdict, label) == (verdict, farthest)
    assert judged.high - judged.estimate == pytest.approx(wide(label, 5))
    assert judged.estimate == pytest.approx({"a": a, "b": b}[label] * wide(label, 5))


def test_half_a_point_is_no_difference_however_small_the_noise() -> None:
    values = {"a": [0.7, 0.7, 0.7001]}
    assert judge_cells(values, {"a": 0.704}, 1, 0.01)[0].verdict == "reproduced"
    assert judge_cells(values, {"a": 0.706}, 1, 0.01)[0].verdict == "not reproduced"
    assert judge_cells(values, {"a": 0.704}, 1, 0.01, point=0.0)[0].verdict == "not reproduced"
    assert judge_cells({"a": [0.7, 0.7]}, {"a": 0.7}, 1, 0.01)[0].verdict == "undecided"
    cells = {"kind": "cells", "published": {"a": 0.7, "b": 0.6}, "gap": 0.1, "repeats": 5}
    outcome = outcome_of(cells, evidence(VALUES))
    assert (outcome.status, outcome.against) == ("not reproduced", "b")
    assert row(outcome)[2] == "2 numbers"
    assert row(outcome)[3].startswith("farthest b: -10.0 (noise ± 4.6)")


def test_what_is_no_statement_of_its_own_is_counted_apart() -> None:
    claims = (
        {**NOISELESS, "central": True},
        {**NOISELESS, "first": "b", "second": "a"},
        {**NOISELESS, "setting": {"network": ["vit"]}},
        {**NOISELESS, "apart": "twin"},
        {**NOISELESS, "apart": "trivial"},
        {"kind": "exact", "check": "fedclup_rows_rise", "apart": "print"},
        {"kind": "exact", "check": "ckt_costs", "apart": "formula"},
        {"kind": "cells", "published": {"a": 0.7}, "gap": 0.1},
    )
    one = paper(*claims, gates=["faithful"])
    outcomes = judge_paper(one, [evidence(LINES)])
    parts = summary(outcomes).split("; ")
    assert (parts[0], len(parts)) == (
        "1 holds, 1 reversed, 1 reproduced, 1 not tested at this scale", 5,
    )  # fmt: skip
    for sentence in (
        "Of 4 statements 2 were measured in the paper's setting: 1 holds, 1 reversed.",
        "Published numbers, 1 groups of them: 1 reproduced.",
        "1 statements were measured in another setting alone, which tests no paper (1 holds there)",
        "Central claims: P: 1 holds.",
    ):
        assert sentence in headline({"p": (one, outcomes)})


def test_a_note_is_told_where_there_is_a_verdict() -> None:
    sign = {"kind": "sign", "first": "a", "second": "b", "note": "but"}
    assert "but" not in row(Outcome(Claim(id="x", text="t", source="s", recipe="r", **sign), "not run"))[-1]
    assert row(outcome_of(sign, evidence({"a": [0.7] * 3, "b": [0.6] * 3})))[-1].endswith("; but")
