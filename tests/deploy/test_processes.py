"""A server and clients that are processes: the commands of the documentation, and the simulation's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.federating import TRAIN, experiment
from deploy.running import Field
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.store import RunStore

pytest.importorskip("flwr")

TWO: dict[str, Any] = {"name": "digits", "clients": 2, "samples": 400}
DYNAMIC = {"kind": "dynamic", "patience": 1, "tol": 0.5, "values": [0.5, 2.0]}
CLIENTS = {"name": "mlp", "hidden": [8], "larger": [{"name": "mlp", "hidden": [12]}]}
EIGHT: list[Any] = [
    "fedavg",
    "ditto",
    "fedrep",
    {"name": "perada", "distil": {"steps": 3}},
    {"name": "fedclup", "lr_rule": "deterministic", "smoothness": 5, "schedule": DYNAMIC},
    {"name": "perfed_ckt", "model": CLIENTS},
    "plgu_lf",
    "scaffold",
]


def are_recorded(field: Field, sim: Simulation, label: str) -> None:
    """Assert that the server's records have the metrics of the simulation's models, to the bit."""
    frame = RunStore.open(field.job_folder(label), readonly=True).clients()
    last = frame[frame["round"] == frame["round"].max()]
    rows = evaluate(sim, Protocol(("val", "local")))
    assert rows
    for row in rows:
        mine = last[
            (last["client"] == row["client"]) & (last["set"] == row["set"]) & (last["model"] == row["model"])
        ]
        assert mine.iloc[0]["accuracy"] == row["accuracy"], (label, row)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_terminals(tmp_path: Path) -> None:
    config = experiment("fedavg", data=TWO, eval={"every": 0})
    with Field(tmp_path, config) as field:
        server, clients = field.server(), field.clients(2)
        assert server.wait(240) == 0
        assert [client.wait(60) for client in clients] == [0, 0]
        are_recorded(field, field.is_replayed(), "fedavg")
        assert [field.fates(client) for client in (0, 1)] == [["accepted"] * 2] * 2
        model = tmp_path / "state-0" / "deployed" / "fedavg" / "seed-5" / "model"
        assert (model / "model.safetensors").is_file(), sorted(p.name for p in model.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_eight_methods_of_one_file(tmp_path: Path) -> None:
    data = {"name": "digits", "clients": 4, "samples": 400, "public": "digits", "public_samples": 40}
    config = experiment("fedavg", methods=EIGHT, data=data, train=TRAIN, eval={"every": 0})
    with Field(tmp_path, config) as field:
        server, clients = field.server(), field.clients(4)
        assert server.wait(900) == 0
        assert [client.wait(60) for client in clients] == [0] * 4
        for method in config.methods:
            are_recorded(field, field.is_replayed(method.label), method.label)
            assert all({a.fate for a in one.answers} == {"accepted"} for one in field.trace(method.label))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sixteen_clients(tmp_path: Path) -> None:
    data = {"name": "digits", "clients": 16, "samples": 800}
    deploy = {"round_seconds": 300.0, "wait_seconds": 600.0}
    config = experiment("fedavg", data=data, rounds=4, eval={"every": 0}, deploy=deploy)
    with Field(tmp_path, config) as field:
        server, clients = field.server(), field.clients(16)
        assert server.wait(800) == 0
        assert [client.wait(60) for client in clients] == [0] * 16
        field.is_replayed()
        assert all({a.fate for a in one.answers} == {"accepted"} for one in field.trace())
