"""Claims of papers: what may be declared, what is read off result folders, gates, verdicts of synthetic evidence."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from typer.testing import CliRunner

import tailorfl
from studies.claims import exact, words
from studies.claims.__main__ import app
from studies.claims.claim import Claim, Paper, papers, read_paper
from studies.claims.evidence import Evidence, joined, keep
from studies.claims.facts import facts_of
from studies.claims.folders import gathered, keep_records, of_folder
from studies.claims.judging import judge_paper, measured_on
from studies.claims.noise import measured, share
from studies.claims.noise import scores_of as tried
from studies.claims.verdicts import judge, sampling_error
from studies.claims.words import page, sections
from tailorfl.errors import ConfigError, RunError
from tailorfl.report.result import ExperimentResult, results
from tailorfl.settings.loading import expand, load, recipes
from tailorfl.settings.names import slug

ROOT = Path(__file__).resolve().parents[2]


def evidence(
    numbers: dict[str, list[float]], scale: str = "small", variant: str = "", **facts: float
) -> Evidence:
    """Evidence of the recipe `r`: label -> its number with each seed; all jobs have the same facts."""
    rows = [
        {
            "variant": variant,
            "label": label,
            "seed": seed,
            "mean": value,
            "deployed.global": value - 0.1,
            **facts,
        }
        for label, values in numbers.items()
        for seed, value in enumerate(values)
    ]
    return Evidence("r", scale, ("here",), "d", tuple(rows))


def paper(*claims: dict[str, Any], **more: Any) -> Paper:
    given = [{"id": f"c{k}", "text": "t", "source": "s", "recipe": "r", **c} for k, c in enumerate(claims)]
    return Paper.model_validate({"paper": "p", "title": "P", "claims": given, **more})


BETTER = {"kind": "at least", "first": "a", "second": "b", "gap": 0.05}
SAMPLES = {"fact.samples.local": 10_000.0, "fact.samples.global": 400.0}


def statuses(one: Paper, *found: Evidence) -> list[str]:
    return [outcome.status for outcome in judge_paper(one, found)]


class TestVerdicts:
    NUMBERS = {"a": [0.70, 0.71, 0.69, 0.70], "b": [0.64, 0.65, 0.64, 0.63], "c": [0.699, 0.709, 0.691, 0.7]}  # noqa: RUF012

    def test_differences_are_paired_by_seed_and_have_the_error_of_the_test_set(self) -> None:
        found = evidence(self.NUMBERS, **SAMPLES)
        (outcome,) = judge_paper(paper(BETTER), [found])
        differences = np.subtract(self.NUMBERS["a"], self.NUMBERS["b"])
        expected = judge(differences.tolist(), 0.05, math.sqrt(0.2 / 10_000))
        assert outcome.judged == expected
        low, high = stats.t.interval(0.95, 3, differences.mean(), stats.sem(differences))
        assert expected.low < low
        assert expected.high > high
        missing = Evidence("r", "small", (), "d", found.rows[:-1])  # seed 3 of c, and of it alone, is gone
        (of_c,) = judge_paper(paper({**BETTER, "second": "c"}), [missing])
        assert of_c.judged is not None
        assert of_c.judged.seeds == 3

    def test_every_kind(self) -> None:
        claims = [
            BETTER,
            {"kind": "at most", "first": "c", "second": "a", "gap": 0.02},
            {"kind": "sign", "first": "b", "second": "a"},
            {"kind": "ordered", "published": {"a": 0.9, "b": 0.8}},
            {"kind": "exact", "check": "ckt_costs", "apart": "formula"},
            {"kind": "exact", "check": "plgu_least_gain", "apart": "print"},
            {"kind": "at least", "gap": 0.1, "impossible": "no data"},
            {"kind": "sign", "elsewhere": "a study"},
            {"kind": "sign", "missing": "not built"},
            {**BETTER, "second": "absent"},
        ]
        assert statuses(paper(*claims), evidence(self.NUMBERS, **SAMPLES)) == [
            "holds",
            "holds",
            "reversed",
            "holds",
            "holds",
            "does not hold",
            "impossible",
            "elsewhere",
            "not run",
            "not run",
        ]

    def test_of_several_the_worst_counts(self) -> None:
        several = {
            "kind": "at least",
            "first": "a",
            "second": ["b", "c"],
            "published": {"a": 0.9, "b": 0.85, "c": 0.8},
        }
        (outcome,) = judge_paper(paper(several), [evidence(self.NUMBERS, **SAMPLES)])
        assert (outcome.against, outcome.status) == ("c", "does not hold")

    def test_the_test_set_of_the_metric_counts(self) -> None:
        found = evidence(self.NUMBERS, **SAMPLES)
        (own,), (common,) = (
            judge_paper(paper({**BETTER, "metric": m}), [found]) for m in ("mean", "deployed.global")
        )
        assert own.judged is not None
        assert common.judged is not None
        assert own.judged.estimate == pytest.approx(common.judged.estimate)
        differences = np.subtract(self.NUMBERS["a"], self.NUMBERS["b"])
        width = stats.t.ppf(0.975, 3) * stats.sem(differences)
        wide = math.hypot(width, stats.norm.ppf(0.975) * sampling_error(0.2, 400))
        assert common.judged.high - common.judged.estimate == pytest.approx(wide)
        known = {
            "personal.local.accuracy.worst5": ("local", 0.05),
            "deployed.fog-3": ("fog-3", 1.0),
            "worst10": ("local", 0.1),
        }
        assert {metric: measured_on(metric) for metric in known} == known

    def test_without_a_test_sets_size_nothing_is_decided_unless_the_truth_is_known(self) -> None:
        found = evidence(self.NUMBERS)
        assert statuses(paper(BETTER), found) == ["undecided"]
        assert statuses(paper({**BETTER, "noiseless": True}), found) == ["holds"]

    def test_a_smoke_is_no_evidence_and_the_paper_scale_comes_first(self) -> None:
        other = {"a": [0.5, 0.51, 0.5], "b": [0.7, 0.71, 0.7]}
        assert statuses(paper(BETTER), evidence(self.NUMBERS, "smoke", **SAMPLES)) == ["not run"]
        both = [evidence(self.NUMBERS, "small", **SAMPLES), evidence(other, "paper", **SAMPLES)]
        (outcome,) = judge_paper(paper(BETTER), both)
        assert (outcome.status, outcome.scale) == ("reversed", "paper")

    def test_of_one_scale_the_tuned_comparison_is_judged_whichever_comes_first(self) -> None:
        other = {"a": [0.5, 0.51, 0.5], "b": [0.7, 0.71, 0.7]}
        untuned = evidence(self.NUMBERS, **SAMPLES)
        tuned = evidence(other, **SAMPLES, **{"fact.inside_grid": 0.0})
        assert statuses(paper(BETTER), untuned, tuned) == ["reversed"]
        assert statuses(paper(BETTER), tuned, untuned) == ["reversed"]

    def test_variants_are_averaged_seed_by_seed_or_named_by_a_label(self) -> None:
        one, two = (
            evidence({"a": [0.8, 0.9, 0.7]}, variant="x"),
            evidence({"a": [0.6, 0.7, 0.51]}, variant="y"),
        )
        both = Evidence("r", "small", (), "d", (*one.rows, *two.rows))
        claims = paper(
            {"kind": "sign", "first": "a @ x", "second": "a @ y", "noiseless": True},
            {
                "kind": "at most",
                "variants": ["x", "y"],
                "first": "a",
                "second": "a @ x",
                "gap": 0.0,
                "noiseless": True,
            },
        )
        first, second = judge_paper(claims, [both])
        assert first.judged is not None
        assert second.judged is not None
        assert first.judged.estimate == pytest.approx((0.2 + 0.2 + 0.19) / 3)
        assert second.judged.estimate == pytest.approx(-(0.2 + 0.2 + 0.19) / 6)

    def test_a_difference_of_two_lines_is_compared_with_another(self) -> None:
        """Of two places: gains are paired by seed, and their test sets err twice as much in squares."""
        few = evidence({"a": [0.5, 0.6, 0.55], "b": [0.4, 0.45, 0.42, 0.4]}, variant="few", **SAMPLES)
        many = evidence({"a": [0.9, 0.91, 0.9], "b": [0.88, 0.9, 0.87]}, variant="many", **SAMPLES)
        both = Evidence("r", "small", (), "d", (*few.rows, *many.rows))
        claim = {"kind": "sign", "first": "a - b @ few", "second": "a - b @ many"}
        (outcome,) = judge_paper(paper(claim), [both])
        gains = [0.5 - 0.4 - (0.9 - 0.88), 0.6 - 0.45 - (0.91 - 0.9), 0.55 - 0.42 - (0.9 - 0.87)]
        expected = judge(gains, 0.0, math.sqrt(2 * 0.2 / 10_000))
        assert outcome.judged is not None
        assert outcome.status == expected.verdict
        assert outcome.judged.estimate == pytest.approx(expected.estimate)
        assert outcome.judged.p_value == pytest.approx(expected.p_value)
        assert statuses(paper(claim), few) == ["not run"]

    def test_a_metric_may_be_a_difference(self) -> None:
        (outcome,) = judge_paper(
            paper({**BETTER, "metric": "mean - deployed.global", "noiseless": True}), [evidence(self.NUMBERS)]
        )
        assert outcome.judged is not None
        assert outcome.judged.estimate == pytest.approx(0.0)

    def test_holms_correction_takes_back_what_chance_could_have_given(self) -> None:
        """p of about .03: alone it holds, among ten tests of a paper it does not."""
        base = np.array([0.5, 0.5, 0.5, 0.5])
        noise = np.array([1.0, -1.0, 0.4, -0.4])
        noise *= 0.02 * 2 / (stats.t.isf(0.03 / 2, 3) * noise.std(ddof=1))
        numbers = {"b": base.tolist(), "a": (base + 0.02 + noise).tolist()}
        claim = {**BETTER, "gap": 0.02, "noiseless": True}
        (alone,) = judge_paper(paper(claim), [evidence(numbers)])
        assert (alone.status, alone.holm) == ("holds", pytest.approx(0.03, abs=1e-4))
        many = judge_paper(paper(*[claim] * 10), [evidence(numbers)])
        assert {outcome.status for outcome in many} == {"undecided"}
        assert many[0].holm == pytest.approx(0.3, abs=1e-3)
        assert "Holm" in many[0].why[0]
        apart = judge_paper(
            paper(*[{**claim, "family": f"table {k}"} for k in range(10)]), [evidence(numbers)]
        )
        assert [o.holm for o in apart] == [alone.holm] * 10

    def test_what_is_no_share_is_told_as_it_is(self) -> None:
        claim = {**BETTER, "gap": 0.0018, "noiseless": True}
        (outcome,) = judge_paper(paper({**claim, "points": False}), [evidence(self.NUMBERS)])
        assert words.published(outcome) == "+0.0018"
        assert words.found(outcome) == "+0.06 [+0.047, +0.073]"
        (outcome,) = judge_paper(paper(claim), [evidence(self.NUMBERS)])
        assert words.found(outcome) == "+6.0 [+4.7, +7.3]"


class TestGates:
    GOOD = {  # noqa: RUF012
        "fact.took_part.mean": 20.0,
        "fact.took_part.least": 8.0,
        "fact.change": 0.001,
        "fact.change_val": 0.001,
        "fact.pull.each": 3.5,
        "fact.pull.all": 70.0,
        "fact.inside_grid": 1.0,
        **SAMPLES,
    }
    ALL = ("learned", "took part", "trained", "pulled", "settled", "inside grid")
    NUMBERS = {"a": [0.7, 0.71, 0.69], "b": [0.6, 0.61, 0.6], "FedAvg": [0.5] * 3, "LocalTrain": [0.4] * 3}  # noqa: RUF012

    def why(self, **facts: float) -> tuple[str, ...]:
        (outcome,) = judge_paper(
            paper(BETTER, gates=self.ALL), [evidence(self.NUMBERS, **{**self.GOOD, **facts})]
        )
        assert outcome.status == ("not tested" if outcome.why else "holds")
        return outcome.why

    def test_all_pass(self) -> None:
        assert self.why() == ()

    @pytest.mark.parametrize(
        ("fact", "bad", "gate"),
        [
            ("fact.took_part.mean", 9.0, "took part"),
            ("fact.took_part.least", 4.0, "took part"),
            ("fact.change_val", 0.02, "trained"),
            ("fact.change", 0.03, "settled"),
            ("fact.inside_grid", 0.0, "inside grid"),
        ],
    )
    def test_each_fails_by_its_own_fact(self, fact: str, bad: float, gate: str) -> None:
        (why,) = self.why(**{fact: bad})
        assert why.startswith(f"{gate}: ")

    @pytest.mark.parametrize("line", ["a", "b"])
    @pytest.mark.parametrize(
        ("fact", "bad", "gate"),
        [
            ("fact.took_part.mean", 9.0, "took part: clients took part 9.0 times"),
            ("fact.took_part.least", 4.0, "took part: a client took part 4.0 times"),
            ("fact.inside_grid", 0.0, "inside grid: a tuned value lies at the edge"),
        ],
    )
    def test_one_line_that_fails_is_enough(self, fact: str, bad: float, gate: str, line: str) -> None:
        found = evidence(self.NUMBERS, **self.GOOD)
        rows = tuple({**row, fact: bad} if row["label"] == line else row for row in found.rows)
        (outcome,) = judge_paper(paper(BETTER, gates=self.ALL), [replace(found, rows=rows)])
        assert outcome.why[0].startswith(gate)
        assert outcome.status == "not tested"

    @pytest.mark.parametrize("line", ["a", "b"])
    def test_the_rate_has_fallen_where_it_has_in_every_line(self, line: str) -> None:
        """Both curves moved by three points; a line whose rate has not fallen should not move."""
        found = evidence(
            {"a": [0.7, 0.71, 0.69], "b": [0.6, 0.61, 0.6]}, **{**self.GOOD, "fact.change": 0.03}
        )
        for rate, status in ((0.1, "holds"), (0.2, "not tested")):
            left = {"a": 0.1, "b": 0.1, line: rate}
            rows = tuple({**row, "fact.rate_left": left[row["label"]]} for row in found.rows)
            (outcome,) = judge_paper(paper(BETTER, gates=["settled"]), [replace(found, rows=rows)])
            assert outcome.status == status

    @pytest.mark.parametrize(("slope", "settled"), [(0.003, True), (0.009, False)])
    def test_the_verdict_must_stand_if_the_curves_go_on(self, slope: float, settled: bool) -> None:
        # a is .006 above b, within .0005 of it in every seed, and falls while b rises.
        numbers = {"a": [0.6060, 0.6065, 0.6055], "b": [0.6, 0.6, 0.6]}
        claim = {**BETTER, "noiseless": True, "gap": 0.01}
        curves = {"a": -slope / 2, "b": slope / 2}
        found = evidence(numbers, **self.GOOD)
        rows = tuple({**row, "fact.change": curves[row["label"]]} for row in found.rows)
        (outcome,) = judge_paper(paper(claim, gates=["settled"]), [replace(found, rows=rows)])
        assert outcome.status == ("holds" if settled else "not tested")
        if not settled:
            assert outcome.why == (
                "settled: if every curve went on as in the last fifth of the rounds, it would be 'reversed'",
            )

    @pytest.mark.parametrize(("rise", "status"), [((0.03, 0.03), "holds"), ((0.04, 0.01), "not tested")])
    def test_where_the_rate_has_fallen_curves_may_move_but_no_part_of_its_fall_may_decide(
        self, rise: tuple[float, float], status: str
    ) -> None:
        numbers = {"a": [0.62, 0.6205, 0.6195], "b": [0.6, 0.6, 0.6]}
        claim = {**BETTER, "noiseless": True, "gap": 0.01}
        curves = dict(zip("ab", rise, strict=True))
        found = evidence(numbers, **self.GOOD)

        def judged(left: float) -> Any:
            rows = tuple(
                {**row, "fact.change": curves[row["label"]], "fact.rate_left": left} for row in found.rows
            )
            (outcome,) = judge_paper(paper(claim, gates=["settled"]), [replace(found, rows=rows)])
            return outcome

        assert judged(1.0).status == "not tested"
        assert judged(0.1).status == status
        if status == "not tested":
            assert "before the last fifth" in judged(0.1).why[0]

    def test_a_metric_of_a_kind_of_model_goes_on_with_the_curve_of_that_kind(self) -> None:
        row = {"label": "a", "variant": "", "seed": 0, "global.local.accuracy.mean": 0.4, "mean": 0.7}
        row |= {"fact.change": 0.1, "fact.change.global": -0.05, "fact.change.personal": 0.1}
        (moved,) = Evidence("r", "small", (), "d", (row,)).moved_on(-1.0).rows
        assert moved == {**row, "global.local.accuracy.mean": pytest.approx(0.45), "mean": pytest.approx(0.6)}

    def test_numbers_of_another_metric_do_not_go_on_with_the_curve(self) -> None:
        row = {
            "label": "a",
            "variant": "",
            "seed": 0,
            "mean": 0.5,
            "deployed.global": 0.4,
            "fact.change": 0.1,
        }
        row |= {"personal.local.sharpness.mean": 0.03, "personal.local.accuracy.mean": 0.2}
        (moved,) = Evidence("r", "small", (), "d", (row,)).moved_on().rows
        gone_on = {"mean": 0.6, "deployed.global": 0.5, "personal.local.accuracy.mean": pytest.approx(0.3)}
        assert moved == {**row, **gone_on}

    def test_all_clients_in_one_place_take_part_in_nothing(self, tmp_path: Path) -> None:
        settings = {"data": {"clients": 3, "samples": 90}, "rounds": 2, "seeds": 1, "train": {"steps": 1}}
        result = tailorfl.compare(methods=["centralized", "fedavg"], out=tmp_path / "out", **settings)
        alone, shared = facts_of(result)
        assert "fact.took_part.mean" not in alone
        assert shared["fact.took_part.least"] == 2

    def test_a_pull_is_enough_in_a_participation_or_in_all(self) -> None:
        assert self.why(**{"fact.pull.each": 0.5, "fact.pull.all": 10.0}) == ()
        assert self.why(**{"fact.pull.each": 3.0, "fact.pull.all": 6.0}) == ()
        assert self.why(**{"fact.pull.each": 2.9, "fact.pull.all": 9.9})[0].startswith("pulled")

    @pytest.mark.parametrize("level", [0.2, 0.95])
    def test_fedavg_must_have_learned_and_have_something_left_to_learn(self, level: float) -> None:
        found = evidence({**self.NUMBERS, "FedAvg": [level] * 3}, **self.GOOD)
        (outcome,) = judge_paper(paper(BETTER, gates=self.ALL), [found])
        assert outcome.why[0].startswith("learned: FedAvg reaches")

    def test_what_was_not_recorded_does_not_pass(self) -> None:
        found = evidence({"a": [0.7, 0.71, 0.69], "b": [0.6, 0.61, 0.6]}, **SAMPLES)
        (outcome,) = judge_paper(paper(BETTER, gates=self.ALL), [found])
        assert (outcome.status, len(outcome.why)) == ("not tested", 6)

    def test_a_claim_may_need_less(self) -> None:
        found = evidence({"a": [0.7, 0.71, 0.69], "b": [0.6, 0.61, 0.6]}, **SAMPLES)
        assert statuses(paper({**BETTER, "gates": []}, gates=self.ALL), found) == ["holds"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with two variants, run with two seeds."""
    here = tmp_path_factory.mktemp("claims")
    text = """
name: tiny
seeds: 2
data: {clients: 4, samples: 240}
model: {name: mlp, hidden: [8]}
methods: [{name: local, label: LocalTrain}, {name: ditto, label: Ditto, lam: 0.5}]
engine: vectorized
train: {epochs: 2, batch_size: 10, lr: 0.1}
rounds: 10
fraction: 0.5
eval: {every: 2, sets: [val, local], final: [local, global]}
variants:
  a: {}
  b: {train: {lr: 0.2}}
"""
    (here / "tiny.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExperimentResult, "plot", lambda result: [])
        tailorfl.reproduce(here / "tiny.yaml", out=here / "out")
    return here / "out"


class TestFolders:
    @pytest.mark.slow
    def test_numbers_and_facts_are_those_of_the_records(self, folder: Path) -> None:
        found = of_folder(folder)
        assert (found.recipe, found.scale, len(found.rows)) == ("tiny", "", 8)
        place = folder / "a" / slug("Ditto") / "seed-1"
        summary = json.loads((place / "summary.json").read_text())
        rounds = [json.loads(line) for line in (place / "rounds.jsonl").read_text().splitlines()]
        clients = [json.loads(line) for line in (place / "clients.jsonl").read_text().splitlines()]

        def fact(name: str) -> float:
            return found.of("Ditto", "a", name)[1]

        assert fact("mean") == summary["metrics"]["mean"]
        drawn = [client for row in rounds for client in row["clients"]]
        assert fact("fact.took_part.mean") == len(drawn) / 4
        assert fact("fact.took_part.least") == min(drawn.count(client) for client in range(4))
        own = [row["personal/local/accuracy"] for row in rounds if "personal/local/accuracy" in row]
        assert len(own) == 5
        assert fact("fact.change") == pytest.approx(own[-1] - own[-2])  # of rounds 8 and 10
        last = [
            row
            for row in clients
            if row["round"] == 10 and row["set"] == "local" and row["model"] == "personal"
        ]
        assert fact("fact.samples.local") == sum(row["samples"] for row in last)
        local = json.loads((folder / "a" / slug("LocalTrain") / "seed-1" / "summary.json").read_text())
        steps = local["gradients_each"] / 10
        assert fact("fact.pull.each") == pytest.approx(0.1 * 0.5 * steps)
        assert found.of("Ditto", "b", "fact.pull.each")[1] == pytest.approx(0.2 * 0.5 * steps)
        assert found.of("LocalTrain", "a", "fact.pull.each") == {}

    def test_what_is_kept_says_the_same(self, folder: Path, tmp_path: Path) -> None:
        found = of_folder(folder)
        place = keep(found, tmp_path, ["mean", "deployed.global"])
        again = of_folder(place)
        assert (again.recipe, again.scale, again.digest) == (found.recipe, found.scale, found.digest)
        for name in ("mean", "deployed.global", "fact.change", "fact.samples.global"):
            for label in ("LocalTrain", "Ditto"):
                assert again.of(label, "b", name) == pytest.approx(found.of(label, "b", name))
        assert again.of("Ditto", "a", "worst10") == {}
        (place / "numbers.csv").write_text("seed\n1\n")
        with pytest.raises(RunError, match="damaged"):
            of_folder(place)

    def test_beside_the_numbers_lie_the_rows_of_clients_their_noise_and_the_tuning(
        self, folder: Path, tmp_path: Path
    ) -> None:
        claims = [
            Claim.model_validate(
                {"id": "c", "text": "t", "source": "s", "recipe": "tiny", "variants": "a", **claim}
            )
            for claim in (
                {**BETTER, "first": "Ditto", "second": "LocalTrain"},
                {"kind": "sign", "first": "Ditto", "second": "LocalTrain", "metric": "deployed.global"},
                {
                    "kind": "sign",
                    "first": "Ditto",
                    "second": "LocalTrain",
                    "metric": "worst10",
                    "noiseless": True,
                },
            )
        ]
        found = of_folder(folder)
        place = keep(found, tmp_path, ["mean"])
        (folder / "tuning.json").write_text("{}")
        keep_records(found, place, claims)
        (folder / "tuning.json").unlink()
        assert (place / "tuning.json").read_text() == "{}"
        rows = pd.read_csv(place / "clients.csv.gz")
        own = rows.query(
            "variant == 'a' and label == 'Ditto' and seed == 1 and model == 'personal' and set == 'local'"
        )
        assert own["client"].tolist() == [0, 1, 2, 3]
        assert own["value"].mean() == pytest.approx(found.of("Ditto", "a", "mean")[1])
        assert own["samples"].sum() == found.of("Ditto", "a", "fact.samples.local")[1]
        assert found.of("Ditto", "a", "client.2")[1] == pytest.approx(own["value"].iloc[2])
        noise = of_folder(place).noise
        assert set(noise) == {
            ("mean", "a", "Ditto", "LocalTrain"),
            ("deployed.global", "a", "Ditto", "LocalTrain"),
        }
        kept = {name: (place / name).read_bytes() for name in ("clients.csv.gz", "noise.csv")}
        keep_records(of_folder(place), place, [])  # of what was kept nothing is lost
        assert kept == {name: (place / name).read_bytes() for name in kept}

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "metric", ["mean", "weighted_mean", "deployed.global", "personal.local.accuracy.mean"]
    )
    def test_measured_scores_have_the_means_of_the_records(self, folder: Path, metric: str) -> None:
        """Whether predictions were kept or are made again by the models."""
        result = ExperimentResult.load(folder / "a")
        for label in ("Ditto", "LocalTrain"):
            scores = tried(result, label, 1, metric)
            assert scores is not None
            by_client = scores.groupby("client")["score"].mean().mean()
            value = scores["score"].mean() if metric == "weighted_mean" else by_client
            assert value == pytest.approx(of_folder(folder).of(label, "a", metric)[1])

    def test_noise_is_that_of_the_scores_of_all_lines_and_variants(self, folder: Path) -> None:
        found = results(folder)
        claim = {**BETTER, "recipe": "tiny", "first": "Ditto", "second": "LocalTrain", "variants": ["a", "b"]}
        gains = {"kind": "sign", "first": "Ditto - LocalTrain @ a", "second": "Ditto - LocalTrain @ b"}
        some = [
            Claim.model_validate({"id": "c", "text": "t", "source": "s", "recipe": "tiny", **one})
            for one in (claim, gains, {"kind": "cells", "published": {"Ditto": 0.5}, "gap": 0.1})
        ]
        mean, gain = measured(found, some)

        def expected(signs: dict[tuple[str, str], float]) -> float:
            by_seed = []
            for seed in (0, 1):
                parts = [
                    sign * share(tried(found[variant], label, seed, "mean"), by_client=True)
                    for (label, variant), sign in signs.items()
                ]
                by_seed.append(pd.concat(parts).groupby(level=0).sum())
            return max(0.0, float((by_seed[0] * by_seed[1]).dropna().sum()))

        ditto, local = ("Ditto", "LocalTrain")
        half = {(ditto, "a"): 0.5, (ditto, "b"): 0.5, (local, "a"): -0.5, (local, "b"): -0.5}
        assert (mean["variance"], mean["seeds"]) == (pytest.approx(expected(half)), 2)
        assert mean["variants"] == "a; b"
        whole = {(ditto, "a"): 1.0, (local, "a"): -1.0, (ditto, "b"): -1.0, (local, "b"): 1.0}
        assert gain["variance"] == pytest.approx(expected(whole))

    def test_what_was_chosen_is_read_off_the_tuning(self, folder: Path) -> None:
        file = folder / "a" / "tuning.json"
        methods = {"Ditto": {"edges": ["train.lr"], "chosen": {"method.lam": 0.5}}}
        methods["LocalTrain"] = {"edges": [], "chosen": {"train.lr": 0.1}}
        file.write_text(
            json.dumps({"budget": {}, "sampler": "grid", "metric": "accuracy", "methods": methods})
        )
        try:
            found = of_folder(folder)
        finally:
            file.unlink()
        for name, ditto, local in (("inside_grid", 0.0, 1.0), ("lam_chosen", 1.0, 0.0)):
            assert found.of("Ditto", "a", f"fact.{name}") == {0: ditto, 1: ditto}
            assert found.of("LocalTrain", "a", f"fact.{name}") == {0: local, 1: local}
            assert found.of("Ditto", "b", f"fact.{name}") == {}

    def test_folders_of_one_recipe_are_put_together_and_a_seed_counts_once(
        self, folder: Path, tmp_path: Path
    ) -> None:
        found = of_folder(folder)
        more = Evidence(
            "tiny", "", ("there",), found.digest, tuple({**r, "seed": r["seed"] + 1} for r in found.rows)
        )
        other = Evidence("tiny", "", ("there",), "changed", found.rows)
        first, second = joined([found, more, other])
        assert sorted(first.of("Ditto", "a", "mean")) == [0, 1, 2]
        assert first.of("Ditto", "a", "mean")[1] == found.of("Ditto", "a", "mean")[1]
        assert len(second.rows) == 8
        assert [one.recipe for one in gathered([folder.parent])] == ["tiny"]
        with pytest.raises(RunError, match="holds no results"):
            gathered([tmp_path])

    @pytest.mark.slow
    def test_a_report_shows_the_claims_of_its_recipe(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claim = {**BETTER, "recipe": "tiny", "variants": "a", "first": "Ditto", "second": "LocalTrain"}
        monkeypatch.setattr("studies.claims.words.papers", lambda recipe: {"p": paper(claim)})
        (section,) = sections(ExperimentResult.load(folder / "a"))
        assert section.rows[0][0].text == "c0"
        assert "undecided" in section.rows[0][-1].text
        assert sections(ExperimentResult.load(folder / "b")) == []
        assert CliRunner().invoke(app, ["--report", str(folder / "a")]).exit_code == 0
        for name in ("report.md", "report.html"):
            assert section.title in (folder / "a" / name).read_text(encoding="utf-8")


class TestCommand:
    @pytest.mark.slow
    def test_prints_writes_and_keeps(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        done = CliRunner().invoke(
            app, ["fedoa", "--runs", str(folder), "--keep", "kept", "--write", "page.md", "--json"]
        )
        assert done.exit_code == 0, done.output
        found = {line["claim"]: line for line in json.loads(done.stdout)}  # notes go elsewhere
        assert f"kept: {Path('kept') / 'tiny'}" in done.stderr
        assert found["fedoa-13"]["verdict"] == "does not hold"
        assert found["fedoa-1"]["verdict"] == "not run"
        assert (tmp_path / "kept" / "tiny" / "numbers.csv").is_file()
        assert "| fedoa-1 |" in (tmp_path / "page.md").read_text()

    def test_mistakes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for arguments, value in ((["peradas"], "'perada'"), (["--keep", "kept"], "--runs")):
            error = CliRunner().invoke(app, arguments).exception
            assert isinstance(error, ConfigError)
            assert value in str(error)

    @pytest.mark.slow
    def test_outside_a_clone_it_says_where_results_lie(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for options in ([], ["--json"]):
            done = CliRunner().invoke(app, ["fedoa", *options])
            said = done.stderr.replace("\n", " ")
            assert "results/evidence" in said
            assert "clone" in said
            assert "--runs" in said
        without = [line["verdict"] for line in json.loads(done.stdout)].count("not run")
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "evidence").symlink_to(ROOT / "results" / "evidence")
        done = CliRunner().invoke(app, ["fedoa", "--json"])
        assert [line["verdict"] for line in json.loads(done.stdout)].count("not run") < without
        assert "clone" not in done.stderr


class TestDeclared:
    def test_there_are_claims_of_all_five_papers(self) -> None:
        found = papers()
        assert {"perada", "plgu", "perfed_ckt", "fedclup", "fedoa"} <= set(found)
        assert sum(len(one.claims) for one in found.values()) >= 60

    def test_papers_of_a_recipe_are_those_with_a_claim_about_it(self) -> None:
        whole = papers()
        for recipe in ("heart", "perada_pull", "plgu_cifar", "digits"):
            expected = {name for name, one in whole.items() if any(c.recipe == recipe for c in one.claims)}
            assert set(papers(recipe)) == expected

    def test_what_claims_name_is_there(self) -> None:
        known = {
            name: expand(load(name)) for name in recipes() if load(name).scales or name in ("heart", "tcga")
        }
        for claim in (claim for one in papers().values() for claim in one.claims):
            if claim.kind == "exact":
                assert claim.check in exact.CHECKS, claim.id
                assert (ROOT / claim.test).is_file(), claim.id
            elif claim.recipe:
                variants = known.get(claim.recipe) or expand(load(claim.recipe))
                for label in claim.labels:
                    lines, at, variant = label.partition(" @ ")
                    for one in [variant] if at else claim.variants or [""]:
                        there = {method.label for method in variants[one].methods}
                        assert set(lines.split(" - ")) <= there, (claim.id, label, one)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"first": ""}, "lacks recipe, first and second"),
            ({"gap": 0.0}, "has no gap"),
            ({"kind": "exact"}, "lacks check"),
            ({"kind": "exact", "check": "ckt_costs"}, "in apart"),
            ({"kind": "cells"}, "lacks recipe, published and gap"),
            ({"kind": "ordered", "published": {"a": 1.0}}, "two or more"),
            ({"kind": "at lest"}, "at least"),
            ({"gaps": 1}, "gaps"),
        ],
    )
    def test_a_mistake_in_a_claim_is_named(self, change: dict[str, Any], said: str, tmp_path: Path) -> None:
        claim = {"id": "one", "text": "t", "source": "s", "recipe": "r", **BETTER, **change}
        file = tmp_path / "some.yaml"
        file.write_text(json.dumps({"paper": "p", "title": "P", "claims": [claim]}))
        with pytest.raises(ConfigError, match=said):
            read_paper(file)

    def test_two_claims_of_one_name(self) -> None:
        with pytest.raises(ValueError, match="twice"):
            Paper(
                paper="p",
                title="P",
                claims=(Claim(id="x", text="t", source="s", kind="sign", missing="m"),) * 2,
            )


def test_exact_claims() -> None:
    """What is true and what is not, each computed anew here or in the test that the claim names."""
    pytest.importorskip("opacus")
    true = {
        "perada_scalars",
        "plgu_gradients",
        "ckt_costs",
        "ckt_optimum",
        "ckt_gradient_vanishes",
        "fedclup_rate",
        "fedclup_gradients",
        "fedclup_slopes",
    }
    assert {name for name, check in exact.CHECKS.items() if check()} == true
    gains = [lf - max(others) for *others, lf in exact.PLGU_GLOBAL.values()]
    assert [round(gain, 2) for gain in gains] == [1.79, 1.99, 2.55, 1.68, 2.19]
    rising = [key for key, (h, m, l, g, _) in exact.FEDCLUP.items() if h <= m <= l <= g]
    assert len(rising) == 13
    assert [key for key, (*rest, local) in exact.FEDCLUP.items() if local >= min(rest)] == [("CIFAR-10", 10)]


def test_errors_whose_slopes_are_claimed_are_those_of_least_squares() -> None:
    """Together without differences, alone with large ones: d / (s - d - 1) of s samples of normal inputs."""
    together = [exact._error(20, 50, 0.0, seed) for seed in range(200)]
    assert np.mean(together) == pytest.approx(3 / (20 * 50 - 4), rel=0.15)
    alone = [exact._error(20, 50, 16.0, seed) for seed in range(50)]
    assert np.mean(alone) == pytest.approx(3 / (50 - 4), rel=0.1)


@pytest.mark.slow
def test_results_of_claims_are_up_to_date() -> None:
    """Where this fails: python -m studies.claims --write results/claims.md"""
    pytest.importorskip("opacus")
    kept = ROOT / "results" / "evidence"
    found = gathered([kept]) if kept.is_dir() and any(kept.iterdir()) else []
    outcomes = {name: (one, judge_paper(one, found)) for name, one in papers().items()}
    assert (ROOT / "results" / "claims.md").read_text(encoding="utf-8") == page(outcomes)
