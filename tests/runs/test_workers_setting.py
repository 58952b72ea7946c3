"""`engine.workers`: the same experiment whatever their number, also when it goes on with another one."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tailorfl.errors import ConfigError
from tailorfl.report.experiment import run_experiment
from tailorfl.runs.build import check
from tailorfl.runs.store import RunStore
from tailorfl.settings.loading import load

SETTINGS = [
    "methods=[local,ditto]",
    "seeds=1",
    "rounds=3",
    "data.clients=6",
    "fraction=0.5",
    "engine.name=vectorized",
]


def test_results_do_not_depend_on_their_number(tmp_path: Path) -> None:
    found = {}
    for number in (0, 1, 2):
        config = load(None, [*SETTINGS, f"engine.workers={number}", "engine.chunk=2"])
        found[number] = run_experiment(config, tmp_path / str(number)).clients
    pd.testing.assert_frame_equal(found[0], found[1])
    pd.testing.assert_frame_equal(found[0], found[2])


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*SETTINGS, "engine.workers=2", "engine.chunk=2", "checkpoint_every=1"]
    whole = run_experiment(load(None, settings), tmp_path / "whole").clients
    append, count = RunStore.append_round, [0]

    def interrupted(store: RunStore, record: object) -> None:
        count[0] += 1
        if count[0] == 5:
            raise KeyboardInterrupt
        append(store, record)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "append_round", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_experiment(load(None, settings), tmp_path / "out")
    resumed = run_experiment(load(None, settings), tmp_path / "out", way="resume").clients
    pd.testing.assert_frame_equal(whole, resumed)


def test_a_cluster_without_workers_is_found_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"engine\.cluster=auto needs engine\.workers"):
        check(load(None, [*SETTINGS, "engine.cluster=auto"]))
