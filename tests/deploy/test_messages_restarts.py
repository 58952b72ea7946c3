"""Clients and servers that begin again, the same question again, and what the ledger of a client knows of it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.federation import (
    PRIVATE,
    Ask,
    Federation,
    LostError,
    are_equal,
    became,
    fates,
    is_replayed,
    is_training,
    place_of,
    server_state,
    simulated,
    small,
    trace_of,
)
from tailorfl.deploy.client_state import ClientState
from tailorfl.deploy.codec import Packet
from tailorfl.deploy.release_log import verified
from tailorfl.deploy.transport import Letter
from tailorfl.report.result import ExperimentResult


def with_restart(federation: Federation, *, deleted: bool, running: bool, **deploy: Any) -> ExperimentResult:
    """Run four rounds whose client 1 is restarted after the second, with or without its folder."""
    done: list[int] = []

    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        if node == 101 and is_training(question, 3) and not done:
            done.append(node)
            if deleted:
                shutil.rmtree(federation.folder / "state-1")
            if not running:
                federation.restart(node)
        return ask(body)

    federation.meddle = meddle
    return federation.host(small(rounds=4, deploy=deploy))


def test_a_client_is_restarted(federation: Federation) -> None:
    """The server tells it of the job again, and the round is as if nothing had been."""
    result = with_restart(federation, deleted=False, running=False)
    assert fates(result) == {"accepted"}
    is_replayed(result, federation.folder)


@pytest.mark.threat(
    "a fault", "a client's folder is gone", now="left out by name, or begins anew where the server says so"
)
@pytest.mark.parametrize("running", [False, True])
def test_a_client_whose_folder_is_gone_is_left_out(federation: Federation, running: bool) -> None:
    result = with_restart(federation, deleted=True, running=running)
    for round in (3, 4):
        assert became(result, round, 1).fate == "refused"
        assert "private state of round 2" in became(result, round, 1).reason
    are_equal(simulated(result.config, trace=trace_of(result)), server_state(result), [])


@pytest.mark.parametrize("running", [False, True])
def test_a_client_whose_folder_is_gone_begins_anew(federation: Federation, running: bool) -> None:
    """As in a simulation in which its state is forgotten at that moment."""
    result = with_restart(federation, deleted=True, running=running, lost_state="restart")
    trace = trace_of(result)
    assert fates(result) == {"accepted"}
    sim = simulated(result.config, 2, trace)
    sim.groups[0].states.forget((1,))
    for round in (3, 4):
        sim.step(trace=trace.of(round))
    places = [place_of(result.config, federation.folder, client) for client in range(3)]
    are_equal(sim, server_state(result), places, trace)


class Broken(Exception):
    """The server's machine is gone."""


class Breaking(Federation):
    """Breaks once in round 3, before clients are asked or when all have answered."""

    when = ""

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Send letters, or break."""
        training = [letter for letter in letters if is_training(Packet.decoded(letter.body), 3)]
        when, self.when = self.when, "" if training else self.when
        if training and when:
            for letter in training if when == "when all have answered" else ():
                self._asked(letter)
            raise Broken
        return super().send(letters, seconds)


@pytest.mark.parametrize("when", ["before they are asked", "when all have answered"])
def test_the_server_begins_again(tmp_path: Path, when: str) -> None:
    """It ends in round 3 of 4; the same call goes on, with clients that have (or have not) trained in that round."""
    config, federation = small("apfl", rounds=4, checkpoint_every=1), Breaking(tmp_path)
    federation.when = when
    try:
        with pytest.raises(Broken):
            federation.host(config)
        result = federation.host(config)
    finally:
        federation.close()
    assert [one.round for one in trace_of(result)] == [1, 2, 3, 4]
    assert fates(result) == {"accepted"}
    is_replayed(result, tmp_path)


# -- the ledger ---------------------------------------------------------------------------------------------


def used(folder: Path, client: int) -> list[tuple[int, list[Any]]]:
    """Rounds and what private training used in them, as the client's log has it; what left again is not in it."""
    entries = verified(folder / f"state-{client}")
    return [(e["number"], e["uses"]) for e in entries if e["kind"] == "train" and e["uses"]]


@pytest.mark.slow
def test_a_question_again(federation: Federation) -> None:
    """The very same question gets the very same answer; an older one is refused; a new one of that round is new."""
    result = federation.host(small("apfl", train=PRIVATE))
    booked = used(federation.folder, 1)
    *older, (_, question, answer) = federation.of_kind("train", 101)
    assert len(older) + 1 == len(booked) == 3
    assert federation.people[101].answer(question) == answer
    for _, old, _ in older:
        refused = Packet.decoded(federation.people[101].answer(old))
        assert refused.kind == "failure"
        assert "an old one" in refused.facts["reason"]
    federation.restart(101)
    assert federation.people[101].answer(federation.of_kind("setup", 101)[0][1])
    assert federation.people[101].answer(question) == answer
    assert used(federation.folder, 1) == booked
    is_replayed(result, federation.folder)


@pytest.mark.slow
def test_what_was_not_accepted_is_in_the_ledger(federation: Federation) -> None:
    """Noise was used for an answer that got lost: the client's own ledger knows, whatever the server counts."""

    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        if node == 101 and is_training(question, 1):
            raise LostError
        return answer

    federation.meddle = meddle
    result = federation.host(small(train=PRIVATE, rounds=2))
    assert became(result, 1, 1).fate == "lost"
    (first, uses), (second, later) = used(federation.folder, 1)
    assert (first, second) == (1, 2)
    assert uses == later != []
    is_replayed(result, federation.folder)


def test_a_crash_before_the_answer_leaves_is_in_the_ledger(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer lies on the disk and goes out when the client is back: what it used must have been written down."""
    keep = ClientState.keep

    def crash(self: ClientState, *given: Any) -> None:
        keep(self, *given)
        raise LostError

    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        if node == 101 and is_training(question, 1):
            with monkeypatch.context() as patch:
                patch.setattr(ClientState, "keep", crash)
                assert Packet.decoded(ask(body)).kind == "failure"
        return ask(body)

    federation.meddle = meddle
    assert became(federation.host(small(train=PRIVATE, rounds=1)), 1, 1).fate == "accepted"
    ((round, uses),) = used(federation.folder, 1)
    assert round == 1
    assert uses
