"""A client with a newly made key joins a federation of processes that has begun, and gets its model."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from deploy.federating import experiment
from deploy.running import Field
from deploy.test_processes_faults import ENOUGH, LONG
from tailorfl.deploy.keys import make_keys

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_client_with_a_new_key_joins(method: str, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["0", "2", "3"])
    deploy = {"clients": 3, "round_seconds": 60.0, "wait_seconds": float(ENOUGH), "min_replies": 3}
    config = experiment(method, rounds=6, train=LONG, eval={"every": 0}, deploy=deploy)

    def keys(name: str) -> tuple[str, str]:
        return "--keys", f"keys/clients/{name}"

    with Field(tmp_path, config) as field:
        server = field.server(secure=("--keys", "keys/server"))
        clients = [field.client(name, secure=keys(name)) for name in ("0", "2", "3")]
        field.round_done(1, ENOUGH)
        clients[2].signal(signal.SIGKILL)
        server.hears("is paused: 3 answers are needed", ENOUGH)
        # Meanwhile, without a restart of the server: a key is made, and only then the client may join.
        assert field.start("keys", "deploy", "keys", "keys", "--clients", "1").wait(ENOUGH) == 0
        early = field.client("1", secure=keys("1"), label="early")
        assert early.wait(ENOUGH) == 1
        assert "the federation began without '1'" in early.said
        assert field.start("join", "deploy", "join", "out", "1").wait(ENOUGH) == 0
        before = sorted(path.name for path in (tmp_path / "state-0" / "agreements").iterdir())
        newcomer = field.client("1", secure=keys("1"))
        server.hears("client '1' is there", ENOUGH)
        clients[2] = field.client("3", secure=keys("3"), label="again")
        assert [p.wait(ENOUGH) for p in (server, *clients, newcomer)] == [0] * 5
        trace = field.trace()
        (round,) = [one.round for one in trace if one.joined == (("1",),)]
        assert trace[0].joined == (("0", "2", "3"),)
        assert round in (3, 4)  # the pause was in round 2, or in 3
        assert f"'1' joins with round {round}, as client 4" in server.said
        assert [one.asked == (0, 1, 2, 3) for one in trace] == [one.round >= round for one in trace]
        assert sorted(path.name for path in (tmp_path / "state-0" / "agreements").iterdir()) == before
        model = tmp_path / "state-1" / config.name / method / "seed-5" / "model"
        assert (model / "model.safetensors").is_file()
        field.is_replayed()
