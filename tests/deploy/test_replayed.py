"""What a user does: deploy an experiment as it is by default, and play its trace again by `tailorfl run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.federating import deployed, experiment, same, server_state
from tailorfl.report.experiment import run_experiment
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.system import SystemConfig

MEASURED = ("set", "model", "client", "accuracy", "loss")


def played_again(config: ExperimentConfig, folder: Path) -> Any:
    """Run an experiment as a simulation of the trace that its deployment in `folder`/out has left."""
    trace = SystemConfig(trace=str(folder / "out"))
    again = config.model_copy(update={"system": trace, "checkpoint_every": 1})
    return run_experiment(again, folder / "again")


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_with_the_default_settings_a_replay_is_equal_to_the_bit(method: str, tmp_path: Path) -> None:
    config = experiment(method, engine={})
    result = deployed(config, tmp_path)
    again = played_again(config, tmp_path)
    same(server_state(again), server_state(result))
    frames = [RunStore.open(next(r.path.glob("*/seed-5")), readonly=True).clients() for r in (result, again)]
    rows = [
        frame[frame["set"].isin(["val", "local"])][list(MEASURED)].sort_values(list(MEASURED))
        for frame in frames
    ]
    assert len(rows[0])
    assert rows[0].to_numpy().tolist() == rows[1].to_numpy().tolist()
