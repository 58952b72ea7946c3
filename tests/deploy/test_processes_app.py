"""The app that `tailorfl deploy init` writes, on a SuperLink and SuperNodes that somebody else has started."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.federating import experiment
from deploy.running import Field, until
from deploy.test_processes import TWO, are_recorded

pytest.importorskip("flwr")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_flwr_run_has_the_numbers_of_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tailorfl.deploy.flower.processes import Link, Node

    with Field(tmp_path, experiment("ditto", data=TWO, eval={"every": 0})) as field:
        init = field.start("init", "deploy", "init", "experiment.yaml", "-o", "federation")
        assert init.wait(60) == 0
        assert "flwr run federation NAME" in init.said
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        link = Link(tmp_path / "link", "127.0.0.1", field.port, None)
        nodes = []
        try:
            for name in ("0", "1"):
                given = {"name": name, "state": str(tmp_path / f"state-{name}")}
                nodes.append(Node(tmp_path / f"node-{name}", f"127.0.0.1:{field.port}", None, given))
                nodes[-1].keep_up()
            link.run(tmp_path / "federation", {"out": str(tmp_path / "out")})
            models = [tmp_path / f"state-{i}" / "deployed" / "ditto" / "seed-5" / "model" for i in (0, 1)]
            until(lambda: all(m.is_dir() for m in models) or link.ended, 300, "both clients' models")
        finally:
            for node in nodes:
                node.stop()
            link.stop()
        are_recorded(field, field.is_replayed(), "ditto")
        assert [field.fates(client) for client in (0, 1)] == [["accepted"] * 2] * 2
