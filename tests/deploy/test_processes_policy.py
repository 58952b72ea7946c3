"""A client of a real federation with a table of its own: nothing leaves it before its operator has agreed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.running import Field
from deploy.test_hostile_servers import of_table, write_table
from tailorfl.deploy.policy import experiment_digest
from tailorfl.deploy.release_log import verified

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ENOUGH = 400


def test_the_operator_accepts_an_experiment(tmp_path: Path) -> None:
    deploy = {"clients": 2, "round_seconds": 120.0, "wait_seconds": float(ENOUGH)}
    config = of_table(eval={"every": 0}).model_copy(
        update={"deploy": of_table().deploy.model_copy(update=deploy)}
    )
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
    audit = [sys.executable, "-m", "tailorfl", "deploy", "audit", "state-north"]
    said = subprocess.run(audit, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True).stdout
    kinds = [entry["kind"] for entry in verified(tmp_path / "state-north")]
    assert kinds[-5:] == ["describe", "summarise", "setup", "train", "train"] or "train" in kinds
    assert all(f"  {kind}  " in said or f"  {kind} " in said for kind in kinds)
