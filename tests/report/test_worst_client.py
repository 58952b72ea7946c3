"""Where a tenth of the clients is a single one, it has a name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tailorfl
from tailorfl.data.own import from_tensors
from tailorfl.report.document import write_report


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_worst_client_is_named(task: str, tmp_path: Path) -> None:
    """The labels of west do not follow its features: nothing can be learned there, and elsewhere all."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 2)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    owners = np.repeat(["north", "west", "south"], 80)
    y[owners == "west"] = rng.integers(0, 2, 80)
    if task == "regression":
        y = 10 * np.where(owners == "west", rng.normal(size=240), x[:, 0])  # type: ignore[assignment]
    result = tailorfl.run(
        source=from_tensors(x, y, clients=owners, task=task),  # type: ignore[arg-type]
        model="logistic" if task == "classification" else "linear",
        methods=["local", "fedavg"],
        train={"lr": 0.5 if task == "classification" else 0.05},
        rounds=10,
        seeds=2,
        out=tmp_path / "run",
    )
    assert result.worst_clients == ["worst client of local: west", "worst client of fedavg: west"]
    titles = [column.title for column in result.columns]
    assert "worst client" in titles
    assert "worst 10 %" not in titles
    assert "worst client of local: west" in (tmp_path / "run" / "comparison.md").read_text()
    write_report(result)
    assert "worst client of fedavg: west" in (tmp_path / "run" / "report.html").read_text()


def test_of_many_clients_it_stays_a_tenth(tmp_path: Path) -> None:
    result = tailorfl.run(
        data={"clients": 11, "samples": 330},
        model="logistic",
        method="local",
        rounds=1,
        seeds=1,
        out=tmp_path / "run",
    )
    assert result.worst_clients == []
    assert "worst 10 %" in [column.title for column in result.columns]
