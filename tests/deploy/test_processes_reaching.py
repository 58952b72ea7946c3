"""Whether a client can reach its server; and Flower's processes do not outlive the one that has started them."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.running import until
from tailorfl.deploy.flower.processes import Tls, free_port, refuse_taken
from tailorfl.deploy.flower.reaching import Reach, in_the_way
from tailorfl.deploy.keys import client_keys, make_keys, server_keys
from tailorfl.errors import ConfigError, RunError


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["north"])
    return tmp_path / "keys"


@pytest.fixture
def another(tmp_path: Path) -> Tls:
    make_keys(tmp_path / "others", ["127.0.0.1"], ["north"])
    return client_keys(tmp_path / "others" / "clients" / "north")


def listening(context: ssl.SSLContext | None) -> tuple[socket.socket, str]:
    """A server that answers every connection with the first line of HTTP, through TLS or plainly."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
                if context is not None:
                    connection = context.wrap_socket(connection, server_side=True)
                if connection.recv(4096).startswith(b"GET"):
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                connection.close()
            except ssl.SSLError:
                continue
            except OSError:
                if server.fileno() < 0:
                    return

    threading.Thread(target=serve, daemon=True).start()
    return server, f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def plain() -> Iterator[str]:
    server, where = listening(None)
    yield where
    server.close()


@pytest.fixture
def secured(keys: Path) -> Iterator[str]:
    tls, _ = server_keys(keys)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(str(tls.certificate), str(tls.key))
    server, where = listening(context)
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


def test_a_server_that_is_not_there_yet(keys: Path) -> None:
    port = free_port()
    said: list[str] = []
    reach = Reach(f"127.0.0.1:{port}", None, said.append)
    assert not reach.look()
    assert said == [
        f"the server at 127.0.0.1:{port} cannot be reached: Connection refused; it is tried until it can"
    ]
    server = socket.create_server(("127.0.0.1", port))

    def once() -> None:
        connection, _ = server.accept()
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

    threading.Thread(target=once, daemon=True).start()
    until(reach.look, 10, "the server")
    server.close()
    assert said[1:] == [f"the server at 127.0.0.1:{port} can be reached"]


def test_no_address() -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        in_the_way("example.org", None)


def test_a_port_that_is_taken_for_a_moment(plain: str) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    threading.Timer(0.3, server.close).start()
    refuse_taken("127.0.0.1", port, 5.0)
    with pytest.raises(RunError, match=r"cannot listen at .* choose another port"):
        refuse_taken("127.0.0.1", int(plain.rpartition(":")[2]), 0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_processes_end_with_the_one_that_has_started_them(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tailorfl.deploy.flower.processes import Process\n"
        f"home = Path({str(tmp_path)!r})\n"
        "print(Process('sleep', ['600'], home, home / 'log')._running.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.send_signal(signal.SIGKILL)
    until(lambda: not running(child), 10, "the end of the child")


def running(process: int) -> bool:
    """Whether a process is neither over nor a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
