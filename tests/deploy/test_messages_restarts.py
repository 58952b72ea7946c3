"""Clients and servers that begin again, the same question again, and what the ledger of a client knows of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.federating import members, server_state, simulated
from deploy.federating import same as same_tensors
from deploy.tampering import (
    Ask,
    LostError,
    Tampered,
    are_states,
    became,
    hosted,
    is_replayed,
    is_training,
    run_tampered,
    small,
    trace_of,
)
from tailorfl.deploy.client_session import ClientSession, member_of
from tailorfl.deploy.client_state import ClientState
from tailorfl.deploy.codec import Packet
from tailorfl.deploy.release_log import verified
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.training import tree

PRIVATE = {"epochs": 1, "batch_size": 16, "lr": 0.1, "dp": {"clip": 1.0, "noise": 1.0}}


def restarting(post: Tampered, folder: Path, there: dict[int, ClientSession], node: int) -> None:
    """Put a new process in the place of a member: nothing of the old one is left but its folder."""
    there[node].close()
    number = node - 100
    there[node] = member_of(state=folder / f"state-{number}", name=str(number))
    post.members[node] = there[node].answer


def with_restart(config: ExperimentConfig, folder: Path, *, deleted: bool, running: bool = False) -> Any:
    """Run an experiment whose client 1 is restarted after round 2, with or without its folder."""
    there = members(folder, 3)
    done: list[int] = []

    def meddle(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        if node == 101 and is_training(asked, 3) and not done:
            done.append(node)
            if deleted:
                shutil.rmtree(folder / "state-1")
            if not running:
                restarting(post, folder, there, node)
        return ask(body)

    post = Tampered(there, meddle)
    try:
        return hosted(config, folder, post)
    finally:
        post.close()


def test_a_client_is_restarted(tmp_path: Path) -> None:
    """The server tells it of the job again, and the round is as if nothing had been."""
    config = small(rounds=4)
    result = with_restart(config, tmp_path, deleted=False)
    assert {a.fate for one in trace_of(result) for a in one.answers} == {"accepted"}
    is_replayed(config, tmp_path, result)


@pytest.mark.threat(
    "a fault", "a client's folder is gone", now="left out by name, or begins anew where the server says so"
)
@pytest.mark.parametrize("running", [False, True])
def test_a_client_whose_folder_is_gone_is_left_out(tmp_path: Path, running: bool) -> None:
    config = small(rounds=4)
    result = with_restart(config, tmp_path, deleted=True, running=running)
    for round in (3, 4):
        assert became(result, round, 1).fate == "refused"
        assert "the private state of round 2 is not on this client's disk" in became(result, round, 1).reason
    sim = simulated(config, trace=trace_of(result))
    same_tensors(server_state(result), dict(tree.leaves(sim.server)))


@pytest.mark.parametrize("running", [False, True])
def test_a_client_whose_folder_is_gone_begins_anew(tmp_path: Path, running: bool) -> None:
    """As in a simulation in which its state is forgotten at that moment."""
    config = small(rounds=4, deploy={"round_seconds": 60.0, "wait_seconds": 20.0, "lost_state": "restart"})
    result = with_restart(config, tmp_path, deleted=True, running=running)
    trace = trace_of(result)
    assert {a.fate for one in trace for a in one.answers} == {"accepted"}
    sim = simulated(config, 2, trace)
    sim.groups[0].states.forget((1,))
    for round in (3, 4):
        sim.step(trace=trace.of(round))
    same_tensors(server_state(result), dict(tree.leaves(sim.server)))
    are_states(config, tmp_path, sim, trace)


def used(folder: Path, client: int) -> list[tuple[int, list[Any]]]:
    """Rounds and what private training used in them, as the client's log has it; what left again is not in it."""
    entries = verified(folder / f"state-{client}")
    return [(e["number"], e["uses"]) for e in entries if e["kind"] == "train" and e["uses"]]


class Broken(Exception):
    """The server's machine is gone."""


@pytest.mark.parametrize("when", ["before they are asked", "when all have answered"])
def test_the_server_begins_again(tmp_path: Path, when: str) -> None:
    """It ends in round 3 of 4; the same call goes on, with clients that have (or have not) trained in that round."""
    config = small("apfl", rounds=4, checkpoint_every=1)
    there = members(tmp_path, 3)

    class Breaking(Tampered):
        """Breaks in round 3."""

        broken = False

        def send(self, letters: Any, seconds: float) -> list[str]:
            training = [x for x in letters if is_training(Packet.decoded(x.body), 3)]
            if training and not self.broken:
                Breaking.broken = True
                if when == "when all have answered":
                    for letter in training:
                        self._asked(letter)
                raise Broken
            return super().send(letters, seconds)

    post = Breaking(there)
    try:
        with pytest.raises(Broken):
            hosted(config, tmp_path, post)
        result = hosted(config, tmp_path, post)
    finally:
        post.close()
    trace = trace_of(result)
    assert [one.round for one in trace] == [1, 2, 3, 4]
    assert {a.fate for one in trace for a in one.answers} == {"accepted"}
    is_replayed(config, tmp_path, result)


def test_a_question_again(tmp_path: Path) -> None:
    """The very same question gets the very same answer; an older one is refused; a new one of that round is new."""
    config = small("apfl", train=PRIVATE)
    there = members(tmp_path, 3)
    post = Tampered(there)
    try:
        result = hosted(config, tmp_path, post)
    finally:
        post.close()
    booked = used(tmp_path, 1)
    mine = [(q, a) for node, q, a in post.passed if node == 101 and Packet.decoded(q).kind == "train"]
    assert len(mine) == len(booked) == 3
    assert there[101].answer(mine[-1][0]) == mine[-1][1]
    for question, _ in mine[:-1]:
        refused = Packet.decoded(there[101].answer(question))
        assert refused.kind == "failure"
        assert "the message is an old one, or the server has gone back" in refused.facts["reason"]
    restarting(post, tmp_path, there, 101)
    setup = next(q for node, q, _ in post.passed if node == 101 and Packet.decoded(q).kind == "setup")
    assert there[101].answer(setup)
    assert there[101].answer(mine[-1][0]) == mine[-1][1]
    assert used(tmp_path, 1) == booked
    is_replayed(config, tmp_path, result)


def test_what_was_not_accepted_is_in_the_ledger(tmp_path: Path) -> None:
    """Noise was used for an answer that got lost: the client's own ledger knows, whatever the server counts."""
    config = small("ditto", train=PRIVATE, rounds=2)

    def meddle(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        if node == 101 and is_training(asked, 1):
            raise LostError
        return answer

    result, _ = run_tampered(config, tmp_path, meddle)
    assert became(result, 1, 1).fate == "lost"
    (first, uses), (second, other) = used(tmp_path, 1)
    assert (first, second) == (1, 2)
    assert uses == other != []
    is_replayed(config, tmp_path, result)


def test_a_crash_before_the_answer_leaves_is_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer lies on the disk and goes out when the client is back: what it used must have been written down."""
    config = small("ditto", train=PRIVATE, rounds=1)
    keep = ClientState.keep

    def crashing(self: ClientState, *given: Any) -> None:
        keep(self, *given)
        raise LostError

    there = members(tmp_path, 3)
    questions: list[bytes] = []

    def meddle(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        if node == 101 and is_training(asked, 1):
            questions.append(body)
            with monkeypatch.context() as patch:
                patch.setattr(ClientState, "keep", crashing)
                assert Packet.decoded(ask(body)).kind == "failure"
        return ask(body)

    post = Tampered(there, meddle)
    try:
        result = hosted(config, tmp_path, post)
    finally:
        post.close()
    assert became(result, 1, 1).fate == "accepted"
    ((round, uses),) = used(tmp_path, 1)
    assert round == 1
    assert uses
