"""Who is turned away from a federation of processes: it ends within seconds, with clear words, and disturbs nobody."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from deploy.running import Field
from deploy.test_processes_faults import ENOUGH, LONG, all_end, two
from tailorfl.deploy.client_state import ClientState
from tailorfl.deploy.codec import VERSION
from tailorfl.deploy.keys import make_keys, revoke

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ANOTHER_VERSION = """\
import importlib.metadata as metadata

true = metadata.version
metadata.version = lambda name: "0.0.1" if name == "tailorfl" else true(name)
"""


def test_who_comes_late_or_twice_or_with_another_version(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "sitecustomize.py").write_text(ANOTHER_VERSION)
    with Field(tmp_path, two(10, 200, train=LONG)) as field:
        path = f"{old}:{os.environ.get('PYTHONPATH', '')}"
        other = field.client("other", env={"PYTHONPATH": path})
        server = field.server()
        assert other.wait(ENOUGH) == 1
        wrong = f"the server has tailorfl {VERSION}, but client 'other' has 0.0.1"
        assert wrong in other.said
        assert f"a node is turned away: {wrong}" in server.said
        clients = field.clients(2)
        field.round_done(1, ENOUGH)
        server.signal(signal.SIGSTOP)
        late, twice = field.client("late"), field.client(1, "--state", "elsewhere", label="twice")
        for program in (late, twice):
            program.hears("connects to", ENOUGH)
        server.signal(signal.SIGCONT)
        assert [late.wait(ENOUGH), twice.wait(ENOUGH)] == [1, 1]
        without = "the federation began without 'late': it is of 2 clients, 0, 1"
        assert without in late.said
        assert without in server.said
        assert "a client '1' is there already" in twice.said
        assert "a client '1' is there already" in server.said
        all_end(field, server, *clients)
        assert all({a.fate for a in one.answers} == {"accepted"} for one in field.trace())


def test_a_client_that_keeps_another_job(tmp_path: Path) -> None:
    """Of two clients both are needed, so nothing begins without one of them."""
    config = two(2, 200)
    config = config.model_copy(update={"deploy": config.deploy.model_copy(update={"min_replies": 0})})
    with Field(tmp_path, config) as field:
        place = tmp_path / "state-1" / config.name / field.jobs()[0].folder
        held = ClientState(
            place, {"experiment": "deployed", "label": "ditto", "seed": 5, "digest": "of another rate"}
        )
        held.release()
        server = field.server()
        field.clients(2)
        assert server.wait(ENOUGH) == 1
        said = "too few clients take part in ditto, seed 5: '1': "
        assert said in server.said
        assert "holds private states of another job" in server.said
        assert "holds private states of another job" in field.programs[2].said


def test_keys(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["0", "1"])
    make_keys(tmp_path / "others", ["127.0.0.1"], ["1"])

    def of(folder: str, name: str) -> tuple[str, str]:
        return "--keys", f"{folder}/clients/{name}"

    with Field(tmp_path, two(2, 200)) as field:
        server = field.server(secure=("--keys", "keys/server"))
        server.hears("waiting for 2 clients", ENOUGH)
        open_ = field.client("open")
        assert open_.wait(ENOUGH) == 1
        assert "uses TLS and lets in only clients with keys" in open_.said
        stranger = field.client(1, secure=of("others", "1"), label="stranger")
        assert stranger.wait(ENOUGH) == 1
        assert "does not prove to be the one that this client's keys are for" in stranger.said
        claims = field.client(0, secure=of("keys", "1"), label="claims")
        assert claims.wait(ENOUGH) == 2
        assert "calls itself '0', but its certificate in 'keys/clients/1' is that of '1'" in claims.said
        make_keys(tmp_path / "keys", [], ["2"])  # while the server runs
        revoke(tmp_path / "keys", "2")
        revoked = field.client(2, secure=of("keys", "2"))
        assert revoked.wait(ENOUGH) == 1
        assert "turns this client away: the certificate of '2' is revoked" in revoked.said
        clients = [field.client(i, secure=of("keys", str(i))) for i in (0, 1)]
        all_end(field, server, *clients)
        assert all({a.fate for a in one.answers} == {"accepted"} for one in field.trace())


def test_keys_and_a_server_without(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["0"])
    with Field(tmp_path, two(2, 200)) as field:
        field.server().hears("waiting for 2 clients", ENOUGH)
        client = field.client(0, secure=("--keys", "keys/clients/0"))
        assert client.wait(ENOUGH) == 1
        assert "uses no TLS, but this client has keys" in client.said
