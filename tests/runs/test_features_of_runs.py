"""Frozen layers that are computed once: what runs, estimates and benchmarks say of it, and models that leave a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tailorfl
from tailorfl.runs.build import make_federation
from tailorfl.runs.cost_estimate import estimate
from tailorfl.settings.loading import load

FROZEN: dict[str, Any] = {
    "data": {"name": "digits", "clients": 4, "samples": 120},
    "model": {"name": "mlp", "hidden": [256, 128], "trainable": "head"},
    "methods": ["ditto"],
    "train": {"batch_size": 8},
    "rounds": 2,
    "seeds": 1,
    "engine": {"name": "sequential", "features": "disk"},
}


def test_a_run_says_so_and_its_models_read_samples(tmp_path: Path) -> None:
    found = tailorfl.run(FROZEN, out=tmp_path / "on", progress=False)
    other = tailorfl.run(
        {**FROZEN, "engine": {"name": "sequential", "features": "off"}}, out=tmp_path / "off", progress=False
    )
    said = [
        json.loads(next(place.path.rglob("summary.json")).read_text())["features"] for place in (found, other)
    ]
    assert "computed once" in said[0]
    assert f"in a file in {tmp_path / 'on'}" in said[0]
    assert said[1] == "engine.features is off"
    for name in ("accuracy", "loss"):
        a, b = (one.clients[name].astype(float).to_numpy() for one in (found, other))
        assert a == pytest.approx(b, abs=1e-5, nan_ok=True)
    x = make_federation(load(FROZEN), 0).source.take(torch.arange(9))
    left, right = (one.model("0")(x) for one in (found, other))
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


def test_an_estimate_has_what_it_takes() -> None:
    with_it, without = (
        estimate(load({**FROZEN, "engine": {"name": "sequential", "features": place}}))
        for place in ("auto", "off")
    )
    (row,), (plain,) = with_it.methods.values(), without.methods.values()
    assert row["features_bytes"] == 120 * 128 * 4
    assert row["features_seconds"] > 0
    assert "features_bytes" not in plain
    assert with_it.memory_bytes == pytest.approx(without.memory_bytes + row["features_bytes"])
    assert row["gradients_per_round"] == plain["gradients_per_round"]  # which count what trains


@pytest.mark.slow
def test_bench_says_what_it_brings() -> None:
    found = tailorfl.bench({**FROZEN, "engine": "sequential"}, seconds=1e-6)
    assert "computed once for each sample" in found.features
    assert not tailorfl.bench({**FROZEN, "model": "logistic"}, seconds=1e-6).features
