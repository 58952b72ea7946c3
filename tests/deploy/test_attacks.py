"""What outsiders, former clients and clients can do at a server's port: one server for all of them.

Nobody without a certificate of the federation's authority gets a byte of HTTP, and who has one gets only the calls that
a client needs, as itself.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from deploy.running import free_port
from tailorfl.deploy.keys import Revoked, Tls, client_keys, make_keys, renew, revoke, server_keys
from tailorfl.deploy.running import in_the_way
from tailorfl.errors import ConfigError, RunError

pytest.importorskip("flwr")
from tailorfl.deploy.flower_client import Connection
from tailorfl.deploy.flower_server import Link

pytestmark = pytest.mark.timeout(300)

APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "evil"
version = "1.0.0"
description = "An app that nobody has asked for"
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "evil"
[tool.flwr.app.components]
serverapp = "evil.app:server"
clientapp = "evil.app:client"
[tool.flwr.app.config]
"""
CODE = """\
from pathlib import Path
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
server, client = ServerApp(), ClientApp()
@server.main()
def main(grid, context):
    Path({path!r}).write_text("ran")
"""
CLOSED = [
    *(f"POST /v1/control/{name}" for name in ("start-run", "list-runs", "register-node", "list-nodes")),
    *(f"POST /v1/runtime/{name}" for name in ("acquire-task", "push-messages", "push-logs")),
    *(f"POST /v1/fleet/{name}" for name in ("get-fab", "get-run", "")),
    *(f"GET /{name}" for name in ("", "health", "docs", "openapi.json", "v1/fleet/pull-messages")),
]


class Door:
    """A server of a federation of north and south, and the keys of all who knock."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.address = folder, port, f"127.0.0.1:{port}"
        self.keys, self.authority = folder / "keys", folder / "keys" / "server" / "authority.crt"

    def of(self, name: str) -> Tls:
        """The keys of a client, whether they hold or not."""
        place = self.keys / "clients" / name
        return Tls(place / "authority.crt", place / "client.crt", place / "client.key")

    def answer(self, context: ssl.SSLContext | None, line: str = "GET /", body: bytes = b"") -> bytes:
        """The first line that the server says to a request; b"" where it only ends the connection."""
        head = f"{line} HTTP/1.1\r\nHost: x\r\nContent-Type: application/protobuf\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as plain:
            try:
                with (
                    plain
                    if context is None
                    else context.wrap_socket(plain, server_hostname="127.0.0.1") as line_
                ):
                    line_.sendall(head.encode() + body)
                    return line_.recv(4096).partition(b"\r\n")[0]
            except (ssl.SSLError, ConnectionError):
                return b""


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("attacked")
    make_keys(folder / "keys", ["127.0.0.1"], ["north", "south", "former"])
    make_keys(folder / "keys", [], ["old"], days=0)
    make_keys(folder / "others", ["127.0.0.1"], ["north"])
    port = free_port()
    with closing(Link("127.0.0.1", port, server_keys(folder / "keys"), Revoked(folder / "keys").why)) as link:
        yield Door(folder, port)
        assert link._thread.is_alive()


@pytest.mark.threat("an outsider", "has no certificate", now="the handshake fails")
def test_who_has_no_certificate_gets_no_answer(door: Door) -> None:
    known = ssl.create_default_context(cafile=door.authority)  # all that an outsider can know
    assert door.answer(known) == b""
    assert door.answer(None) == b""


@pytest.mark.threat(
    "an outsider", "has a foreign, expired or self-signed certificate, or old TLS", now="the handshake fails"
)
@pytest.mark.parametrize("who", ["another authority", "expired", "signed by itself", "TLS 1.2"])
def test_a_certificate_that_does_not_hold(door: Door, who: str) -> None:
    others = client_keys(door.folder / "others" / "clients" / "north")
    used = {"another authority": others, "signed by itself": others, "expired": door.of("old")}.get(
        who, door.of("north")
    )
    context = ssl.create_default_context(cafile=door.authority)
    context.load_cert_chain(used.certificate, used.key)
    if who == "signed by itself":
        root = door.folder / "others"
        context.load_cert_chain(root / "server" / "authority.crt", root / "authority.key")
    if who == "TLS 1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert door.answer(context) == b""


def test_the_words_that_a_client_is_told_of_its_certificate(door: Door) -> None:
    with pytest.raises(ConfigError, match=r"client.crt' expired at .* UTC"):
        client_keys(door.keys / "clients" / "old")
    theirs = client_keys(door.folder / "others" / "clients" / "north")
    for refused in (door.of("old"), Tls(door.authority, theirs.certificate, theirs.key)):
        assert "does not accept this client's certificate" in in_the_way(door.address, refused)
    with pytest.raises(RunError, match="does not pass this client's check"):
        in_the_way(door.address, theirs)
    with pytest.raises(RunError, match="admits only clients with keys"):
        in_the_way(door.address, None)
    assert in_the_way(door.address, door.of("north")) == ""


@pytest.mark.threat(
    "a client", "calls what a client does not need", now="404", before="Flower's whole interface was there"
)
@pytest.mark.parametrize("line", CLOSED)
def test_a_client_finds_nothing_but_what_it_needs(door: Door, line: str) -> None:
    assert door.answer(door.of("north").for_client(), line) == b"HTTP/1.1 404 Not Found"


def test_what_a_client_may_ask_is_there(door: Door) -> None:
    connection = Connection(door.address, door.of("north"))
    connection.receive()  # nothing, or the server's question who this is
    connection.close()


@pytest.mark.threat("a client", "uses another one's node or name", now="403, and the other stays registered")
def test_a_certificate_of_one_client_and_the_node_of_another(door: Door) -> None:
    import httpx
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest, PullMessagesRequest, PushMessagesRequest
    from flwr.proto.message_pb2 import Message, Metadata
    from flwr.proto.node_pb2 import Node

    north, south = (Connection(door.address, door.of(name)) for name in ("north", "south"))
    for one in (north, south):
        one.receive()  # and so each is registered
    forged = Message(metadata=Metadata(src_node_id=north._node.node_id))
    for call, request in (
        ("PullMessages", PullMessagesRequest(node=north._node)),
        ("PushMessages", PushMessagesRequest(node=north._node)),
        ("PushMessages", PushMessagesRequest(node=south._node, messages_list=[forged])),
        ("DeactivateNode", DeactivateNodeRequest(node_id=north._node.node_id)),
    ):
        with pytest.raises(httpx.HTTPStatusError) as refused:
            getattr(south._calls, call)(request)
        assert refused.value.response.status_code == 403, call
    with pytest.raises(httpx.HTTPStatusError) as unknown:
        south._calls.PullMessages(PullMessagesRequest(node=Node(node_id=1)))
    assert unknown.value.response.status_code == 404
    north.receive()  # it is still registered
    north.close()
    south.close()


@pytest.mark.threat("an outsider", "has a certificate that was revoked", now="403 from the next request on")
def test_a_certificate_that_is_revoked_while_the_server_runs(door: Door) -> None:
    from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest

    former = door.of("former").for_client()

    def registers(context: ssl.SSLContext) -> bytes:
        request = RegisterNodeFleetRequest(public_key=secrets.token_bytes(32))
        return door.answer(context, "POST /v1/fleet/register-node", request.SerializeToString())

    assert registers(former) == b"HTTP/1.1 200 OK"
    renew(door.keys, "former")
    assert registers(former) == b"HTTP/1.1 403 Forbidden"
    assert registers(door.of("former").for_client()) == b"HTTP/1.1 200 OK"
    revoke(door.keys, "former")
    assert registers(door.of("former").for_client()) == b"HTTP/1.1 403 Forbidden"


@pytest.mark.threat(
    "an outsider",
    "sends a head without end with a revoked certificate",
    now="400 after 64 KiB",
    before="all of it was kept",
)
def test_a_head_without_end_is_not_read(door: Door) -> None:
    context = door.of("north").for_client()
    with (
        socket.create_connection(("127.0.0.1", door.port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        secured.sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n")
        with suppress(OSError):  # closed meanwhile
            for _ in range(100):
                secured.sendall(b"X: " + b"x" * 10_000 + b"\r\n")
        assert secured.recv(4096).startswith(b"HTTP/1.1 400")


@pytest.mark.threat("a client", "sends a request of 100 GB", now="413, before it is read")
def test_a_request_that_is_too_large_is_not_read(door: Door) -> None:
    context = door.of("north").for_client()
    with (
        socket.create_connection(("127.0.0.1", door.port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
        secured.sendall(head)
        assert secured.recv(4096).startswith(b"HTTP/1.1 413")


@pytest.mark.threat(
    "an outsider",
    "sends code by flwr run",
    now="no code runs",
    before="the processes of Flower took and ran apps",
)
@pytest.mark.slow  # the calls that it makes are refused in `CLOSED`
def test_flwr_run_is_refused(door: Door) -> None:
    app, home, proof = door.folder / "app", door.folder / "attacker", door.folder / "proof"
    (app / "evil").mkdir(parents=True)
    (app / "pyproject.toml").write_text(APP)
    (app / "evil" / "__init__.py").write_text("")
    (app / "evil" / "app.py").write_text(CODE.format(path=str(proof)))
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "x"\n\n[superlink.x]\naddress = "{door.address}"\n'
        f'root-certificates = "{door.authority}"\n'
    )
    flwr = shutil.which("flwr", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert flwr is not None
    environment = {**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run(
        [flwr, "run", str(app), "x"], env=environment, capture_output=True, timeout=120, check=False
    )
    assert done.returncode != 0
    time.sleep(2.0)
    assert not proof.exists()
