"""What is in the way between a client and its server, in words."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable

from tailorfl.deploy.keys import Tls
from tailorfl.errors import ConfigError, RunError

SECONDS, REFUSAL_SECONDS = 5.0, 0.5
"""How long one look may take, and how long it is waited for a refusal."""
_ASKED = b"GET / HTTP/1.1\r\nHost: server\r\nConnection: close\r\n\r\n"
_REFUSED = ("CERTIFICATE", "UNKNOWN_CA", "DECRYPT_ERROR")
"""In the name of what TLS says where it does not take the other side's certificate."""


def address(text: str) -> tuple[str, int]:
    """Return (host, port). Raises ConfigError where it is no HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"an address is HOST:PORT, such as 127.0.0.1:8000, but is '{text}'")
    return host.strip("[]"), int(port)


def in_the_way(server: str, tls: Tls | None) -> str:
    """Return why a server cannot be reached now, "" where it can.

    Raises:
        RunError: it never will be as things stand: one side does not take the other's certificate, or one of them uses
            TLS and the other does not.
    """
    host, port = address(server)
    try:
        if tls is None:
            return _plain(host, port, server)
        ended = not _answer(host, port, tls.for_client())
        return "it ends the connection, as where it does not take this client's certificate" if ended else ""
    except ssl.SSLCertVerificationError as error:
        raise RunError(
            f"the server at {server} does not prove to be the one that this client's keys are for "
            f"({error.verify_message}); check the address, and that both sides have keys of one authority that still "
            "hold"
        ) from error
    except ssl.SSLError as error:
        if any(word in (error.reason or "") for word in _REFUSED):
            raise RunError(
                f"the server at {server} does not take this client's certificate ({_words(error)}); it needs one of "
                "the federation's authority that still holds (tailorfl deploy keys --renew)"
            ) from error
        if _speaks_plainly(host, port):
            raise RunError(
                f"the server at {server} uses no TLS, but this client has keys; start the server with --keys, or this "
                "client with --insecure"
            ) from error
        return f"the TLS connection fails: {error.reason or error}"
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def _words(error: ssl.SSLError) -> str:
    return (error.reason or "").lower().replace("_", " ").partition("alert ")[2] or str(error)


def _answer(host: str, port: int, context: ssl.SSLContext) -> bytes:
    """Return what a server says to a request; only then TLS has taken both sides' certificates."""
    with (
        socket.create_connection((host, port), timeout=SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        secured.settimeout(REFUSAL_SECONDS)
        with contextlib.suppress(TimeoutError):
            return secured.recv(5)  # a refusal of this side's certificate comes unasked
        secured.settimeout(SECONDS)
        secured.sendall(_ASKED)
        return secured.recv(5)


def _plain(host: str, port: int, server: str) -> str:
    if _speaks_plainly(host, port):
        return ""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        _answer(host, port, anybody)
    except ssl.SSLError as error:
        if not any(word in (error.reason or "") for word in _REFUSED):
            return "what listens there does not answer as a server of a federation"
    raise RunError(
        f"the server at {server} uses TLS and lets in only clients with keys; give this client's folder of tailorfl "
        "deploy keys with --keys"
    )


def _speaks_plainly(host: str, port: int) -> bool:
    """Whether HTTP is spoken without TLS. Raises OSError where nobody listens."""
    with socket.create_connection((host, port), timeout=SECONDS) as connection:
        try:
            connection.sendall(_ASKED)
            return connection.recv(5) == b"HTTP/"
        except ConnectionResetError:
            return False


class Reach:
    """Says when a server can no longer be reached, why, and when it can again.

    Args:
        server: HOST:PORT.
        tls: what secures the connection.
        notify: called with a sentence for the person who looks on.
    """

    def __init__(self, server: str, tls: Tls | None, notify: Callable[[str], None]) -> None:
        self._server, self._tls, self._notify = server, tls, notify
        self.trouble = ""
        """Why it could not be reached at the last try, "" where it could."""

    def failed(self, reason: str) -> None:
        """Note that a call has failed.

        Raises:
            RunError: all will as things stand, see `in_the_way`.
        """
        trouble = in_the_way(self._server, self._tls) or reason
        if trouble != self.trouble:
            self._notify(
                f"the server at {self._server} cannot be reached: {trouble}; it is tried until it can"
            )
        self.trouble = trouble

    def succeeded(self) -> None:
        """Note that a call was answered."""
        if self.trouble:
            self._notify(f"the server at {self._server} can be reached")
        self.trouble = ""
