"""A client's process loads no library that its samples and its method do not need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from deploy.federating import experiment
from deploy.running import Field
from imported import imported_modules
from tailorfl.deploy.policy import experiment_digest

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NEEDLESS = {
    "pyarrow.lib", "sklearn", "scipy", "matplotlib", "jinja2", "optuna", "sympy", "torch._dynamo", "torch._inductor",
    "opacus", "transformers", "datasets", "ray",
}  # fmt: skip


def test_a_client_with_a_table_of_numbers(tmp_path: Path) -> None:
    data = {"name": "table", "normalise": "federated", "options": {"label": "ill"}}
    config = experiment(
        "ditto", data=data, deploy={"clients": 2, "round_seconds": 120.0, "wait_seconds": 120.0}
    )
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
