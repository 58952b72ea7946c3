"""Rules of verdicts on made-up numbers: corrections both ways, faithful settings, measured noise, printed cells."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from studies.claims.claim import Claim, Paper, Setting, papers
from studies.claims.evidence import Evidence, setting_of
from studies.claims.judging import Outcome, judge_paper, step_down
from studies.claims.noise import share, shared_variance
from studies.claims.verdicts import half_width, judge, judge_cells, judge_order, sampling_error
from studies.claims.words import headline, row, summary
from tailorfl.evaluation.ranks import holm
from tailorfl.settings.loading import load

BETTER = {"kind": "at least", "first": "a", "second": "b", "gap": 0.05, "noiseless": True}
MLP = {"network": "mlp", "split": "dirichlet alpha=0.1", "head": "trained"}


def paper(*claims: dict[str, Any], **more: Any) -> Paper:
    given = [{"id": f"c{k}", "text": "t", "source": "s", "recipe": "r", **c} for k, c in enumerate(claims)]
    return Paper.model_validate({"paper": "p", "title": "P", "claims": given, **more})


def evidence(numbers: dict[str, list[float]], variant: str = "", **facts: float) -> Evidence:
    rows = [
        {"variant": variant, "label": label, "seed": seed, "mean": value, **facts}
        for label, values in numbers.items()
        for seed, value in enumerate(values)
    ]
    return Evidence("r", "small", ("here",), "d", tuple(rows), {variant: MLP})


def spread(mean: float, p: float, seeds: int = 4) -> list[float]:
    """Differences of a mean whose t-test against 0 has a p-value."""
    base = np.linspace(-1, 1, seeds)
    scale = abs(mean) / stats.t.isf(p / 2, seeds - 1) * math.sqrt(seeds) / base.std(ddof=1)
    return (mean + base * scale).tolist()


def of(differences: list[float]) -> Evidence:
    return evidence({"a": differences, "b": [0.0] * len(differences)})


class TestBothDirections:
    def test_two_hypotheses_a_claim_of_which_one_can_be_true(self) -> None:
        """By hand: .001 of 3 claims, .004 of 3, .01 of 2 (the first is rejected whole), .2 of 2, .3 of 1."""
        tests = [(0.001, 0.004), (0.01, 0.3), (math.nan, 0.2)]
        first, second, third = step_down(tests)
        assert first == pytest.approx((0.003, 0.012))
        assert second == pytest.approx((0.02, 0.4))
        assert third[1] == pytest.approx(0.4)
        assert math.isnan(third[0])

    def test_with_one_hypothesis_a_claim_it_is_holms(self) -> None:
        p = [0.04, 0.001, 0.3, 0.012, 0.9]
        assert [one for one, _ in step_down([(value, math.nan) for value in p])] == pytest.approx(holm(p))

    def test_it_rarely_errs_where_every_claim_has_a_true_hypothesis(self) -> None:
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
        ("mean", "p", "gap", "alone", "among"),
        [
            (0.02, 0.03, 0.02, "holds", "undecided"),
            (0.02, 0.03, 0.09, "holds in sign", "undecided"),
            (
                -0.02,
                0.03,
                0.02,
                "reversed",
                "undecided",
            ),  # .02 / 2 is as near to -.02 as to be .008: times ten .08
            (-0.02, 0.03, 0.12, "reversed", "does not hold"),  # .06 is farther away
            (0.001, 0.9, 0.04, "does not hold", "undecided"),
        ],
    )
    def test_every_verdict_is_taken_back(
        self, mean: float, p: float, gap: float, alone: str, among: str
    ) -> None:
        claim = {**BETTER, "gap": gap}
        found = of(spread(mean, p) if p < 0.5 else spread_of_width(mean, 0.016))
        (outcome,) = judge_paper(paper(claim), [found])
        assert outcome.status == alone
        several = judge_paper(paper(*[claim] * 10), [found])
        assert {one.status for one in several} == {among}
        assert len(several[0].why) == 1
        assert not outcome.why

    def test_what_a_verdict_rests_on_is_its_p_value(self) -> None:
        found = of(spread_of_width(0.001, 0.016))
        (outcome,) = judge_paper(paper({**BETTER, "gap": 0.04}), [found])
        differences = [row["mean"] for row in found.rows if row["label"] == "a"]
        assert outcome.holm == pytest.approx(stats.ttest_1samp(differences, 0.02).pvalue, rel=1e-6)
        (margin,) = judge_paper(paper({**BETTER, "kind": "at most", "gap": 0.03}), [found])
        assert margin.status == "holds"
        assert margin.holm == pytest.approx(stats.ttest_1samp(differences, 0.03).pvalue, rel=1e-6)

    def test_a_difference_that_is_large_enough_says_nothing_against(self) -> None:
        assert judge([0.03, 0.031, 0.029], 0.05).p_against == 1.0
        assert judge([0.003, 0.0031, 0.0029], 0.0).p_against < 1e-3  # half a point
        assert judge([0.003, 0.0031, 0.0029], 0.0, point=0.0).p_against == 1.0

    def test_one_pair_of_an_order_is_enough_so_its_p_value_counts_for_all(self) -> None:
        values = {"a": [0.9, 0.91, 0.9], "b": [0.8, 0.8, 0.81], "c": [0.803, 0.8, 0.806]}
        order = judge_order(values, {"a": 0.9, "b": 0.85, "c": 0.8})
        single = judge(np.subtract(values["b"], values["c"]).tolist(), 0.05)
        assert order.judged.verdict == "does not hold"
        assert order.judged.p_against == pytest.approx(3 * single.p_against)

    def test_errors_have_no_half_point(self) -> None:
        """.0001 ± .0004 is no sign that a published .001 is not there, though half a point is far above both."""
        found = of(spread_of_width(0.0001, 0.0005))
        claim = {**BETTER, "gap": 0.001, "points": False}
        (outcome,) = judge_paper(paper(claim), [found])
        assert outcome.status == "undecided"


def spread_of_width(mean: float, width: float, seeds: int = 4) -> list[float]:
    base = np.linspace(-1, 1, seeds)
    wide = stats.t.ppf(0.975, seeds - 1) * base.std(ddof=1) / math.sqrt(seeds)
    return (mean + base * width / wide).tolist()


class TestLearned:
    NUMBERS = {"a": [0.7, 0.71, 0.69], "b": [0.6, 0.61, 0.6], "FedAvg": [0.5] * 3}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("line", "level"), [("a", 0.24), ("b", 0.24), ("FedAvg", 0.24), ("FedAvg", 0.91)]
    )
    def test_every_line_of_the_claim_has(self, line: str, level: float) -> None:
        one = paper(BETTER, gates=["learned"])
        (passes,) = judge_paper(one, [evidence(self.NUMBERS)])
        assert passes.status == "holds"
        (dead,) = judge_paper(one, [evidence({**self.NUMBERS, line: [level] * 3})])
        assert dead.status == "not tested"
        assert dead.why[0].startswith(f"learned: {line} reaches {level}")

    def test_only_fedavg_must_leave_something_to_learn_and_only_where_it_is_named(self) -> None:
        high = evidence({**self.NUMBERS, "a": [0.97, 0.98, 0.97], "FedAvg": [0.95] * 3})
        assert judge_paper(paper(BETTER, gates=["learned"]), [high])[0].status == "not tested"
        unnamed = paper(BETTER, gates=["learned"], floor={"fedavg": ""})
        assert judge_paper(unnamed, [high])[0].status == "holds"


class TestFaithful:
    NUMBERS = {"a": [0.7, 0.71, 0.69], "b": [0.6, 0.61, 0.6]}  # noqa: RUF012
    FACTS = {"fact.took_part.mean": 20.0, "fact.lam_chosen": 1.0}  # noqa: RUF012

    def judged(
        self, setting: dict[str, Any], paper_has: dict[str, Any] | None = None, **facts: float
    ) -> Outcome:
        one = paper({**BETTER, "setting": setting}, gates=["faithful"], setting=paper_has or {})
        (outcome,) = judge_paper(one, [evidence(self.NUMBERS, **{**self.FACTS, **facts})])
        return outcome

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
    def test_each_part_of_a_setting(self, same: dict[str, Any], other: dict[str, Any]) -> None:
        assert self.judged(same).status == "holds"
        outcome = self.judged(other)
        assert (outcome.status, outcome.shown, outcome.why) == ("not tested at this scale", "holds", ())
        assert "the run here: holds" in row(outcome)[-1]

    def test_a_pinned_value_is_none_that_was_chosen(self) -> None:
        assert self.judged({"lam": "chosen"}, **{"fact.lam_chosen": 0.0}).shown == "holds"
        assert self.judged({"lam": "pinned"}, **{"fact.lam_chosen": 0.0}).status == "holds"

    def test_a_claim_says_what_differs_from_its_paper(self) -> None:
        assert Setting(head="frozen").over(Setting(network=("vit",), turns=9)) == Setting(
            network=("vit",), turns=9, head="frozen"
        )
        assert self.judged({"network": ["mlp"]}, {"network": ["vit"], "turns": 20}).status == "holds"
        assert self.judged({"network": ["mlp"]}, {"network": ["vit"], "turns": 30}).elsewhere.startswith(
            "clients"
        )

    def test_the_run_is_corrected_and_told_but_another_gate_comes_first(self) -> None:
        claim = {**BETTER, "gap": 0.02, "setting": {"network": ["vit"]}}
        found = replace(of(spread(0.02, 0.03)), settings={"": MLP})
        several = judge_paper(paper(*[claim] * 10, gates=["faithful"]), [found])
        assert {(one.status, one.shown) for one in several} == {("not tested at this scale", "undecided")}
        (dead,) = judge_paper(paper(claim, gates=["faithful", "took part"]), [found])
        assert (dead.status, len(dead.why), dead.shown) == ("not tested", 2, None)

    def test_settings_that_were_not_kept_do_not_pass(self) -> None:
        found = replace(of(spread(0.06, 0.001)), settings={})
        (outcome,) = judge_paper(paper(BETTER, gates=["faithful"]), [found])
        assert outcome.status == "not tested at this scale"

    @pytest.mark.parametrize(
        ("changes", "setting"),
        [
            ({}, {"network": "mlp", "split": "dirichlet alpha=0.3", "head": "trained"}),
            ({"model": {"name": "mlp", "trainable": "body"}}, {"head": "frozen"}),
            ({"model": {"name": "mlp", "trainable": "body+head"}}, {"head": "trained"}),
            (
                {"data": {"partition": "labels_per_client", "partition_options": {"classes": 2}}},
                {"split": "labels_per_client classes=2"},
            ),
        ],
    )
    def test_what_a_setting_is_read_from(self, changes: dict[str, Any], setting: dict[str, str]) -> None:
        plain = {
            "data": {"partition": "dirichlet", "partition_options": {"alpha": 0.3, "min_size": 2}},
            "model": "mlp",
        }
        read = setting_of(load({**plain, **changes}))
        assert {name: read[name] for name in setting} == setting

    def test_every_claim_that_is_measured_says_what_it_must_share(self) -> None:
        for one in papers().values():
            for claim in (claim for claim in one.claims if claim.recipe and not claim.elsewhere):
                setting = one.setting_of(claim)
                assert "faithful" in one.gates_of(claim), claim.id
                assert setting.network, claim.id
                assert setting.split, claim.id


class TestNoise:
    def looks(
        self, scores: list[float], client: list[int] | None = None, sample: list[int] | None = None
    ) -> pd.DataFrame:
        n = len(scores)
        return pd.DataFrame(
            {"client": client or [0] * n, "sample": sample or list(range(n)), "score": scores}
        )

    def test_a_share_is_what_a_sample_adds_to_a_mean(self) -> None:
        found = share(self.looks([1.0, 0.0, 0.0, 1.0], client=[0, 0, 0, 1]), by_client=True)
        mean = (1 / 3 + 1) / 2
        assert found.tolist() == pytest.approx([(1 - mean) / 6, -mean / 6, -mean / 6, (1 - mean) / 2])
        found = share(self.looks([1.0, 0.0, 0.0, 1.0], client=[0, 0, 0, 1]), by_client=False)
        assert found.tolist() == pytest.approx([0.125, -0.125, -0.125, 0.125])

    def test_a_sample_of_several_clients_is_one(self) -> None:
        found = share(
            self.looks([1.0, 0.0, 1.0, 1.0], client=[0, 0, 1, 1], sample=[7, 8, 7, 9]), by_client=True
        )
        assert found.to_dict() == pytest.approx({7: 2 * 0.25 / 4, 8: -0.75 / 4, 9: 0.25 / 4})

    def test_models_that_are_the_same_with_every_seed_have_all_the_noise_of_their_samples(self) -> None:
        """±1 on a share q of N samples in all seeds: q/N."""
        d = np.array([1.0] * 10 + [-1.0] * 10 + [0.0] * 80)
        one = share(self.looks(d.tolist()), by_client=False)
        assert shared_variance([one, one, one]) == pytest.approx(sampling_error(0.2, 100) ** 2)

    def test_by_hand_of_two_seeds(self) -> None:
        one, two = pd.Series({"x": 0.5, "y": -0.5}), pd.Series({"y": -0.2, "z": 0.2})
        assert shared_variance([one, two]) == pytest.approx(0.1)
        assert shared_variance([one, -two]) == 0.0
        with pytest.raises(ValueError, match="two"):
            shared_variance([one])

    @pytest.mark.slow
    @pytest.mark.parametrize("tested", [200, 50])
    def test_with_the_spread_over_seeds_it_is_the_error_of_the_mean(self, tested: int) -> None:
        """Brute force: a pool of 200 samples drawn anew 200 times, of which 4 seeds test all, or 50 each."""
        rng = np.random.default_rng(tested)
        means, predicted = [], []
        for _ in range(200):
            of_samples = rng.normal(0, 1, 200)
            seeds, numbers = [], []
            for _ in range(4):
                rows = rng.choice(200, tested, replace=False)
                scores = of_samples[rows] + rng.normal(0, 0.5, tested)
                seeds.append(share(self.looks(scores.tolist(), sample=rows.tolist()), by_client=False))
                numbers.append(scores.mean())
            means.append(np.mean(numbers))
            signed = (sum_of(seeds) - sum(float((s**2).sum()) for s in seeds)) / 12
            predicted.append(np.var(numbers, ddof=1) / 4 + signed)
        assert np.mean(predicted) == pytest.approx(np.var(means), rel=0.25)

    def test_measured_noise_takes_the_place_of_what_is_assumed(self) -> None:
        numbers = {"a": [0.7, 0.71, 0.69], "b": [0.6, 0.61, 0.605]}
        claim = {**BETTER, "noiseless": False}
        found = evidence(numbers, **{"fact.samples.local": 400.0})
        differences = np.subtract(numbers["a"], numbers["b"]).tolist()

        def width(one: Evidence, **more: Any) -> float:
            (outcome,) = judge_paper(paper(claim, **more), [one])
            assert outcome.judged is not None
            return outcome.judged.high - outcome.judged.estimate

        def expected(error: float) -> float:
            return half_width(float(np.std(differences, ddof=1)), 3, error)

        assert width(found) == pytest.approx(expected(math.sqrt(0.2 / 400)))
        declared = {"discordance": 0.05, "source": "s"}
        assert width(found, noise={"r": declared}) == pytest.approx(expected(math.sqrt(0.05 / 400)))
        pool = {**declared, "samples": {"local": 1000}}
        assert width(found, noise={"r": pool}) == pytest.approx(expected(math.sqrt(0.05 / 1000)))
        measured = replace(found, noise={("mean", "", "a", "b"): 1e-4})
        assert width(measured, noise={"r": pool}) == pytest.approx(expected(0.01))

    def test_sizes_are_turned_over_before_they_are_averaged(self) -> None:
        """Gains in two places of 100 (or 50) and 10,000 samples: they add, of two variants a quarter of it."""
        few, many = (
            evidence({"a": [0.5, 0.6, 0.55], "b": [0.4, 0.45, 0.42]}, variant=v, **{"fact.samples.local": n})
            for v, n in (("few", 100.0), ("many", 10_000.0))
        )
        few = replace(
            few, rows=tuple({**r, "fact.samples.local": 50.0} if r["seed"] == 1 else r for r in few.rows)
        )
        both = replace(few, rows=(*few.rows, *many.rows), settings={})
        inverse = (1 / 100 + 1 / 50 + 1 / 100) / 3 + 1 / 10_000
        gains = {"kind": "sign", "first": "a - b @ few", "second": "a - b @ many"}
        shared = {"kind": "sign", "first": "a @ few", "second": "a @ many"}
        mean = {"kind": "sign", "first": "a", "second": "b", "variants": ["few", "many"]}
        errors = [0.2 * inverse, 0.2 * inverse / 2, 0.2 * inverse / 4]
        differences = [[0.0] * 3, [0.0] * 3, [0.1, 0.15, 0.13]]
        for claim, error, values in zip((gains, shared, mean), errors, differences, strict=True):
            (outcome,) = judge_paper(paper(claim), [both])
            assert outcome.judged is not None
            wide = half_width(float(np.std(values, ddof=1)), 3, math.sqrt(error))
            assert outcome.judged.high - outcome.judged.estimate == pytest.approx(wide)


def sum_of(seeds: list[pd.Series[float]]) -> float:
    return float((pd.concat(seeds).groupby(level=0).sum() ** 2).sum())


class TestCells:
    VALUES = {"a": [0.70, 0.71, 0.69, 0.70], "b": [0.5, 0.52, 0.48, 0.5]}  # noqa: RUF012

    def wide(self, label: str, repeats: int) -> float:
        s = np.std(self.VALUES[label], ddof=1)
        return float(stats.t.ppf(1 - 0.05 / 4, 3) * s * math.sqrt(1 / 4 + 1 / repeats))

    @pytest.mark.parametrize(
        ("a", "b", "widest", "verdict"),
        [
            (0.0, 0.9, 0.1, "reproduced"),
            (0.9, 0.0, 0.1, "reproduced"),
            (1.1, 0.0, 0.1, "not reproduced"),
            (0.0, -1.1, 0.1, "not reproduced"),
            (0.5, 0.5, 0.03, "undecided"),  # noise of four points says little
            (0.1, 0.1, 0.001, "reproduced"),  # but half a point is what was printed
        ],
    )
    def test_by_how_much_of_the_noise_cells_differ(
        self, a: float, b: float, widest: float, verdict: str
    ) -> None:
        published = {"a": 0.7 - a * self.wide("a", 5), "b": 0.5 - b * self.wide("b", 5)}
        judged, farthest = judge_cells(self.VALUES, published, 5, widest)
        assert judged.verdict == verdict
        assert farthest == ("a" if abs(a) > abs(b) else "b") or a == b
        label = farthest
        assert judged.high - judged.estimate == pytest.approx(self.wide(label, 5))
        assert judged.estimate == pytest.approx({"a": a, "b": b}[label] * self.wide(label, 5))

    def test_half_a_point_is_no_difference_however_small_the_noise(self) -> None:
        values = {"a": [0.7, 0.7, 0.7001]}
        assert judge_cells(values, {"a": 0.704}, 1, 0.01)[0].verdict == "reproduced"
        assert judge_cells(values, {"a": 0.706}, 1, 0.01)[0].verdict == "not reproduced"
        assert judge_cells(values, {"a": 0.704}, 1, 0.01, point=0.0)[0].verdict == "not reproduced"
        assert judge_cells({"a": [0.7, 0.7]}, {"a": 0.7}, 1, 0.01)[0].verdict == "undecided"

    def test_a_claim_about_cells(self) -> None:
        cells = {"kind": "cells", "published": {"a": 0.7, "b": 0.6}, "gap": 0.1, "repeats": 5}
        (outcome,) = judge_paper(paper(cells), [evidence(self.VALUES)])
        assert (outcome.status, outcome.against) == ("not reproduced", "b")
        assert row(outcome)[2] == "2 numbers"
        assert row(outcome)[3].startswith("farthest b: -10.0 (noise ± 4.6)")


class TestCounting:
    def test_what_is_no_statement_of_its_own_is_counted_apart(self) -> None:
        found = evidence({"a": [0.7, 0.71, 0.69], "b": [0.6, 0.61, 0.6]})
        claims = (
            {**BETTER, "central": True},
            {**BETTER, "first": "b", "second": "a"},
            {**BETTER, "setting": {"network": ["vit"]}},
            {**BETTER, "apart": "twin"},
            {**BETTER, "apart": "trivial"},
            {"kind": "exact", "check": "fedclup_rows_rise", "apart": "print"},
            {"kind": "exact", "check": "ckt_costs", "apart": "formula"},
            {"kind": "cells", "published": {"a": 0.7}, "gap": 0.1},
        )
        one = paper(*claims, gates=["faithful"])
        outcomes = judge_paper(one, [found])
        said = summary(outcomes)
        assert said.split("; ")[0] == "1 holds, 1 reversed, 1 reproduced, 1 not tested at this scale"
        assert len(said.split("; ")) == 5
        whole = headline({"p": (one, outcomes)})
        assert "Of 4 statements 2 were measured in the paper's setting: 1 holds, 1 reversed." in whole
        assert "Published numbers, 1 groups of them: 1 reproduced." in whole
        assert (
            "1 statements were measured in another setting alone, which tests no paper (1 holds there)"
            in whole
        )
        assert "Central claims: P: 1 holds." in whole

    def test_a_note_is_told_where_there_is_a_verdict(self) -> None:
        claim = Claim(
            id="x", text="t", source="s", kind="sign", recipe="r", first="a", second="b", note="but"
        )
        assert "but" not in row(Outcome(claim, "not run"))[-1]
        (judged,) = judge_paper(
            Paper(paper="p", title="P", claims=(claim,)), [evidence({"a": [0.7] * 3, "b": [0.6] * 3})]
        )
        assert row(judged)[-1].endswith("; but")
