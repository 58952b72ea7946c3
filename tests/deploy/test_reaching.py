"""What is in the way between a client and its server."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.running import free_port
from tailorfl.deploy.keys import Tls, client_keys, make_keys, server_keys
from tailorfl.deploy.reaching import Reach, in_the_way
from tailorfl.errors import ConfigError, RunError


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["north"])
    return tmp_path / "keys"


@pytest.fixture
def another(tmp_path: Path) -> Tls:
    make_keys(tmp_path / "others", ["127.0.0.1"], ["north"])
    return client_keys(tmp_path / "others" / "clients" / "north")


def answer(connection: socket.socket, context: ssl.SSLContext | None) -> None:
    """Answer one connection as HTTP does, and read all that comes: what is left would take a last alert along."""
    plain = connection
    if context is not None:
        plain = socket.socket(fileno=os.dup(connection.fileno()))
        try:
            connection = context.wrap_socket(connection, server_side=True)
        except ssl.SSLError:
            plain.settimeout(0.5)
            while plain.recv(4096):
                pass
            return
    if connection.recv(4096).startswith(b"GET"):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    connection.close()


def listening(context: ssl.SSLContext | None) -> tuple[socket.socket, str]:
    """A server that answers every connection with the first line of HTTP, through TLS or plainly."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                answer(connection, context)

    threading.Thread(target=serve, daemon=True).start()
    return server, f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def plain() -> Iterator[str]:
    server, where = listening(None)
    yield where
    server.close()


@pytest.fixture
def secured(keys: Path) -> Iterator[str]:
    server, where = listening(server_keys(keys).for_server())
    yield where
    server.close()


def test_both_sides_agree(plain: str, secured: str, keys: Path) -> None:
    assert in_the_way(plain, None) == ""
    assert in_the_way(secured, client_keys(keys / "clients" / "north")) == ""


def test_one_side_has_keys(plain: str, secured: str, keys: Path) -> None:
    with pytest.raises(RunError, match=f"{secured} uses TLS .* with --keys"):
        in_the_way(secured, None)
    with pytest.raises(RunError, match=f"{plain} uses no TLS, but this client has keys"):
        in_the_way(plain, client_keys(keys / "clients" / "north"))


def test_another_authority(secured: str, another: Tls) -> None:
    with pytest.raises(RunError, match="does not prove to be the one"):
        in_the_way(secured, another)


def test_a_client_whose_certificate_is_not_taken(secured: str, keys: Path, tmp_path: Path) -> None:
    make_keys(keys, [], ["old"], days=0)
    old = keys / "clients" / "old"
    with pytest.raises(RunError, match=r"does not take this client's certificate \(certificate expired\)"):
        in_the_way(secured, Tls(old / "authority.crt", old / "client.crt", old / "client.key"))
    make_keys(tmp_path / "others", ["127.0.0.1"], ["north"])
    theirs = tmp_path / "others" / "clients" / "north"
    mixed = Tls(keys / "clients" / "north" / "authority.crt", theirs / "client.crt", theirs / "client.key")
    with pytest.raises(RunError, match="does not take this client's certificate"):
        in_the_way(secured, mixed)


def test_a_server_that_is_not_there_yet(keys: Path) -> None:
    port = free_port()
    said: list[str] = []
    reach = Reach(f"127.0.0.1:{port}", None, said.append)
    for _ in range(2):
        reach.failed("the call has failed")
    assert said == [
        f"the server at 127.0.0.1:{port} cannot be reached: Connection refused; it is tried until it can"
    ]
    for _ in range(2):
        reach.succeeded()
    assert said[1:] == [f"the server at 127.0.0.1:{port} can be reached"]


def test_no_address() -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        in_the_way("example.org", None)
