"""What a machine may do to a federation of processes: its disk is full; it is another one, on a network of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.running import Field
from deploy.test_processes_faults import ENOUGH, all_end, two
from tailorfl.deploy.keys import make_keys

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
        may(
            "ip",
            "link",
            "add",
            "cable",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "cable",
            "netns",
            names[1],
        )
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
