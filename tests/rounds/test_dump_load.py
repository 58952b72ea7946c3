"""Interrupted runs go on exactly, in memory, through files, and with states on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from methods.settings import NAMES, make, one_of
from methods.small import BOTH, assert_same, everything, personal, simulation
from tailorfl.engines.auto import Auto
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import checkpoints
from tailorfl.training import tree

SETTINGS: dict[str, Any] = {"fraction": 0.4, "seed": 2}
IN_TURN = [(name, ("sequential", "vectorized")[k % 2]) for k, name in enumerate(NAMES)]
"""One engine a method: neither knows what is kept between rounds, and where it lies."""


def go_on(sim: Simulation, rounds: int) -> Simulation:
    for _ in range(rounds):
        sim.step()
    return sim


def assert_equal_runs(a: Simulation, b: Simulation) -> None:
    assert_same(everything(a), everything(b))
    assert_same(personal(a), personal(b))
    assert (a.round, a.traffic, a.states.clients) == (b.round, b.traffic, b.states.clients)
    assert (a.gradients, a.turns) == (b.gradients, b.turns)


@pytest.mark.parametrize(("name", "engine"), IN_TURN)
def test_resumed_equals_uninterrupted(name: str, engine: str, tmp_path: Path) -> None:
    """The run that was dumped goes on itself: that a dump changes no run, `test_method_contract` says."""
    first = simulation(name, BOTH, engine, rounds=2, **SETTINGS)
    tensors, facts = first.dump()
    checkpoints.save(tmp_path, first.round, tensors, facts)
    memory = simulation(name, BOTH, engine, **SETTINGS)
    memory.load(tensors, facts)
    assert_equal_runs(memory, first)
    loaded = checkpoints.load_latest(tmp_path)
    assert loaded is not None
    disk = simulation(name, BOTH, engine, **SETTINGS)
    disk.load(loaded[1], loaded[2])
    whole = go_on(first, 1)
    for resumed in (memory, disk):
        assert_equal_runs(whole, go_on(resumed, 1))


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
    assert_equal_runs(whole, go_on(second, 3))


@pytest.mark.parametrize("name", one_of(3, NAMES))
def test_before_the_first_round_and_over_another_state(name: str) -> None:
    """Nothing of what a simulation did before `load` survives it."""
    fresh, used = (simulation(name, "batch_norm", rounds=r, **SETTINGS) for r in (0, 2))
    used.load(*fresh.dump())
    assert_equal_runs(fresh, used)
    assert_equal_runs(go_on(fresh, 1), go_on(used, 1))


@pytest.mark.parametrize("name", one_of(3, NAMES, 1))
def test_loading_copies(name: str) -> None:
    """A run that goes on does not write into the tensors it was loaded from."""
    first, second = (simulation(name, "batch_norm", rounds=r, **SETTINGS) for r in (2, 0))
    tensors, facts = first.dump()
    kept = {p: t.clone() for p, t in tensors.items()}
    second.load(tensors, facts)
    lying = {t.data_ptr() for t in tensors.values() if t.numel()}
    assert not any(t.data_ptr() in lying for _, t in tree.leaves(second.server) if t.numel())
    go_on(second, 2)
    assert_same(kept, tensors)
    assert facts["round"] == 2


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
    assert_equal_runs(go_on(memory, 1), go_on(resumed, 1))


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
    assert_equal_runs(whole, go_on(resumed, 2))
