"""A server and clients that are processes: the commands of the documentation, and the simulation's numbers."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from deploy.federation import TRAIN, experiment
from deploy.running import Field
from deploy.test_hostile_servers import of_table, write_table
from deploy.test_processes_faults import ENOUGH, LONG
from imported import imported_modules
from tailorfl.deploy.keys import make_keys
from tailorfl.deploy.policy import experiment_digest
from tailorfl.deploy.release_log import verified
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.runs.store import RunStore

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

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


def are_played(field: Field, count: int) -> None:
    """Run a server and so many clients to the end; assert that states and records are the simulation's, to the bit."""
    server, clients = field.server(), field.clients(count)
    assert server.wait(2 * ENOUGH) == 0
    assert [client.wait(60) for client in clients] == [0] * count
    for job in field.jobs():
        label = job.method.label
        sim = field.is_replayed(label)
        assert all({a.fate for a in one.answers} == {"accepted"} for one in field.trace(label))
        frame = RunStore.open(field.job_folder(label), readonly=True).clients()
        last = frame[frame["round"] == frame["round"].max()].to_dict("records")
        recorded = {(row["client"], row["set"], row["model"]): row["accuracy"] for row in last}
        rows = evaluate(sim, Protocol(("val", "local")))
        assert rows
        for row in rows:
            assert recorded[row["client"], row["set"], row["model"]] == row["accuracy"], (label, row)


def test_three_terminals(tmp_path: Path) -> None:
    with Field(tmp_path, experiment("fedavg", data=TWO, eval={"every": 0})) as field:
        are_played(field, 2)
        model = tmp_path / "state-0" / "deployed" / "fedavg" / "seed-5" / "model"
        assert (model / "model.safetensors").is_file(), sorted(p.name for p in model.iterdir())


def test_eight_methods_of_one_file(tmp_path: Path) -> None:
    data = {"name": "digits", "clients": 4, "samples": 400, "public": "digits", "public_samples": 40}
    config = experiment("fedavg", methods=EIGHT, data=data, train=TRAIN, eval={"every": 0})
    with Field(tmp_path, config) as field:
        are_played(field, 4)


def test_sixteen_clients(tmp_path: Path) -> None:
    data = {"name": "digits", "clients": 16, "samples": 800}
    deploy = {"round_seconds": 300.0, "wait_seconds": 600.0}
    with Field(
        tmp_path, experiment("fedavg", data=data, rounds=4, eval={"every": 0}, deploy=deploy)
    ) as field:
        are_played(field, 16)


def test_the_operator_accepts_an_experiment(tmp_path: Path) -> None:
    """Nothing leaves a client with a table of its own before its operator has agreed."""
    config = of_table(eval={"every": 0}, deploy={"clients": 2, "wait_seconds": float(ENOUGH)})
    digest = experiment_digest(config)
    for name in ("north", "south"):
        write_table(tmp_path / f"{name}.csv")
    with Field(tmp_path, config) as field:
        server = field.server()
        south = field.client("south", "--data", "south.csv", "--experiment", "experiment.yaml")
        north = field.client("north", "--data", "north.csv", label="north-asks")
        north.hears(f"--accept {digest}", ENOUGH)
        assert "the server asks to join" in north.said
        assert "fedavg (fedavg), 2 rounds" in north.said
        assert {entry["kind"] for entry in verified(tmp_path / "state-north")} == {"failure"}
        for program in (north, south, server):
            program.signal(15)
            program.wait(ENOUGH)
        server = field.server(name="server-again")
        clients = [
            field.client(name, "--data", f"{name}.csv", "--accept", digest, label=f"{name}-again")
            for name in ("north", "south")
        ]
        assert server.wait(ENOUGH) == 0
        assert [client.wait(ENOUGH) for client in clients] == [0, 0]
        audit = field.start("audit", "deploy", "audit", "state-north")
        assert audit.wait(ENOUGH) == 0
    kinds = [entry["kind"] for entry in verified(tmp_path / "state-north")]
    assert "train" in kinds
    assert all(f"│ {kind} " in audit.said for kind in kinds)


NEEDLESS = {
    "pyarrow.lib", "sklearn", "scipy", "matplotlib", "jinja2", "optuna", "sympy", "torch._dynamo", "torch._inductor",
    "opacus", "transformers", "datasets", "ray",
}  # fmt: skip


def test_a_client_with_a_table_of_numbers(tmp_path: Path) -> None:
    """Its process loads no library that its samples and its method do not need."""
    data = {"name": "table", "normalise": "federated", "options": {"label": "ill"}}
    config = experiment("ditto", data=data, deploy={"clients": 2, "wait_seconds": 120.0})
    rng = np.random.default_rng(1)
    for name in ("north", "south"):
        values = {"age": rng.normal(60, 9, 60), "pulse": rng.normal(70, 9, 60), "ill": rng.integers(0, 2, 60)}
        pd.DataFrame(values).to_csv(tmp_path / f"{name}.csv", index=False)
    accept = ("--accept", experiment_digest(config))
    with Field(tmp_path, config) as field:
        server = field.server()
        profiled = {"PYTHONPROFILEIMPORTTIME": "1"}
        north = field.client("north", "--data", "north.csv", *accept, env=profiled)
        south = field.client("south", "--data", "south.csv", *accept)
        assert server.wait(240) == 0
        assert [north.wait(60), south.wait(60)] == [0, 0]
        assert [field.fates(client) for client in (0, 1)] == [["accepted"] * 2] * 2
    imported = imported_modules(north.said)
    assert {"torch", "pandas", "flwr"} <= imported
    assert not imported & NEEDLESS


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_client_with_a_new_key_joins(method: str, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["0", "2", "3"])
    deploy = {"clients": 3, "wait_seconds": float(ENOUGH), "min_replies": 3}
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
