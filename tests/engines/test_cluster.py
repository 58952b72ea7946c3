"""Pooled on a cluster of two nodes: the bits of one process, states that stay where they are, and lost workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from methods.small import simulation
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError, MissingExtraError


@pytest.mark.slow
def test_two_nodes() -> None:
    pytest.importorskip("ray", reason="needs ray (pip install 'tailorfl[cluster]')")
    program = Path(__file__).with_name("on_two_nodes.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert seen["addresses"] == ["127.0.0.1"]
    assert seen["nodes"] == 2
    assert len({name.split()[1] for name in seen["workers"]}) == 2, seen["workers"]
    assert seen["same"] == dict.fromkeys(
        ("fedavg", "ditto", "fedrep", "scaffold", "plgu_lf", "fedfomo", "ditto, 20 clients"), True
    )
    assert seen["ledger"]
    assert seen["resumed"] == [True, True]
    assert seen["error"][0] == "DivergenceError"
    assert seen["unchanged"]
    assert seen["went_on"]
    assert any("worker 1 of 4" in word for word in seen["words"])
    kind, message = seen["lost"]
    assert kind == "WorkerError"
    assert "no other worker is left" in message
    assert "--resume" in message
    assert seen["kept"]


def test_a_cluster_needs_workers() -> None:
    with pytest.raises(ConfigError, match=r"engine\.cluster=auto needs engine\.workers"):
        make_engine("auto", cluster="auto")
    with pytest.raises(ConfigError, match=r"engine\.gpus is for the workers of a cluster"):
        make_engine("auto", workers=2, gpus=1.0)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    sim = simulation("fedavg", "mlp", make_engine("sequential", workers=2, cluster="local"))
    with pytest.raises(MissingExtraError, match=r"pip install 'ray>=2.40'"):
        sim.step()
