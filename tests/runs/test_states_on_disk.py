"""`engine.states: disk` gives the numbers of `memory`, also when resumed, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from tailorfl.report.experiment import run_experiment
from tailorfl.settings.loading import load

SETTINGS = ["method=ditto", "seeds=1", "rounds=3", "data.clients=6", "fraction=0.5", "engine.name=vectorized"]


def test_disk_and_memory_agree(tmp_path: Path) -> None:
    found = {}
    for where in ("memory", "disk"):
        config = load(None, [*SETTINGS, f"engine.states={where}"])
        found[where] = run_experiment(config, tmp_path / where).clients
    pd.testing.assert_frame_equal(found["memory"], found["disk"])
    names = {p.name for p in (tmp_path / "disk").rglob("*") if p.is_file()}
    assert not any("states" in name for name in names), names
