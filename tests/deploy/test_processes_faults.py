"""What happens to a federation of processes when one of them is killed, stops answering, or cannot be reached."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from deploy.federating import experiment
from deploy.running import Field, Program, until
from tailorfl.deploy.flower_server import GONE_SECONDS
from tailorfl.runs.checkpoints import rounds
from tailorfl.settings.experiment import ExperimentConfig

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENOUGH = 400
"""Seconds that any single thing may take on a busy machine."""
LONG = {"epochs": 10, "batch_size": 4, "lr": 0.01}
"""Training that takes most of a second, so that something may happen meanwhile."""
SAYS_ALL = ("--log-level", "debug")


def two(number: int, seconds: float, method: str = "ditto", **more: Any) -> ExperimentConfig:
    """Two clients whose private states matter, so many rounds, and seconds for each; one reply is enough."""
    data = {"name": "digits", "clients": 2, "samples": 400}
    deploy = {"round_seconds": seconds, "wait_seconds": float(ENOUGH), "min_replies": 1}
    return experiment(method, data=data, rounds=number, eval={"every": 0}, deploy=deploy, **more)


def all_end(field: Field, server: Program, *clients: Program) -> None:
    """Assert that everything ends well, and with the states of the simulation of what took part."""
    assert server.wait(ENOUGH) == 0
    assert [client.wait(ENOUGH) for client in clients] == [0] * len(clients)
    field.is_replayed()


@pytest.mark.threat(
    "a fault", "a client is killed while it trains", now="started again, it goes on, to the bit"
)
def test_a_client_is_killed_while_it_has_a_question(tmp_path: Path) -> None:
    with Field(tmp_path, two(6, 60, train=LONG)) as field:
        server, (first, second) = field.server(), field.clients(2, *SAYS_ALL)
        field.round_done(1, ENOUGH)
        second.hears("asked: train", ENOUGH, times=2)
        second.signal(signal.SIGKILL)
        server.signal(signal.SIGSTOP)  # no round passes while the client comes back
        again = field.client(1, label="client-1-again")
        again.hears("connects to", ENOUGH)
        server.signal(signal.SIGCONT)
        all_end(field, server, first, again)
        fates = field.fates(1)
        assert fates[0] == "accepted"
        assert "lost" in fates
        assert fates[-1] == "accepted"
        assert set(field.fates(0)) == {"accepted"}


@pytest.mark.threat(
    "a fault", "a client hangs and comes back", now="the round goes on without it, later ones with it"
)
def test_a_client_stops_answering_and_comes_back(tmp_path: Path) -> None:
    with Field(tmp_path, two(12, 200, train=LONG)) as field:
        server, (first, second) = field.server(), field.clients(2)
        field.round_done(1, ENOUGH)
        second.signal(signal.SIGSTOP)
        until(lambda: "lost" in field.fates(1), ENOUGH, "a round without the client")
        second.signal(signal.SIGCONT)
        late = len(field.trace())
        all_end(field, server, first, second)
        fates = field.fates(1)
        assert "accepted" in fates[late:], fates
        assert set(field.fates(0)) == {"accepted"}
        (waited,) = (r.seconds for r in field.trace() if r.answers[1].fate == "lost")
        assert waited is not None
        assert waited < 2 * GONE_SECONDS


@pytest.mark.threat("a fault", "the server is killed", now="the same command goes on; clients wait for it")
def test_the_server_is_killed_and_started_again(tmp_path: Path) -> None:
    with Field(tmp_path, two(4, 120)) as field:
        server, clients = field.server(), field.clients(2)
        field.round_done(2, ENOUGH)
        server.signal(signal.SIGKILL)
        kept = rounds(field.job_folder())[-1]  # what is noted of a round may be on disk before its states are
        done = [one.line() for one in field.trace()][:kept]
        assert kept >= 1
        for client in clients:
            client.hears("cannot be reached", ENOUGH)
        again = field.server(name="server-again")
        all_end(field, again, *clients)
        assert [one.line() for one in field.trace()][: len(done)] == done
        assert len(field.trace()) == 4
        assert all(client.said.count("connects to") == 1 for client in clients)


class Cable:
    """A link between a client and its server that can be cut and healed: it hands bytes on, both ways."""

    def __init__(self, server: int) -> None:
        self._server, self._whole, self._ends = server, True, list[socket.socket]()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections, and take no new ones."""
        self._whole = False
        for end in self._ends:
            end.close()

    def heal(self) -> None:
        """Take connections again."""
        self._whole = True

    def close(self) -> None:
        """End it."""
        self.cut()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
                if not self._whole:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._server))
            except OSError:
                if self._listening.fileno() < 0:
                    return
                near.close()
                continue
            self._ends += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while self._whole and (data := one.recv(2**16)):
                other.sendall(data)
        except OSError:
            pass
        for end in (one, other):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


@pytest.mark.threat("a fault", "the network is cut and healed", now="the client takes part again")
def test_a_link_is_cut_and_healed(tmp_path: Path) -> None:
    with Field(tmp_path, two(20, 60, train=LONG)) as field:
        cable = Cable(field.port)
        try:
            server, first, second = field.server(), field.client(0), field.client(1, port=cable.port)
            field.round_done(1, ENOUGH)
            cable.cut()
            missed = {"late", "lost", "unavailable"}
            until(lambda: bool(missed & set(field.fates(1))), ENOUGH, "a round without the client")
            second.hears("cannot be reached", 60)
            server.signal(signal.SIGSTOP)
            cable.heal()
            second.hears("can be reached", 60)
            server.signal(signal.SIGCONT)
            all_end(field, server, first, second)
            assert "accepted" in field.fates(1)[2:], field.fates(1)
            assert set(field.fates(0)) == {"accepted"}
        finally:
            cable.close()
