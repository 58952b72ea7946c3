"""Who counts as there: clients that come twice, late, or have not answered in time. Real members, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from deploy.federating import members
from deploy.running import until
from tailorfl.deploy.codec import Packet
from tailorfl.deploy.connected_clients import ConnectedClients
from tailorfl.deploy.transport import Arrival, InProcessTransport, Letter

GOODBYE = Packet("goodbye", {"turned_away": ""})


class Leaky(InProcessTransport):
    """A post that loses all letters to some nodes, or drops what they answer, without a word."""

    def __init__(self, nodes: dict, deaf: Sequence[int] = ()) -> None:
        super().__init__(nodes)
        self.deaf, self.letters = set(deaf), list[Letter]()

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        self.letters += letters
        heard = [letter for letter in letters if letter.node not in self.deaf]
        tickets = iter(super().send(heard, seconds))
        return [
            f"lost-{len(self.letters)}-{i}" if one.node in self.deaf else next(tickets)
            for i, one in enumerate(letters)
        ]

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        return super().receive([t for t in tickets if not t.startswith("lost")])


@pytest.fixture
def post(tmp_path: Path) -> Iterator[Leaky]:
    there = Leaky({node: member.answer for node, member in members(tmp_path, 2).items()})
    yield there
    there.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailorfl.deploy.connected_clients.DOUBT_SECONDS", 0.2)


def twin(post: Leaky, folder: Path) -> list[bytes]:
    """A second client '0', as node 200; returns the list of what it will be asked."""
    member, asked = members(folder / "twin", 1)[100], list[bytes]()

    def answer(data: bytes) -> bytes:
        asked.append(data)
        return member.answer(data)

    post.members[200] = answer
    return asked


def test_a_second_client_of_a_name_is_turned_away_with_the_reason(post: Leaky, tmp_path: Path) -> None:
    said: list[str] = []
    connected = ConnectedClients(post, notify=said.append)
    assert connected.refresh() == {"0", "1"}
    asked = twin(post, tmp_path)
    assert connected.refresh() == {"0", "1"}
    assert said[-1] == "a node is turned away: a client '0' is there already"
    connected.ask({"0": GOODBYE}, 5.0)
    last = Packet.decoded(asked[-1])
    assert (last.kind, last.facts["turned_away"]) == ("goodbye", "a client '0' is there already")


def test_a_client_takes_the_place_of_its_dead_former_self(post: Leaky, tmp_path: Path) -> None:
    connected = ConnectedClients(post)
    connected.refresh()
    post.deaf.add(100)  # it was killed, and Flower does not know yet
    asked = twin(post, tmp_path)
    assert connected.refresh() == {"0", "1"}
    assert connected.ask({"0": GOODBYE}, 5.0)["0"].fate == "answered"
    assert Packet.decoded(asked[-1]).kind == "goodbye"


def test_a_federation_that_has_begun_takes_nobody_else(post: Leaky, tmp_path: Path) -> None:
    said: list[str] = []
    connected = ConnectedClients(post, notify=said.append)
    connected.close_to(["0", "7"])
    assert connected.refresh() == {"0"}
    assert "a node is turned away: the federation began without '1': it is of 2 clients, 0, 7" in said


def test_a_member_says_why_it_is_turned_away(tmp_path: Path) -> None:
    member = members(tmp_path, 1)[100]
    assert (
        Packet.decoded(member.answer(Packet("goodbye", {"turned_away": "full"}).encoded())).kind == "goodbye"
    )
    assert (member.ended, member.turned_away) == (True, "full")


def test_a_client_that_was_late_is_asked_again_as_soon_as_it_says_that_it_is_there(post: Leaky) -> None:
    connected = ConnectedClients(post)
    connected.refresh()
    post.deaf.add(100)
    hello = Packet("hello", {"version": "0", "protocol": 1})
    assert connected.ask({"0": hello}, 0.2)["0"].fate == "late"
    assert connected.ask({"0": hello}, 60.0)["0"].reason == "still at an earlier question"
    post.deaf.clear()

    def answers() -> bool:
        connected.refresh()
        return connected.ask({"0": GOODBYE}, 5.0)["0"].fate == "answered"

    until(answers, 10, "the client")
