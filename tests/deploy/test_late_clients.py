"""A client joins a federation that has begun. Real members, a real server, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from deploy.federating import deployed, experiment, members, private_state, same, server_state
from deploy.test_own_files import FEW, WARDS, of_files, write
from deploy.test_replayed import played_again
from tailorfl.deploy.client_session import ClientSession, member_of
from tailorfl.deploy.membership import ALLOWED, let_in
from tailorfl.deploy.serving import host_experiment
from tailorfl.deploy.transport import InProcessTransport
from tailorfl.errors import ConfigError, RunError
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.one_round import RoundResult
from tailorfl.rounds.participation import Trace
from tailorfl.runs.job import Job, Observer
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig

LATE = "1"
"""The share of the client that joins: number 1 of the data, and 3 of the federation."""


class After(Observer):
    """Does something after a round."""

    def __init__(self, round: int, do: Callable[[], None]) -> None:
        self.round, self.do = round, do

    def round_done(self, job: Job, done: RoundResult) -> None:
        if done.round + 1 == self.round:
            self.do()


def three(method: str | Mapping[str, Any], **changes: Any) -> ExperimentConfig:
    """Four shares, of which three begin."""
    deploy = {"clients": 3, "round_seconds": 60.0, "wait_seconds": 20.0}
    return experiment(method, rounds=6, deploy=deploy, **changes)


def joined(
    config: ExperimentConfig,
    folder: Path,
    nodes: Mapping[int, ClientSession],
    newcomer: ClientSession,
    after: int = 2,
) -> ExperimentResult:
    """Deploy an experiment that another client joins after a round."""
    post = InProcessTransport({node: member.answer for node, member in nodes.items()})

    def join() -> None:
        let_in(folder / "out", newcomer.data.name)
        post.members[999] = newcomer.answer

    try:
        return deployed(config, folder, post=post, observer=After(after, join))
    finally:
        post.close()


def trace_of(result: ExperimentResult) -> list[Any]:
    """What became of whom in the first job."""
    job = Job(result.config, result.config.methods[0], result.config.seeds[0])
    return list(Trace.read(result.path / job.folder / "trace.jsonl"))


def shares(folder: Path) -> tuple[dict[int, ClientSession], ClientSession]:
    """The members that begin, and the one that joins."""
    everyone = members(folder)
    newcomer = everyone.pop(100 + int(LATE))
    return everyone, newcomer


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedrep"])
def test_a_client_joins_and_the_replay_is_equal_to_the_bit(method: str, tmp_path: Path) -> None:
    config = three(method)
    result = joined(config, tmp_path, *shares(tmp_path))
    trace = trace_of(result)
    assert [one.joined for one in trace] == [(("0", "2", "3"),), (), ((LATE,),), (), (), ()]
    assert [one.asked for one in trace] == [(0, 1, 2)] * 2 + [(0, 1, 2, 3)] * 4
    assert {a.fate for one in trace for a in one.answers} == {"accepted"}
    model = tmp_path / f"state-{LATE}" / config.name / method / "seed-5" / "model"
    assert (model / "model.safetensors").is_file()
    again = played_again(config, tmp_path)
    same(server_state(again), server_state(result))
    records = [RunStore.open(r.path / method / "seed-5", readonly=True).clients() for r in (result, again)]
    columns = ["set", "model", "client", "accuracy", "loss"]
    last = [
        frame[(frame["round"] == 6) & (frame["set"] == "local")][columns].sort_values(columns)
        for frame in records
    ]
    assert len(last[0])
    assert last[0].to_numpy().tolist() == last[1].to_numpy().tolist()


def test_those_who_are_there_are_asked_nothing_new_and_keep_what_they_agreed_on(tmp_path: Path) -> None:
    config = three("ditto")
    founders, newcomer = shares(tmp_path)
    joined(config, tmp_path, founders, newcomer)
    agreements = {
        name: [path.name for path in (tmp_path / f"state-{name}" / "agreements").iterdir()]
        for name in ("0", "2", "3", LATE)
    }
    assert {len(listed) for listed in agreements.values()} == {1}
    assert agreements["0"] == agreements["2"] == agreements["3"] != agreements[LATE]
    kinds = [line["kind"] for line in _log(tmp_path / "state-0")]
    assert kinds.count("describe") == kinds.count("setup") == 1


def _log(state: Path) -> list[dict[str, Any]]:
    from tailorfl.deploy.release_log import verified

    return verified(state)


@pytest.mark.parametrize("options", [{}, {"label": "outcome", "indicator": True}])
def test_a_client_with_a_file_of_its_own_joins(options: dict[str, Any], tmp_path: Path) -> None:
    """Its rows are prepared by what the others agreed on; its name stands before theirs, its number after."""
    files = tmp_path / "files"
    write(files)
    config = of_files(
        files,
        "ditto",
        {"clients": 3, "round_seconds": 60.0, "wait_seconds": 20.0},
        normalise="federated",
        **({"options": options} if options else {}),
    ).model_copy(update={"rounds": 6})
    nodes = {
        7 + i: member_of(
            state=tmp_path / f"state-{w}", data=files / f"{w}.csv", policy=FEW, experiment=config
        )
        for i, w in enumerate(WARDS)
    }
    newcomer = nodes.pop(7 + WARDS.index("north"))
    result = joined(config, tmp_path, nodes, newcomer)
    assert [one.joined for one in trace_of(result)][:3] == [(("east", "south", "west"),), (), (("north",),)]
    again = played_again(config, tmp_path)
    same(server_state(again), server_state(result))
    told = [line for line in _log(tmp_path / "state-north") if line["kind"] == "summarise"]
    assert [line["facts"]["summary"] for line in told] == [{}]


def test_a_client_with_a_class_that_the_others_have_not_is_turned_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = tmp_path / "files"
    write(files)
    odd = pd.read_csv(files / "north.csv")
    odd.loc[0, "outcome"] = "dead"
    odd.to_csv(files / "north.csv", index=False)
    deploy = {"clients": 3, "round_seconds": 60.0, "wait_seconds": 20.0}
    config = of_files(files, "fedavg", deploy, normalise="federated").model_copy(update={"rounds": 3})
    nodes = {
        7 + i: member_of(
            state=tmp_path / f"state-{w}", data=files / f"{w}.csv", policy=FEW, experiment=config
        )
        for i, w in enumerate(WARDS)
    }
    newcomer = nodes.pop(7 + WARDS.index("north"))
    result = joined(config, tmp_path, nodes, newcomer, after=1)
    assert all(one.asked == (0, 1, 2) for one in trace_of(result))
    assert "'north' cannot join: its data cannot be used" in caplog.text
    assert newcomer.turned_away


def test_who_is_not_on_the_list_is_turned_away(tmp_path: Path) -> None:
    founders, newcomer = shares(tmp_path)
    post = InProcessTransport({node: member.answer for node, member in founders.items()})
    appear = After(1, lambda: post.members.update({999: newcomer.answer}))
    try:
        result = deployed(three("fedavg"), tmp_path, post=post, observer=appear)
    finally:
        post.close()
    assert all(one.asked == (0, 1, 2) for one in trace_of(result))
    assert "the federation began without '1'" in newcomer.turned_away


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("fedamp", "keeps the model of every client"),
        ({"name": "fedavg", "weights": "uniform", "train": {"dp": {"level": "client", "clip": 1.0, "noise": 1.0}}},
         "client-level privacy"),
        ({"name": "fedavg", "train": {"dp": {"clip": 1.0, "epsilon": 8.0}}}, "epsilon"),
    ],
)  # fmt: skip
def test_a_method_that_needs_all_clients_refuses_another_one(
    method: Any, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server says so before it begins; so does the operator's command; a list written by hand changes nothing."""
    data = {"name": "digits", "clients": 4, "samples": 400}
    founders, _ = shares(tmp_path)
    with pytest.raises(ConfigError, match=f"4 clients, but 3 are here.*{why}"):
        deployed(three(method, data=data), tmp_path, founders)
    whole = experiment(method, rounds=3, data=data)
    post = InProcessTransport({node: member.answer for node, member in members(tmp_path / "all").items()})
    refused = member_of(state=tmp_path / "fifth", name="eve")

    def by_hand() -> None:
        with pytest.raises(ConfigError, match=why):
            let_in(tmp_path / "out", "eve")
        (tmp_path / "out" / ALLOWED).write_text("eve\n", encoding="utf-8")
        post.members[999] = refused.answer

    try:
        deployed(whole, tmp_path, post=post, observer=After(1, by_hand))
    finally:
        post.close()
    assert why in refused.turned_away


def test_a_server_that_was_started_again_goes_on_with_the_client_that_joined(tmp_path: Path) -> None:
    config = three("ditto")
    founders, newcomer = shares(tmp_path)
    post = InProcessTransport({node: member.answer for node, member in founders.items()})

    class Ends(After):
        def round_done(self, job: Job, done: RoundResult) -> None:
            super().round_done(job, done)
            if done.round + 1 == 4:
                raise RunError("the power is cut")

    def join() -> None:
        let_in(tmp_path / "out", LATE)
        post.members[999] = newcomer.answer

    try:
        with pytest.raises(RunError, match="power"):
            host_experiment(post, config, tmp_path / "out", observer=Ends(2, join))
        result = host_experiment(post, config, tmp_path / "out")
    finally:
        post.close()
    trace = trace_of(result)
    assert [one.joined for one in trace] == [(("0", "2", "3"),), (), ((LATE,),), (), (), ()]
    again = played_again(config, tmp_path)
    same(server_state(again), server_state(result))
    assert private_state(tmp_path, config, LATE)
