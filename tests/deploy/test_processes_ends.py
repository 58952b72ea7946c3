"""Processes at the end of a federation: who is away gets its model, who leaves is not waited for."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from deploy.federation import experiment
from deploy.running import Field
from deploy.test_processes_faults import ENOUGH, LONG
from tailorfl.settings.experiment import ExperimentConfig

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def three(rounds: int, wait: float, **more: Any) -> ExperimentConfig:
    """Three clients, of whom two are enough for a round."""
    data = {"name": "digits", "clients": 3, "samples": 300}
    return experiment(
        "ditto", data=data, rounds=rounds, eval={"every": 0}, deploy={"wait_seconds": wait}, **more
    )


def model_of(field: Field, client: int) -> Path:
    """Return where a client's model lies."""
    return field.folder / f"state-{client}" / field.config.name / field.jobs()[0].folder / "model"


def test_a_client_that_is_killed_near_the_end_gets_its_model_when_it_comes_back(tmp_path: Path) -> None:
    with Field(tmp_path, three(6, float(ENOUGH), train=LONG)) as field:
        server, clients = field.server(), field.clients(3)
        field.round_done(4, ENOUGH)
        clients[1].signal(signal.SIGKILL)
        server.hears("waiting for '1' to fetch the last model", ENOUGH)
        assert not model_of(field, 1).exists()
        again = field.client(1, label="client-1-again")
        assert [p.wait(ENOUGH) for p in (server, clients[0], again, clients[2])] == [0] * 4
        assert all(model_of(field, client).is_dir() for client in range(3))
        field.is_replayed()


def test_a_finished_federation_hands_out_the_model_that_is_missing(tmp_path: Path) -> None:
    with Field(tmp_path, three(6, 4.0, train=LONG)) as field:
        server, clients = field.server(), field.clients(3)
        field.round_done(4, ENOUGH)
        clients[1].signal(signal.SIGKILL)
        assert [p.wait(ENOUGH) for p in (server, clients[0], clients[2])] == [0] * 3
        assert "'1' did not come for the last model within 4 s" in server.said
        late = field.client(1, label="client-1-again")
        late.hears("cannot be reached", ENOUGH)
        again = field.server(name="server-again")
        assert [again.wait(ENOUGH), late.wait(ENOUGH)] == [0, 0]
        assert model_of(field, 1).is_dir()
        field.is_replayed()


def test_a_client_leaves_and_an_operator_takes_another_one_off(tmp_path: Path) -> None:
    with Field(tmp_path, three(12, float(ENOUGH), train=LONG)) as field:
        server, clients = field.server(), field.clients(3)
        field.round_done(1, ENOUGH)
        for client in clients[1:]:
            client.signal(signal.SIGKILL)
        server.hears("is paused: 2 answers are needed", ENOUGH)
        assert field.client(1, "--leave", label="client-1-leaves").wait(ENOUGH) == 0
        server.hears("1 left for good", ENOUGH)
        assert field.start("off", "deploy", "leave", "out", "2").wait(ENOUGH) == 0
        assert [server.wait(ENOUGH), clients[0].wait(ENOUGH)] == [0, 0]
        trace = field.trace()
        assert len(trace) == 12
        assert trace[-1].asked == (0,)
        assert not model_of(field, 1).exists()
        field.is_replayed()
