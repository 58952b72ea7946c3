"""Questions that a client refuses: each with words, and none changes what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deploy.federating import experiment, members
from deploy.tampering import (
    Ask,
    LostError,
    Tampered,
    filled,
    hosted,
    is_training,
    packed,
    place_of,
    signed,
    with_facts,
    with_tensor,
)
from tailorfl.deploy.client_session import ClientSession
from tailorfl.deploy.codec import PROTOCOL, VERSION, Packet, failure
from tailorfl.deploy.connected_clients import ConnectedClients
from tailorfl.deploy.policy import Policy
from tailorfl.deploy.transport import InProcessTransport
from tailorfl.errors import RunError

Asked = tuple[ClientSession, bytes, Path]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """A client that has answered two rounds of three, the last question "train", and its folder."""
    folder = tmp_path_factory.mktemp("asked")
    data = {"name": "digits", "clients": 2, "samples": 200}
    waits = {"round_seconds": 60.0, "wait_seconds": 1.0}
    config = experiment("ditto", data=data, eval={"every": 0}, rounds=3, deploy=waits)
    there = members(folder, 2)

    def meddle(node: int, asked: Packet, body: bytes, ask: Ask) -> bytes:
        if is_training(asked, 3):
            raise LostError
        return ask(body)

    post = Tampered(there, meddle)
    try:
        with pytest.raises(RunError, match="round 3 needs 2 answers"):
            hosted(config, folder, post)
    finally:
        post.close()
    question = [q for node, q, _ in post.passed if node == 101 and Packet.decoded(q).kind == "train"][-1]
    return there[101], question, place_of(config, folder, 1)


def next_round(question: bytes) -> bytes:
    """The question of round 3."""
    return with_facts(question, round=3, acked=2, attempt="1" * 16)


CASES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "NaN": (
        lambda q: with_tensor(next_round(q), lambda t: filled(t, float("nan"))),
        "what the server sent holds NaN or infinity in 'received/",
    ),
    "another shape": (
        lambda q: with_tensor(next_round(q), lambda t: t[:-1].contiguous()),
        "but this model's is torch.float32 of shape",
    ),
    "another dtype": (
        lambda q: with_tensor(next_round(q), lambda t: t.double()),
        "is torch.float64 of shape",
    ),
    "a tensor less": (
        lambda q: packed(replace(Packet.decoded(next_round(q)), tensors={})),
        "what the server sent does not fit Ditto",
    ),
    "of an old round": (
        lambda q: with_facts(q, round=1, acked=0),
        "the message is an old one, or the server",
    ),
    "goes on from an older round": (
        lambda q: with_facts(q, round=3, acked=0),
        "the message is an old one, or",
    ),
    "goes on from a later round": (lambda q: with_facts(q, round=3, acked=3), "cannot go on from round 3"),
    "from before the beginning": (lambda q: with_facts(q, round=3, acked=-1), "cannot go on from round -1"),
    "a round that is no number": (lambda q: with_facts(q, round=True), "has no usable 'round'"),
    "another job": (lambda q: with_facts(q, digest="0" * 32), "this client has not agreed on that job"),
    "another protocol": (
        lambda q: packed(Packet.decoded(q), protocol=7),
        "is of protocol 7, but this is protocol",
    ),
    "damaged": (lambda q: q[:-1] + bytes([q[-1] ^ 1]), "its digest is another one"),
    "no packet": (lambda q: signed(b"x" * 100), "a message cannot be read"),
    "an answer": (lambda q: failure("no").encoded(), "a failure is no question"),
    "another version": (
        lambda q: Packet("hello", {"version": "0.0.1", "protocol": PROTOCOL}).encoded(),
        "the server has tailorfl 0.0.1, but client '1' has " + VERSION,
    ),
    "another federation": (
        lambda q: Packet("setup", {"experiment": {}}).encoded(),
        "a message 'setup' has no usable 'names'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_and_nothing_changes(case: str, asked: Asked) -> None:
    member, question, place = asked
    before = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    answer = Packet.decoded(member.answer(CASES[case][0](question)))
    assert answer.kind == "failure"
    assert CASES[case][1] in answer.facts["reason"]
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()} == before


def test_too_many_bytes(asked: Asked) -> None:
    member, question, _ = asked
    small = ClientSession(member.data, member.folder, policy=Policy(max_bytes=1024))
    answer = Packet.decoded(small.answer(question))
    assert "at most 1,024 are taken" in answer.facts["reason"]


def test_the_next_round_is_taken(asked: Asked) -> None:
    """What the cases above change is what they are refused for: the question they begin with is good."""
    member, question, _ = asked
    assert Packet.decoded(member.answer(next_round(question))).kind == "train"


HELLO = {"name": "north", "version": VERSION, "protocol": PROTOCOL, "torch": torch.__version__}
MAJOR, MINOR, PATCH = VERSION.split(".")[:3]
TURNED_AWAY: dict[str, tuple[dict[str, object], str, str]] = {
    "another version": ({"version": "0.0.1"}, "", "it has tailorfl 0.0.1, the server"),
    "a later minor version": (
        {"version": f"{MAJOR}.{int(MINOR) + 1}.{PATCH}"},
        "",
        f"it has tailorfl {MAJOR}.{int(MINOR) + 1}.{PATCH}, the server {VERSION}",
    ),
    "no version": ({"version": None}, "", "no usable 'version'"),
    "no name": ({"name": 5}, "", "no usable 'name'"),
    "the name of another key": ({}, "south", "it calls itself 'north', but its key is that of 'south'"),
}


@pytest.mark.parametrize("case", TURNED_AWAY)
def test_turned_away(case: str) -> None:
    changes, registered, words = TURNED_AWAY[case]

    class Keyed(InProcessTransport):
        """Knows nodes by their keys."""

        def nodes(self) -> dict[int, str]:
            return {7: registered}

    said: list[str] = []
    post = Keyed({7: lambda question: Packet("hello", {**HELLO, **changes}).encoded()})
    try:
        assert ConnectedClients(post, notify=said.append).refresh() == frozenset()
    finally:
        post.close()
    assert len(said) == 1
    assert said[0].startswith("a node is turned away: ")
    assert words in said[0]


def test_versions_that_differ_in_the_last_number_are_compatible(tmp_path: Path) -> None:
    """Both sides take them, and the server says that numbers are equal to rounding alone."""
    other, said = f"{MAJOR}.{MINOR}.{int(PATCH) + 5}", list[str]()
    post = InProcessTransport({7: lambda question: Packet("hello", {**HELLO, "version": other}).encoded()})
    try:
        assert ConnectedClients(post, notify=said.append).refresh() == frozenset({"north"})
    finally:
        post.close()
    assert any(other in sentence and VERSION in sentence for sentence in said)
    member = members(tmp_path, 1)[100]
    asked = Packet("hello", {"version": other, "protocol": PROTOCOL}).encoded()
    assert Packet.decoded(member.answer(asked)).kind == "hello"


def test_two_nodes_with_one_name() -> None:
    said: list[str] = []
    post = InProcessTransport({node: lambda question: Packet("hello", HELLO).encoded() for node in (7, 8)})
    try:
        assert ConnectedClients(post, notify=said.append).refresh() == frozenset({"north"})
    finally:
        post.close()
    assert "a node is turned away: a client 'north' is there already" in said
