"""Answers that are late, lost, doubled, of somebody else, or of a node that has another number now."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.federating import members
from deploy.tampering import (
    Ask,
    LostError,
    Tampered,
    became,
    hosted_once,
    is_replayed,
    is_training,
    run_tampered,
    small,
    trace_of,
)
from tailorfl.deploy.client_session import ClientSession
from tailorfl.deploy.codec import Packet
from tailorfl.deploy.transport import Arrival, Letter


def test_lost(tmp_path: Path) -> None:
    """The client has trained and its answer is lost: it goes on from the round before, as if it had not."""

    def meddle(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        if node == 101 and is_training(asked, 2):
            raise LostError
        return answer

    config = small()
    result, _ = run_tampered(config, tmp_path, meddle)
    assert became(result, 2, 1).fate == "lost"
    assert became(result, 2, 1).reason == "LostError"
    is_replayed(config, tmp_path, result)


class Slow(Tampered):
    """Keeps the answers of one node in a round until `until` says so."""

    def __init__(self, nodes: dict[int, ClientSession], node: int, round: int) -> None:
        super().__init__(nodes, self._noting)
        self.node, self.round = node, round
        self.until = threading.Event()
        self.held: set[str] = set()
        self.seen: list[int] = []

    def _noting(self, node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        if asked.kind == "train":
            self.seen.append(asked.facts["round"])
        return ask(body)

    def send(self, letters: Any, seconds: float) -> list[str]:
        """Send letters; note that of the slow node."""
        tickets = super().send(letters, seconds)
        for letter, ticket in zip(letters, tickets, strict=True):
            if letter.node == self.node and is_training(Packet.decoded(letter.body), self.round):
                self.held.add(ticket)
        return tickets

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Bring what is there, but not what is held."""
        if self.round + 1 in self.seen:
            self.until.set()
        return super().receive([t for t in tickets if self.until.is_set() or t not in self.held])


def test_late(tmp_path: Path) -> None:  # takes as long as a round may, 3 s
    """An answer that comes a round later counts for neither; the client is asked again only when it is done."""
    config = small(rounds=5, deploy={"round_seconds": 3.0, "wait_seconds": 20.0})
    there = members(tmp_path, 3)
    post = Slow(there, 101, 2)
    result = hosted_once(config, tmp_path, post)
    assert became(result, 2, 1).fate == "late"
    assert became(result, 2, 1).reason.startswith("no answer in 3 s")
    assert became(result, 3, 1).fate == "unavailable"
    assert became(result, 3, 1).reason == "still at an earlier question"
    assert became(result, 4, 1).fate == "accepted"
    is_replayed(config, tmp_path, result)


def test_a_letter_that_is_given_up_when_its_time_ends_is_late(tmp_path: Path) -> None:
    """As Flower says of a message that a node has not fetched; the client is asked again when it says who it is."""

    class Expiring(Slow):
        """Gives what is held up just when nobody waits any more."""

        sent = math.inf

        def receive(self, tickets: Sequence[str]) -> list[Arrival]:
            if time.monotonic() - self.sent < 1.5 or self.until.is_set():
                return super().receive(tickets)
            return super().receive(tickets) + [
                Arrival(t, None, "given up") for t in tickets if t in self.held
            ]

        def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
            self.sent = time.monotonic()
            return super().send(letters, seconds)

    config = small(rounds=5, deploy={"round_seconds": 1.5, "wait_seconds": 20.0})
    post = Expiring(members(tmp_path, 3), 101, 2)
    result = hosted_once(config, tmp_path, post)
    assert became(result, 2, 1).fate == "late"
    assert became(result, 2, 1).reason.startswith("no answer in 2 s")
    assert became(result, 4, 1).fate == "accepted"
    is_replayed(config, tmp_path, result)


class Doubling(Tampered):
    """Brings every answer twice, in the reverse order, and answers to questions that nobody has asked."""

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Bring it all."""
        found = super().receive(tickets)[::-1]
        return [*found, *found, Arrival("nobody's", b"")]


def test_doubled_and_in_another_order(tmp_path: Path) -> None:
    config = small()
    post = Doubling(members(tmp_path, 3))
    result = hosted_once(config, tmp_path, post)
    assert {a.fate for one in trace_of(result) for a in one.answers} == {"accepted"}
    is_replayed(config, tmp_path, result)


def test_answers_of_two_clients_change_places(tmp_path: Path) -> None:
    class Swapping(Tampered):
        """Gives 100 the answer of 101 and the other way round."""

        def receive(self, tickets: Sequence[str]) -> list[Arrival]:
            found = super().receive(tickets)
            if len(found) == 3 and any(is_training(Packet.decoded(a.body or b""), 2) for a in found):
                first, second, third = found
                return [Arrival(first.ticket, second.body), Arrival(second.ticket, first.body), third]
            return found

    class Together(Swapping):
        """Brings answers when all are there."""

        def receive(self, tickets: Sequence[str]) -> list[Arrival]:
            waits = any(t in self._pending and not self._pending[t].done() for t in tickets)
            return [] if waits else super().receive(tickets)

    config = small(deploy={"min_replies": 1})
    post = Together(members(tmp_path, 3))
    result = hosted_once(config, tmp_path, post)
    fates = [became(result, 2, client) for client in range(3)]
    assert [a.fate for a in fates] == ["refused", "refused", "accepted"]
    assert all("or of an earlier question" in a.reason for a in fates[:2])
    is_replayed(config, tmp_path, result)


def test_a_node_changes_its_number(tmp_path: Path) -> None:
    there = members(tmp_path, 3)

    def meddle(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        if node == 102 and is_training(asked, 1):
            post.members[777] = post.members[102]
            moved.append(node)
        return answer

    moved: list[int] = []

    class Moving(Tampered):
        def nodes(self) -> dict[int, str]:
            if moved:
                self.members.pop(102, None)
            return super().nodes()

    post = Moving(there, meddle)
    config = small()
    result = hosted_once(config, tmp_path, post)
    assert {node for node, asked, _ in post.passed if is_training(Packet.decoded(asked), 2)} == {
        100,
        101,
        777,
    }
    assert {a.fate for one in trace_of(result) for a in one.answers} == {"accepted"}
    is_replayed(config, tmp_path, result)
