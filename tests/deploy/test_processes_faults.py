"""Faults of a federation of processes: one is killed, hangs or cannot be reached; a disk is full or lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.federation import experiment
from deploy.running import Field, Program, until
from tailorfl.deploy.flower_server import GONE_SECONDS
from tailorfl.deploy.keys import make_keys
from tailorfl.deploy.release_log import MISSING, verified
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


class Cable(socketserver.ThreadingTCPServer):
    """A link between a client and its server that can be cut and healed: it hands bytes on, both ways."""

    daemon_threads, is_whole = True, True

    def __init__(self, server: int) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.server, self.port, self.ends = server, self.server_address[1], list[socket.socket]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take new connections while it is whole."""
        return self.is_whole

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Carry what goes to and fro until one end is closed."""
        far = socket.create_connection(("127.0.0.1", self.server))
        self.ends += [request, far]
        threading.Thread(target=carry, args=(far, request), daemon=True).start()
        carry(request, far)

    def cut(self) -> None:
        """Break all connections, and take no new ones."""
        self.is_whole = False
        end_all(self.ends)

    def heal(self) -> None:
        """Take connections again."""
        self.is_whole = True


def end_all(ends: Iterable[socket.socket]) -> None:
    """End connections."""
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def carry(source: socket.socket, target: socket.socket) -> None:
    """Hand bytes on until one of two ends is closed, and close both then."""
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
    end_all((source, target))


@pytest.mark.threat("a fault", "the network is cut and healed", now="the client takes part again")
def test_a_link_is_cut_and_healed(tmp_path: Path) -> None:
    """Both are needed: the round pauses until the client is back."""
    with Field(tmp_path, two(4, 60, train=LONG)) as field, Cable(field.port) as cable:
        server, first = field.server("deploy.min_replies=2"), field.client(0)
        second = field.client(1, port=cable.port)
        field.round_done(1, ENOUGH)
        before = second.said.count("can be reached")
        cable.cut()
        server.hears("is paused: 2 answers are needed", ENOUGH)
        second.hears("cannot be reached", 60)
        cable.heal()
        second.hears("can be reached", 60, times=before + 1)
        all_end(field, server, first, second)
        assert [field.fates(client) for client in (0, 1)] == [["accepted"] * 4] * 2


# -- folders that are lost, and restored from copies as docs/operations.md says ---------------------------------


def restored(folder: Path, copy: Path) -> None:
    """Put a copy in the place of a folder that is lost."""
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)


@pytest.mark.threat(
    "a fault", "the server's folder is lost", now="a copy of the last round goes on; an older one is refused"
)
def test_the_folder_of_a_killed_server_is_restored(tmp_path: Path) -> None:
    """A copy of the last round goes on and ends with the numbers of the trace; an older one is refused by name."""
    with Field(tmp_path, two(7, 60)) as field:
        server, clients = field.server(), field.clients(2)
        for number, copy in ((1, "older"), (4, "newest")):
            field.round_done(number, ENOUGH)
            server.signal(signal.SIGSTOP)
            shutil.copytree(tmp_path / "out", tmp_path / copy)
            server.signal(signal.SIGCONT if copy == "older" else signal.SIGKILL)
        restored(tmp_path / "out", tmp_path / "older")
        refused = field.server("deploy.wait_seconds=2", name="server-older")
        assert refused.wait(ENOUGH) != 0
        assert "the server went back" in refused.said
        assert [client.code for client in clients] == [None, None]
        restored(tmp_path / "out", tmp_path / "newest")
        all_end(field, field.server(name="server-newest"), *clients)
        assert len(field.trace()) == 7


@pytest.mark.threat("a fault", "a client's folder is lost", now="a copy goes on")
def test_the_folder_of_a_client_is_restored(tmp_path: Path) -> None:
    """It was copied while the client was stopped, and says all that has left."""
    with Field(tmp_path, two(7, 60)) as field:
        server, (first, second) = field.server("deploy.min_replies=2"), field.clients(2)
        field.round_done(2, ENOUGH)
        server.signal(signal.SIGSTOP)
        second.signal(signal.SIGTERM)
        second.wait(ENOUGH)
        shutil.copytree(tmp_path / "state-1", tmp_path / "copy")
        restored(tmp_path / "state-1", tmp_path / "copy")
        again = field.client(1, label="client-1-again")
        again.hears("connects to", ENOUGH)
        server.signal(signal.SIGCONT)
        all_end(field, server, first, again)
        assert field.fates(1) == ["accepted"] * 7
        assert {entry["kind"] for entry in verified(tmp_path / "state-1")} & {MISSING, "train"} == {"train"}


# -- machines -----------------------------------------------------------------------------------------------


def may(*words: str) -> None:
    """Run a command of the system; skip the test where it is refused or missing."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]} here")
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        pytest.skip(f"'{' '.join(words)}' is not permitted here: {done.stderr.strip()}")


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A disk of 8 MiB at a folder."""
    place.mkdir()
    may("mount", "-t", "tmpfs", "-o", "size=8m", "tailorfl-test", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=20)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.threat(
    "a fault", "the disk of a client is full", now="it says so and takes part again when there is room"
)
def test_the_disk_of_a_client_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "state-1"), Field(tmp_path, two(6, 120)) as field:
        server, clients = field.server(), field.clients(2)
        field.round_done(1, ENOUGH)
        fill(tmp_path / "state-1" / "filler")
        clients[1].hears("No space left on device", ENOUGH)
        (tmp_path / "state-1" / "filler").unlink()
        all_end(field, server, *clients)
        fates = field.fates(1)
        hit = fates.index("refused")
        assert hit >= 1
        assert "accepted" in fates[hit + 1 :], fates
        reason = field.trace()[hit].answers[1].reason
        assert "cannot read or write its files" in reason
        assert set(field.fates(0)) == {"accepted"}


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them, 10.231.0.1 and 10.231.0.2, and nothing else."""
    names = [f"tailorfl-{os.getpid()}-{i}" for i in (1, 2)]
    try:
        for name in names:
            may("ip", "netns", "add", name)
        may(*f"ip link add cable netns {names[0]} type veth peer cable netns {names[1]}".split())
        for i, name in enumerate(names, start=1):
            may("ip", "-n", name, "addr", "add", f"10.231.0.{i}/24", "dev", "cable")
            may("ip", "-n", name, "link", "set", "cable", "up")
            may("ip", "-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=20)


def test_two_machines_on_a_network_of_their_own(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["10.231.0.1"], ["0", "1"])
    with two_machines() as (here, there), Field(tmp_path, two(2, 200)) as field:
        field.host = "10.231.0.1"
        field.before = {"server": ["ip", "netns", "exec", here], "client": ["ip", "netns", "exec", there]}
        clients = [field.client(i, secure=("--keys", f"keys/clients/{i}")) for i in (0, 1)]
        clients[0].hears("cannot be reached", ENOUGH)
        server = field.server(secure=("--keys", "keys/server"))
        all_end(field, server, *clients)
        assert all({a.fate for a in one.answers} == {"accepted"} for one in field.trace())


# -- the end ------------------------------------------------------------------------------------------------


def test_clients_are_killed_and_leave_or_come_back_at_the_end(tmp_path: Path) -> None:
    """Who leaves, or is taken off, is not waited for; who comes back after the last round gets its model."""
    data = {"name": "digits", "clients": 5, "samples": 400}
    deploy = {"wait_seconds": float(ENOUGH)}
    config = experiment("ditto", data=data, rounds=6, train=LONG, eval={"every": 0}, deploy=deploy)
    with Field(tmp_path, config) as field:
        server, clients = field.server(), field.clients(5)
        field.round_done(1, ENOUGH)
        for client in clients[1:4]:
            client.signal(signal.SIGKILL)
        server.hears("is paused: 3 answers are needed", ENOUGH)
        assert field.client(1, "--leave", label="client-1-leaves").wait(ENOUGH) == 0
        server.hears("1 left for good", ENOUGH)
        assert field.start("off", "deploy", "leave", "out", "2").wait(ENOUGH) == 0
        server.hears("waiting for '3' to fetch the last model", ENOUGH)
        models = [tmp_path / f"state-{i}" / config.name / field.jobs()[0].folder / "model" for i in range(5)]
        assert not models[3].exists()
        all_end(field, server, clients[0], clients[4], field.client(3, label="client-3-again"))
        assert len(field.trace()) == 6
        assert field.trace()[-1].asked == (0, 3, 4)
        assert [model.is_dir() for model in models] == [True, False, False, True, True]
