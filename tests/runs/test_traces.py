"""`system.trace`: a run leaves a trace in its folder, and another one plays it again, also after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tailorfl
from tailorfl.errors import ConfigError, RunError
from tailorfl.report.curves import sections, to_target
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.files import read_lines
from tailorfl.runs.job import Job
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig

SMALL: dict[str, Any] = {
    "seeds": [0],
    "methods": ["fedavg", "ditto"],
    "data": {"samples": 200, "clients": 5},
    "model": "logistic",
    "rounds": 3,
    "engine": "sequential",
    "eval": {"every": 1},
    "checkpoint_every": 1,
}
MEASURED = ("seconds", "round_seconds")


def records(folder: Path) -> dict[str, Any]:
    """What was recorded of each job, times apart."""
    return {
        str(file.relative_to(folder)): [
            {k: v for k, v in json.loads(line).items() if k not in MEASURED} for line in read_lines(file)
        ]
        for file in sorted(folder.rglob("*.jsonl"))
    }


def trace_file(folder: Path, rounds: int = 3) -> Path:
    lines = []
    for number in range(1, rounds + 1):
        fates = ["accepted"] * 5
        fates[number % 5] = "late"
        answers = [{"client": i, "fate": fate, "seconds": 2.0 + i} for i, fate in enumerate(fates)]
        lines.append({"round": number, "sampled": [0, 1, 2, 3, 4], "answers": answers, "simulated": False})
    file = folder / "given.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_trace_of_a_file_and_of_the_folder_that_it_left(tmp_path: Path) -> None:
    tailorfl.run({**SMALL, "system": {"trace": str(trace_file(tmp_path))}}, out=tmp_path / "a")
    found = records(tmp_path / "a")
    assert [r["absent"] for r in found["ditto/seed-0/rounds.jsonl"]] == [[1], [2], [3]]
    tailorfl.run({**SMALL, "system": {"trace": str(tmp_path / "a")}}, out=tmp_path / "b")
    assert records(tmp_path / "b") == found
    tailorfl.run(SMALL, out=tmp_path / "c")
    assert "fedavg/seed-0/trace.jsonl" not in records(tmp_path / "c")
    assert "absent" not in records(tmp_path / "c")["fedavg/seed-0/rounds.jsonl"][0]


def test_a_resumed_job_has_one_line_a_round(tmp_path: Path) -> None:
    settings = {**SMALL, "seeds": [0], "methods": ["ditto"], "system": {"trace": str(trace_file(tmp_path))}}
    tailorfl.run(settings, out=tmp_path / "whole")
    tailorfl.run(settings, out=tmp_path / "cut")
    job = tmp_path / "cut" / "ditto" / "seed-0"
    with RunStore.open(job) as store:
        store.truncate_after(2)
        store.mark("interrupted")
        store.append_trace({"round": 3})  # what a job that was killed in its third round may have left
    tailorfl.run(settings, out=tmp_path / "cut", resume=True)
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    with RunStore.open(job) as store:
        store.truncate_after(2)
        store.mark("interrupted")
    (job / "trace.jsonl").write_bytes(read_lines(job / "trace.jsonl")[0] + b"\n")
    with pytest.raises(RunError, match=r"trace\.jsonl' has lost the records of rounds 2"):
        tailorfl.run(settings, out=tmp_path / "cut", resume=True)


def test_a_trace_that_cannot_be_played_is_refused_before_anything_starts(tmp_path: Path) -> None:
    short = trace_file(tmp_path, rounds=2)
    with pytest.raises(ConfigError, match=r"has 3 rounds, but .* has 2; set rounds=2"):
        tailorfl.run({**SMALL, "system": {"trace": str(short)}}, out=tmp_path / "a")
    with pytest.raises(RunError, match="cannot read the trace"):
        tailorfl.run({**SMALL, "system": {"trace": str(tmp_path / "none.jsonl")}}, out=tmp_path / "b")
    few = {**SMALL, "rounds": 2, "data": {"samples": 200, "clients": 4}}
    with pytest.raises(ConfigError, match="asks client 4 in round 1, but there are 4"):
        tailorfl.run({**few, "system": {"trace": str(short)}}, out=tmp_path / "c")
    secret = {
        "sampling": "bernoulli",
        "fraction": 0.5,
        "weights": "uniform",
        "rounds": 2,
        "methods": ["fedavg"],
    }
    dp = {"dp": {"level": "client", "clip": 1.0, "noise": 1.0}}
    with pytest.raises(ConfigError, match="nobody seeing who takes part"):
        tailorfl.run({**SMALL, **secret, "train": dp, "system": {"trace": str(short)}}, out=tmp_path / "d")


FAULTS: dict[str, Any] = {
    "speed": {"kind": "lognormal", "median": 30.0},
    "availability": {"kind": "wave", "share": 0.8, "period": 20.0},
    "stragglers": {"share": 0.4, "factor": 3, "redraw": "round"},
    "dropout": 0.1,
}


@pytest.mark.parametrize("mode", [{"deadline": 5.0, "min_replies": 2}, {"mode": "buffered", "buffer": 2}])
def test_a_simulated_system_is_resumed_and_played_again(mode: dict[str, Any], tmp_path: Path) -> None:
    """With clients in the middle of their training where rounds are buffered."""
    settings = {**SMALL, "seeds": [0], "rounds": 6, "system": {**FAULTS, **mode}}
    for name in ("whole", "cut"):
        tailorfl.run(settings, out=tmp_path / name)
    for job in (tmp_path / "cut").glob("*/seed-0"):
        with RunStore.open(job) as store:
            store.truncate_after(5)
            store.mark("interrupted")
    tailorfl.run(settings, out=tmp_path / "cut", resume=True)
    found = records(tmp_path / "whole")
    assert records(tmp_path / "cut") == found
    replay = {**settings, "system": {**settings["system"], "trace": str(tmp_path / "whole")}}
    tailorfl.run(replay, out=tmp_path / "again")
    assert records(tmp_path / "again") == found
    times = [r["simulated_seconds"] for r in found["ditto/seed-0/rounds.jsonl"]]
    assert times == sorted(times)
    assert times[-1] > 0


def test_tables_say_who_answered_and_how_long_it_took(tmp_path: Path) -> None:
    system = {"speed": 20.0, "stragglers": {"share": 0.5, "factor": 5, "redraw": "round"}, "deadline": 6.0}
    settings = {**SMALL, "rounds": 4, "system": system, "methods": ["centralized", "local", "fedavg"]}
    result = tailorfl.run({**settings, "eval": {"every": 1, "target": 0.05}}, out=tmp_path / "a")
    for summary, store in result.jobs:
        rounds = store.rounds()
        if summary["method"] == "centralized":
            assert "absent" not in rounds
            assert "simulated_seconds" not in summary
            continue
        absent = [len(one) for one in rounds["absent"]]
        assert 0 < sum(absent) < 20
        assert summary["answered"] == pytest.approx(1 - sum(absent) / 20)
        assert summary["simulated_seconds"] == rounds["simulated_seconds"].iloc[-1] <= 4 * 6.0
    table = result.table
    assert table["answered"].isna().tolist() == [True, False, False]
    assert table.loc["local", "simulated_seconds"] == table.loc["fedavg", "simulated_seconds"] > 0
    assert "| clients that answered | simulated time |" in result.markdown
    (section, *_) = sections(result, 0.05)
    assert section.head[-1] == "Simulated time"
    targets = to_target(result, 0.05)
    assert targets["simulated_seconds"].notna().tolist() == [False, True, True]


def test_tables_without_a_system_say_nothing_of_it(tmp_path: Path) -> None:
    result = tailorfl.run({**SMALL, "rounds": 1, "eval": {"target": 0.05}}, out=tmp_path / "a")
    assert "simulated" not in result.markdown
    assert "answered" not in result.markdown
    assert to_target(result, 0.05)["simulated_seconds"].isna().all()
    assert "Simulated time" not in sections(result, 0.05)[0].head


@pytest.mark.parametrize(("given", "wanted"), [({}, "sequential"), ({"name": "vectorized"}, "vectorized")])
def test_a_trace_of_real_clients_is_played_again_as_they_trained(
    given: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    """Each by itself, unless the user says otherwise; one of a simulation with whatever is quickest."""
    file = trace_file(tmp_path)
    config = ExperimentConfig.model_validate({**SMALL, "engine": given})
    engines = {}
    for simulated in (False, True):
        lines = [{**json.loads(line), "simulated": simulated} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        system = config.system.model_copy(update={"trace": str(file)})
        job = Job(config.model_copy(update={"system": system}), config.methods[0], 0)
        engines[simulated] = make_simulation(job, make_federation(config, 0)).engine.name
    assert engines == {False: wanted, True: given.get("name", "auto")}


def test_a_table_over_rounds_without_effect_says_so_first(tmp_path: Path) -> None:
    settings = {**SMALL, "methods": ["fedavg"], "system": {"trace": str(trace_file(tmp_path))}}
    usual = tailorfl.run(settings, out=tmp_path / "usual")
    assert usual.without_effect == []
    idle = tailorfl.run(
        {**settings, "system": {**settings["system"], "min_replies": 5}}, out=tmp_path / "idle"
    )
    (sentence,) = idle.without_effect
    assert sentence.startswith("3 of 3 rounds of fedavg, seed 0")
    assert (tmp_path / "idle" / "comparison.md").read_text().splitlines()[0] == sentence.replace(
        "fedavg", "FedAvg"
    )
