"""Several result folders as one table: seeds of array jobs, methods of several people; and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import tailorfl
from report.tiny import TINY, invoke
from runs.killing import assert_identical
from tailorfl.errors import ConfigError, RunError
from tailorfl.models.registry import build
from tailorfl.models.weights import save_weights
from tailorfl.report.clients import clients_of
from tailorfl.report.result import ExperimentResult

SETTINGS = {**TINY, "methods": ["local", "ditto"], "rounds": 2}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def table(path: Path) -> dict[str, list[Any]]:
    frame = pd.read_csv(path / "comparison.csv").drop(columns=["seconds", "seconds_ci"])
    return {str(key): value for key, value in frame.to_dict("list").items()}


def test_a_job_for_each_seed_gives_the_table_of_one_for_all() -> None:
    """As an array of jobs does them: one seed a job, in a folder of its own, begun and resumed by the same line."""
    Path("experiment.yaml").write_text(tailorfl.load_config({**SETTINGS, "rounds": 1}).to_yaml())
    for task in (2, 0, 1, 0):
        invoke("compare", "experiment.yaml", f"seeds=[{task}]", "--resume", f"jobs/{task}", "--quiet")
    shown = invoke("report", "jobs/2", "jobs/0", "jobs/1", "--out", "together")
    assert "mean over 3 seeds" in shown
    assert "not the same experiment" not in shown
    tailorfl.run({**SETTINGS, "seeds": 3, "rounds": 1}, out="whole")
    assert_identical(table(Path("together")), table(Path("whole")))
    page = Path("together/report.md").read_text()
    assert "Not the same experiment" not in page
    assert "seeds:\n- 0\n- 1\n- 2\n" in page
    merged = tailorfl.merge([f"jobs/{task}" for task in range(3)], "again")[""]
    whole = ExperimentResult.load("whole")
    assert merged.differences().equals(whole.differences())
    assert merged.table["share_beating_local"].equals(whole.table["share_beating_local"])


@pytest.mark.slow
def test_methods_of_several_folders_share_their_local_and_what_is_missing_is_named() -> None:
    for folder, methods in (("a", ["local", "fedavg"]), ("b", ["ditto"])):
        tailorfl.run({**SETTINGS, "methods": methods, "seeds": 2}, out=folder)
    merged = tailorfl.merge(["a", "b"], "out")[""]
    assert list(merged.table.index) == ["local", "fedavg", "ditto"]
    whole = tailorfl.run({**SETTINGS, "methods": ["local", "fedavg", "ditto"], "seeds": 2}, out="whole")
    for name in ("share_beating_local", "mean", "worst10"):
        assert merged.table[name].equals(whole.table[name])
    assert not merged.unlike
    Path("b/ditto/seed-1/summary.json").unlink()
    shown = invoke("report", "a", "b", "--out", "less")
    for text in (shown, Path("less/report.md").read_text()):
        assert "b: ditto, seed 1: damaged" in text


@pytest.mark.slow
def test_variants_are_put_together_each() -> None:
    two = {"a": {"train": {"lr": 0.1}}, "b": {"train": {"lr": 0.2}}}
    for seed in (0, 1):
        recipe = {**SETTINGS, "name": "two", "methods": ["local"], "seeds": [seed], "variants": two}
        Path("two.yaml").write_text(json.dumps(recipe))
        invoke("run", "two.yaml", "--out", f"job-{seed}", "--quiet")
    merged = tailorfl.merge(["job-0", "job-1"], "out")
    assert {name: part.table["seeds"].tolist() for name, part in merged.items()} == {"a": [2], "b": [2]}
    invoke("report", "job-0", "job-1", "--out", "out")
    assert Path("out/a/report.html").is_file()


@pytest.mark.slow
def test_every_tuning_of_merged_folders_is_shown_once() -> None:
    budget = {"trials": 1, "rounds": 2, "seeds": [1000], "samples": 100}
    trial = {"number": 0, "values": {"train.lr": 0.1}, "score": 0.5, "seconds": 1.0, "state": "complete"}
    method = {"chosen": {"train.lr": 0.1}, "rank": 1, "edges": [], "trials": [trial]}
    facts = {"budget": budget, "sampler": "grid", "metric": "accuracy", "methods": {"local": method}}
    for seed in (0, 1, 2):
        tailorfl.run({**SETTINGS, "methods": ["local"], "seeds": [seed]}, out=f"job-{seed}")
        Path(f"job-{seed}/tuning.json").write_text(json.dumps(facts))
    invoke("report", "job-0", "job-1", "job-2", "--out", "same")
    assert Path("same/report.md").read_text().count("## Tuning\n") == 1
    Path("job-2/tuning.json").write_text(json.dumps({**facts, "sampler": "random"}))
    invoke("report", "job-0", "job-1", "job-2", "--out", "out")
    text = Path("out/report.md").read_text()
    assert "## Tuning of job-0\n" in text
    assert "## Tuning of job-2\n" in text
    assert "job-1\n" not in text


@pytest.mark.slow
def test_the_same_method_with_other_settings_stands_apart_and_the_report_says_so() -> None:
    tailorfl.run({**SETTINGS, "seeds": 1}, out="slow")
    tailorfl.run({**SETTINGS, "seeds": 1, "train": {"lr": 0.3}}, out="fast")
    shown = invoke("report", "slow", "fast", "--out", "out")
    for label in ("LocalTrain (slow)", "Ditto (slow)", "LocalTrain (fast)", "Ditto (fast)"):
        assert label in shown
    assert "train.lr was 0.05 and is 0.3" in shown
    page = Path("out/report.md").read_text()
    assert "## Not the same experiment" in page
    assert "train.lr was 0.05 and is 0.3" in page
    merged = tailorfl.merge(["slow", "fast"], "out")[""]
    for name in ("slow", "fast"):
        alone = ExperimentResult.load(name).table.loc["ditto", "share_beating_local"]
        assert merged.table.loc[f"ditto ({name})", "share_beating_local"] == alone
        alone = ExperimentResult.load(name).differences()["difference"]
        for label in ("local", "ditto"):
            assert merged.differences().loc[f"{label} ({name})", "difference"] == alone[label]
    assert merged.differences().index.tolist() == [
        f"{m} ({f})" for f in ("slow", "fast") for m in ("local", "ditto")
    ]


def test_the_same_method_from_other_weights_stands_apart() -> None:
    module = build("logistic", (1, 8, 8), 10)
    for folder, change in (("a", 0.0), ("b", 1.0)):
        save_weights({name: t + change for name, t in module.state_dict().items()}, "start.safetensors")
        model = {"name": "logistic", "weights": "start.safetensors"}
        tailorfl.run({**SETTINGS, "methods": ["local"], "model": model, "seeds": [int(change)]}, out=folder)
    assert list(tailorfl.merge(["a", "b"], "out")[""].table.index) == ["local (a)", "local (b)"]


def test_what_does_not_go_together_is_refused() -> None:
    local = {**SETTINGS, "methods": ["local"], "rounds": 1}
    tailorfl.run({**local, "seeds": 2}, out="a")
    tailorfl.run({**local, "seeds": [1]}, out="b")
    tailorfl.run({**local, "seeds": [5], "data": {"name": "synthetic_linear"}, "model": "linear"}, out="c")
    for folders, out, error, words in (
        (["a", "b"], "out", RunError, r"local, seed 1, .*'a.*'b"),
        (["a", "c"], "out", RunError, "accuracy in 'a', mse in 'c'"),
        (["a", "./a"], "out", ConfigError, "a$"),
        (["a"], "b", ConfigError, "'b'"),
        ("a", "out", ConfigError, "'a' alone"),
    ):
        with pytest.raises(error, match=words):
            tailorfl.merge(folders, out)
    assert "--out" in invoke("report", "a", "b", code=2)


def test_local_with_the_same_samples_dealt_otherwise_is_no_measure() -> None:
    for place, method, alpha in (("a", "local", 0.1), ("b", "ditto", 5.0)):
        data = {**SETTINGS["data"], "partition": "dirichlet", "partition_options": {"alpha": alpha}}
        tailorfl.run({**SETTINGS, "methods": [method], "seeds": 1, "data": data}, out=place)
    merged = tailorfl.merge(["a", "b"], "out")[""]
    assert merged.table["share_beating_local"].isna()["ditto"]
    assert {line.gain for line in clients_of(merged).lines} == {None}


def test_the_table_is_in_the_order_of_the_seeds_and_folders_of_one_name_are_told_apart() -> None:
    for place, seeds, lam in (("a/run", [3, 0], 0.5), ("b/run", [1], 0.5), ("c/run", [0], 2.0)):
        ditto = [{"name": "ditto", "lam": lam}]
        tailorfl.run({**SETTINGS, "methods": ditto, "seeds": seeds, "rounds": 1}, out=place)
    merged = tailorfl.merge(["a/run", "b/run"], "out")[""]
    assert [int(summary["seed"]) for summary, _ in merged.jobs] == [0, 1, 3]
    assert merged.config.seeds == (0, 1, 3)
    unlike = tailorfl.merge(["a/run", "c/run"], "out")[""]
    assert list(unlike.table.index) == ["ditto (a/run)", "ditto (c/run)"]
    three = tailorfl.merge(["a/run", "b/run", "c/run"], "out")[""]  # those that are alike stay one method
    assert three.table["seeds"].to_dict() == {"ditto (a/run)": 3, "ditto (c/run)": 1}
    (method,) = unlike.config.methods
    assert method.options["lam"] == 0.5  # the first folder's
