"""Whether a client can reach its server, and what is in the way; Flower itself tries on in silence."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable

from tailorfl.deploy.flower.processes import Tls
from tailorfl.errors import ConfigError, RunError

SECONDS = 5.0
"""How long one look may take."""
BETWEEN = 10.0
"""Seconds between two looks."""


def address(given: str) -> tuple[str, int]:
    """Returns (host, port). Raises ConfigError where it is no HOST:PORT."""
    host, _, port = given.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"an address is HOST:PORT, such as 127.0.0.1:8000, but is '{given}'")
    return host.strip("[]"), int(port)


def in_the_way(server: str, tls: Tls | None) -> str:
    """Returns why a server cannot be reached now, "" where it can.

    Raises:
        RunError: it never will be as things stand: it has another authority's certificate or one for another name, or
            one side uses TLS and the other does not.
    """
    host, port = address(server)
    try:
        if tls is None:
            return _plain(host, port, server)
        context = ssl.create_default_context(cafile=str(tls.authority))
        _shaken(host, port, context)
        return ""
    except ssl.SSLCertVerificationError as error:
        raise RunError(
            f"the server at {server} does not prove to be the one that this client's keys are for "
            f"({error.verify_message}); check the address, and that both sides have keys of one authority that still "
            "hold"
        ) from error
    except ssl.SSLError as error:
        if _speaks_plainly(host, port):
            raise RunError(
                f"the server at {server} uses no TLS, but this client has keys; start the server with --keys, or this "
                "client with --insecure"
            ) from error
        return f"the TLS connection fails: {error.reason or error}"
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def _shaken(host: str, port: int, context: ssl.SSLContext) -> None:
    with (
        socket.create_connection((host, port), timeout=SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host),
    ):
        pass


def _plain(host: str, port: int, server: str) -> str:
    if _speaks_plainly(host, port):
        return ""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        _shaken(host, port, anybody)
    except ssl.SSLError:
        return "what listens there does not answer as a server of a federation"
    raise RunError(
        f"the server at {server} uses TLS and lets in only clients with keys; give this client's folder of tailorfl "
        "deploy keys with --keys"
    )


def _speaks_plainly(host: str, port: int) -> bool:
    """Whether HTTP is spoken without TLS. Raises OSError where nobody listens."""
    with socket.create_connection((host, port), timeout=SECONDS) as connection:
        try:
            connection.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            return connection.recv(5) == b"HTTP/"
        except ConnectionResetError:
            return False


class Reach:
    """Looks now and then whether the server can be reached, and says when that has changed.

    Args:
        server: HOST:PORT.
        tls: what secures the connection.
        told: what is called with a sentence for the person who looks on.
    """

    def __init__(self, server: str, tls: Tls | None, told: Callable[[str], None]) -> None:
        self._server, self._tls, self._told = server, tls, told
        self._next = 0.0
        self.trouble: str | None = None
        """Why it could not be reached at the last look, "" where it could; None before the first look."""

    def look(self) -> bool:
        """Returns whether the server could be reached at the last look, which may be this one.

        Raises:
            RunError: it never will be, see `in_the_way`.
        """
        if time.monotonic() >= self._next:
            found = in_the_way(self._server, self._tls)
            self._next = time.monotonic() + (BETWEEN if not found else 1.0)
            if found and found != self.trouble:
                self._told(
                    f"the server at {self._server} cannot be reached: {found}; it is tried until it can"
                )
            elif not found and self.trouble:
                self._told(f"the server at {self._server} can be reached")
            self.trouble = found
        return not self.trouble
