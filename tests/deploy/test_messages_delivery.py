"""Answers that are late, lost, doubled, of somebody else, or of a node that has another number now."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.federation import Ask, Federation, LostError, became, fates, is_replayed, is_training, small
from tailorfl.deploy.codec import Packet
from tailorfl.deploy.transport import Arrival, Letter
from tailorfl.report.result import ExperimentResult


def run(federation: Federation, **changes: Any) -> ExperimentResult:
    """Run an experiment, and assert that it is as its trace says."""
    try:
        result = federation.host(small(**changes))
    finally:
        federation.close()
    is_replayed(result, federation.folder)
    return result


def test_lost(federation: Federation) -> None:
    """The client has trained and its answer is lost: it goes on from the round before, as if it had not."""

    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        if node == 101 and is_training(question, 2):
            raise LostError
        return answer

    federation.meddle = meddle
    outcome = became(run(federation), 2, 1)
    assert (outcome.fate, outcome.reason) == ("lost", "LostError")


class Slow(Federation):
    """Keeps the answers of client 1 in round 2 until `until` says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, meddle=self._note)
        self.until = threading.Event()
        self.held = set[str]()

    def _note(self, node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        if is_training(question, 3):
            self.until.set()
        return ask(body)

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Send letters; note that of the slow node."""
        tickets = super().send(letters, seconds)
        for letter, ticket in zip(letters, tickets, strict=True):
            if letter.node == 101 and is_training(Packet.decoded(letter.body), 2):
                self.held.add(ticket)
        return tickets

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Bring what is there, but not what is held."""
        return super().receive([t for t in tickets if self.until.is_set() or t not in self.held])


@pytest.mark.slow
def test_late(tmp_path: Path) -> None:
    """An answer that comes a round later counts for neither; the client is asked again only when it is done."""
    result = run(Slow(tmp_path), rounds=5, deploy={"round_seconds": 2.0})
    outcomes = [became(result, round, 1) for round in (2, 3, 4)]
    assert [outcome.fate for outcome in outcomes] == ["late", "unavailable", "accepted"]
    assert outcomes[1].reason == "still at an earlier question"


class Expiring(Slow):
    """Gives what is held up just when nobody waits any more, as Flower does with a message that is not fetched."""

    sent = math.inf

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Bring what is there, and say what is given up."""
        arrivals = super().receive(tickets)
        if time.monotonic() - self.sent >= 1.5 and not self.until.is_set():
            arrivals += [Arrival(t, None, "given up") for t in tickets if t in self.held]
        return arrivals

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Send letters, and note when."""
        self.sent = time.monotonic()
        return super().send(letters, seconds)


@pytest.mark.slow
def test_a_letter_that_is_given_up_when_its_time_ends_is_late(tmp_path: Path) -> None:
    """The client is asked again when it says who it is."""
    result = run(Expiring(tmp_path), rounds=5, deploy={"round_seconds": 1.5})
    assert [became(result, round, 1).fate for round in (2, 4)] == ["late", "accepted"]


class Doubling(Federation):
    """Brings every answer twice, in the reverse order, and answers to questions that nobody has asked."""

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Bring it all."""
        arrivals = super().receive(tickets)[::-1]
        return [*arrivals, *arrivals, Arrival("nobody's", b"")]


def test_doubled_and_in_another_order(tmp_path: Path) -> None:
    assert fates(run(Doubling(tmp_path))) == {"accepted"}


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
    result = run(Swapping(tmp_path), deploy={"min_replies": 1})
    assert [became(result, 2, client).fate for client in range(3)] == ["refused", "refused", "accepted"]


def test_a_node_changes_its_number(federation: Federation) -> None:
    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        answer = ask(body)
        if node == 102 and is_training(question, 1):
            federation.members[777] = federation.members[102]
            federation.away.add(102)
        return answer

    federation.meddle = meddle
    assert fates(run(federation)) == {"accepted"}
    asked = {node for node, question, _ in federation.passed if is_training(Packet.decoded(question), 2)}
    assert asked == {100, 101, 777}
