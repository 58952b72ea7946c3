"""Interrupted runs go on exactly, in memory, through files, and with states on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from methods.settings import NAMES, make, one_of
from methods.small import assert_same, everything, personal, simulation
from rounds.helpers import stepped
from tailorfl.engines.auto import Auto
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import checkpoints

SETTINGS: dict[str, Any] = {"fraction": 0.4, "seed": 2}
IN_TURN = [(name, ("sequential", "vectorized")[k % 2]) for k, name in enumerate(NAMES)]
"""One engine a method: neither knows what is kept between rounds, and where it lies."""


def assert_equal_runs(a: Simulation, b: Simulation) -> None:
    assert_same(everything(a), everything(b))
    assert_same(personal(a), personal(b))
    assert (a.round, a.traffic, a.states.clients) == (b.round, b.traffic, b.states.clients)
    assert (a.gradients, a.turns) == (b.gradients, b.turns)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "adam", "lr": 0.1, "momentum": 0.9},
        {"kind": "sgd", "lr": 0.5, "momentum": 0.9},
        {"kind": "yogi", "lr": 0.1, "initial": 1e-6},
        {"kind": "adagrad", "lr": 0.1},
    ],
)
def test_server_optimizers_resume_with_their_moments(options: dict[str, Any], tmp_path: Path) -> None:
    method = make("fedavg", server=options)
    whole, first, second = (simulation(method, rounds=r, **SETTINGS) for r in (5, 2, 0))
    checkpoints.save(tmp_path, 2, *first.dump())
    loaded = checkpoints.load_latest(tmp_path)
    assert loaded is not None
    second.load(*loaded[1:])
    assert_equal_runs(whole, stepped(second, 3))


def test_a_resumed_run_keeps_the_engine_that_was_chosen() -> None:
    for choice in ("sequential", "vectorized"):
        first = simulation("ditto", engine=Auto(choice=choice), rounds=1)
        second = simulation("ditto", engine=Auto())
        second.load(*first.dump())
        assert second.engine.name == choice


@pytest.mark.parametrize("name", one_of(3, NAMES, 2))
def test_states_on_disk_are_states_in_memory(name: str, tmp_path: Path) -> None:
    engine = dict(IN_TURN)[name]
    memory = simulation(name, "batch_norm", engine, rounds=2, **SETTINGS)
    disk = simulation(name, "batch_norm", engine, rounds=2, state_folder=tmp_path / "states", **SETTINGS)
    assert_equal_runs(memory, disk)
    if memory.states.dump()["clients"].numel():
        assert str(tmp_path / "states") in Path("/proc/self/maps").read_text()
    resumed = simulation(name, "batch_norm", engine, state_folder=tmp_path / "others", **SETTINGS)
    resumed.load(*disk.dump())
    assert_equal_runs(stepped(memory, 1), stepped(resumed, 1))


def test_a_resumed_run_may_use_the_same_folder(tmp_path: Path) -> None:
    """As after a crash: the files are there, and perhaps a round ahead of the checkpoint."""
    whole = simulation("ditto", rounds=4, **SETTINGS)
    crashed = simulation("ditto", rounds=2, state_folder=tmp_path, **SETTINGS)
    saved = {p: t.clone() for p, t in crashed.dump()[0].items()}
    facts = crashed.dump()[1]
    crashed.step()
    del crashed
    resumed = simulation("ditto", state_folder=tmp_path, **SETTINGS)
    resumed.load(saved, facts)
    assert_equal_runs(whole, stepped(resumed, 2))
