"""Several worker processes: the bits of one, whatever their number; and what happens when something goes wrong."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from engines.networks import Broken, Undecided
from methods.settings import make
from methods.small import (
    CLASSES,
    NEWCOMER,
    SIZES,
    TRAIN,
    assert_same,
    everything,
    federation,
    model,
    personal,
    simulation,
)
from processes import fork
from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.engines import pool, process_pool
from tailorfl.engines.auto import Auto
from tailorfl.engines.make import make_engine
from tailorfl.engines.pool import PooledEngine
from tailorfl.engines.process_pool import ProcessPool
from tailorfl.engines.sequential import Sequential
from tailorfl.errors import ClientError, ConfigError, WorkerError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.methods.ditto import Ditto
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.sample_privacy import SampleDP

METHODS = ("fedavg", "ditto", "fedrep", "scaffold", "plgu_lf", "fedfomo")
"""Without private state; with one; a part of the model; states in parts; SAM; a message for each client."""


def team_of(sim: Simulation) -> ProcessPool:
    assert isinstance(sim.engine, PooledEngine | Auto)
    assert isinstance(sim.engine.pool, ProcessPool)
    return sim.engine.pool


def outcome(sim: Simulation) -> dict[str, Tensor]:
    ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 2)
    return {
        **everything(sim),
        **{f"personal/{n}": t for n, t in personal(sim).items()},
        **{f"adapted/{n}": t for n, t in adapted.items()},
    }


def run(name: str, engine: str, number: int, model_name: str = "batch_norm", **settings: Any) -> Simulation:
    team = make_engine(engine, 2, number)
    return simulation(name, model_name, team, **{"fraction": 0.8, "rounds": 3, **settings})


@pytest.mark.parametrize(("name", "engine"), [*zip(METHODS, ("sequential", "vectorized") * 3, strict=True)])
def test_workers_give_the_bits_of_one_process(name: str, engine: str) -> None:
    one, two = run(name, engine, 1), run(name, engine, 2)
    assert_same(outcome(one), outcome(two))
    assert (one.traffic, one.states.clients) == (two.traffic, two.states.clients)
    assert len(team_of(two).pids) == 2


@pytest.mark.parametrize(("engine", "number"), [("sequential", 3), ("vectorized", 7)])
def test_their_number_does_not_matter(engine: str, number: int, tmp_path: Path) -> None:
    """Also more workers than chunks, with dropout, and with states on the disk."""
    one, many = (
        run("ditto", engine, n, "dropout", state_folder=tmp_path / str(n) if n > 1 else None)
        for n in (1, number)
    )
    assert_same(outcome(one), outcome(many))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_losses_and_evaluations_are_those_of_one_process(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "WORTH", 0)
    monkeypatch.setattr("tailorfl.training.cohort.INPUT_BYTES", 2000)  # some samples at a time
    protocol = Protocol(("val", "local", "heldout"), (0, 2))
    one, two = (run("ditto", engine, number, rounds=1) for number in (1, 2))
    assert one.step().losses == two.step().losses
    assert evaluate(one, protocol) == evaluate(two, protocol)


def test_what_private_training_used_comes_back() -> None:
    private = replace(TRAIN, momentum=0.0, weight_decay=0.0, dp=SampleDP(0.5, 0.8, "shuffle"))
    one, two = (run("ditto", "vectorized", number, "mlp", train=private) for number in (1, 2))
    assert one.ledger == two.ledger
    assert one.ledger
    assert_same(outcome(one), outcome(two))


def test_clients_with_different_architectures() -> None:
    found = []
    for number in (1, 2):
        sim = Simulation(
            make("perfed_ckt"),
            federation(),
            {"small": model("mlp"), "large": model("batch_norm")},
            TRAIN,
            assignment=("large", "small", "small", "large", "small", "large"),
            engine=make_engine("sequential", None, number),
        )
        for _ in range(2):
            sim.step()
        found.append({p: t.clone() for p, t in sim.dump()[0].items()})
    assert_same(*found)


# -- the automatic engine -----------------------------------------------------------------------------------


def test_the_choice_is_made_once_and_here(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tailorfl"):
        sim = run("ditto", "auto", 2)
    assert caplog.text.count("engine: ") == 1
    assert len(team_of(sim).pids) == 2
    assert sim.engine.name in {"sequential", "vectorized"}
    assert_same(outcome(sim), outcome(run("ditto", sim.engine.name, 1)))


def test_a_model_that_workers_cannot_vectorize_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    """As where it was chosen on another architecture: the first one could."""
    kinds: tuple[Any, ...] = (Sequential(), Auto(choice="vectorized", pool=ProcessPool(2)))
    with caplog.at_level(logging.WARNING, logger="tailorfl"):
        found = [Simulation(FedAvg(), federation(), Model(Undecided), TRAIN, engine=kind) for kind in kinds]
        for sim in found:
            sim.step()
    assert caplog.text.count("vectorized engine cannot run this model") == 1
    assert found[1].engine.name == "sequential"
    assert_same(everything(found[0]), everything(found[1]))


# -- rounds take place as a whole or not at all -------------------------------------------------------------


class Stopping(Ditto):
    """Is interrupted after all clients have trained."""

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        if replies.round == 1:
            raise KeyboardInterrupt
        return super().aggregate(server, replies)


@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupted_round_changes_nothing(number: int) -> None:
    sim = run(Stopping(), "sequential", number, rounds=1)  # type: ignore[arg-type]
    before, ledger = outcome(sim), sim.ledger.dump()
    with pytest.raises(KeyboardInterrupt):
        sim.step()
    assert sim.round == 1
    assert_same(before, outcome(sim))
    assert sim.ledger.dump() == ledger


# -- errors -------------------------------------------------------------------------------------------------


def test_an_error_in_a_worker_is_that_of_one_process() -> None:
    said = []
    for number in (1, 2):
        sim = Simulation(
            FedAvg(), federation(), Model(Broken), TRAIN, engine=make_engine("sequential", None, number)
        )
        with pytest.raises(ClientError, match=r"client 0, round 1, stage 'train'") as caught:
            sim.step()
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert any("Broken" in note or "63" in note for note in caught.value.__notes__)


class Dying(FedAvg):
    """Kills the process it runs in, in round 2 if that is a worker."""

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        if client.round == 1 and os.getpid() != MAIN:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local(client, state, received)


MAIN = os.getpid()


def test_a_worker_that_is_killed_is_named_and_nothing_hangs() -> None:
    sim = run(Dying(), "sequential", 2, rounds=1)  # type: ignore[arg-type]
    before, pids = everything(sim), team_of(sim).pids
    with pytest.raises(WorkerError, match=r"process \d+ was killed by signal 9 \(SIGKILL\)") as e:
        sim.step()
    assert "training client" in str(e.value)
    assert "round 2" in str(e.value)
    assert_same(before, everything(sim))
    assert not any(alive(pid) for pid in pids)


def test_after_a_worker_was_killed_between_rounds_the_next_call_says_so_and_then_goes_on() -> None:
    sim, same = (run("ditto", "sequential", number, rounds=1) for number in (2, 1))
    for pid in team_of(sim).pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="SIGKILL"):
        sim.step()
    sim.step()
    same.step()
    assert_same(outcome(sim), outcome(same))


def test_workers_need_no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match=r"engine\.workers needs Linux or macOS"):
        make_engine("auto", None, 2)


# -- how they start and end ---------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    """Whether a process runs (one that has ended and not been waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids: tuple[int, ...], patience: float = 20.0) -> bool:
    end = time.monotonic() + patience
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def test_workers_end_with_their_simulation() -> None:
    sim = run("ditto", "sequential", 2, rounds=1)
    pids = team_of(sim).pids
    assert all(alive(pid) for pid in pids)
    del sim
    gc.collect()
    assert not any(alive(pid) for pid in pids)


def test_a_parent_with_several_threads_that_has_used_them() -> None:
    """A fork copies one thread alone; workers have one, so they never wait for the others."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.randn(600, 600) @ torch.randn(600, 600)
        torch.randn(2_000_000).exp().sum()
        sim = run("fedavg", "vectorized", 2, "cnn2", rounds=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    one = run("fedavg", "vectorized", 1, "cnn2", rounds=2)
    assert_same(everything(sim), everything(one))


def training_for_long() -> None:
    """Say which its workers are, and go on training."""
    sim = simulation("ditto", "cnn2", make_engine("sequential", None, 2), rounds=1)
    print(*team_of(sim).pids, flush=True)
    sim.train = replace(TRAIN, epochs=None, steps=10**5)
    sim.step()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_process_that_started_them(how: signal.Signals) -> None:
    """In the middle of a long training: killed, as SIGTERM does it too, or stopped by Ctrl-C."""
    process, said = fork(training_for_long)
    line = said.readline()
    assert line.replace(" ", "").strip().isdigit(), line + said.read()
    pids = tuple(map(int, line.split()))
    assert len(pids) == 2
    time.sleep(0.3)
    os.kill(process, how)
    os.waitpid(process, 0)
    assert gone(pids)
    if how is signal.SIGINT:
        assert "KeyboardInterrupt" in said.read()


def small_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def test_without_fork_what_cannot_be_pickled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "START", "spawn")
    with pytest.raises(
        WorkerError, match=r"cannot be pickled: .*lambda.*; make models of functions at the top"
    ):
        run("ditto", "sequential", 2, "mlp", rounds=1)


@pytest.mark.slow
def test_without_fork_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for number in (1, 2):
        monkeypatch.setattr(process_pool, "START", "spawn")
        engine = make_engine("sequential", None, number)
        sim = Simulation(make("ditto"), federation(), Model(small_network), TRAIN, engine=engine)
        for _ in range(2):
            sim.step()
        found.append(everything(sim))
    assert_same(*found)
    assert len(SIZES) == len(found[0]["client/1.weight"])
