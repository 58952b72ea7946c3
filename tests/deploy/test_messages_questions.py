"""Questions that a client refuses: none changes what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.federation import (
    Ask,
    Federation,
    LostError,
    deployed,
    experiment,
    filled,
    is_training,
    packed,
    place_of,
    signed,
    small,
    with_facts,
    with_tensor,
)
from tailorfl.deploy.client_session import ClientSession, member_of
from tailorfl.deploy.client_state import ClientState
from tailorfl.deploy.messages import PROTOCOL, Packet, failure
from tailorfl.deploy.policy import Policy
from tailorfl.errors import RunError

Asked = tuple[ClientSession, bytes, Path]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """A client that has done two of three rounds, the question of the second, and where its states lie."""
    folder = tmp_path_factory.mktemp("asked")
    data, deploy = {"name": "digits", "clients": 2, "samples": 200}, {"min_replies": 2, "wait_seconds": 0.1}
    config = experiment("ditto", data=data, eval={"every": 0}, rounds=3, deploy=deploy)

    def meddle(node: int, question: Packet, body: bytes, ask: Ask) -> bytes:
        if is_training(question, 3):
            raise LostError
        return ask(body)

    federation = Federation(folder, 2, meddle)
    with pytest.raises(RunError, match="round 3 needs 2 answers"):
        federation.host(config)
    question = federation.of_kind("train", 101)[-1][1]
    return federation.people[101], question, place_of(config, folder, 1)


def next_round(question: bytes, **facts: Any) -> bytes:
    """The question of round 3."""
    return with_facts(question, **{"round": 3, "acked": 2, "attempt": "1" * 16, **facts})


CASES: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda q: with_tensor(next_round(q), filled(float("nan"))), "NaN or infinity in 'received/"),
    (lambda q: with_tensor(next_round(q), lambda t: t[:-1].contiguous()), "this model's is torch.float32"),
    (lambda q: with_tensor(next_round(q), lambda t: t.double()), "is torch.float64"),
    (lambda q: packed(replace(Packet.decoded(next_round(q)), tensors={})), "does not fit Ditto"),
    (lambda q: with_facts(q, round=1, acked=0), "the message is old"),
    (lambda q: next_round(q, acked=0), "the message is old"),
    (lambda q: next_round(q, acked=3), "from round 3"),
    (lambda q: next_round(q, acked=-1), "from round -1"),
    (lambda q: next_round(q, round=True), "'round'"),
    (lambda q: next_round(q, digest="0" * 32), "not agreed on this job"),
    (lambda q: packed(Packet.decoded(q), protocol=7), "protocol 7"),
    (lambda q: q[:-1] + bytes([q[-1] ^ 1]), "digest"),
    (lambda q: signed(b"x" * 100), "cannot be read"),
    (lambda q: failure("no").encoded(), "a failure"),
    (lambda q: Packet("hello", {"version": "0.0.1", "protocol": PROTOCOL}).encoded(), "0.0.1"),
    (lambda q: Packet("setup", {"experiment": {}}).encoded(), "'names'"),
]


@pytest.mark.parametrize(("change", "words"), CASES)
def test_refused_and_nothing_changes(change: Callable[[bytes], bytes], words: str, asked: Asked) -> None:
    client, question, place = asked
    before = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    answer = Packet.decoded(client.answer(change(question)))
    assert answer.kind == "failure"
    assert words in answer.facts["reason"]
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()} == before


def test_too_many_bytes(asked: Asked) -> None:
    client, question, _ = asked
    narrow = ClientSession(client.data, client.folder, policy=Policy(max_bytes=1024))
    assert "at most 1,024" in Packet.decoded(narrow.answer(question)).facts["reason"]


def test_the_next_round_is_taken(asked: Asked) -> None:
    """What the cases above change is what they are refused for: the question they begin with is good."""
    client, question, _ = asked
    assert Packet.decoded(client.answer(next_round(question))).kind == "train"


def test_a_client_that_keeps_another_job(tmp_path: Path) -> None:
    """Of two clients both are needed, so nothing begins without one of them."""
    config = small(
        "ditto", data={"name": "digits", "clients": 2, "samples": 100}, deploy={"wait_seconds": 1.0}
    )
    job = {"experiment": "deployed", "label": "ditto", "seed": 5, "digest": "of another rate"}
    ClientState(place_of(config, tmp_path, 1), job).release()
    too_few = (
        r"too few clients take part in ditto, seed 5: '1': .* private states of another job .* client, digest"
    )
    with pytest.raises(RunError, match=too_few):
        deployed(config, tmp_path, 2)


@pytest.mark.parametrize(("method", "has_loss"), [("fedavg", True), ("federated_trees", False)])
def test_a_client_is_told_a_loss_where_it_has_one(method: str, has_loss: bool, tmp_path: Path) -> None:
    """Trees report how many nodes they have split, which is no loss."""
    sentences: list[str] = []
    nodes = {7: member_of(state=tmp_path / "state", name="0", notify=sentences.append)}
    deployed(small(method, rounds=1, data={"name": "digits", "clients": 1, "samples": 60}), tmp_path, nodes)
    (trained,) = [sentence for sentence in sentences if sentence.startswith("round 1 of 1: ")]
    assert ("loss" in trained) is has_loss
