"""What `watch` and the board read of a folder, against what the run itself wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import tailorfl
from report.tiny import TINY
from tailorfl.errors import ConfigError, RunError
from tailorfl.report import live
from tailorfl.report.live import Watched
from tailorfl.runs.job import Job, Observer

SMALL = {
    **TINY,
    "name": "small",
    "methods": ["ditto", "fedavg"],
    "seeds": 2,
    "rounds": 4,
    "eval": {"every": 2},
}


class Looking(Observer):
    """Looks at the folder whenever a round is over, and keeps what it sees."""

    def __init__(self, out: Path) -> None:
        self._out, self.seen = out, list[dict[str, Any]]()
        self._watched: Watched | None = None

    def recorded(self, job: Job, record: Any) -> None:
        self._watched = self._watched or Watched(self._out)
        self.seen.append(self._watched.look())


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A finished experiment, and how it stood after each of its rounds."""
    out = tmp_path_factory.mktemp("live") / "out"
    looking = Looking(out)
    tailorfl.run(SMALL, out=out, observer=looking)
    return out, looking.seen


def last_record(job: Path) -> Any:
    return json.loads((job / "rounds.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
def test_every_look_is_one_round_further(looked: tuple[Path, list[dict[str, Any]]]) -> None:
    _, seen = looked
    assert len(seen) == 16
    for turn, found in enumerate(seen):
        assert (found["status"], found["total"], found["done"]) == ("running", 4, turn // 4)
        states = [job["status"] for job in found["jobs"]]
        assert states == ["finished"] * (turn // 4) + ["running"] + ["waiting"] * (3 - turn // 4)
        assert found["jobs"][turn // 4]["round"] == turn % 4 + 1
        assert [job["label"] for job in found["jobs"]] == ["ditto", "fedavg"] * 2


def test_the_time_left_is_that_of_the_rounds_to_come(looked: tuple[Path, list[dict[str, Any]]]) -> None:
    _, seen = looked
    found = seen[9]  # ditto and fedavg of seed 0 are done, ditto of seed 1 had two of four rounds
    pace = {k: job["seconds"] / job["round"] for k, job in enumerate(found["jobs"][:3])}
    assert found["jobs"][0]["left"] == 0
    assert found["jobs"][2]["left"] == pytest.approx(2 * pace[2])
    assert found["jobs"][3]["left"] == pytest.approx(4 * pace[1])  # as the other seed of its method
    assert found["left"] == pytest.approx(sum(job["left"] for job in found["jobs"]))
    first = seen[0]["jobs"]
    assert first[1]["left"] == pytest.approx(4 * first[0]["seconds"])  # of no fedavg is anything known yet


def test_with_a_budget_the_end_is_not_known_before_it(tmp_path: Path) -> None:
    """LG-FedAvg sends only its head, so that it takes more rounds than FedAvg for the same bytes."""
    looking = Looking(tmp_path / "out")
    settings = {**SMALL, "methods": ["fedavg", "lg_fedavg"], "seeds": 1, "rounds": 1, "budget": "bytes"}
    tailorfl.run(settings, out=tmp_path / "out", observer=looking)
    assert len(looking.seen) > 3
    for found in looking.seen:
        assert found["left"] is None
        for job in found["jobs"]:
            assert job["round"] <= job["rounds"]
            assert job["left"] in (None, 0)
    job = Watched(tmp_path / "out").look()["jobs"][1]
    assert job["round"] == job["rounds"] == last_record(tmp_path / "out/lg_fedavg/seed-0")["round"] > 1


def test_the_end_is_what_the_records_say(looked: tuple[Path, list[dict[str, Any]]]) -> None:
    out, _ = looked
    found = Watched(out).look()
    whole = {"status": "finished", "done": 4, "left": None, "metric": "accuracy"}
    assert whole.items() <= found.items()
    job, last = found["jobs"][2], last_record(out / "ditto/seed-1")
    key = "personal/local/accuracy"
    assert [job["score"], job["low"], job["high"]] == [last[key], last[f"{key}/p10"], last[f"{key}/p90"]]
    assert (job["loss"], job["bytes_up"]) == (last["loss/train"], last["bytes_up"])
    assert [point[0] for point in job["curve"]] == [2, 4]
    assert [point[0] for point in job["losses"]] == [1, 2, 3, 4]
    assert found["jobs"][1]["score"] == last_record(out / "fedavg/seed-0")["global/local/accuracy"]
    json.dumps(found, allow_nan=False)


def test_a_file_that_is_cut_or_half_written_is_read_anew(tmp_path: Path) -> None:
    tailorfl.run({**SMALL, "methods": ["fedavg"], "seeds": 1}, out=tmp_path)
    watched, file = Watched(tmp_path), tmp_path / "fedavg/seed-0/rounds.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    assert watched.look()["jobs"][0]["round"] == 4
    (tmp_path / "new").write_bytes(b"".join(whole[:2]))
    os.replace(tmp_path / "new", file)
    assert watched.look()["jobs"][0]["round"] == 2
    with file.open("ab") as more:
        more.write(whole[2] + whole[3][:20])
    assert [point[0] for point in watched.look()["jobs"][0]["losses"]] == [1, 2, 3]
    with file.open("ab") as more:
        more.write(whole[3][20:])
    assert [point[0] for point in watched.look()["jobs"][0]["losses"]] == [1, 2, 3, 4]
    file.unlink()
    assert watched.look()["jobs"][0]["round"] == 0
    file.write_bytes(b"nonsense\n")
    with pytest.raises(RunError, match="line 1 of"):
        watched.look()
    with pytest.raises(ConfigError, match="not a result folder"):
        Watched(tmp_path / "fedavg")


def test_who_stopped_and_who_diverged_is_said(tmp_path: Path) -> None:
    class Stop(Observer):
        def round_done(self, job: Job, done: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tailorfl.run({**SMALL, "seeds": 1}, out=tmp_path / "stopped", observer=Stop())
    found = Watched(tmp_path / "stopped").look()
    assert (found["status"], found["message"]) == ("interrupted", "stopped by Ctrl-C")
    assert [job["status"] for job in found["jobs"]] == ["interrupted", "waiting"]
    assert (found["left"], found["jobs"][1]["left"]) == (None, None)

    wild = {"name": "fedavg", "label": "wild", "train": {"lr": 1e30}}
    tailorfl.run({**SMALL, "seeds": 1, "methods": [wild, "fedavg"]}, out=tmp_path / "wild")
    found = Watched(tmp_path / "wild").look()
    assert (found["status"], found["done"]) == ("finished", 2)
    assert found["jobs"][0]["status"] == "failed"
    assert "diverged" in found["jobs"][0]["message"]


def test_variants_are_jobs_of_one_whole(tmp_path: Path) -> None:
    settings = {
        **SMALL, "seeds": 1, "methods": ["fedavg"], "rounds": 1,
        "variants": {"few": {"data": {"clients": 4}}, "many": {"data": {"clients": 9}}},
    }  # fmt: skip
    file = tmp_path / "recipe.yaml"
    file.write_text(tailorfl.load_config(settings).to_yaml())
    tailorfl.reproduce(file, out=tmp_path / "out")
    found = Watched(tmp_path / "out").look()
    assert found["status"] == "finished"
    assert [job["name"] for job in found["jobs"]] == ["few: FedAvg, seed 0", "many: FedAvg, seed 0"]
    for name in ("config.yaml", "fedavg/seed-0/config.json", "status.json"):
        (tmp_path / "out/many" / name).unlink()
    found = Watched(tmp_path / "out").look()
    assert [job["status"] for job in found["jobs"]] == ["finished", "waiting"]
    assert found["status"] == "interrupted"


def test_long_lines_are_thinned_and_keep_their_end() -> None:
    points = [[k, k] for k in range(1, 1002)]
    thin = live._thinned(points)
    assert len(thin) <= live.MOST_POINTS
    assert thin[-1] == [1001, 1001]
    assert live._thinned(points[:400]) == points[:400]
