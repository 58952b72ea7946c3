"""Several result folders as one table: seeds of array jobs, methods of several people; and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tailorfl
from runs.killing import assert_identical
from tailorfl.cli.main import app
from tailorfl.errors import ConfigError, RunError
from tailorfl.report.result import ExperimentResult

TINY: dict[str, Any] = {
    "methods": ["local", "ditto"],
    "rounds": 2,
    "data": {"clients": 4, "samples": 200},
    "model": {"name": "mlp", "hidden": [4]},
    "engine": "sequential",
    "eval": {"every": 1},
}


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ExperimentResult, "plot", lambda result: [])


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def table(path: Path) -> dict[str, list[Any]]:
    import pandas as pd

    frame = pd.read_csv(path / "comparison.csv")
    timed = [name for name in frame if name.startswith("seconds")]
    return {str(key): value for key, value in frame.drop(columns=timed).to_dict("list").items()}


def test_a_job_for_each_seed_gives_the_table_of_one_for_all() -> None:
    """As an array of jobs does them: one seed a job, in a folder of its own, begun and resumed by the same line."""
    Path("experiment.yaml").write_text(tailorfl.load_config(TINY).to_yaml())
    for task in (2, 0, 1):
        for _ in range(2):
            invoke("compare", "experiment.yaml", f"seeds=[{task}]", "--resume", f"jobs/{task}", "--quiet")
    shown = invoke("report", "jobs/2", "jobs/0", "jobs/1", "--out", "together")
    assert "mean over 3 seeds" in shown
    assert "not the same experiment" not in shown
    tailorfl.run({**TINY, "seeds": 3}, out="whole")
    assert_identical(table(Path("together")), table(Path("whole")))
    page = Path("together/report.md").read_text()
    assert "Not the same experiment" not in page
    assert "seeds:\n- 0\n- 1\n- 2\n" in page
    merged = tailorfl.merge([f"jobs/{task}" for task in range(3)], "again")[""]
    whole = ExperimentResult.load("whole")
    assert merged.differences().equals(whole.differences())
    assert merged.table["share_beating_local"].equals(whole.table["share_beating_local"])


def test_methods_of_several_folders_share_their_local() -> None:
    tailorfl.run({**TINY, "methods": ["local", "fedavg"], "seeds": 2}, out="a")
    tailorfl.run({**TINY, "methods": ["ditto"], "seeds": 2}, out="b")
    merged = tailorfl.merge(["a", "b"], "out")[""]
    assert list(merged.table.index) == ["local", "fedavg", "ditto"]
    whole = tailorfl.run({**TINY, "methods": ["local", "fedavg", "ditto"], "seeds": 2}, out="whole")
    for name in ("share_beating_local", "mean", "worst10"):
        assert merged.table[name].equals(whole.table[name])
    assert not merged.unlike


def test_the_same_method_with_other_settings_stands_apart_and_the_report_says_so() -> None:
    tailorfl.run({**TINY, "seeds": 1}, out="slow")
    tailorfl.run({**TINY, "seeds": 1, "train": {"lr": 0.3}}, out="fast")
    shown = invoke("report", "slow", "fast", "--out", "out")
    for label in ("local (slow)", "ditto (slow)", "local (fast)", "ditto (fast)"):
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


def test_other_samples_are_other_experiments() -> None:
    for name, samples in (("few", 150), ("many", 200)):
        tailorfl.run(
            {**TINY, "methods": ["local"], "seeds": 1, "data": {"clients": 4, "samples": samples}}, out=name
        )
    config = Path("few/local/seed-0/config.json")
    facts = json.loads(config.read_text())
    assert facts["data"] != json.loads(Path("many/local/seed-0/config.json").read_text())["data"]
    assert list(tailorfl.merge(["few", "many"], "out")[""].table.index) == ["local (few)", "local (many)"]


def test_what_does_not_go_together_is_refused() -> None:
    tailorfl.run({**TINY, "seeds": 2, "methods": ["local"]}, out="a")
    tailorfl.run({**TINY, "seeds": [1], "methods": ["local"]}, out="b")
    with pytest.raises(RunError, match=r"local, seed 1, is in 'a.*' and in 'b.*', which would count one"):
        tailorfl.merge(["a", "b"], "out")
    with pytest.raises(ConfigError, match="give every folder once: a"):
        tailorfl.merge(["a", "./a"], "out")
    with pytest.raises(ConfigError, match="'b' holds an experiment of its own"):
        tailorfl.merge(["a"], "b")
    assert "needs a place of its own: --out" in invoke("report", "a", "b", code=2)
    linear = {
        **TINY,
        "seeds": [5],
        "methods": ["local"],
        "data": {"name": "synthetic_linear"},
        "model": "linear",
    }
    tailorfl.run(linear, out="c")
    with pytest.raises(RunError, match="measure different things"):
        tailorfl.merge(["a", "c"], "out")


def test_jobs_that_are_missing_are_named_with_their_folder() -> None:
    for seed in (0, 1):
        tailorfl.run({**TINY, "seeds": [seed]}, out=f"job-{seed}")
    Path("job-1/ditto/seed-1/summary.json").unlink()
    shown = invoke("report", "job-0", "job-1", "--out", "out")
    assert "not in the table: job-1: ditto, seed 1: damaged" in shown
    assert "job-1: ditto, seed 1: damaged" in Path("out/report.md").read_text()


def test_variants_are_put_together_each() -> None:
    two = {"a": {"train": {"lr": 0.1}}, "b": {"train": {"lr": 0.2}}}
    for seed in (0, 1):
        recipe = {**TINY, "name": "two", "methods": ["local"], "seeds": [seed], "variants": two}
        Path("two.yaml").write_text(json.dumps(recipe))
        invoke("run", "two.yaml", "--out", f"job-{seed}", "--quiet")
    merged = tailorfl.merge(["job-0", "job-1"], "out")
    assert list(merged) == ["a", "b"]
    assert [int(part.table["seeds"].iloc[0]) for part in merged.values()] == [2, 2]
    invoke("report", "job-0", "job-1", "--out", "out")
    assert Path("out/a/report.html").is_file()


def test_folders_of_one_name_are_told_apart_by_their_ways() -> None:
    for place, lam in (("a/run", 0.5), ("b/run", 2.0)):
        tailorfl.run({**TINY, "methods": [{"name": "ditto", "lam": lam}], "seeds": 1}, out=place)
    merged = tailorfl.merge(["a/run", "b/run"], "out")[""]
    assert list(merged.table.index) == ["ditto (a/run)", "ditto (b/run)"]
    (method,) = merged.config.methods
    assert method.options["lam"] == 0.5  # the first folder's


def test_local_with_the_same_samples_dealt_otherwise_is_no_measure() -> None:
    for place, method, alpha in (("a", "local", 0.1), ("b", "ditto", 5.0)):
        data = {**TINY["data"], "partition": "dirichlet", "partition_options": {"alpha": alpha}}
        tailorfl.run({**TINY, "methods": [method], "seeds": 1, "data": data}, out=place)
    share = tailorfl.merge(["a", "b"], "out")[""].table["share_beating_local"]
    assert share.isna()["ditto"]


def test_the_table_is_in_the_order_of_the_seeds_and_the_settings_of_the_first_folder() -> None:
    for place, seeds, rounds in (("a", [3, 0], 2), ("b", [1], 2)):
        tailorfl.run({**TINY, "methods": ["local"], "seeds": seeds, "rounds": rounds}, out=place)
    merged = tailorfl.merge(["a", "b"], "out")[""]
    assert [int(summary["seed"]) for summary, _ in merged.jobs] == [0, 1, 3]
    assert merged.config.seeds == (0, 1, 3)
