"""`system.trace`: a run leaves a trace in its folder, and another one plays it again, also after a kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tailorfl
from runs.small import TINY, first_job, records, simulation_of
from tailorfl.errors import ConfigError, RunError
from tailorfl.report.curves import sections, to_target
from tailorfl.rounds.participation import Trace
from tailorfl.runs.files import read_lines
from tailorfl.runs.store import RunStore

SMALL = TINY | {"methods": ["fedavg", "ditto"], "data": {"samples": 200, "clients": 5}}
SMALL |= {"eval": {"every": 1}, "checkpoint_every": 1}
MEASURED = ("seconds", "round_seconds")


def recorded(folder: Path) -> dict[str, Any]:
    """What was recorded of each job, times apart."""
    return {
        str(file.relative_to(folder)): [
            {k: v for k, v in line.items() if k not in MEASURED} for line in records(file)
        ]
        for file in sorted(folder.rglob("*.jsonl"))
    }


def cut_back(job: Path, rounds: int) -> None:
    """As a job stands that was killed after so many rounds."""
    with RunStore.open(job) as store:
        store.truncate_after(rounds)
        store.mark("interrupted")


def trace_file(folder: Path, rounds: int = 3, simulated: bool = False) -> Path:
    """A trace of five clients, of which another one is late in each round."""
    lines = []
    for number in range(1, rounds + 1):
        fates = ["late" if i == number % 5 else "accepted" for i in range(5)]
        answers = [{"client": i, "fate": fate, "seconds": 2.0 + i} for i, fate in enumerate(fates)]
        line = {"round": number, "sampled": [0, 1, 2, 3, 4], "answers": answers, "simulated": simulated}
        lines.append(json.dumps(line) + "\n")
    file = folder / f"given-{simulated}.jsonl"
    file.write_text("".join(lines))
    return file


def test_a_trace_of_a_file_and_of_the_folder_that_it_left(tmp_path: Path) -> None:
    tailorfl.run({**SMALL, "system": {"trace": str(trace_file(tmp_path))}}, out=tmp_path / "a")
    found = recorded(tmp_path / "a")
    assert [r["absent"] for r in found["ditto/seed-0/rounds.jsonl"]] == [[1], [2], [3]]
    tailorfl.run({**SMALL, "system": {"trace": str(tmp_path / "a")}}, out=tmp_path / "b")
    assert recorded(tmp_path / "b") == found
    tailorfl.run(SMALL, out=tmp_path / "c")
    assert "fedavg/seed-0/trace.jsonl" not in recorded(tmp_path / "c")
    assert "absent" not in recorded(tmp_path / "c")["fedavg/seed-0/rounds.jsonl"][0]


def test_a_resumed_job_has_one_line_a_round(tmp_path: Path) -> None:
    settings = {**SMALL, "methods": ["ditto"], "system": {"trace": str(trace_file(tmp_path))}}
    tailorfl.run(settings, out=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    job = tmp_path / "cut" / "ditto" / "seed-0"
    cut_back(job, 2)
    with RunStore.open(job) as store:
        store.append_trace({"round": 3})  # what a job that was killed in its third round may have left
    tailorfl.run(settings, out=tmp_path / "cut", resume=True)
    assert recorded(tmp_path / "cut") == recorded(tmp_path / "whole")
    cut_back(job, 2)
    (job / "trace.jsonl").write_bytes(read_lines(job / "trace.jsonl")[0] + b"\n")
    with pytest.raises(RunError, match=r"trace\.jsonl' has lost the records of rounds 2"):
        tailorfl.run(settings, out=tmp_path / "cut", resume=True)


DP = {"dp": {"level": "client", "clip": 1.0, "noise": 1.0}}
SECRET = {"sampling": "bernoulli", "fraction": 0.5, "weights": "uniform", "train": DP}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, r"has 3 rounds, but .* has 2; set rounds=2"),
        ({"system": {"trace": "none.jsonl"}}, "cannot read the trace"),
        ({"rounds": 2, "data": {"clients": 4}}, "client 4 in round 1, but there are 4"),
        ({"rounds": 2, "methods": ["fedavg"], **SECRET}, "nobody sees who takes part"),
    ],
)
def test_a_trace_that_cannot_be_played_is_refused_before_anything_starts(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    short = {"trace": str(trace_file(tmp_path, rounds=2))}
    with pytest.raises((ConfigError, RunError), match=said):
        tailorfl.run({**SMALL, "system": short, **changes}, out=tmp_path / "out")


FAULTS: dict[str, Any] = {
    "speed": {"kind": "lognormal", "median": 30.0},
    "availability": {"kind": "wave", "share": 0.8, "period": 20.0},
    "stragglers": {"share": 0.4, "factor": 3, "redraw": "round"},
    "dropout": 0.1,
}


@pytest.mark.parametrize("mode", [{"deadline": 5.0, "min_replies": 2}, {"mode": "buffered", "buffer": 2}])
def test_a_simulated_system_is_resumed_and_played_again(mode: dict[str, Any], tmp_path: Path) -> None:
    """With clients in the middle of their training where rounds are buffered."""
    settings = {**SMALL, "rounds": 6, "system": {**FAULTS, **mode}}
    tailorfl.run(settings, out=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for job in (tmp_path / "cut").glob("*/seed-0"):
        cut_back(job, 5)
    tailorfl.run(settings, out=tmp_path / "cut", resume=True)
    found = recorded(tmp_path / "whole")
    assert recorded(tmp_path / "cut") == found
    replay = {**settings, "system": {**settings["system"], "trace": str(tmp_path / "whole")}}
    tailorfl.run(replay, out=tmp_path / "again")
    assert recorded(tmp_path / "again") == found
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


def test_who_answered_is_counted_among_all_that_were_asked(tmp_path: Path) -> None:
    """Two of five are sampled, but all are asked."""
    everybody = {"name": "ditto", "participation": "all"}
    system = {"availability": {"kind": "share", "share": 0.6}}
    settings = {**SMALL, "rounds": 4, "fraction": 0.4, "system": system, "methods": [everybody]}
    ((summary, store),) = tailorfl.run(settings, out=tmp_path / "a").jobs
    answers = [answer for trace in Trace.read(store.path / "trace.jsonl") for answer in trace.answers]
    assert len(answers) == 4 * 5
    share = sum(answer.fate == "accepted" for answer in answers) / len(answers)
    assert 0 < share < 1
    assert summary["answered"] == pytest.approx(share)


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
    engines = {}
    for simulated in (False, True):
        system = {"trace": str(trace_file(tmp_path, simulated=simulated))}
        engines[simulated] = simulation_of(first_job(SMALL, engine=given, system=system)).engine.name
    assert engines == {False: wanted, True: given.get("name", "auto")}


def test_a_table_over_rounds_without_effect_says_so_first(tmp_path: Path) -> None:
    settings = {**SMALL, "methods": ["fedavg"], "system": {"trace": str(trace_file(tmp_path))}}
    usual = tailorfl.run(settings, out=tmp_path / "usual")
    assert usual.without_effect == []
    system = {**settings["system"], "min_replies": 5}
    idle = tailorfl.run({**settings, "system": system}, out=tmp_path / "idle")
    (sentence,) = idle.without_effect
    assert sentence.startswith("3 of 3 rounds of fedavg, seed 0")
    first = (tmp_path / "idle" / "comparison.md").read_text().splitlines()[0]
    assert first == sentence.replace("fedavg", "FedAvg")
