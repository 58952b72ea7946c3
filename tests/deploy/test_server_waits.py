"""A server whose clients are away: it pauses, hands out models when they come back, and ends in bounded time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from deploy.federation import (
    After,
    Ask,
    Federation,
    Meddle,
    deployed,
    is_training,
    lying,
    place_of,
    records_are_equal,
    refusal,
    small,
)
from tailorfl.deploy.membership import take_off
from tailorfl.deploy.messages import Packet
from tailorfl.errors import ConfigError, RunError
from tailorfl.rounds.participation import Trace
from tailorfl.runs.job import Job, Observer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look more often, and wait less long for those that do not come back."""
    for module in ("remote_rounds", "serving"):
        monkeypatch.setattr(f"tailorfl.deploy.{module}.LOOK", 0.02)
    monkeypatch.setattr("tailorfl.deploy.serving.RETURN_SECONDS", 0.1)


def model_of(folder: Path, client: int) -> Path:
    """Return where a client's model lies."""
    return place_of(small(), folder, client) / "model"


def leaving(federation: Federation, *nodes: int, after: int) -> Meddle:
    """Return a change of nothing, but nodes are away once they have answered in round `after`."""

    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        if node in nodes and is_training(question, after):
            federation.away.add(node)
        return answer

    return meddle


def kinds(federation: Federation, since: int) -> list[tuple[int, str]]:
    """(node, kind) of the questions that have passed after the first so many."""
    return [(node, Packet.decoded(question).kind) for node, question, _ in federation.passed[since:]]


# -- the last message ---------------------------------------------------------------------------------------


@pytest.mark.threat(
    "a fault", "a client is away at the end", now="it gets its model later", before="it never got its model"
)
def test_a_client_that_is_away_at_the_end_gets_its_model_when_it_comes_back(federation: Federation) -> None:
    federation.meddle = leaving(federation, 101, after=3)
    federation.on["waiting for '1' to fetch the last model"] = federation.away.clear
    result = federation.host(small())
    assert all(model_of(federation.folder, client).is_dir() for client in range(3))
    assert result.became(3, 1).fate == "accepted"
    assert federation.people[101].ended
    assert not federation.people[101].turned_away


def test_a_finished_federation_hands_out_what_is_missing(federation: Federation, tmp_path: Path) -> None:
    """The model that is fetched late is that of a client that was there."""
    config = small(deploy={"wait_seconds": 0.2})
    deployed(config, tmp_path / "there", 3)
    federation.meddle = leaving(federation, 101, after=3)
    federation.host(config)
    assert federation.said[-1].startswith("'1' did not fetch the last model")
    assert not model_of(tmp_path, 1).exists()
    first = len(federation.passed)
    federation.away.clear()
    federation.host(config)
    again = kinds(federation, first)
    assert [node for node, kind in again if kind == "finish"] == [101]
    assert "train" not in {kind for _, kind in again}
    (usual,) = model_of(tmp_path / "there", 1).glob("*.safetensors")
    assert (model_of(tmp_path, 1) / usual.name).read_bytes() == usual.read_bytes()
    last = len(federation.passed)
    federation.host(config)  # everybody has all: it ends at once
    assert "finish" not in {kind for _, kind in kinds(federation, last)}


def test_who_cannot_take_its_model(federation: Federation, caplog: pytest.LogCaptureFixture) -> None:
    federation.meddle = lying(lambda question, answer: refusal("the disk is full"), "finish")
    federation.host(small())
    assert federation.people[101].turned_away == "it has no model of ditto, seed 5: the disk is full"
    assert "'1' has no model of ditto, seed 5 yet: the disk is full" in caplog.text
    assert federation.people[100].ended
    assert not federation.people[100].turned_away


@pytest.mark.slow
@pytest.mark.threat(
    "a fault", "a client never answers the last message", now="the server ends all the same, in bounded time"
)
def test_the_end_waits_for_nobody(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailorfl.deploy.serving.GOODBYE_SECONDS", 0.2)
    asleep: list[float] = []

    def sleep(question: Packet, answer: bytes) -> bytes:
        asleep.append(time.monotonic())
        time.sleep(3.0)
        return answer

    federation.meddle = lying(sleep, "goodbye")
    federation.host(small(rounds=1))
    assert time.monotonic() - asleep[0] < 2.0


# -- rounds -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.threat(
    "a fault", "nobody is there", now="no round passes", before="rounds passed without anybody"
)
def test_no_round_passes_where_nobody_is_there(federation: Federation) -> None:
    config = small(rounds=4, deploy={"wait_seconds": 0.3})
    federation.meddle = leaving(federation, 100, 101, 102, after=2)
    with pytest.raises(RunError, match=r"round 3 needs 2 answers and has 0.*'0' \(not connected\)"):
        federation.host(config)
    assert (
        "round 3 is paused: 2 answers are needed; waiting for '0', '1', '2', at most 0 s" in federation.said
    )
    federation.away.clear()
    result = federation.replayed(config)
    assert [one.round for one in result.trace] == [1, 2, 3, 4]
    assert result.fates == {"accepted"}


@pytest.mark.threat(
    "a fault", "fewer than a majority answer", now="the round pauses until they are back", before="it passed"
)
def test_a_round_goes_on_when_enough_are_back(federation: Federation) -> None:
    federation.meddle = leaving(federation, 101, 102, after=2)
    federation.on["round 3 is paused"] = lambda: federation.away.discard(101)
    federation.on["waiting for '2' to fetch"] = federation.away.clear
    result = federation.replayed(small(rounds=4))
    assert "round 3 continues" in federation.said
    assert result.fates_of(1) == ["accepted"] * 4
    assert result.fates_of(2) == ["accepted"] * 2 + ["unavailable"] * 2


def test_a_client_that_answered_before_the_pause_is_not_asked_twice(federation: Federation) -> None:
    federation.meddle = leaving(federation, 101, 102, after=1)
    federation.on["round 2 is paused"] = federation.away.clear
    federation.replayed(small(rounds=2))
    assert len(federation.of_kind("train", 100)) == 2


def test_min_replies_may_change_when_the_server_begins_again(federation: Federation) -> None:
    """As every setting of `deploy`: it decides whether a round passes, which the trace tells, and no number."""
    federation.meddle = leaving(federation, 101, 102, after=1)
    with pytest.raises(RunError):
        federation.host(small(rounds=3, deploy={"wait_seconds": 0.2}))
    result = federation.replayed(small(rounds=3, deploy={"min_replies": 1, "wait_seconds": 0.2}))
    assert result.fates_of(0) == ["accepted"] * 3
    assert result.fates_of(1) == ["accepted", "unavailable", "unavailable"]


@pytest.mark.slow
def test_a_server_that_begins_again_does_not_need_everybody(federation: Federation) -> None:
    config = small(rounds=4, deploy={"wait_seconds": 0.3})
    federation.meddle = leaving(federation, 100, 101, 102, after=2)
    with pytest.raises(RunError):
        federation.host(config)
    federation.away = {102}
    result = federation.replayed(config)
    assert len(result.trace) == 4
    assert result.became(4, 2).fate == "unavailable"


# -- leaving ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"fraction": 0.67}])
def test_a_client_leaves_for_good(federation: Federation, options: dict[str, Any]) -> None:
    """It says so in place of an answer; nobody waits for it any more, and the run is played again to the bit."""
    config = small(rounds=6, deploy={"wait_seconds": 0.5}, **options)

    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        federation.people[101].leaves = question.kind == "train" and question.facts["round"] >= 2
        return ask(body)

    federation.meddle = meddle
    result = federation.replayed(config)
    trace = list(result.trace)
    left = next(one.round for one in trace for a in one.answers if a.fate == "refused")
    assert all(1 not in one.asked for one in trace if one.round > left)
    assert all(one.sampled for one in trace)
    assert "1 left for good" in federation.said
    assert federation.people[101].ended
    assert [node for node, *_ in federation.of_kind("finish")] == [100, 102]
    first = len(federation.passed)
    federation.host(config)
    assert (101, "finish") not in kinds(federation, first)


def test_the_operator_takes_a_client_off_while_the_server_waits_for_it(federation: Federation) -> None:
    out = federation.folder / "out"
    with pytest.raises(ConfigError, match="no federation"):
        take_off(out, "1")
    federation.meddle = leaving(federation, 101, 102, after=2)
    federation.on["round 3 is paused"] = lambda: [take_off(out, name) for name in ("1", "2")]
    result = federation.replayed(small(rounds=4))
    with pytest.raises(ConfigError, match="'7'"):
        take_off(out, "7")
    assert "1, 2 left for good" in federation.said
    assert [one.asked for one in result.trace] == [(0, 1, 2)] * 3 + [(0,)]


@pytest.mark.parametrize("is_there", [True, False])
def test_who_has_left_is_not_asked_in_another_seed(is_there: bool, federation: Federation) -> None:
    """Whether its process still runs, or the server waits for it when the operator takes it off."""
    out, trace = federation.folder / "out", federation.folder / "out" / "fedavg" / "seed-6" / "trace.jsonl"

    def off() -> None:
        take_off(out, "1")

    def wait() -> None:
        federation.away.add(101)
        federation.on["waiting for 3 clients"] = off

    observer = After({1: off}) if is_there else After({2: wait})
    federation.host(small("fedavg", rounds=2, seeds=[5, 6], deploy={"wait_seconds": 9.0}), observer=observer)
    assert [one.asked for one in Trace.read(trace)] == [(0, 1)] * 2


@pytest.mark.parametrize("kind", ["setup", "describe"])
def test_who_leaves_before_a_round_is_not_waited_for(kind: str, federation: Federation) -> None:
    """It says so to whatever it is asked, here at the beginning of the first seed or of the second."""

    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        is_meant = question.kind == kind and (kind == "setup" or question.facts["seed"] == 6)
        federation.people[101].leaves |= is_meant
        answer = ask(body)
        if federation.people[101].ended:  # so does its process
            federation.away.add(101)
        return answer

    federation.meddle = meddle
    result = federation.host(small("fedavg", rounds=1, seeds=[5, 6], deploy={"wait_seconds": 9.0}))
    assert "1 left for good" in federation.said
    trace = Trace.read(result.result.path / "fedavg" / "seed-6" / "trace.jsonl")
    assert [one.asked for one in trace] == [(0, 1)]
    assert not any("did not fetch the last model" in sentence for sentence in federation.said)


def test_who_is_taken_off_is_not_waited_for_at_the_end(federation: Federation) -> None:
    federation.meddle = leaving(federation, 101, after=1)
    federation.on["waiting for '1' to fetch"] = lambda: take_off(federation.folder / "out", "1")
    federation.host(small("fedavg", rounds=1, deploy={"wait_seconds": 9.0}))
    assert not any("did not fetch the last model" in sentence for sentence in federation.said)


# -- the server ends ----------------------------------------------------------------------------------------


class PowerCut(Observer):
    """Ends the server, once, when it has the evaluation after round 2."""

    has_power = True

    def evaluated(self, job: Job, round: int, metrics: dict[str, float]) -> None:
        """End it."""
        if round == 2 and self.has_power:
            self.has_power = False
            raise RunError("the power is cut")


@pytest.mark.threat(
    "a fault",
    "the server ends in an evaluation, and other clients are there when it begins again",
    now="the models that were evaluated are evaluated again",
    before="the clients refused all evaluations, so the experiment could not go on",
)
def test_the_server_ends_in_an_evaluation(federation: Federation) -> None:
    config = small("fedavg", eval={"every": 1}, deploy={"wait_seconds": 0.5})
    federation.meddle = leaving(federation, 102, after=1)
    with pytest.raises(RunError, match="power"):
        federation.host(config, observer=PowerCut())
    federation.away.clear()
    result = federation.replayed(config)
    assert result.fates_of(2) == ["accepted", "unavailable", "accepted"]
    records_are_equal(result, result.played_again())
