"""A server whose clients are away: it pauses, hands out models when they come back, and ends in bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.federating import members
from deploy.tampering import (
    Ask,
    Meddle,
    Tampered,
    became,
    honest,
    is_replayed,
    is_training,
    packed,
    place_of,
    small,
    trace_of,
)
from tailorfl.deploy.client_session import ClientSession
from tailorfl.deploy.codec import Packet
from tailorfl.deploy.membership import take_off
from tailorfl.deploy.serving import host_experiment
from tailorfl.errors import ConfigError, RunError
from tailorfl.report.result import ExperimentResult
from tailorfl.settings.experiment import ExperimentConfig


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look more often, and wait less long for those that do not come back."""
    for module in ("remote_rounds", "serving"):
        monkeypatch.setattr(f"tailorfl.deploy.{module}.LOOK", 0.02)
    monkeypatch.setattr("tailorfl.deploy.serving.RETURN_SECONDS", 0.1)


class Field(Tampered):
    """Three clients, of which those in `away` cannot be reached; `said` is what the server has said."""

    def __init__(self, folder: Path, meddle: Meddle = honest, clients: int = 3) -> None:
        self.people: dict[int, ClientSession] = members(folder, clients)
        super().__init__(self.people, meddle)
        self.folder, self.away, self.said = folder, set[int](), list[str]()
        self.on: dict[str, Callable[[], Any]] = {}

    def nodes(self) -> dict[int, str]:
        """Return the nodes that can be reached."""
        return {node: name for node, name in super().nodes().items() if node not in self.away}

    def told(self, sentence: str) -> None:
        """Note what the server says, and do what is to be done when it says that."""
        self.said.append(sentence)
        for words in [words for words in self.on if words in sentence]:
            self.on.pop(words)()

    def host(self, config: ExperimentConfig) -> ExperimentResult:
        """Run the server."""
        return host_experiment(self, config, self.folder / "out", notify=self.told)

    def asked(self, kind: str) -> list[int]:
        """Return the nodes that were asked a kind of question, in order."""
        return [node for node, question, _ in self.passed if Packet.decoded(question).kind == kind]

    def model(self, config: ExperimentConfig, client: int) -> Path:
        """Return where a client's model lies."""
        return place_of(config, self.folder, client) / "model"


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    there = Field(tmp_path)
    yield there
    there.close()


def leaving(field: Field, *nodes: int, after: int) -> Meddle:
    """Return a change of nothing, but nodes are away once they have answered in round `after`."""

    def meddle(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        if node in nodes and is_training(asked, after):
            field.away.add(node)
        return answer

    return meddle


# -- the last message ---------------------------------------------------------------------------------------


@pytest.mark.threat(
    "a fault",
    "a client is away at the end",
    now="it gets its model when it comes back",
    before="it never got its model",
)
def test_a_client_that_is_away_at_the_end_gets_its_model_when_it_comes_back(field: Field) -> None:
    config = small(deploy={"wait_seconds": 20.0})
    field.meddle = leaving(field, 101, after=3)
    field.on["waiting for '1' to fetch the last model"] = field.away.clear
    result = field.host(config)
    assert all(field.model(config, client).is_dir() for client in range(3))
    assert became(result, 3, 1).fate == "accepted"
    assert field.people[101].ended
    assert not field.people[101].turned_away


def test_a_finished_federation_hands_out_what_is_missing_and_nothing_else(field: Field) -> None:
    config = small(deploy={"wait_seconds": 0.2})
    field.meddle = leaving(field, 101, after=3)
    field.host(config)
    assert field.said[-1].startswith("'1' did not come for the last model")
    assert not field.model(config, 1).exists()
    first = len(field.passed)
    field.away.clear()
    field.host(config)
    assert field.model(config, 1).is_dir()
    again = [(node, Packet.decoded(question).kind) for node, question, _ in field.passed[first:]]
    assert [node for node, kind in again if kind == "finish"] == [101]
    assert "train" not in {kind for _, kind in again}
    last = len(field.passed)
    field.host(config)  # everybody has all: it ends at once
    assert "finish" not in {Packet.decoded(question).kind for _, question, _ in field.passed[last:]}


def test_the_model_that_is_fetched_late_is_that_of_a_client_that_was_there(
    field: Field, tmp_path: Path
) -> None:
    config = small(deploy={"wait_seconds": 0.2})
    there = Field(tmp_path / "there")
    try:
        there.host(config)
    finally:
        there.close()
    field.meddle = leaving(field, 101, after=3)
    field.host(config)
    field.away.clear()
    field.host(config)
    late, usual = field.model(config, 1), there.model(config, 1)
    weights = sorted(path.name for path in usual.iterdir() if path.suffix == ".safetensors")
    assert weights
    for name in weights:
        assert (late / name).read_bytes() == (usual / name).read_bytes()


def test_who_cannot_take_its_model_ends_with_the_reason(
    field: Field, caplog: pytest.LogCaptureFixture
) -> None:
    def meddle(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        if node == 101 and asked.kind == "finish":
            return packed(Packet("failure", {"reason": "the disk is full", "code": "failed"}))
        return ask(body)

    field.meddle = meddle
    field.host(small())
    assert field.people[101].turned_away == "it has no model of ditto, seed 5: the disk is full"
    assert "'1' has no model of ditto, seed 5 yet: the disk is full" in caplog.text
    assert field.people[100].ended
    assert not field.people[100].turned_away


@pytest.mark.threat(
    "a fault", "a client never answers the last message", now="the server ends all the same, in bounded time"
)
def test_the_end_does_not_wait_for_whoever_says_nothing(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailorfl.deploy.serving.GOODBYE_SECONDS", 0.2)
    asleep: list[float] = []

    def meddle(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        if asked.kind == "goodbye" and node == 101:
            asleep.append(time.monotonic())
            time.sleep(3.0)
        return ask(body)

    field.meddle = meddle
    field.host(small(rounds=1))
    assert time.monotonic() - asleep[0] < 2.0


# -- rounds -------------------------------------------------------------------------------------------------


@pytest.mark.threat(
    "a fault", "nobody is there", now="no round passes", before="rounds passed without anybody"
)
def test_no_round_passes_where_nobody_is_there(field: Field) -> None:
    config = small(rounds=4, deploy={"wait_seconds": 0.3})
    field.meddle = leaving(field, 100, 101, 102, after=2)
    with pytest.raises(RunError, match=r"round 3 needs 2 answers and has 0.*'0' \(not connected\)"):
        field.host(config)
    assert (
        "round 3 is paused: 2 answers are needed, so it waits for '0', '1', '2', for 0 s at most"
        in field.said
    )
    field.away.clear()
    result = field.host(config)
    assert [one.round for one in trace_of(result)] == [1, 2, 3, 4]
    assert {a.fate for one in trace_of(result) for a in one.answers} == {"accepted"}
    is_replayed(config, field.folder, result)


@pytest.mark.threat(
    "a fault",
    "fewer than a majority answer",
    now="the round pauses, and goes on when they are back",
    before="the round passed with whoever had answered",
)
def test_a_round_goes_on_when_enough_are_back(field: Field) -> None:
    config = small(rounds=4, deploy={"wait_seconds": 20.0})
    field.meddle = leaving(field, 101, 102, after=2)
    field.on["round 3 is paused"] = lambda: field.away.discard(101)
    field.on["waiting for '2' to fetch"] = field.away.clear
    result = field.host(config)
    assert "round 3 goes on" in field.said
    assert [became(result, round, 1).fate for round in range(1, 5)] == ["accepted"] * 4
    assert [became(result, round, 2).fate for round in range(1, 5)] == ["accepted"] * 2 + ["unavailable"] * 2
    is_replayed(config, field.folder, result)


def test_a_client_that_answered_before_the_pause_is_not_asked_twice(field: Field) -> None:
    config = small(rounds=2, deploy={"wait_seconds": 20.0})
    field.meddle = leaving(field, 101, 102, after=1)
    field.on["round 2 is paused"] = field.away.clear
    result = field.host(config)
    assert field.asked("train").count(100) == 2
    is_replayed(config, field.folder, result)


def test_min_replies_says_how_many_are_enough(field: Field) -> None:
    config = small(rounds=3, deploy={"min_replies": 1, "wait_seconds": 0.2})
    field.meddle = leaving(field, 101, 102, after=1)
    result = field.host(config)
    assert [became(result, round, 0).fate for round in (1, 2, 3)] == ["accepted"] * 3
    assert became(result, 3, 1).fate == "unavailable"
    is_replayed(config, field.folder, result)


def test_min_replies_may_change_when_the_server_is_started_again(field: Field) -> None:
    """As every setting of `deploy`: it decides whether a round passes, which the trace tells, and no number."""
    config = small(rounds=3, deploy={"wait_seconds": 0.2})
    field.meddle = leaving(field, 101, 102, after=1)
    with pytest.raises(RunError):
        field.host(config)
    fewer = config.model_copy(update={"deploy": config.deploy.model_copy(update={"min_replies": 1})})
    result = field.host(fewer)
    assert [became(result, round, 0).fate for round in (1, 2, 3)] == ["accepted"] * 3
    is_replayed(config, field.folder, result)


def test_a_server_that_begins_again_does_not_need_everybody(field: Field) -> None:
    config = small(rounds=4, deploy={"wait_seconds": 0.3})
    field.meddle = leaving(field, 100, 101, 102, after=2)
    with pytest.raises(RunError):
        field.host(config)
    field.away = {102}
    result = field.host(config)
    assert len(trace_of(result)) == 4
    assert became(result, 4, 2).fate == "unavailable"
    is_replayed(config, field.folder, result)


# -- leaving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fraction": 0.67}])
def test_a_client_leaves_for_good(field: Field, options: dict[str, Any]) -> None:
    """It says so in place of an answer; nobody waits for it any more, and the run is played again to the bit."""
    config = small(rounds=6, deploy={"wait_seconds": 0.5}, **options)

    def meddle(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        field.people[101].leaves = asked.kind == "train" and asked.facts["round"] >= 2
        return ask(body)

    field.meddle = meddle
    result = field.host(config)
    trace = list(trace_of(result))
    left = next(one.round for one in trace for a in one.answers if a.fate == "refused")
    assert all(1 not in one.asked for one in trace if one.round > left)
    assert all(one.sampled for one in trace)
    assert "1 left for good" in field.said
    assert field.people[101].ended
    assert field.asked("finish") == [100, 102]
    is_replayed(config, field.folder, result)
    first = len(field.passed)
    field.host(config)
    assert 101 not in {node for node, q, _ in field.passed[first:] if Packet.decoded(q).kind == "finish"}


def test_the_operator_takes_a_client_off_while_the_server_waits_for_it(field: Field) -> None:
    config = small(rounds=4, deploy={"wait_seconds": 20.0})
    out = field.folder / "out"
    with pytest.raises(ConfigError, match="'1'"):
        take_off(out, "1")  # there is no federation yet
    field.meddle = leaving(field, 101, 102, after=2)
    field.on["round 3 is paused"] = lambda: [take_off(out, name) for name in ("1", "2")]
    result = field.host(config)
    with pytest.raises(ConfigError, match="'7'"):
        take_off(out, "7")
    assert "1, 2 left for good" in field.said
    assert [one.asked for one in trace_of(result)] == [(0, 1, 2)] * 3 + [(0,)]
    is_replayed(config, field.folder, result)
