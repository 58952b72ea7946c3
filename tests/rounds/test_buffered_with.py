"""Buffered rounds together with other options of a run: robust rules, malicious clients, two architectures, workers,
states on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rounds.helpers import dumped
from tailorfl.report.experiment import run_experiment
from tailorfl.rounds.buffered import Buffered
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig

TWO = {"name": "logistic", "larger": [{"name": "mlp", "hidden": [6]}], "assign": "random"}
OPTIONS: dict[str, dict[str, Any]] = {
    "median": {"server": {"robust": "median"}},
    "Krum": {"server": {"robust": {"rule": "krum", "f": 1}}},
    "norm bound": {"server": {"robust": {"rule": "norm_bound", "bound": 0.1}}},
    "flipped signs": {"system": {"malicious": {"share": 0.34, "kind": "sign_flip"}}},
    "noise, median": {
        "system": {"malicious": {"share": 0.34, "kind": "noise"}},
        "server": {"robust": "median"},
    },
    "two architectures": {"model": TWO, "methods": ["local"]},
    "adam at the server": {"methods": [{"name": "fedavg", "server": {"kind": "adam", "lr": 0.05}}]},
}
SLOW_AND_QUICK = {"kind": "lognormal", "median": 200, "spread": 1.0}


def experiment(mode: str, of_mode: dict[str, Any], **changes: Any) -> ExperimentConfig:
    """Six clients; `of_mode` beside what the options say of it."""
    given = {
        "data": {"name": "digits", "clients": 6, "samples": 240},
        "model": "logistic",
        "methods": ["ditto"],
        "seeds": [3],
        "rounds": 5,
        "train": {"steps": 3, "batch_size": 8, "lr": 0.1},
        "engine": {"name": "sequential"},
        **changes,
    }
    given["system"] = {"mode": mode, **of_mode, **given.get("system", {})}
    return ExperimentConfig.model_validate(given)


def simulation(config: ExperimentConfig) -> Simulation:
    """The run of the first job."""
    return make_simulation(Job(config, config.methods[0], 3), make_federation(config, 3))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_equal_durations_are_synchronous_rounds(name: str) -> None:
    sim = simulation(experiment("buffered", {"buffer": 6, "concurrency": 6}, **OPTIONS[name]))
    plain = simulation(experiment("synchronous", {}, **OPTIONS[name]))
    assert isinstance(sim, Buffered)
    for _ in range(4):
        sim.step()
        plain.step()
    same(dumped(sim), dumped(plain))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_stop_in_mid_flight_changes_no_bit(name: str) -> None:
    config = experiment("buffered", {"buffer": 4, "speed": SLOW_AND_QUICK}, **OPTIONS[name])
    whole, first, rest = (simulation(config) for _ in range(3))
    ages = set[int]()
    for number in range(6):
        trace = whole.step().trace
        assert trace is not None
        ages |= {number - a.version for a in trace.answers if a.version is not None}
    for _ in range(3):
        first.step()
    rest.load(*first.dump())
    for _ in range(3):
        rest.step()
    same(dumped(whole), dumped(rest))
    assert max(ages) > 0, "nobody was stale"


@pytest.mark.parametrize("engine", [{"workers": 2}, {"states": "disk"}, {"chunk": 1}])
def test_numbers_do_not_depend_on_where_clients_are(engine: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for number, given in enumerate(({}, engine)):
        config = experiment(
            "buffered",
            {"buffer": 4, "speed": SLOW_AND_QUICK},
            engine={"name": "vectorized", **given},
            eval={"every": 1},
        )
        result = run_experiment(config, tmp_path / str(number))
        found.append(result.clients.drop(columns=["seconds"], errors="ignore"))
    columns = [c for c in found[0].columns if found[0][c].dtype.kind == "f"]
    assert columns
    torch.testing.assert_close(
        torch.tensor(found[0][columns].to_numpy()),
        torch.tensor(found[1][columns].to_numpy()),
        rtol=1e-5,
        atol=1e-6,
        equal_nan=True,
    )
