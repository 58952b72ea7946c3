"""Folders of a server and of a client that were lost, and are restored from copies as docs/operations.md says."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from deploy.running import Field
from deploy.test_processes_faults import ENOUGH, all_end, two
from tailorfl.deploy.release_log import MISSING, verified

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
        assert "the server has gone back" in refused.said
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
