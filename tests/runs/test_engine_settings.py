"""Engine settings of a run: workers, where states and features lie, and numbers of half the width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import tailorfl
from runs.small import StopAt, facts
from tailorfl.engines.devices import HOST, available
from tailorfl.runs.build import make_federation
from tailorfl.runs.cost_estimate import estimate
from tailorfl.settings.loading import load

SETTINGS: dict[str, Any] = {
    "methods": ["local", "ditto"],
    "seeds": 1,
    "rounds": 3,
    "data": {"clients": 6, "samples": 300},
    "fraction": 0.5,
    "checkpoint_every": 1,
}
FROZEN: dict[str, Any] = {
    "data": {"name": "digits", "clients": 4, "samples": 120},
    "model": {"name": "mlp", "hidden": [256, 128], "trainable": "head"},
    "methods": ["ditto"],
    "train": {"batch_size": 8},
    "rounds": 2,
    "seeds": 1,
}


def on(**engine: Any) -> dict[str, Any]:
    return {**SETTINGS, "engine": {"name": "vectorized", "chunk": 2, **engine}}


def test_results_do_not_depend_on_workers_nor_on_where_states_lie(tmp_path: Path) -> None:
    """Nor on the kill of a run that has workers."""
    wanted = tailorfl.run(on(), out=tmp_path / "plain").clients
    for name, engine in (("one", {"workers": 1}), ("disk", {"states": "disk"})):
        pd.testing.assert_frame_equal(tailorfl.run(on(**engine), out=tmp_path / name).clients, wanted)
    assert not [file for file in (tmp_path / "disk").rglob("*states*") if file.is_file()]
    with pytest.raises(KeyboardInterrupt):
        tailorfl.run(on(workers=2), out=tmp_path / "two", observer=StopAt("ditto, seed 0", 2))
    pd.testing.assert_frame_equal(tailorfl.run(out=tmp_path / "two", resume=True).clients, wanted)


def frozen(**changes: Any) -> dict[str, Any]:
    """Settings of a run with layers in front that need no training, and are computed once."""
    return {**FROZEN, "engine": {"name": "sequential", **changes}}


def test_a_run_says_that_frozen_layers_are_computed_once_and_its_models_read_samples(tmp_path: Path) -> None:
    found, other = (
        tailorfl.run(frozen(features=place), out=tmp_path / place, progress=False)
        for place in ("disk", "off")
    )
    said, unsaid = (facts(result.path / "ditto/seed-0/summary.json")["features"] for result in (found, other))
    assert "computed once" in said
    assert f"in a file in {tmp_path / 'disk'}" in said
    assert unsaid == "engine.features is off"
    for name in ("accuracy", "loss"):
        a, b = (result.clients[name].astype(float).to_numpy() for result in (found, other))
        assert a == pytest.approx(b, abs=1e-5, nan_ok=True)
    x = make_federation(load(FROZEN), 0).source.take(torch.arange(9))
    left, right = (result.model("0")(x) for result in (found, other))
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("a_quick_estimate")
def test_an_estimate_has_what_features_take() -> None:
    with_it, without = (estimate(load(frozen(features=place))) for place in ("auto", "off"))
    (row,), (plain,) = with_it.methods.values(), without.methods.values()
    assert row["features_bytes"] == 120 * 128 * 4
    assert row["features_seconds"] > 0
    assert "features_bytes" not in plain
    assert with_it.memory_bytes == pytest.approx(without.memory_bytes + row["features_bytes"])
    assert row["gradients_per_round"] == plain["gradients_per_round"]  # which count what trains


@pytest.mark.slow
def test_bench_says_what_features_bring() -> None:
    found = tailorfl.bench(frozen(), seconds=1e-6)
    assert "computed once for each sample" in found.features
    assert not tailorfl.bench({**FROZEN, "model": "logistic"}, seconds=1e-6).features


@pytest.mark.slow
@pytest.mark.skipif("bfloat16" not in available(HOST), reason="needs a processor that multiplies bfloat16")
def test_the_demo_is_as_accurate_in_bfloat16(tmp_path: Path) -> None:
    """Means over 20 clients after 20 rounds: some 360 test samples, of which a handful may fall otherwise."""
    wide, narrow = (
        tailorfl.run(
            "demo",
            rounds=20,
            seeds=1,
            engine={"name": "vectorized", "precision": precision},
            out=tmp_path / precision,
        ).table["mean"]
        for precision in ("float32", "bfloat16")
    )
    gaps = (narrow - wide).abs()
    assert len(gaps) == 6
    assert gaps.max() < 0.03, gaps
    assert narrow.min() > 0.7
