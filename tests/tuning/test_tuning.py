"""Tunings from end to end: equal budgets, validation data alone, failures, edges, and the experiment that comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tailorfl
from tailorfl.data.federation import Federation
from tailorfl.errors import ConfigError, DataError, RunError
from tailorfl.report.document import tuning_sections, write_report
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation
from tailorfl.runs.folders import tuning_beside, value_of
from tailorfl.settings.loading import load
from tailorfl.tuning import training
from tailorfl.tuning.plan import TuningRequest, begin, plan
from tailorfl.tuning.run import Tuning
from tuning.tiny import TINY, experiment, tuned, untimed

SEARCH = {"train.lr": [0.05, 0.5, 2.0], "method.lam": [0.1, 1.0]}
LR = {"train.lr": [0.05, 0.5], "method.lam": None}
REQUEST = TuningRequest("3x2")
HALVING: dict[str, Any] = {
    "methods": ["fedavg"],
    "search": {"train.lr": {"low": 0.01, "high": 1, "log": True}},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    return tuned(tmp_path_factory.mktemp("finished") / "t", REQUEST, search=SEARCH)


def table(tuning: Tuning) -> dict[str, Any]:
    """The tuning.json of a tuning without times."""
    return untimed(tuning.folder / "tuning.json")


@pytest.mark.parametrize(("budget", "trials"), [("rounds", [2, 4]), ("gradients", [4, 4])])
def test_every_method_gets_the_same_samples_whatever_its_rounds_take(
    budget: str, trials: list[int], tmp_path: Path
) -> None:
    """Ditto trains two models: by rounds it gets half the trials, by gradients as many of half the rounds."""
    settings = {"search": {"train.lr": {"low": 0.1, "high": 1}}, "budget": budget}
    found = tuned(tmp_path / "t", TuningRequest("4x4"), **settings)
    data = make_federation(experiment(**settings), 1000)
    assert found.samples == 4 * 4 * data.sizes("train").sum()
    assert [len(m.trials) for m in found.methods] == trials
    assert [m.samples for m in found.methods] == [found.samples, found.samples]


def test_a_model_of_this_process_is_not_trained_by_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers=1"):
        tailorfl.tune(TINY, model=torch.nn.Flatten(), budget=1, workers=2, out=tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_what_is_written_down(tmp_path: Path) -> None:
    tuning = tuned(tmp_path / "t", TuningRequest("4x2x2", "grid"), search=SEARCH)
    said = table(tuning)
    assert said.keys() == {"budget", "sampler", "metric", "methods"}
    assert said["budget"] == {"trials": 4, "rounds": 2, "seeds": [1000, 1001], "samples": tuning.samples}
    assert (said["sampler"], said["metric"]) == ("grid", "accuracy")
    ditto = said["methods"]["ditto"]
    assert ditto.keys() == {"space", "chosen", "rank", "edges", "trials"}
    assert ditto["space"] == {"train.lr": [0.05, 0.5, 2.0], "method.lam": [0.1, 1.0]}
    assert ditto["trials"][0].keys() == {"number", "values", "score", "samples", "state"}
    best = max(ditto["trials"], key=lambda t: (t["score"], -t["number"]))
    assert ditto["chosen"] == best["values"]
    best_of = {n: max(t["score"] for t in row["trials"]) for n, row in said["methods"].items()}
    for name, row in said["methods"].items():
        assert row["rank"] == 1 + sorted(best_of.values(), reverse=True).index(best_of[name])


def test_no_test_sample_is_looked_at(
    finished: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the labels of all test samples replaced, everything is the same."""
    build = training.make_federation

    def spoilt(*arguments: Any, **named: Any) -> Federation:
        found = build(*arguments, **named)
        rows = torch.as_tensor(found.global_test())
        found.source.y[rows] = (found.source.y[rows] + 1) % 10
        return found

    monkeypatch.setattr(training, "make_federation", spoilt)
    assert table(tuned(tmp_path / "t", REQUEST, search=SEARCH)) == table(finished)


def test_trials_that_diverge_are_told_apart_and_count_as_whole_ones(tmp_path: Path) -> None:
    search = {"train.lr": [1e30, 0.5, 1e31, 1e32, 1e33]}
    found = tuned(tmp_path / "t", TuningRequest("3x4", "grid"), methods=["fedavg"], search=search)
    (fedavg,) = found.methods
    states = {t.values["train.lr"]: t.state for t in fedavg.trials}
    assert sorted(states.values()) == ["complete", "failed", "failed"]  # three trials, failed or not
    assert states[0.5] == "complete"
    assert fedavg.chosen == {"train.lr": 0.5}
    failed = next(t for t in fedavg.trials if t.state == "failed")
    assert failed.samples < found.samples / 3
    assert failed.score is None
    assert "diverged" in failed.reason


def test_where_every_trial_fails_the_experiment_keeps_its_settings(tmp_path: Path) -> None:
    found = tuned(tmp_path / "t", TuningRequest("2x2"), methods=["fedavg"], search={"train.lr": [1e30, 1e35]})
    row = untimed(tmp_path / "t" / "tuning.json")["methods"]["fedavg"]
    assert (row["chosen"], row["rank"], row["edges"]) == ({}, None, [])
    assert found.methods[0].expected_of([1.0]) == [None]
    assert load(tmp_path / "t" / "tuned.yaml").train.lr == 0.5


def test_a_value_at_the_edge_is_said_and_widening_goes_beyond_it_within_the_budget(tmp_path: Path) -> None:
    few = {"methods": ["fedavg"], "search": {"train.lr": [0.01, 0.1]}, "train": {"batch_size": 0, "lr": 0.1}}
    requests = {name: TuningRequest("4x9", widen=name == "wide") for name in ("narrow", "wide")}
    narrow, wide = (tuned(tmp_path / name, request, **few) for name, request in requests.items())
    rates = [[t.values["train.lr"] for t in tuning.methods[0].trials] for tuning in (narrow, wide)]
    assert rates == [[0.1, 0.01], [0.1, 0.01, 1.0, 10.0]]
    assert table(narrow)["methods"]["fedavg"]["edges"] == ["train.lr"]
    assert table(wide)["methods"]["fedavg"]["space"]["train.lr"] == [0.01, 0.1, 1.0, 10.0]
    assert wide.methods[0].samples == narrow.samples == wide.samples


@pytest.mark.parametrize("select", ["last", "val"])
def test_settings_are_chosen_by_a_metric_that_is_measured_on_request(select: str, tmp_path: Path) -> None:
    measured = {"metric": "brier", "select": select, "every": 1}
    found = tuned(tmp_path / "t", TuningRequest("4x2", "grid"), methods=["ditto"], search=LR, eval=measured)
    (ditto,) = found.methods
    assert (found.metric, ditto.higher_is_better) == ("brier", False)
    scores = [trial.score for trial in ditto.trials]
    assert [trial.state for trial in ditto.trials] == ["complete"] * len(scores)
    assert ditto.best is not None
    assert 0 < min(scores) == ditto.best.score < max(scores) < 2


@pytest.mark.slow
def test_successive_halving_trains_no_round_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = [], Simulation.step
    monkeypatch.setattr(Simulation, "step", lambda sim, *a, **k: (steps.append(1), step(sim, *a, **k))[1])
    found = tuned(tmp_path / "t", TuningRequest("4x9", "halving"), **HALVING)
    (fedavg,) = found.methods
    each = found.samples / 4 / 9
    assert sum(t.samples for t in fedavg.trials) == len(steps) * each
    reached = {t.state: t.samples / each for t in fedavg.trials}
    assert reached["complete"] == 9
    assert reached["pruned"] in (1, 3)
    assert len(fedavg.trials) > 4, "trials that are stopped early leave room for others"
    assert abs(fedavg.samples - found.samples) <= 9 * each


def test_the_experiment_that_comes_out_has_what_was_chosen_and_its_report_says_so(
    finished: Tuning, tmp_path: Path
) -> None:
    config = load(finished.experiment)
    assert (config.name, config.seeds, config.rounds) == ("digits-tuned", (0, 1), 9)
    for line, one in zip(config.methods, finished.methods, strict=True):
        assert {key: value_of(config, line, key) for key in one.chosen} == one.chosen
    brief = {"rounds": 1, "eval": {"every": 0}}
    tailorfl.compare(finished.experiment, out=tmp_path / "c", **brief)
    assert untimed(tmp_path / "c" / "tuning.json") == table(finished)
    text = write_report(ExperimentResult.load(tmp_path / "c"))[0].read_text(encoding="utf-8")
    assert "## Tuning" in text
    assert f"{finished.samples:,} samples seen" in text
    assert "with seed 1000, none of the comparison's;" in text
    assert (
        "of which the comparison uses 1000, too" in tuning_sections([tmp_path / "c"], [0, 1000], {})[0].note
    )
    names = {line.label: f"the {line.label}" for line in config.methods}
    (section,) = tuning_sections([tmp_path / "c"], [], names)
    assert [row[0].text for row in section.rows] == list(names.values())
    assert tuning_beside(finished.experiment, config) == finished.folder / "tuning.json"
    others = tuple(line.model_copy(update={"train": {**line.train, "lr": 0.3}}) for line in config.methods)
    for methods in (config.methods[:1], others):
        changed = config.model_copy(update={"methods": methods})
        assert tuning_beside(finished.experiment, changed) is None, "of another experiment"


@pytest.mark.slow  # two processes import torch; the order of trials, and what they are, has quick tests
def test_two_workers_find_what_one_finds_where_trials_do_not_depend_on_each_other(
    finished: Tuning, tmp_path: Path
) -> None:
    assert table(tuned(tmp_path / "t", REQUEST, workers=2, search=SEARCH)) == table(finished)


@pytest.mark.slow  # as above
def test_workers_stop_trials_early(tmp_path: Path) -> None:
    found = tuned(tmp_path / "t", TuningRequest("4x9", "halving"), workers=2, **HALVING)
    states = [trial.state for trial in found.methods[0].trials]
    assert set(states) == {"complete", "pruned"}
    assert abs(found.methods[0].samples - found.samples) <= 2 * found.samples / 4


def test_what_cannot_be_tuned_is_refused(tmp_path: Path) -> None:
    untested = {**TINY["data"], "split": {"train": 0.8, "test": 0.2}}
    with pytest.raises(DataError, match="tuning chooses by validation samples"):
        tuned(tmp_path / "a", TuningRequest("2x1"), data=untested)
    with pytest.raises(ConfigError, match="unknown sampler 'best'"):
        TuningRequest("2", "best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has variants"):
        plan(experiment(variants={"a": {"rounds": 1}}), TuningRequest("2"))
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="is not empty"):
        begin(tmp_path, plan(experiment(), TuningRequest("2")))


def test_from_python_it_is_the_same(finished: Tuning, tmp_path: Path) -> None:
    tuning = tailorfl.tune(TINY, budget="3x2", out=tmp_path / "t", search=SEARCH)
    assert table(tuning) == table(finished)
    assert tuning.experiment.read_bytes() == finished.experiment.read_bytes()
    again = tailorfl.tune(out=tmp_path / "t", resume=True)
    assert again.as_json() == tuning.as_json()
    with pytest.raises(ConfigError, match="resume"):
        tailorfl.tune(TINY, out=tmp_path / "t", resume=True)
