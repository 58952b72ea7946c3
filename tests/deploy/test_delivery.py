"""Answers that are late, lost, doubled or swapped; clients and servers that begin again; and the ledger of it all."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.federation import (
    PRIVATE,
    TRAIN,
    Ask,
    Deployed,
    Federation,
    LostError,
    are_equal,
    deployed,
    is_training,
    lose,
    lying,
    once_before,
    packed,
    place_of,
    same,
    simulated,
    small,
)
from tailorfl.deploy.client_state import ClientState
from tailorfl.deploy.local_run import LocalRun
from tailorfl.deploy.messages import Arrival, Letter, Packet, RefusalError
from tailorfl.deploy.release_log import verified
from tailorfl.errors import DivergenceError
from tailorfl.settings.system import SystemConfig
from tailorfl.training import tree


def is_for(letter: Letter, round: int) -> bool:
    """Whether a letter is the question of a round."""
    return is_training(Packet.decoded(letter.body), round)


# -- delivery -----------------------------------------------------------------------------------------------


def test_lost(federation: Federation) -> None:
    """The client has trained and its answer is lost: it goes on from the round before, as if it had not."""
    federation.meddle = lying(lose, round=2)
    outcome = federation.replayed(small()).became(2, 1)
    assert (outcome.fate, outcome.reason) == ("lost", "LostError")


class Slow(Federation):
    """Keeps the answers of client 1 in round 2 until round 3 is trained, or until the end where nobody is."""

    seconds = 2.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, meddle=self._note)
        self.until, self.held, self.sent = threading.Event(), set[str](), math.inf

    def _note(self, node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        if is_training(question, 3):
            self.until.set()
        return ask(body)

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Send letters; note when, and that of the slow node."""
        self.sent = time.monotonic()
        tickets = super().send(letters, seconds)
        sent = zip(letters, tickets, strict=True)
        self.held |= {ticket for letter, ticket in sent if letter.node == 101 and is_for(letter, 2)}
        return tickets

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Bring what is there, but not what is held."""
        return super().receive([t for t in tickets if self.until.is_set() or t not in self.held])


class Expiring(Slow):
    """Gives what is held up just when nobody waits any more, as Flower does with a message that is not fetched."""

    seconds = 1.5

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Bring what is there, and say what is given up."""
        arrivals = super().receive(tickets)
        if time.monotonic() - self.sent >= self.seconds and not self.until.is_set():
            arrivals += [Arrival(t, None, "given up") for t in tickets if t in self.held]
        return arrivals


@pytest.mark.slow
@pytest.mark.parametrize("post", [Slow, Expiring])
def test_late(post: type[Slow], tmp_path: Path) -> None:
    """An answer that comes a round later counts for neither; the client is asked again only when it is done."""
    with post(tmp_path) as federation:
        result = federation.replayed(small(rounds=5, deploy={"round_seconds": post.seconds}))
    outcomes = [result.became(round, 1) for round in (2, 3, 4)]
    assert [outcome.fate for outcome in outcomes[::2]] == ["late", "accepted"]
    if post is Slow:
        assert (outcomes[1].fate, outcomes[1].reason) == (
            "unavailable",
            "still answering an earlier question",
        )


class Doubling(Federation):
    """Brings every answer twice, in the reverse order, and answers to questions that nobody has asked."""

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Bring it all."""
        arrivals = super().receive(tickets)[::-1]
        return [*arrivals, *arrivals, Arrival("nobody's", b"")]


def test_doubled_and_in_another_order(tmp_path: Path) -> None:
    with Doubling(tmp_path) as federation:
        assert federation.replayed(small()).fates == {"accepted"}


class Swapping(Federation):
    """Brings answers when all are there, and in round 2 gives 100 the answer of 101 and the other way round."""

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Bring them."""
        if any(t in self._pending and not self._pending[t].done() for t in tickets):
            return []
        arrivals = super().receive(tickets)
        if len(arrivals) == 3 and any(is_training(Packet.decoded(a.body or b""), 2) for a in arrivals):
            first, second, third = arrivals
            return [Arrival(first.ticket, second.body), Arrival(second.ticket, first.body), third]
        return arrivals


def test_answers_of_two_clients_change_places(tmp_path: Path) -> None:
    with Swapping(tmp_path) as federation:
        result = federation.replayed(small(deploy={"min_replies": 1}))
    assert [result.became(2, client).fate for client in range(3)] == ["refused", "refused", "accepted"]


def test_a_node_changes_its_number(federation: Federation) -> None:
    def move(question: Packet, answer: bytes) -> bytes:
        federation.members[777] = federation.members[102]
        federation.away.add(102)
        return answer

    federation.meddle = lying(move, round=1, node=102)
    assert federation.replayed(small()).fates == {"accepted"}
    asked = {node for node, question, _ in federation.passed if is_training(Packet.decoded(question), 2)}
    assert asked == {100, 101, 777}


# -- restarts -----------------------------------------------------------------------------------------------


def with_restart(federation: Federation, *, deleted: bool, running: bool, **deploy: Any) -> Deployed:
    """Run four rounds whose client 1 is restarted after the second, with or without its folder."""

    def restart(question: Packet, body: bytes, ask: Ask) -> None:
        if deleted:
            shutil.rmtree(federation.folder / "state-1")
        if not running:
            federation.restart(101)

    federation.meddle = once_before(3, restart)
    return federation.host(small(rounds=4, deploy=deploy))


def test_a_client_is_restarted(federation: Federation) -> None:
    """The server tells it of the job again, and the round is as if nothing had been."""
    result = with_restart(federation, deleted=False, running=False)
    assert result.fates == {"accepted"}
    result.is_replayed()


@pytest.mark.threat(
    "a fault", "a client's folder is gone", now="left out by name, or begins anew where the server says so"
)
@pytest.mark.parametrize("running", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_client_whose_folder_is_gone_is_left_out(federation: Federation, running: bool) -> None:
    result = with_restart(federation, deleted=True, running=running)
    assert result.fates_of(1) == ["accepted", "accepted", "refused", "refused"]
    assert "private state of round 2" in result.became(3, 1).reason
    are_equal(simulated(result.config, trace=result.trace), result.server_state, [])


@pytest.mark.parametrize("running", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_client_whose_folder_is_gone_begins_anew(federation: Federation, running: bool) -> None:
    """As in a simulation in which its state is forgotten at that moment."""
    result = with_restart(federation, deleted=True, running=running, lost_state="restart")
    trace = result.trace
    assert result.fates == {"accepted"}
    sim = simulated(result.config, 2, trace)
    sim.groups[0].states.forget((1,))
    for round in (3, 4):
        sim.step(trace=trace.of(round))
    places = [place_of(result.config, federation.folder, client) for client in range(3)]
    are_equal(sim, result.server_state, places, trace)


class Breaking(Federation):
    """Breaks once in round 3, before clients are asked or when all have answered."""

    when = ""

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Send letters, or break."""
        training = [letter for letter in letters if is_for(letter, 3)]
        when, self.when = self.when, "" if training else self.when
        if training and when:
            for letter in training if when == "when all have answered" else ():
                self._asked(letter)
            raise LostError
        return super().send(letters, seconds)


@pytest.mark.parametrize("when", ["before they are asked", "when all have answered"])
def test_the_server_begins_again(tmp_path: Path, when: str) -> None:
    """It ends in round 3 of 4; the same call goes on, with clients that have (or have not) trained in that round.

    It may go on with other settings of `deploy`.
    """
    config = small("apfl", rounds=4, checkpoint_every=1)
    with Breaking(tmp_path) as federation:
        federation.when = when
        with pytest.raises(LostError):
            federation.host(config)
        deploy = config.deploy.model_copy(update={"lost_state": "restart"})
        result = federation.replayed(config.model_copy(update={"deploy": deploy}))
    assert [one.round for one in result.trace] == [1, 2, 3, 4]
    assert result.fates == {"accepted"}


# -- the ledger ---------------------------------------------------------------------------------------------


def used(folder: Path, client: int) -> list[tuple[int, list[Any]]]:
    """Rounds and what private training used in them, as the client's log has it; what left again is not in it."""
    entries = verified(folder / f"state-{client}")
    return [(e["number"], e["uses"]) for e in entries if e["kind"] == "train" and e["uses"]]


def test_a_question_again(federation: Federation) -> None:
    """The very same question gets the very same answer; an older one is refused; a new one of that round is new."""
    federation.replayed(small("apfl", train=PRIVATE, rounds=2))
    booked = used(federation.folder, 1)
    *older, (_, question, answer) = federation.of_kind("train", 101)
    assert len(older) + 1 == len(booked) == 2
    assert federation.people[101].answer(question) == answer
    (kept,) = place_of(small("apfl"), federation.folder, 1).glob("*.packet")  # of all rounds the last
    assert kept.read_bytes() == answer
    for _, old, _ in older:
        refused = Packet.decoded(federation.people[101].answer(old))
        assert refused.kind == "failure"
        assert "the message is old" in refused.facts["reason"]
    federation.restart(101)
    assert federation.people[101].answer(federation.of_kind("setup", 101)[0][1])
    assert federation.people[101].answer(question) == answer
    assert used(federation.folder, 1) == booked


@pytest.mark.slow
def test_what_was_not_accepted_is_in_the_ledger(federation: Federation) -> None:
    """Noise was used for an answer that got lost: the client's own ledger knows, whatever the server counts."""
    federation.meddle = lying(lose, round=1)
    assert federation.replayed(small(train=PRIVATE, rounds=2)).fates_of(1) == ["lost", "accepted"]
    (first, uses), (second, later) = used(federation.folder, 1)
    assert (first, second) == (1, 2)
    assert uses == later != []


def test_training_that_diverged_is_in_the_ledger(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server learns from it; another question for this round is refused."""

    def diverge(*given: Any) -> None:
        raise RefusalError("its update is not finite", "not-finite")

    monkeypatch.setattr(LocalRun, "one_round", diverge)
    with pytest.raises(DivergenceError, match="all clients that answered diverged"):
        federation.host(small(train=PRIVATE, rounds=1))
    ((round, uses),) = used(federation.folder, 1)
    assert (round, bool(uses)) == (1, True)
    ((_, question, answer),) = federation.of_kind("train", 101)
    assert federation.people[101].answer(question) == answer
    packet = Packet.decoded(question)
    other = replace(packet, tensors={name: t + 1 for name, t in packet.tensors.items()}).encoded()
    refused = Packet.decoded(federation.people[101].answer(other))
    assert "different question" in refused.facts["reason"]
    assert used(federation.folder, 1) == [(round, uses)]


def test_an_update_that_is_not_finite_counts_as_zero_under_client_level_privacy(tmp_path: Path) -> None:
    """As in a simulation: without it the mean would be one of fewer clients, and show that it was left out."""
    train = {**TRAIN, "dp": {"level": "client", "clip": 1.0, "noise": 0.1}}
    config = small("fedavg", train=train, weights="uniform", rounds=2)
    words = Packet("failure", {"reason": "its update is not finite", "code": "not-finite"})
    result = deployed(config, tmp_path, 3, lying(lambda question, answer: packed(words)))
    assert result.fates_of(1) == ["refused", "refused"]
    hostile = SystemConfig.model_validate({"malicious": {"clients": [1], "kind": "nan"}})
    sim = simulated(config.model_copy(update={"system": hostile}))
    same(result.server_state, dict(tree.leaves(sim.server)))


def test_a_crash_before_the_answer_leaves(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer lies on the disk and goes out when the client is back: what it used must have been written down."""
    keep = ClientState.keep

    def keep_and_crash(self: ClientState, *given: Any) -> None:
        keep(self, *given)
        raise LostError

    def crash(question: Packet, body: bytes, ask: Ask) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ClientState, "keep", keep_and_crash)
            assert Packet.decoded(ask(body)).kind == "failure"

    federation.meddle = once_before(1, crash)
    assert federation.host(small(train=PRIVATE, rounds=1)).became(1, 1).fate == "accepted"
    ((round, uses),) = used(federation.folder, 1)
    assert round == 1
    assert uses
