"""What `tailorfl server` and `tailorfl client` do: one process a side, and what is said meanwhile."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from pathlib import Path

from tailorfl.deploy.client_session import ClientSession
from tailorfl.deploy.codec import failure
from tailorfl.deploy.flower_client import Connection, ForgottenError, ServerMessage, UnreachableError
from tailorfl.deploy.health import served
from tailorfl.deploy.keys import Revoked, client_keys, server_keys
from tailorfl.deploy.reaching import Reach, address
from tailorfl.deploy.serving import host_experiment
from tailorfl.errors import ConfigError, RunError
from tailorfl.report.result import ExperimentResult
from tailorfl.rounds.one_round import RoundResult
from tailorfl.runs.job import Job, Observer, Several
from tailorfl.runs.signals import raise_if_told
from tailorfl.settings.experiment import ExperimentConfig

Notify = Callable[[str], None]
LEAST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two looks for a letter: few while a job runs, more the longer none came."""
PATIENCE = 20.0
"""The pause is the time since the last letter divided by this."""
SILENCE = 60.0
"""After so many seconds without a message a client says once that it is waiting."""
AGAIN = 1.0
"""Seconds between two tries to reach a server."""


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
    reaches it, which without `anywhere` are programs of this machine. `health` is a port for those who watch over it.

    Raises:
        TailorflError: see the message; the same call goes on.
    """
    from tailorfl.deploy.flower_server import Link  # a client's process does without its libraries

    host, port = address(listen)
    largest = config.deploy.max_bytes
    if keys is not None:
        link = Link(host, port, server_keys(keys), Revoked(keys).why, largest)
    elif anywhere or _is_loopback(host):
        link = Link(host, port, None, largest=largest)
    else:
        raise ConfigError(
            f"without keys anybody who reaches {listen} may join, and reads along; listen at 127.0.0.1, give "
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
        """Count one."""
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
    """Answer a server until it says that there is nothing more; with `stay` until it is told to end.

    `keys` is the client's folder as `tailorfl deploy keys` writes it, `health` a port for those who watch over it.

    Raises:
        ConfigError: the keys are another client's.
        RunError: the server turns this client away, or what secures the connection differs on both sides.
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
                    time.sleep(_pause(idle))
                    continue
                answer = _answer(member, question, notify)
            connection.send(question, answer)
            question, last, is_waiting = None, time.monotonic(), False
        except ForgottenError:  # a server that was started again asks again, and gets the answer that is kept
            question = None
        except UnreachableError as error:
            if member.ended and not stay:  # nobody waits for what it says to the last message
                return
            reach.failed(str(error))
            time.sleep(AGAIN)


def _answer(member: ClientSession, question: ServerMessage, notify: Notify) -> bytes:
    if not question.problem:
        return member.answer(question.body)
    notify(f"refused: {question.problem}")
    return failure(question.problem, "message").encoded()


def _pause(idle: float) -> float:
    return min(max(idle / PATIENCE, LEAST_PAUSE), LONGEST_PAUSE)
