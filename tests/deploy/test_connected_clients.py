"""Who counts as there: clients with another version or name, that come twice, late, or have not answered in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.federation import Federation, InProcessTransport
from deploy.running import until
from tailorfl.deploy.client_session import member_of
from tailorfl.deploy.connected_clients import ConnectedClients
from tailorfl.deploy.messages import PROTOCOL, VERSION, Letter, Packet

GOODBYE = Packet("goodbye", {"turned_away": ""})


class Leaky(Federation):
    """A post that loses all letters to `deaf` nodes without a word."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 2)
        self.deaf, self.letters = set[int](), list[Letter]()

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        self.letters += letters
        tickets = iter(super().send([x for x in letters if x.node not in self.deaf], seconds))
        return [f"lost-{i}" if x.node in self.deaf else next(tickets) for i, x in enumerate(letters)]


@pytest.fixture
def post(tmp_path: Path) -> Iterator[Leaky]:
    with Leaky(tmp_path) as leaky:
        yield leaky


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailorfl.deploy.connected_clients.DOUBT_SECONDS", 0.2)


def twin(post: Leaky) -> None:
    """Let a second client '0' connect, as node 200."""
    post.join(member_of(state=post.folder / "twin", name="0"), 200)


def test_a_second_client_of_a_name_is_turned_away_with_the_reason(post: Leaky) -> None:
    said: list[str] = []
    connected = ConnectedClients(post, notify=said.append)
    assert connected.refresh() == {"0", "1"}
    twin(post)
    assert connected.refresh() == {"0", "1"}
    assert said[-1] == "a node is turned away: a client '0' is connected already"
    connected.ask({"0": GOODBYE}, 5.0)
    last = Packet.decoded(post.of_kind("goodbye", 200)[-1][1])
    assert (last.kind, last.facts["turned_away"]) == ("goodbye", "a client '0' is connected already")


def test_a_client_takes_the_place_of_its_dead_former_self(post: Leaky) -> None:
    connected = ConnectedClients(post)
    connected.refresh()
    post.deaf.add(100)  # it was killed, and Flower does not know yet
    twin(post)
    assert connected.refresh() == {"0", "1"}
    assert connected.ask({"0": GOODBYE}, 5.0)["0"].fate == "answered"
    assert post.of_kind("goodbye", 200)


@pytest.mark.threat(
    "a client",
    "connects a hundred times under its name",
    now="one of these is asked at a time",
    before="the server waited 15 s for each before it went on",
)
def test_nodes_of_one_certificate_are_asked_one_by_one(post: Leaky, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {100: "0", 101: "1", **dict.fromkeys(range(200, 220), "0")}
    monkeypatch.setattr(post, "nodes", lambda: {node: names[node] for node in sorted(post.members)})
    connected = ConnectedClients(post)
    assert connected.refresh() == {"0", "1"}
    post.deaf.add(100)
    client = member_of(state=post.folder / "twins", name="0")
    for node in range(200, 220):
        post.join(client, node)
    assert connected.refresh() == {"0", "1"}
    assert len({letter.node for letter in post.letters if letter.node >= 200}) == 1


def test_a_federation_that_has_begun_takes_nobody_else(post: Leaky) -> None:
    said: list[str] = []
    connected = ConnectedClients(post, notify=said.append)
    connected.close_to(["0", "7"])
    assert connected.refresh() == {"0"}
    assert "a node is turned away: the federation began without '1': it has 2 clients, 0, 7" in said


def test_a_member_says_why_it_is_turned_away(post: Leaky) -> None:
    member = post.people[100]
    assert (
        Packet.decoded(member.answer(Packet("goodbye", {"turned_away": "full"}).encoded())).kind == "goodbye"
    )
    assert (member.ended, member.turned_away) == (True, "full")


def test_a_client_that_was_late_is_asked_again_as_soon_as_it_says_that_it_is_there(post: Leaky) -> None:
    connected = ConnectedClients(post)
    connected.refresh()
    post.deaf.add(100)
    hello = Packet("hello", {"version": "0", "protocol": PROTOCOL})
    assert connected.ask({"0": hello}, 0.2)["0"].fate == "late"
    assert connected.ask({"0": hello}, 60.0)["0"].reason == "still answering an earlier question"
    post.deaf.clear()

    def answers() -> bool:
        connected.refresh()
        return connected.ask({"0": GOODBYE}, 5.0)["0"].fate == "answered"

    until(answers, 10, "the client")


# -- greetings ----------------------------------------------------------------------------------------------

HELLO = {"name": "north", "version": VERSION, "protocol": PROTOCOL, "torch": torch.__version__}
MAJOR, MINOR, PATCH = VERSION.split(".")[:3]
LATER = f"{MAJOR}.{int(MINOR) + 1}.{PATCH}"


def greeted(facts: Mapping[str, Any], certificate: str = "") -> tuple[frozenset[str], list[str]]:
    """Who is there, and what the server says, where a node answers a greeting with other facts."""

    class Keyed(InProcessTransport):
        """Knows nodes by their keys."""

        def nodes(self) -> dict[int, str]:
            return dict.fromkeys(self.members, certificate)

    said: list[str] = []
    with closing(Keyed({7: lambda question: Packet("hello", {**HELLO, **facts}).encoded()})) as post:
        return ConnectedClients(post, notify=said.append).refresh(), said


@pytest.mark.parametrize(
    ("facts", "certificate", "words"),
    [
        ({"version": "0.0.1"}, "", "0.0.1"),
        ({"version": LATER}, "", LATER),
        ({"version": None}, "", "'version'"),
        ({"name": 5}, "", "'name'"),
        ({"name": "n" * 201}, "", "more than 200"),  # of which the others would not let themselves be told
        ({"name": "north\x1b[2J"}, "", r"north\x1b[2J"),
        ({}, "south", "'north', but its key is that of 'south'"),
    ],
)
def test_turned_away(facts: dict[str, Any], certificate: str, words: str) -> None:
    present, (sentence,) = greeted(facts, certificate)
    assert not present
    assert sentence.startswith("a node is turned away: ")
    assert words in sentence


def test_versions_that_differ_in_the_last_number_are_compatible(post: Leaky) -> None:
    """Both sides take them, and the server says that numbers are equal to rounding alone."""
    version = f"{MAJOR}.{MINOR}.{int(PATCH) + 5}"
    present, said = greeted({"version": version})
    assert present == {"north"}
    assert any(version in sentence and VERSION in sentence for sentence in said)
    question = Packet("hello", {"version": version, "protocol": PROTOCOL}).encoded()
    assert Packet.decoded(post.people[100].answer(question)).kind == "hello"
