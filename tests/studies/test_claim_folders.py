"""Claims on result folders: the numbers that are read off them and kept, the command, and the claims declared here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import tailorfl
from claimed import BETTER, paper
from studies.claims import exact
from studies.claims.__main__ import app
from studies.claims.claim import Claim, Paper, papers, read_paper
from studies.claims.evidence import Evidence, joined, keep
from studies.claims.facts import facts_of
from studies.claims.folders import gathered, keep_records, of_folder
from studies.claims.judging import judge_paper
from studies.claims.noise import measured, share
from studies.claims.noise import scores_of as tried
from studies.claims.words import page, sections
from tailorfl.errors import ConfigError, RunError
from tailorfl.report.result import ExperimentResult, results
from tailorfl.settings.loading import expand, load, recipes
from tailorfl.settings.names import slug

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
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
DITTO = {"recipe": "tiny", "first": "Ditto", "second": "LocalTrain"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with two variants, run with two seeds."""
    here = tmp_path_factory.mktemp("claims")
    (here / "tiny.yaml").write_text(RECIPE)
    tailorfl.reproduce(here / "tiny.yaml", out=here / "out")
    return here / "out"


@pytest.fixture(scope="module")
def found(folder: Path) -> Evidence:
    return of_folder(folder)


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_numbers_and_facts_are_those_of_the_records(folder: Path, found: Evidence) -> None:
    assert (found.recipe, found.scale, len(found.rows)) == ("tiny", "", 8)
    place = folder / "a" / slug("Ditto") / "seed-1"
    rounds, clients = rows_of(place / "rounds.jsonl"), rows_of(place / "clients.jsonl")

    def fact(name: str) -> float:
        return found.of("Ditto", "a", name)[1]

    assert fact("mean") == json.loads((place / "summary.json").read_text())["metrics"]["mean"]
    drawn = [client for row in rounds for client in row["clients"]]
    assert fact("fact.took_part.mean") == len(drawn) / 4
    assert fact("fact.took_part.least") == min(drawn.count(client) for client in range(4))
    own = [row["personal/local/accuracy"] for row in rounds if "personal/local/accuracy" in row]
    assert len(own) == 5
    assert fact("fact.change") == pytest.approx(own[-1] - own[-2])  # of rounds 8 and 10
    at_end = {"round": 10, "set": "local", "model": "personal"}
    last = [row for row in clients if at_end.items() <= row.items()]
    assert fact("fact.samples.local") == sum(row["samples"] for row in last)
    local = json.loads((folder / "a" / slug("LocalTrain") / "seed-1" / "summary.json").read_text())
    steps = local["gradients_each"] / 10
    assert fact("fact.pull.each") == pytest.approx(0.1 * 0.5 * steps)
    assert found.of("Ditto", "b", "fact.pull.each")[1] == pytest.approx(0.2 * 0.5 * steps)
    assert found.of("LocalTrain", "a", "fact.pull.each") == {}


def test_all_clients_in_one_place_take_part_in_nothing(tmp_path: Path) -> None:
    settings = {"data": {"clients": 3, "samples": 90}, "rounds": 2, "seeds": 1, "train": {"steps": 1}}
    result = tailorfl.compare(methods=["centralized", "fedavg"], out=tmp_path / "out", **settings)
    alone, shared = facts_of(result)
    assert "fact.took_part.mean" not in alone
    assert shared["fact.took_part.least"] == 2


def test_what_is_kept_says_the_same(found: Evidence, tmp_path: Path) -> None:
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
    folder: Path, found: Evidence, tmp_path: Path
) -> None:
    sign = {**DITTO, "kind": "sign", "variants": "a"}
    claims = paper(
        {**BETTER, **DITTO, "variants": "a"},
        {**sign, "metric": "deployed.global"},
        {**sign, "metric": "worst10", "noiseless": True},
    ).claims
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
    measured_of = {(metric, "a", "Ditto", "LocalTrain") for metric in ("mean", "deployed.global")}
    assert set(of_folder(place).noise) == measured_of
    kept = {name: (place / name).read_bytes() for name in ("clients.csv.gz", "noise.csv")}
    keep_records(of_folder(place), place, [])  # of what was kept nothing is lost
    assert kept == {name: (place / name).read_bytes() for name in kept}


@pytest.mark.slow
@pytest.mark.parametrize(
    "metric", ["mean", "weighted_mean", "deployed.global", "personal.local.accuracy.mean"]
)
def test_measured_scores_have_the_means_of_the_records(folder: Path, found: Evidence, metric: str) -> None:
    """Whether predictions were kept or are made again by the models."""
    result = ExperimentResult.load(folder / "a")
    for label in ("Ditto", "LocalTrain"):
        scores = tried(result, label, 1, metric)
        assert scores is not None
        by_client = scores.groupby("client")["score"].mean().mean()
        value = scores["score"].mean() if metric == "weighted_mean" else by_client
        assert value == pytest.approx(found.of(label, "a", metric)[1])


def test_noise_is_that_of_the_scores_of_all_lines_and_variants(folder: Path) -> None:
    by_variant = results(folder)
    claims = paper(
        {**BETTER, **DITTO, "variants": ["a", "b"]},
        {"kind": "sign", "first": "Ditto - LocalTrain @ a", "second": "Ditto - LocalTrain @ b"},
        {"kind": "cells", "published": {"Ditto": 0.5}, "gap": 0.1},
    ).claims
    mean, gain = measured(by_variant, claims)

    def expected(signs: dict[tuple[str, str], float]) -> float:
        by_seed = []
        for seed in (0, 1):
            parts = [
                sign * share(tried(by_variant[variant], label, seed, "mean"), by_client=True)
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


def test_what_was_chosen_is_read_off_the_tuning(folder: Path) -> None:
    methods = {"Ditto": {"edges": ["train.lr"], "chosen": {"method.lam": 0.5}}}
    methods["LocalTrain"] = {"edges": [], "chosen": {"train.lr": 0.1}}
    tuning = {"budget": {}, "sampler": "grid", "metric": "accuracy", "methods": methods}
    file = folder / "a" / "tuning.json"
    file.write_text(json.dumps(tuning))
    try:
        tuned = of_folder(folder)
    finally:
        file.unlink()
    for name, ditto, local in (("inside_grid", 0.0, 1.0), ("lam_chosen", 1.0, 0.0)):
        assert tuned.of("Ditto", "a", f"fact.{name}") == {0: ditto, 1: ditto}
        assert tuned.of("LocalTrain", "a", f"fact.{name}") == {0: local, 1: local}
        assert tuned.of("Ditto", "b", f"fact.{name}") == {}


def test_folders_of_one_recipe_are_put_together_and_a_seed_counts_once(
    folder: Path, found: Evidence, tmp_path: Path
) -> None:
    later = tuple({**row, "seed": row["seed"] + 1} for row in found.rows)
    more = Evidence("tiny", "", ("there",), found.digest, later)
    other = Evidence("tiny", "", ("there",), "changed", found.rows)
    first, second = joined([found, more, other])
    assert sorted(first.of("Ditto", "a", "mean")) == [0, 1, 2]
    assert first.of("Ditto", "a", "mean")[1] == found.of("Ditto", "a", "mean")[1]
    assert len(second.rows) == 8
    assert [one.recipe for one in gathered([folder.parent])] == ["tiny"]
    with pytest.raises(RunError, match="holds no results"):
        gathered([tmp_path])


@pytest.mark.slow
def test_a_report_shows_the_claims_of_its_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = paper({**BETTER, **DITTO, "variants": "a"})
    monkeypatch.setattr("studies.claims.words.papers", lambda recipe: {"p": claims})
    (section,) = sections(ExperimentResult.load(folder / "a"))
    assert section.rows[0][0].text == "c0"
    assert "undecided" in section.rows[0][-1].text
    assert sections(ExperimentResult.load(folder / "b")) == []
    assert CliRunner().invoke(app, ["--report", str(folder / "a")]).exit_code == 0
    for name in ("report.md", "report.html"):
        assert section.title in (folder / "a" / name).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_command_prints_writes_and_keeps_and_says_where_results_lie(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--runs", str(folder), "--keep", "kept", "--write", "page.md"]
    done = CliRunner().invoke(app, ["fedoa", *words, "--json"])
    assert done.exit_code == 0, done.output
    verdicts = {line["claim"]: line["verdict"] for line in json.loads(done.stdout)}  # notes go elsewhere
    assert f"kept: {Path('kept') / 'tiny'}" in done.stderr
    assert (verdicts["fedoa-13"], verdicts["fedoa-1"]) == ("does not hold", "not run")
    assert (tmp_path / "kept" / "tiny" / "numbers.csv").is_file()
    assert "| fedoa-1 |" in (tmp_path / "page.md").read_text()
    outside = CliRunner().invoke(app, ["fedoa", "--json"])
    assert all(word in outside.stderr.replace("\n", " ") for word in ("results/evidence", "clone", "--runs"))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "evidence").symlink_to(ROOT / "results" / "evidence")
    inside = CliRunner().invoke(app, ["fedoa", "--json"])
    missing = [
        [line["verdict"] for line in json.loads(done.stdout)].count("not run") for done in (inside, outside)
    ]
    assert missing[0] < missing[1]
    assert "clone" not in inside.stderr


@pytest.mark.parametrize(("arguments", "value"), [(["peradas"], "'perada'"), (["--keep", "kept"], "--runs")])
def test_mistakes_in_the_command(
    arguments: list[str], value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ConfigError)
    assert value in str(error)


def test_what_claims_name_is_there() -> None:
    declared = papers()
    assert {"perada", "plgu", "perfed_ckt", "fedclup", "fedoa"} <= set(declared)
    for recipe in ("heart", "perada_pull", "plgu_cifar", "digits"):
        about = {name for name, one in declared.items() if any(c.recipe == recipe for c in one.claims)}
        assert set(papers(recipe)) == about
    variants_of = {name: expand(load(name)) for name in recipes() if load(name).scales}
    for claim in (claim for one in declared.values() for claim in one.claims):
        if claim.kind == "exact":
            assert claim.check in exact.CHECKS, claim.id
            assert (ROOT / claim.test).is_file(), claim.id
        elif claim.recipe:
            variants = variants_of.get(claim.recipe) or expand(load(claim.recipe))
            for label in claim.labels:
                lines, at, variant = label.partition(" @ ")
                for name in [variant] if at else claim.variants or [""]:
                    there = {method.label for method in variants[name].methods}
                    assert set(lines.split(" - ")) <= there, (claim.id, label, name)


@pytest.mark.parametrize(
    ("change", "named"),
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
def test_a_mistake_in_a_claim_is_named(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    claim = {"id": "one", "text": "t", "source": "s", "recipe": "r", **BETTER, **change}
    file = tmp_path / "some.yaml"
    file.write_text(json.dumps({"paper": "p", "title": "P", "claims": [claim]}))
    with pytest.raises(ConfigError, match=named):
        read_paper(file)


def test_two_claims_of_one_name() -> None:
    claim = Claim(id="x", text="t", source="s", kind="sign", missing="m")
    with pytest.raises(ValueError, match="twice"):
        Paper(paper="p", title="P", claims=(claim, claim))


def test_exact_claims() -> None:
    """What is true and what is not, each computed anew here or in the test that the claim names."""
    pytest.importorskip("opacus")
    assert {name for name, check in exact.CHECKS.items() if check()} == {
        "perada_scalars", "plgu_gradients", "ckt_costs", "ckt_optimum", "ckt_gradient_vanishes",
        "fedclup_rate", "fedclup_gradients", "fedclup_slopes",
    }  # fmt: skip
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
