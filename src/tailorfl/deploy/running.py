"""The processes of `tailorfl server` and `tailorfl client`: their loops, and what they report.

A client says why it cannot reach its server. Both serve their health to monitoring at 127.0.0.1: /healthz and /metrics.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tailorfl.deploy.client_session import ClientSession
from tailorfl.deploy.flower_client import Connection, ForgottenError, ServerMessage, UnreachableError
from tailorfl.deploy.keys import Revoked, Tls, client_keys, server_keys
from tailorfl.deploy.messages import failure
from tailorfl.deploy.serving import host_experiment
from tailorfl.errors import ConfigError, RunError
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.one_round import RoundResult
from tailorfl.runs.job import Job, Observer, Several
from tailorfl.runs.process import raise_if_told
from tailorfl.settings.experiment import ExperimentConfig

Notify = Callable[[str], None]
LEAST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Shortest and longest pause between two checks for a letter, in seconds; it grows while none comes."""
PATIENCE = 20.0
"""The pause is the time since the last letter divided by this."""
SILENCE = 60.0
"""Seconds without a message after which a client notes once that it is waiting."""
AGAIN = 1.0
"""Seconds between two attempts to reach a server."""
LOOK_SECONDS, REFUSAL_SECONDS = 5.0, 0.5
"""Seconds that one attempt to reach a server may take, and seconds to wait for it to refuse this client."""
_ASKED = b"GET / HTTP/1.1\r\nHost: server\r\nConnection: close\r\n\r\n"
_REFUSED = ("CERTIFICATE", "UNKNOWN_CA", "DECRYPT_ERROR")
"""Parts of the names of TLS errors if the other side's certificate is not accepted."""
State = Callable[[], tuple[str, Mapping[str, float]]]
"""Returns the present problem ("" if there is none) and numbers by name; those ending in _total only grow."""


def run_server(
    config: ExperimentConfig,
    out: Path,
    listen: str,
    keys: Path | None,
    *,
    notify: Notify,
    observer: Observer | None = None,
    anywhere: bool = False,
    health: int | None = None,
) -> ExperimentResult:
    """Run an experiment with clients that connect to `listen`, and return its result.

    `keys` is the server's folder as `tailorfl deploy keys` writes it; None leaves the connection open to everybody who
    reaches it, which without `anywhere` are only programs of this machine. `health` is a port for monitoring.

    Raises:
        TailorflError: see the message; the same call continues the run.
    """
    from tailorfl.deploy.flower_server import Link  # a client's process does not need its libraries

    host, port = address(listen)
    largest = config.deploy.max_bytes
    if keys is not None:
        link = Link(host, port, server_keys(keys), Revoked(keys).why, largest)
    elif anywhere or _is_loopback(host):
        link = Link(host, port, None, largest=largest)
    else:
        raise ConfigError(
            f"without keys, anybody who reaches {listen} can join and read the traffic; listen at 127.0.0.1, give "
            "--keys, or add --anywhere"
        )
    notify(
        f"listening at {host}:{port} ({'open to everybody' if keys is None else 'TLS, clients by certificate'})"
    )
    rounds = Rounds()
    watching = rounds if observer is None else Several((observer, rounds))

    def state() -> tuple[str, dict[str, float]]:
        return "", {**link.numbers, "rounds_total": rounds.done}

    try:
        with served(health, state):
            return host_experiment(link, config, out, notify=notify, observer=watching)
    finally:
        link.close()


class Rounds(Observer):
    """Counts rounds."""

    done = 0

    def round_done(self, job: Job, done: RoundResult) -> None:
        """Count a round."""
        self.done += 1


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def run_client(
    member: ClientSession,
    server: str,
    keys: Path | None,
    *,
    notify: Notify,
    stay: bool = False,
    health: int | None = None,
) -> None:
    """Answer a server until it ends the session; with `stay` until this process is stopped.

    `keys` is the client's folder as `tailorfl deploy keys` writes it, `health` a port for monitoring.

    Raises:
        ConfigError: the keys are another client's.
        RunError: the server turns this client away, or both sides use different security (TLS, certificates).
    """
    tls = None if keys is None else client_keys(keys)
    name = member.data.name
    if tls is not None and tls.holder() != name:
        raise ConfigError(
            f"this client calls itself '{name}', but its certificate in '{keys}' is that of '{tls.holder()}'; give "
            f"--name {tls.holder()}, or the keys of '{name}'"
        )
    address(server)
    connection, reach = Connection(server, tls, member.policy.max_bytes), Reach(server, tls, notify)
    try:
        with served(health, lambda: (reach.trouble, connection.numbers)):
            _answer_all(connection, reach, member, notify, stay)
        if member.turned_away:
            raise RunError(f"the server at {server} turns this client away: {member.turned_away}")
        if without := member.without_model():
            raise RunError(without)
    finally:
        connection.close()
        member.close()


def _answer_all(
    connection: Connection, reach: Reach, member: ClientSession, notify: Notify, stay: bool
) -> None:
    question: ServerMessage | None = None
    answer, last, is_waiting = b"", time.monotonic(), False
    while question is not None or (not member.turned_away and (stay or not member.ended)):
        raise_if_told()
        try:
            if question is None:
                question = connection.receive()
                reach.succeeded()
                if question is None:
                    idle = time.monotonic() - last
                    if idle > SILENCE and not is_waiting:
                        notify(f"no message for {idle:.0f} s; the server may be waiting for other clients")
                        is_waiting = True
                    time.sleep(min(max(idle / PATIENCE, LEAST_PAUSE), LONGEST_PAUSE))
                    continue
                answer = _answer(member, question, notify)
            connection.send(question, answer)
            member.delivered()
            question, last, is_waiting = None, time.monotonic(), False
        except ForgottenError:  # a restarted server asks again, and gets the stored answer
            question = None
        except UnreachableError as error:
            if member.ended and not stay:  # nobody waits for the answer to the last message
                return
            reach.failed(str(error))
            time.sleep(AGAIN)


def _answer(member: ClientSession, question: ServerMessage, notify: Notify) -> bytes:
    if not question.problem:
        return member.answer(question.body)
    notify(f"refused: {question.problem}")
    return failure(question.problem, "message").encoded()


def address(text: str) -> tuple[str, int]:
    """Return (host, port). Raises ConfigError if the text is not HOST:PORT."""
    host, _, port = text.rpartition(":")
    is_bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or is_bare or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"'{text}' is not an address; use HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000")
    return host.strip("[]"), int(port)


def in_the_way(server: str, tls: Tls | None) -> str:
    """Return why a server cannot be reached now, "" if it can.

    Raises:
        RunError: trying again is useless: one side does not accept the other's certificate, or only one of them uses
            TLS.
    """
    host, port = address(server)
    try:
        if tls is None:
            return _plain_trouble(host, port, server)
        ended = not _first_bytes(host, port, tls.for_client())
        return (
            "it ends the connection, perhaps because it does not accept this client's certificate"
            if ended
            else ""
        )
    except ssl.SSLCertVerificationError as error:
        raise RunError(
            f"the certificate of the server at {server} does not pass this client's check ({error.verify_message}); "
            "check the address, and that both sides have valid keys of the same authority"
        ) from error
    except ssl.SSLError as error:
        if any(word in (error.reason or "") for word in _REFUSED):
            raise RunError(
                f"the server at {server} does not accept this client's certificate ({_words(error)}); it needs a valid "
                "one of the federation's authority (tailorfl deploy keys --renew)"
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


def _first_bytes(host: str, port: int, context: ssl.SSLContext) -> bytes:
    """Return a server's first bytes of an answer, which proves that both sides' certificates were accepted."""
    with (
        socket.create_connection((host, port), timeout=LOOK_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        secured.settimeout(REFUSAL_SECONDS)
        with suppress(TimeoutError):
            return secured.recv(5)  # a refusal of this side's certificate comes without a request
        secured.settimeout(LOOK_SECONDS)
        secured.sendall(_ASKED)
        return secured.recv(5)


def _plain_trouble(host: str, port: int, server: str) -> str:
    if _speaks_plainly(host, port):
        return ""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        _first_bytes(host, port, anybody)
    except ssl.SSLError as error:
        if not any(word in (error.reason or "") for word in _REFUSED):
            return "the program at this address does not answer like a federation's server"
    raise RunError(
        f"the server at {server} uses TLS and admits only clients with keys; give --keys with this client's folder "
        "from tailorfl deploy keys"
    )


def _speaks_plainly(host: str, port: int) -> bool:
    """Return whether the server speaks HTTP without TLS. Raises OSError if nobody listens."""
    with socket.create_connection((host, port), timeout=LOOK_SECONDS) as connection:
        try:
            connection.sendall(_ASKED)
            return connection.recv(5) == b"HTTP/"
        except ConnectionResetError:
            return False


class Reach:
    """Reports when and why a server can no longer be reached, and when it can again.

    Args:
        server: HOST:PORT.
        tls: the keys and certificates; None: an open connection.
        notify: called with a sentence for the operator.
    """

    def __init__(self, server: str, tls: Tls | None, notify: Notify) -> None:
        self._server, self._tls, self._notify = server, tls, notify
        self.trouble = ""
        """Why the server could not be reached at the last attempt, "" if it could."""

    def failed(self, reason: str) -> None:
        """Note that a call has failed.

        Raises:
            RunError: all further calls would fail too, see `in_the_way`.
        """
        trouble = in_the_way(self._server, self._tls) or reason
        if trouble != self.trouble:
            self._notify(
                f"the server at {self._server} cannot be reached: {trouble}; this client keeps trying"
            )
        self.trouble = trouble

    def succeeded(self) -> None:
        """Note that a call was answered."""
        if self.trouble:
            self._notify(f"the server at {self._server} can be reached")
        self.trouble = ""


@contextmanager
def served(port: int | None, state: State) -> Iterator[None]:
    """Serve the process's health at a local port within the block; None: not at all.

    GET /healthz returns status 200, or 503 and the problem; GET /metrics the numbers in Prometheus's format.

    Raises:
        RunError: the port is taken.
    """
    if port is None:
        yield
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            trouble, numbers = state()
            if self.path == "/healthz":
                text = json.dumps({"status": trouble or "ok"})
                self._answer(503 if trouble else 200, "application/json", text)
            elif self.path == "/metrics":
                self._answer(
                    200, "text/plain; version=0.0.4", exposition({"up": float(not trouble), **numbers})
                )
            else:
                self._answer(404, "text/plain", "there are /healthz and /metrics\n")

        def _answer(self, status: int, kind: str, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: monitoring calls every few seconds."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise RunError(f"cannot listen at 127.0.0.1:{port} (--health): {error.strerror}") from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def exposition(numbers: Mapping[str, float]) -> str:
    """Return numbers in Prometheus's format."""
    lines: list[str] = []
    for name, value in numbers.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE tailorfl_{name} {kind}", f"tailorfl_{name} {value:.17g}"]
    return "\n".join(lines) + "\n"
