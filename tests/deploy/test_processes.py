"""A server and clients that are processes: the commands of the documentation, and the simulation's numbers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from deploy.federation import TRAIN, experiment
from deploy.running import Field
from deploy.test_processes_faults import ENOUGH, LONG, all_end, two
from imported import imported_modules
from tailorfl.deploy.keys import make_keys, revoke
from tailorfl.deploy.messages import VERSION
from tailorfl.deploy.policy import experiment_digest
from tailorfl.deploy.release_log import verified
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.runs.store import RunStore

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

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


def test_eight_methods_of_one_file(tmp_path: Path) -> None:
    data = {"name": "digits", "clients": 4, "samples": 400, "public": "digits", "public_samples": 40}
    config = experiment("fedavg", methods=EIGHT, data=data, train=TRAIN, eval={"every": 0})
    with Field(tmp_path, config) as field:
        are_played(field, 4)
        model = tmp_path / "state-0" / "deployed" / "fedavg" / "seed-5" / "model"
        assert (model / "model.safetensors").is_file(), sorted(p.name for p in model.iterdir())


def test_sixteen_clients(tmp_path: Path) -> None:
    data = {"name": "digits", "clients": 16, "samples": 800}
    deploy = {"round_seconds": 300.0, "wait_seconds": 600.0}
    config = experiment("fedavg", data=data, rounds=4, eval={"every": 0}, deploy=deploy)
    with Field(tmp_path, config) as field:
        are_played(field, 16)


NEEDLESS = {
    "pyarrow.lib", "sklearn", "scipy", "matplotlib", "jinja2", "optuna", "sympy", "torch._dynamo", "torch._inductor",
    "opacus", "transformers", "datasets", "ray",
}  # fmt: skip


def test_the_operator_accepts_an_experiment(tmp_path: Path) -> None:
    """Nothing leaves a client with a table before its operator agrees; it loads no library that it does not need."""
    data = {"name": "table", "normalise": "federated", "options": {"label": "ill"}}
    deploy = {"clients": 2, "wait_seconds": float(ENOUGH)}
    config = experiment("ditto", data=data, eval={"every": 0}, deploy=deploy)
    digest, rng = experiment_digest(config), np.random.default_rng(1)
    for name in ("north", "south"):
        values = {"age": rng.normal(60, 9, 60), "pulse": rng.normal(70, 9, 60), "ill": rng.integers(0, 2, 60)}
        pd.DataFrame(values).to_csv(tmp_path / f"{name}.csv", index=False)
    with Field(tmp_path, config) as field:
        server = field.server()
        south = field.client("south", "--data", "south.csv", "--experiment", "experiment.yaml")
        north = field.client("north", "--data", "north.csv", label="north-asks")
        north.hears(f"--accept {digest}", ENOUGH)
        assert "the server asks to join" in north.said
        assert "ditto (ditto), 2 rounds" in north.said
        assert {entry["kind"] for entry in verified(tmp_path / "state-north")} == {"failure"}
        for program in (north, south, server):
            program.signal(signal.SIGTERM)
            program.wait(ENOUGH)
        server = field.server(name="server-again")
        north, south = (
            field.client(
                *(name, "--data", f"{name}.csv", "--accept", digest),
                label=f"{name}-again",
                env={"PYTHONPROFILEIMPORTTIME": "1"},
            )
            for name in ("north", "south")
        )
        assert [program.wait(ENOUGH) for program in (server, north, south)] == [0, 0, 0]
        assert [field.fates(client) for client in (0, 1)] == [["accepted"] * 2] * 2
        audit = field.start("audit", "deploy", "audit", "state-north")
        assert audit.wait(ENOUGH) == 0
    kinds = [entry["kind"] for entry in verified(tmp_path / "state-north")]
    assert "train" in kinds
    assert all(f"│ {kind} " in audit.said for kind in kinds)
    imported = imported_modules(north.said)
    assert {"torch", "pandas", "flwr"} <= imported
    assert not imported & NEEDLESS


def test_a_client_with_a_new_key_joins(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["0", "2", "3"])
    deploy = {"clients": 3, "wait_seconds": float(ENOUGH), "min_replies": 3}
    config = experiment("ditto", rounds=6, train=LONG, eval={"every": 0}, deploy=deploy)

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
        server.hears("client '1' is connected", ENOUGH)
        clients[2] = field.client("3", secure=keys("3"), label="again")
        assert [p.wait(ENOUGH) for p in (server, *clients, newcomer)] == [0] * 5
        trace = field.trace()
        (round,) = [one.round for one in trace if one.joined == (("1",),)]
        assert trace[0].joined == (("0", "2", "3"),)
        assert round in (3, 4)  # the pause was in round 2, or in 3
        assert f"'1' joins with round {round}, as client 4" in server.said
        assert [one.asked == (0, 1, 2, 3) for one in trace] == [one.round >= round for one in trace]
        assert sorted(path.name for path in (tmp_path / "state-0" / "agreements").iterdir()) == before
        model = tmp_path / "state-1" / config.name / "ditto" / "seed-5" / "model"
        assert (model / "model.safetensors").is_file()
        field.is_replayed()


# -- who is turned away: it ends within seconds, with clear words, and disturbs nobody ---------------------------

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
        without = "the federation began without 'late': it has 2 clients, 0, 1"
        assert without in late.said
        assert without in server.said
        assert "a client '1' is connected already" in twice.said
        assert "a client '1' is connected already" in server.said
        all_end(field, server, *clients)
        assert all({a.fate for a in one.answers} == {"accepted"} for one in field.trace())


def test_who_has_no_key_or_that_of_another_one(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["127.0.0.1"], ["0", "1", "2"])
    make_keys(tmp_path / "others", ["127.0.0.1"], ["1"])

    def of(name: str, folder: str = "keys") -> tuple[str, str]:
        return "--keys", f"{folder}/clients/{name}"

    refused = [
        ("open", ("--insecure",), 1, "uses TLS and admits only clients with keys"),
        ("1", of("1", "others"), 1, "does not pass this client's check"),
        ("0", of("1"), 2, "calls itself '0', but its certificate in 'keys/clients/1' is that of '1'"),
        ("2", of("2"), 1, "turns this client away: the certificate of '2' is revoked"),
    ]
    with Field(tmp_path, two(2, 200)) as field:
        server = field.server(secure=("--keys", "keys/server"))
        server.hears("waiting for 2 clients", ENOUGH)
        revoke(tmp_path / "keys", "2")  # while the server runs
        for name, secure, code, words in refused:
            client = field.client(name, secure=secure, label=f"refused-{name}")
            assert client.wait(ENOUGH) == code
            assert words in client.said
        all_end(field, server, *(field.client(i, secure=of(str(i))) for i in (0, 1)))
        assert all({a.fate for a in one.answers} == {"accepted"} for one in field.trace())
