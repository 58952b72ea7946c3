"""What is needed of Flower, whose inner parts carry letters: a new version of it that moves them is seen here."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deploy.running import free_port, until
from tailorfl.deploy.client_session import member_of
from tailorfl.deploy.keys import Revoked, client_keys, make_keys, revoke, server_keys
from tailorfl.deploy.messages import Arrival, Letter, Packet
from tailorfl.deploy.running import Reach, in_the_way
from tailorfl.errors import ConfigError, RunError

pytest.importorskip("flwr")
import httpx
from flwr.app import Array, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

from tailorfl.deploy import flower_client, flower_server, running
from tailorfl.deploy.flower_client import Connection, ForgottenError, ServerMessage, UnreachableError
from tailorfl.deploy.flower_server import Link


class Ends:
    """A server's and clients' ends of a line on this machine."""

    def __init__(self, folder: Path) -> None:
        make_keys(folder, ["127.0.0.1"], ["north", "south"])
        self.folder, self.port, self.open = folder, free_port(), list[Connection]()
        self.link = self.listen()

    def listen(self, largest: int = 2**26) -> Link:
        """Start the server's end."""
        keys = server_keys(self.folder)
        self.link = Link("127.0.0.1", self.port, keys, Revoked(self.folder).why, largest)
        return self.link

    def client(self, name: str = "north", largest: int = 2**26) -> Connection:
        """A client's end, which has been heard of."""
        keys = client_keys(self.folder / "clients" / name)
        self.open.append(Connection(f"127.0.0.1:{self.port}", keys, largest))
        assert self.open[-1].receive() is None
        return self.open[-1]

    def send(self, body: bytes = b"?", seconds: float = 60.0) -> str:
        """Send a letter to the only node; return its ticket."""
        (ticket,) = self.link.send([Letter(node, "train", body) for node in self.link.nodes()], seconds)
        assert ticket
        return ticket

    def arrival(self, ticket: str, seconds: float = 20.0) -> Arrival:
        """What comes back for a letter."""
        arrivals: list[Arrival] = []
        until(lambda: bool(arrivals.extend(self.link.receive([ticket])) or arrivals), seconds, "the answer")
        assert arrivals[0].ticket == ticket
        return arrivals[0]

    def exchange(self, client: Connection, body: bytes, answer: bytes) -> None:
        """Assert that a letter gets to the only client, once, and its answer back, once."""
        ticket = self.send(body)
        assert self.link.receive([ticket]) == []
        question = asked(client)
        assert question.body == body
        assert client.receive() is None
        client.send(question, answer)
        assert self.arrival(ticket) == Arrival(ticket, answer)
        assert self.arrival(ticket).body is None


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    there = Ends(tmp_path)
    yield there
    for one in there.open:
        one.close()
    there.link.close()


def asked(client: Connection) -> ServerMessage:
    """The question that waits for a client."""
    question = client.receive()
    assert question is not None
    return question


# -- letters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 9, 12 * 2**20])
def test_a_letter_and_its_answer(ends: Ends, size: int) -> None:
    client, body = ends.client(), bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert list(ends.link.nodes().values()) == ["north"]
    ends.exchange(client, body, body[::-1])
    state = ends.link._state
    assert (len(state.object_store), state.num_message_ins(), state.num_message_res()) == (0, 0, 0)


def test_an_answer_that_comes_twice_is_brought_once(ends: Ends) -> None:
    client, ticket = ends.client(), ends.send()
    question = asked(client)
    client.send(question, b"first")
    client.send(question, b"second")
    assert ends.arrival(ticket).body == b"first"
    assert ends.arrival(ticket).body is None
    client.send(question, b"third")
    assert ends.arrival(ends.send(b"??", 0.2)).body is None


def test_an_answer_whose_parts_are_announced_late(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    client, ticket = ends.client(), ends.send()
    question = asked(client)
    state = ends.link._state
    announce = state.preregister_object_tree

    def slowly(*arguments: object) -> object:
        time.sleep(0.5)
        return announce(*arguments)

    monkeypatch.setattr(state, "preregister_object_tree", slowly)
    sending = threading.Thread(target=client.send, args=(question, b"whole"))
    sending.start()
    assert ends.arrival(ticket) == Arrival(ticket, b"whole")
    sending.join(20)


def test_nobody_waits_longer_than_told(ends: Ends) -> None:
    client, ticket = ends.client(), ends.send(b"?", 0.2)
    question = asked(client)
    assert "in time" in ends.arrival(ticket).problem
    client.send(question, b"late")
    assert ends.arrival(ticket).body is None
    ends.send(b"never fetched", 0.2)
    assert asked(client).body == b"never fetched"


def test_several_clients_at_once(ends: Ends) -> None:
    clients = [ends.client(name) for name in ("north", "south", "south")]
    nodes = ends.link.nodes()
    assert sorted(nodes.values()) == ["north", "south", "south"]
    tickets = ends.link.send([Letter(node, "query", str(node).encode() * 10**5) for node in nodes], 60.0)

    def answer(client: Connection) -> None:
        question = asked(client)
        client.send(question, question.body[::-1])

    threads = [threading.Thread(target=answer, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for node, ticket in zip(nodes, tickets, strict=True):
        assert ends.arrival(ticket).body == (str(node).encode() * 10**5)[::-1]


def test_what_is_too_large(ends: Ends) -> None:
    ends.link.close()
    ends.listen(largest=2**20)
    client, ticket = ends.client(largest=2**20), ends.send(b"x" * 4 * 2**20)
    question = asked(client)
    assert (question.body, str(2**20) in question.problem) == (b"", True)
    client.send(question, b"refused")
    assert ends.arrival(ticket).body == b"refused"
    ticket, question = ends.send(), asked(client)
    with pytest.raises(ForgottenError, match=str(2**20)):
        client.send(question, b"x" * 12 * 2**20)
    assert str(2**20) in ends.arrival(ticket).problem
    ends.exchange(client, b"?", b"small")


@pytest.mark.parametrize("hours", [1, -2, 24 * 30])
def test_clocks_that_jump(ends: Ends, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    from flwr.supercore.date import now

    client, ticket = ends.client(), ends.send()
    question = asked(client)
    shifted = [m for m in sys.modules.values() if isinstance(m, ModuleType) and vars(m).get("now") is now]
    assert len(shifted) > 3
    for module in shifted:
        monkeypatch.setattr(module, "now", lambda: now() + timedelta(hours=hours))
    assert client.receive() is None
    client.send(question, b"!")
    assert ends.arrival(ticket).body == b"!"
    ticket = ends.send(b"after")
    monkeypatch.undo()
    client.send(asked(client), b"!")
    assert ends.arrival(ticket).body == b"!"


# -- few bytes that stand for many ---------------------------------------------------------------------------


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays list each of their chunks a thousand times."""
    once = Array.slice_array
    monkeypatch.setattr(Array, "slice_array", lambda self: once(self) * 1000)


@pytest.mark.threat(
    "a client", "lists one chunk of bytes a thousand times", now="not read", before="read into memory"
)
def test_a_chunk_that_is_listed_a_thousand_times(ends: Ends, repeated: None) -> None:
    ends.link.close()
    ends.listen(largest=2**20)
    client, ticket = ends.client(largest=2**20), ends.send(b"x" * 2**19)
    with pytest.raises(UnreachableError, match="no packet"):
        client.receive()
    assert "gone" in ends.arrival(ticket).problem
    assert client.receive() is None  # as a new node


def test_an_answer_that_lists_its_chunk_a_thousand_times(ends: Ends, request: pytest.FixtureRequest) -> None:
    ends.link.close()
    ends.listen(largest=2**20)
    client, ticket = ends.client(), ends.send()
    question = asked(client)
    request.getfixturevalue("repeated")
    client.send(question, b"x" * 2**19)
    assert "cannot be read" in ends.arrival(ticket).problem


def announced(client: Connection, question: ServerMessage, *parts: ObjectTree, root: str = "") -> int:
    """The status of an answer that is only announced, with these parts."""
    header, tree, _ = flower_client.in_parts(Message(RecordDict(), reply_to=question.message))
    header.metadata.created_at, header.metadata.ttl = question.message.metadata.created_at, 60.0
    whole = ObjectTree(object_id=root or tree.object_id, children=parts)
    request = PushMessagesRequest(
        node=client._node, messages_list=[message_to_proto(header)], message_object_trees=[whole]
    )
    try:
        client._calls.PushMessages(request)
    except httpx.HTTPStatusError as error:
        return error.response.status_code
    return 200


def announce_falsely(ends: Ends, body: bytes) -> None:
    """Let a client announce the parts of a message that is still to come, with others inside."""
    hostile, _ = ends.client("south"), ends.send()
    question = asked(hostile)
    _, tree, _ = flower_client.in_parts(Message(flower_client.content(body), 1, "query"))
    (record,) = tree.children
    bogus = ObjectTree(object_id="a" * 64)
    lies = [ObjectTree(object_id=part.object_id, children=[bogus]) for part in iterate_object_tree(record)]
    assert announced(hostile, question, *lies) == 200


@pytest.mark.threat(
    "a client", "announces parts that contain each other many times", now="400", before="the server hung"
)
def test_parts_that_contain_each_other(ends: Ends) -> None:
    client, other = ends.client("north"), ends.client("south")
    tickets = ends.link.send([Letter(node, "train", b"?") for node in ends.link.nodes()], 60.0)
    leaf = ObjectTree(object_id="a" * 64)
    pair, alone = (ObjectTree(object_id="b" * 64, children=two) for two in ([leaf, leaf], []))
    question = asked(client)
    assert announced(client, question, pair, alone) == 400
    assert announced(client, question, leaf, root="c" * 64) == 400
    assert announced(client, question, leaf, pair) == 200
    assert announced(other, asked(other), alone) == 400
    assert [arrival.ticket for arrival in ends.link.receive(tickets)] == []


def test_a_part_without_a_name_that_flower_accepts(ends: Ends) -> None:
    client, _ = ends.client(), ends.send()
    question, before = asked(client), len(ends.link._state.object_store)
    assert announced(client, question, ObjectTree(object_id="a" * 64), ObjectTree(object_id="?")) == 400
    assert len(ends.link._state.object_store) == before


@pytest.mark.threat(
    "a client",
    "announces parts of another one's letter as its own",
    now="the letter arrives",
    before="nobody else got the letter",
)
def test_parts_of_a_letter_that_is_still_to_come(ends: Ends) -> None:
    announce_falsely(ends, b"hello")
    honest = ends.client("north")
    (node,) = [node for node, name in ends.link.nodes().items() if name == "north"]
    (ticket,) = ends.link.send([Letter(node, "query", b"hello")], 60.0)
    letter = asked(honest)
    assert letter.body == b"hello"
    honest.send(letter, b"!")
    assert ends.arrival(ticket).body == b"!"


@pytest.mark.threat(
    "a client",
    "announces parts of another one's answer as its own",
    now="the answer arrives",
    before="the other could not answer",
)
def test_parts_of_an_answer_that_is_still_to_come(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    announce_falsely(ends, b"!")
    honest = ends.client("north")
    sent, content = list[bytes](), flower_client.content
    monkeypatch.setattr(flower_client, "content", lambda body: (sent.append(body), content(body))[1])
    (node,) = [node for node, name in ends.link.nodes().items() if name == "north"]
    for _ in range(2):
        (ticket,) = ends.link.send([Letter(node, "query", b"?")], 60.0)
        honest.send(asked(honest), b"!")
        assert ends.arrival(ticket).body == b"!"
    assert len(set(sent)) == 2, "nobody can know the parts of an answer from those of an earlier one"


def test_a_key_of_megabytes(ends: Ends) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        ends.client()._calls.RegisterNode(RegisterNodeFleetRequest(public_key=b"x" * 2**20))


@pytest.mark.threat("the server", "sends bytes that grow when they are unpacked", now="the client ends")
@pytest.mark.parametrize("how", [{"content-encoding": "gzip"}, {"transfer-encoding": "chunked"}])
def test_an_answer_of_the_server_that_grows(ends: Ends, how: dict[str, str]) -> None:
    response = httpx.Response(200, headers={"content-length": "9", **how}, stream=httpx.ByteStream(b"x" * 9))
    with pytest.raises(RunError, match="at once"):
        ends.client()._bounded(response)


# -- who comes and goes -------------------------------------------------------------------------------------


def test_a_client_that_leaves(ends: Ends) -> None:
    client, ticket = ends.client(), ends.send()
    client.close()
    assert "gone" in ends.arrival(ticket, 2.0).problem
    assert ends.link.nodes() == {}
    assert ends.link.send([Letter(1, "train", b"?")], 1.0) == [""]


def test_a_call_is_noted_before_it_is_answered(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.link.close()
    noted = Link._heard

    def slowly(*arguments: Any) -> None:
        time.sleep(0.2)
        noted(*arguments)

    monkeypatch.setattr(Link, "_heard", slowly)
    ends.listen()
    client = ends.client()
    assert list(ends.link.nodes().values()) == ["north"]
    client.close()
    assert ends.link.nodes() == {}


@pytest.mark.threat(
    "a client", "leaves while a letter to it is written", now="it is gone", before="KeyError ended the server"
)
def test_a_client_that_leaves_while_its_letter_is_written(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, nodes = ends.client(), ends.link.nodes()
    client.close()
    monkeypatch.setattr(ends.link, "nodes", lambda: nodes)  # as they were when it began
    assert ends.link.send([Letter(node, "train", b"?") for node in nodes], 1.0) == [""]


@pytest.mark.threat(
    "a client", "leaves and comes back within an answer", now="413", before="its bytes counted anew each time"
)
def test_an_answer_that_is_too_large_in_several_visits(ends: Ends) -> None:
    ends.link.close()
    ends.listen(largest=2**20)
    client, _ = ends.client(), ends.send()
    key = next(iter(ends.link._owners))
    statuses = []
    for _ in range(2):
        request = PushObjectRequest(node=client._node, object_id="a" * 64, object_content=b"x" * (3 * 2**19))
        try:
            client._calls.PushObject(request)
            statuses.append(200)
        except httpx.HTTPStatusError as error:
            statuses.append(error.response.status_code)
        if statuses[-1] != 413:
            client._calls.DeactivateNode(DeactivateNodeRequest(node_id=client._node.node_id))
            client._calls.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30.0))
    assert [status == 413 for status in statuses] == [False, True]


def test_a_client_whose_process_is_killed(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_server, "LEFT_SECONDS", 0.5)
    client, ticket = ends.client(), ends.send()
    asked(client)
    client._over.set()
    client._calls.close()  # as the system does it for a process that is gone
    client._node = None
    assert "gone" in ends.arrival(ticket, 5.0).problem


@pytest.mark.slow
def test_a_client_that_computes_is_still_there(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_client, "HEARTBEAT_SECONDS", 0.4)
    monkeypatch.setattr(flower_server, "GONE_SECONDS", 1.5)
    client, ticket = ends.client(), ends.send()
    question = asked(client)
    time.sleep(3.0)
    assert ends.link.nodes()
    client.send(question, b"done")
    assert ends.arrival(ticket).body == b"done"


@pytest.mark.slow
def test_a_server_that_is_started_again(ends: Ends) -> None:
    client, _ = ends.client(), ends.send()
    question = asked(client)
    ends.link.close()
    with pytest.raises(UnreachableError):
        client.send(question, b"!")
    ends.listen()
    with pytest.raises(ForgottenError):
        client.send(question, b"!")
    assert client.receive() is None
    ends.exchange(client, b"again", b"!")


def test_a_letter_that_is_lost_on_its_way(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    client = ends.client()
    (first,), ticket = ends.link.nodes(), ends.send()

    def cut(request: object) -> None:
        raise UnreachableError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(client._calls, "PullObject", cut)
        with pytest.raises(UnreachableError):
            client.receive()
    assert client.receive() is None
    assert "gone" in ends.arrival(ticket, 2.0).problem
    assert first not in ends.link.nodes()
    assert len(ends.link.nodes()) == 1


def test_a_revoked_certificate_is_turned_away_while_it_is_connected(ends: Ends) -> None:
    north, south = ends.client("north"), ends.client("south")
    revoke(ends.folder, "north")
    with pytest.raises(RunError, match="north"):
        north.receive()
    assert south.receive() is None


def test_a_client_that_hears_nothing_says_so_once(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    end, said = time.monotonic() + 1.2, list[str]()

    class Member:
        turned_away = ""

        @property
        def ended(self) -> bool:
            return time.monotonic() > end

    monkeypatch.setattr(running, "SILENCE", 0.2)
    client, server = ends.client(), f"127.0.0.1:{ends.port}"
    running._answer_all(client, Reach(server, None, said.append), Member(), said.append, False)  # type: ignore[arg-type]
    assert len(said) == 1


def test_a_client_has_left_when_the_server_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is lost on the way, then the server begins again and asks once more."""
    monkeypatch.setattr(running, "AGAIN", 0.0)
    said, tries = list[str](), [UnreachableError("cut"), ForgottenError("restarted"), None]
    body = Packet("setup").encoded()

    class Line:
        def receive(self) -> ServerMessage:
            return ServerMessage(body, Message(RecordDict(), 1, "query"))

        def send(self, question: ServerMessage, answer: bytes) -> None:
            assert Packet.decoded(answer).fact("code", str) == "left"
            assert not said
            if (problem := tries.pop(0)) is not None:
                raise problem

    class Silent(Reach):
        def failed(self, reason: str) -> None:
            """Try again."""

    member = member_of(state=tmp_path, name="north", notify=said.append)
    member.leaves = True
    running._answer_all(Line(), Silent("", None, said.append), member, said.append, False)  # type: ignore[arg-type]
    assert (tries, member.ended, len(said)) == ([], True, 1)


def test_a_port_that_is_taken(ends: Ends) -> None:
    with pytest.raises(RunError, match=f"{ends.port}: .* choose another port"):
        Link("127.0.0.1", ends.port, None)


@pytest.mark.slow
def test_the_end_takes_no_longer_than_seconds(ends: Ends) -> None:
    client = ends.client()
    for end in (ends.link, client):
        begin = time.monotonic()
        end.close()
        assert time.monotonic() - begin < 5


# -- what is in the way between a client and a server without keys; of one with keys see `test_attacks.py` ---------


def test_a_server_without_keys(ends: Ends) -> None:
    plain = f"127.0.0.1:{free_port()}"
    with closing(Link("127.0.0.1", int(plain.partition(":")[2]), None)):
        assert in_the_way(plain, None) == ""
        with pytest.raises(RunError, match=f"{plain} uses no TLS"):
            in_the_way(plain, client_keys(ends.folder / "clients" / "north"))


def test_a_server_that_is_not_there_yet() -> None:
    """It is said once that it cannot be reached, and once that it can."""
    server, said = f"127.0.0.1:{free_port()}", list[str]()
    reach = Reach(server, None, said.append)
    for _ in range(2):
        reach.failed("the call has failed")
    assert len(said) == 1
    assert "Connection refused" in reach.trouble
    for _ in range(2):
        reach.succeeded()
    assert said[1:] == [f"the server at {server} can be reached"]
    assert reach.trouble == ""


@pytest.mark.parametrize("address", ["example.org", "a:b", ":80", "a:0", "a:65536", "a:²", "::1:80"])
def test_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        in_the_way(address, None)
