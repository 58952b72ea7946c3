"""`engine.workers` and `engine.states`: the same experiment, also when it goes on with other ones."""

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


def test_results_do_not_depend_on_workers_nor_on_where_states_lie(tmp_path: Path) -> None:
    clients = {}
    for settings in ("workers=0", "workers=1", "workers=2", "states=disk"):
        config = load(None, [*SETTINGS, f"engine.{settings}", "engine.chunk=2"])
        clients[settings] = run_experiment(config, tmp_path / settings).clients
        pd.testing.assert_frame_equal(clients["workers=0"], clients[settings])
    assert not [file for file in (tmp_path / "states=disk").rglob("*states*") if file.is_file()]


@pytest.mark.slow
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
