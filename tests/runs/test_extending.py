"""More seeds, methods and rounds in a result folder, and commands that begin what they cannot resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tailorfl
from report.tiny import invoke
from runs.killing import assert_identical, numbers
from runs.small import Counts, StopAt, contents, first_job, untimed
from tailorfl.errors import ConfigError, DataError, RunError
from tailorfl.report.experiment import run_variants
from tailorfl.runs import extension
from tailorfl.runs.files import FolderLock
from tailorfl.runs.job import Job
from tailorfl.runs.store import RunStore
from tailorfl.settings.loading import load

TINY: dict[str, Any] = {
    "methods": ["local", "ditto"],
    "rounds": 3,
    "seeds": [0],
    "data": {"clients": 4, "samples": 200, "heldout_clients": 1},
    "model": {"name": "mlp", "hidden": [4], "norm": "batch"},
    "engine": "sequential",
    "eval": {"every": 2, "final": ["local", "heldout", "global"]},
    "checkpoint_every": 2,
}
ADAM = {"name": "fedavg", "label": "fedadam", "server": {"kind": "adam", "lr": 0.05}}
MANY: list[Any] = [ADAM, "fedavg_ft", "fedrep", "apfl", "pfedme", "scaffold", "fedbn"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny experiment, which tests copy."""
    out = tmp_path_factory.mktemp("finished") / "out"
    tailorfl.run(TINY, out=out)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A result folder of the tiny experiment of one's own."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


def longer_is_whole(out: Path, settings: dict[str, Any], rounds: int) -> dict[str, int]:
    """Compare a run that is extended with one of as many rounds; return the rounds that were trained then."""
    tailorfl.run(settings, out=out / "out")
    watch = Counts()
    tailorfl.run(out=out / "out", extend=True, rounds=rounds, observer=watch)
    tailorfl.run({**settings, "rounds": rounds}, out=out / "whole")
    assert_identical(numbers(out / "out"), numbers(out / "whole"))
    return watch.rounds


def test_more_seeds_and_methods_equal_an_experiment_that_had_them_all(out: Path, tmp_path: Path) -> None:
    kept = contents(out / "ditto")
    watch = Counts()
    tailorfl.run(out=out, extend=True, seeds=2, methods=["fedavg"], observer=watch)
    assert watch.rounds == {"fedavg, seed 0": 3, "local, seed 1": 3, "ditto, seed 1": 3, "fedavg, seed 1": 3}
    after = contents(tmp_path / "out" / "ditto")
    assert {name: after[name] for name in kept} == kept
    tailorfl.run({**TINY, "seeds": 2, "methods": ["local", "ditto", "fedavg"]}, out=tmp_path / "whole")
    assert_identical(numbers(tmp_path / "out"), numbers(tmp_path / "whole"))


@pytest.mark.parametrize("way", ["resume", "extend"])
def test_texts_may_change_although_nothing_is_left_to_train(way: str, out: Path) -> None:
    text, rows = "for the ward", {"ditto": {"mean": 0.9}}
    given: dict[str, Any] = {"config": TINY} if way == "resume" else {}
    tailorfl.run(out=out, name="ward", description=text, published=rows, **{way: True}, **given)
    config = tailorfl.load_config(out / "config.yaml")
    assert (config.name, config.description, config.published) == ("ward", text, rows)
    tailorfl.run(out=out, extend=True, methods=["fedavg"])
    assert tailorfl.load_config(out / "config.yaml").published == rows


@pytest.mark.slow
def test_the_command_extends_with_a_file_or_with_settings_alone(out: Path, tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    more = {**TINY, "methods": ["ditto", {"name": "ditto", "label": "Ditto 0.1", "lam": 0.1}]}
    file.write_text(tailorfl.load_config(more).to_yaml())
    shown = invoke("run", file, "--extend", out, "--quiet")
    assert all(label in shown for label in ("LocalTrain", "Ditto ", "Ditto 0.1"))
    shown = invoke("compare", "seeds=[7]", "--extend", out, "--quiet")
    assert "mean over 2 seeds" in shown
    assert "FedAvg" not in shown, "nothing is compared that nobody named"
    assert tailorfl.load_config(tmp_path / "out" / "config.yaml").seeds == (0, 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"methods": MANY},  # the last round of three is not evaluated in the longer run
        {"methods": ["fedavg_ft", "fedbn"], "rounds": 2},  # that of two is, with fewer sets
        {"train": {"round_schedule": {"kind": "inverse"}}},
        {"train": {"round_schedule": {"kind": "step", "milestones": [2]}}},
    ],
)
def test_more_rounds_have_the_bits_of_a_longer_run(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = {**TINY, **changes}
    assert set(longer_is_whole(tmp_path, settings, 5).values()) == {5 - settings["rounds"]}
    invoke("check", tmp_path / "out")


@pytest.mark.slow
def test_a_choice_by_validation_is_made_anew_where_the_last_round_was_no_candidate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = {**TINY, "eval": {**TINY["eval"], "select": "val"}, "methods": ["ditto", "fedavg"]}
    assert longer_is_whole(tmp_path, short, 6) == {"ditto, seed 0": 6, "fedavg, seed 0": 3}
    assert "ditto, seed 0 starts again: its last round was a candidate of eval.select=val" in caplog.text


@pytest.mark.slow
def test_a_larger_budget_goes_on_too(tmp_path: Path) -> None:
    short = {**TINY, "methods": ["fedavg", "fedrep"], "budget": "gradients", "rounds": 8}
    tailorfl.run(short, out=tmp_path / "out")
    longer = untimed(tailorfl.run(out=tmp_path / "out", extend=True, rounds=16))
    assert longer.equals(untimed(tailorfl.run({**short, "rounds": 16}, out=tmp_path / "whole")))
    assert longer.loc["fedrep", "rounds"] < 16


def test_an_extension_that_is_stopped_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything else, half-way through reopening, and in a round."""
    out = tmp_path / "out"
    tailorfl.run({**TINY, "rounds": 4}, out=out)
    real, seen = extension._reopen, []

    def dying(job: Job, folder: Path) -> None:
        seen.append(job)
        if len(seen) == 2:
            raise KeyboardInterrupt
        real(job, folder)

    monkeypatch.setattr(extension, "_reopen", dying)
    with pytest.raises(KeyboardInterrupt):
        tailorfl.run(out=out, extend=True, rounds=7)
    monkeypatch.setattr(extension, "_reopen", real)
    (missing,) = tailorfl.ExperimentResult.load(out).missing
    assert "not finished" in missing

    with pytest.raises(KeyboardInterrupt):
        tailorfl.run(out=out, extend=True, rounds=7, observer=StopAt("local, seed 0", 5))
    tailorfl.run(out=out, resume=True)
    tailorfl.run({**TINY, "rounds": 7}, out=tmp_path / "whole")
    assert_identical(numbers(out), numbers(tmp_path / "whole"))


@pytest.mark.parametrize("schedule", [{"kind": "cosine"}, {"kind": "step", "milestones": [0.5]}])
def test_where_the_number_of_rounds_decides_more_are_refused(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    train = {"round_schedule": schedule}
    tailorfl.run({**TINY, "methods": ["local"], "train": train}, out=tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(ConfigError, match=f"of kind {schedule['kind']} depends on the total"):
        tailorfl.run(out=tmp_path / "out", extend=True, rounds=5)
    assert contents(tmp_path / "out") == before
    tailorfl.run(out=tmp_path / "out", extend=True, seeds=2)


def test_variants_that_cannot_have_more_rounds_stay_as_they_are(tmp_path: Path) -> None:
    out, train = tmp_path / "out", {"round_schedule": {"kind": "cosine"}}
    variants = {"a": {"train": {"lr": 0.1}}, "b": {"train": train}}
    config = load({**TINY, "methods": ["local"], "rounds": 1, "variants": variants})
    list(run_variants(config, out))
    before = contents(out)
    longer, way = extension.with_more(out, load(config, {"rounds": 2}))
    with pytest.raises(ConfigError, match="cosine"):
        list(run_variants(longer, out, way=way))
    assert contents(out) == before


def test_a_running_or_unusable_variant_keeps_all_of_them_from_being_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = load({**TINY, "methods": ["local"], "rounds": 1, "variants": {"a": {}, "b": {}}})
    list(run_variants(config, out))
    before = contents(out)
    with FolderLock(out / "b"), pytest.raises(RunError, match="is writing"):
        list(run_variants(config, out, overwrite=True))
    assert contents(out) == before
    unusable = load(config, {"variants": {"a": {}, "b": {"data": {"samples": 2}}}})
    with pytest.raises(DataError):
        list(run_variants(unusable, out, overwrite=True))
    assert contents(out) == before


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"train": {"lr": 0.5}}, r"train\.lr was 0\.\d+ and is 0\.5"),
        ({"methods": [{"name": "ditto", "lam": 0.25}]}, r"lam was 1\.0 and is 0\.25.*another label"),
        ({"rounds": 2}, "has 3 rounds, and --extend cannot remove any"),
        ({"data": {"clients": 5}}, r"data\.clients was 4 and is 5"),
    ],
)
def test_what_is_no_extension_is_refused_and_nothing_changes(
    more: dict[str, Any], said: str, out: Path
) -> None:
    before = contents(out)
    with pytest.raises(RunError, match=said):
        tailorfl.run(out=out, extend=True, **more)
    assert contents(out) == before


def test_privacy_was_planned_for_its_rounds() -> None:
    assert "ε" in extension.tied(first_job(TINY, train={"dp": {"clip": 1.0, "noise": 1.0}}))


@pytest.mark.slow
def test_resume_begins_where_nothing_is_and_goes_on_with_the_same_command(tmp_path: Path) -> None:
    """As a queue sends it: again after every loss of the machine."""
    out, file = tmp_path / "out", tmp_path / "experiment.yaml"
    file.write_text(tailorfl.load_config({**TINY, "seeds": [0]}).to_yaml())
    command = ("run", file, "--resume", out, "--quiet")
    invoke(*command, "train.lr=0.07")
    first = contents(out)
    invoke(*command, "train.lr=0.07")
    assert contents(out) == first
    RunStore.discard(out / "ditto" / "seed-0")
    invoke(*command, "train.lr=0.07", "engine.workers=0")
    tailorfl.run({**TINY, "train": {"lr": 0.07}}, out=tmp_path / "whole")
    assert_identical(numbers(out), numbers(tmp_path / "whole"))

    assert "train.lr was 0.07 and is 0.08" in invoke(*command, "train.lr=0.08", code=1)
    said = invoke(*command, "train.lr=0.07", "seeds=3", code=1)
    assert "was started with seeds [0], but is resumed with [0, 1, 2]" in said
    assert f"--extend {out}" in said
    assert "give the experiment" in invoke("run", "--resume", tmp_path / "nothing", code=2)
    assert not (tmp_path / "nothing").exists()


def test_python_begins_with_resume_too(tmp_path: Path) -> None:
    for _ in range(2):
        result = tailorfl.run({**TINY, "methods": ["local"]}, out=tmp_path / "out", resume=True)
        assert list(result.table.index) == ["local"]
    with pytest.raises(ConfigError, match="choose one"):
        tailorfl.run(out=tmp_path / "out", resume=True, extend=True)
    with pytest.raises(ConfigError, match="give out"):
        tailorfl.run(extend=True, seeds=3)
    again = tailorfl.compare(out=tmp_path / "out", extend=True, methods=["fedavg"])
    assert list(again.table.index) == ["local", "fedavg"]


def test_force_goes_on_with_other_settings_and_says_so(tmp_path: Path) -> None:
    given = {**TINY, "methods": ["local"]}
    tailorfl.run(given, out=tmp_path / "out")
    RunStore.discard(tmp_path / "out" / "local" / "seed-0")
    tailorfl.run({**given, "seeds": [0], "train": {"lr": 0.3}}, out=tmp_path / "out", resume=True, force=True)
    assert tailorfl.load_config(tmp_path / "out" / "config.yaml").train.lr == 0.3


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    assert "--resume and --extend" in invoke("run", "--extend", "a", "--resume", "b", code=2)
    assert "--out and --extend" in invoke("compare", "--extend", "a", "--out", "b", code=2)
    assert "no config.yaml" in invoke("compare", "--extend", tmp_path, "seeds=3", code=2)


@pytest.mark.slow
def test_variants_are_extended_each(tmp_path: Path) -> None:
    recipe = tmp_path / "two.yaml"
    two = {"a": {"train": {"lr": 0.1}}, "b": {"train": {"lr": 0.2}}}
    settings = {**TINY, "name": "two", "methods": ["local"], "rounds": 2, "variants": two}
    recipe.write_text(json.dumps(settings))
    invoke("run", recipe, "--resume", tmp_path / "out", "--quiet")
    invoke("run", "seeds=2", "rounds=3", "--extend", tmp_path / "out", "--quiet")
    for name in two:
        found = tailorfl.ExperimentResult.load(tmp_path / "out" / name)
        assert [(s["seed"], s["rounds"]) for s, _ in found.jobs] == [(0, 3), (1, 3)]


def test_damaged_jobs_are_not_gone_on_with(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    (out / "ditto" / "seed-0" / "rounds.jsonl").unlink()
    watch = Counts()
    tailorfl.run(out=out, extend=True, rounds=5, observer=watch)
    assert watch.rounds == {"local, seed 0": 2, "ditto, seed 0": 5}
    assert "ditto, seed 0 is run again: rounds.jsonl is missing" in caplog.text
