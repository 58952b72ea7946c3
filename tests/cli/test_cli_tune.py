"""`tailorfl tune` and `compare --tune`: tables, JSON, costs, and going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.commands import invoke
from tailorfl.cli.arguments import RunRequest, experiment
from tailorfl.cli.tune import _continued, beside
from tailorfl.errors import ConfigError
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.folders import tuning_beside
from tailorfl.settings.loading import load
from tuning.tiny import untimed

TINY = ["data.clients=4", "data.samples=240", "model.hidden=8", "methods=fedavg,ditto", "rounds=2", "seeds=1"]
TINY += ["engine=sequential", "train.batch_size=0", "eval.every=0"]
LR = "search={train.lr: [0.05, 0.5], method.lam: [1]}"


def done(*arguments: str) -> str:
    return invoke(*arguments, columns=100).stdout


def test_what_was_chosen_its_edges_and_what_to_expect_are_printed_and_then_compared() -> None:
    said = done("tune", *TINY, LR, "--budget", "2", "--out", "t")
    found = untimed(Path("t/tuning.json"))
    for row in found["methods"].values():
        best = max(trial["score"] for trial in row["trials"])
        assert f"{best:.4f}" in said
    assert "expected best validation accuracy after a share of the budget" in said
    assert "FedAvg train.lr=0.5 (largest)" in said
    assert "tailorfl compare t/tuned.yaml" in said
    done("compare", "t/tuned.yaml", "--out", "c", "--quiet")
    assert untimed(Path("c/tuning.json")) == found
    assert load("c/config.yaml").seeds == (0,)


def test_json_is_the_file_and_nothing_else() -> None:
    said = done("tune", *TINY, LR, "--budget", "1x1", "--out", "t", "--json")
    assert json.loads(said) == json.loads(Path("t/tuning.json").read_text())


def test_a_line_that_an_override_leaves_out_is_noted_on_stderr_and_json_stays_json() -> None:
    Path("e.yaml").write_text(
        "methods: [fedavg, ditto]\nsearch: {train.lr: [0.5], methods: {ditto: {lam: [1]}}}\n"
    )
    asked = [text for text in TINY if not text.startswith("methods=")]
    words = ("methods=[fedavg]", "--budget", "1x1", "--out", "t", "--quiet", "--json")
    result = invoke("tune", "e.yaml", *asked, *words)
    assert list(json.loads(result.stdout)["methods"]) == ["fedavg"]
    assert "'methods.ditto.lam' is without effect" in result.stderr


@pytest.mark.usefixtures("a_quick_estimate")
def test_a_dry_run_says_what_would_be_searched_and_trains_nothing() -> None:
    said = done("tune", *TINY, LR, "--budget", "3", "--dry-run")
    assert "train.lr=0.05,0.5 method.lam=1" in said
    assert "3 trials of 2 rounds, seeds 1000, random" in said
    assert not Path("runs").exists()


def test_a_comparison_that_was_begun_without_a_tuning_is_not_tuned_on_the_way() -> None:
    """Before hours of tuning whose settings the comparison would then refuse."""
    done("compare", *TINY, "--out", "c", "--quiet")
    for words in ([], TINY):
        result = invoke("compare", *words, "--tune", "2x1", "--resume", "c", code=2)
        assert "no tuning to continue" in result.stderr
    assert not Path("c-tuning").exists()


def test_a_comparison_tunes_first_and_a_second_call_goes_on_with_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = done("compare", *TINY, LR, "--tune", "2x1", "--out", "c", "--quiet")
    assert "chosen by validation accuracy" in said
    assert "digits-tuned: 1 seed" in said
    assert untimed(Path("c/tuning.json")) == untimed(Path("c-tuning/tuning.json"))
    monkeypatch.setattr(Simulation, "step", None)
    again = done("compare", "--tune", "2x1", "--resume", "c", "--quiet")
    assert again.splitlines()[:5] == said.splitlines()[:5]
    old, asked = Path("c-tuning"), RunRequest([*TINY, LR, "engine=auto"])
    assert _continued(old, asked, "2x1").budget == _continued(old, RunRequest(None), "2x1").budget
    for words, budget in (
        ("train.momentum=0.5", "2x1"),
        ("search={train.lr: [0.1]}", "2x1"),
        ("seeds=1", "3x1"),
    ):
        with pytest.raises(ConfigError):
            _continued(old, RunRequest([*TINY, LR, words]), budget)


def test_a_file_may_have_an_equals_sign_in_its_name(tmp_path: Path) -> None:
    """A folder named after a setting has one, and its tuning is beside it."""
    (tmp_path / "lr=0.1-tuning").mkdir()
    file = tmp_path / "lr=0.1-tuning" / "tuned.yaml"
    file.write_text("rounds: 7\n")
    assert experiment([str(file), "seeds=1"]).rounds == 7
    long = f"description={'word ' * 60}"  # longer than any name of a file
    assert experiment([long, "rounds=8"]).rounds == 8
    assert tuning_beside(long, experiment([long])) is None


def test_the_present_folder_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs")
    assert beside(Path()) == tmp_path / "runs-tuning"
    assert beside(Path("inner")) == Path("inner-tuning")
    monkeypatch.chdir(tmp_path / "runs" / "inner")
    assert beside(Path("..")) == tmp_path / "runs-tuning"


def test_a_tuning_that_was_stopped_says_how_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Simulation.step, []

    def interrupted(sim: Simulation) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(sim)

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "step", interrupted)
        result = invoke("tune", *TINY, LR, "--budget", "2", "--out", "t", code=130)
    assert "continue with: tailorfl tune --resume t" in result.stderr
    done("tune", "--resume", "t")
    done("tune", *TINY, LR, "--budget", "2", "--out", "whole")
    assert untimed(Path("t/tuning.json")) == untimed(Path("whole/tuning.json"))
