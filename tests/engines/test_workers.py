"""Several workers, processes or a cluster: the bits of one process, and what happens when something goes wrong."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from engines.networks import Broken, Undecided, outcome
from methods.settings import make
from methods.small import CLASSES, TRAIN, assert_same, everything, federation, model, simulation
from processes import fork
from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.engines import pool, process_pool
from tailorfl.engines.choice import Auto, make_engine
from tailorfl.engines.in_process import Sequential
from tailorfl.engines.pool import PooledEngine
from tailorfl.engines.process_pool import ProcessPool
from tailorfl.errors import ClientError, ConfigError, MissingExtraError, WorkerError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.methods.ditto import Ditto
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.sample_privacy import SampleDP

KINDS = ("sequential", "vectorized")
METHODS = ("fedavg", "ditto", "fedrep", "scaffold", "plgu_lf", "fedfomo")
"""Without private state; with one; a part of the model; states in parts; SAM; a message for each client."""

QUICK = ("fedrep", "scaffold", "fedfomo")


def team_of(sim: Simulation) -> ProcessPool:
    assert isinstance(sim.engine, PooledEngine | Auto)
    assert isinstance(sim.engine.pool, ProcessPool)
    return sim.engine.pool


def run(name: str, engine: str, number: int, model_name: str = "batch_norm", **settings: Any) -> Simulation:
    team = make_engine(engine, 2, number)
    return simulation(name, model_name, team, **{"fraction": 0.8, "rounds": 2, **settings})


PRIVATE = replace(TRAIN, momentum=0.0, weight_decay=0.0, dp=SampleDP(0.5, 0.8, "shuffle"))


@pytest.mark.parametrize(
    ("name", "engine", "number", "settings"),
    [
        *(
            pytest.param(name, engine, 2, {}, marks=[] if name in QUICK else [pytest.mark.slow])
            for name, engine in zip(METHODS, KINDS * 3, strict=True)
        ),
        # More workers than chunks, with states on the disk.
        pytest.param("ditto", "sequential", 3, {"model_name": "dropout"}, marks=pytest.mark.slow),
        ("ditto", "vectorized", 7, {"model_name": "dropout"}),
        ("ditto", "vectorized", 2, {"model_name": "mlp", "train": PRIVATE}),
    ],
)
def test_workers_give_the_bits_of_one_process(
    name: str, engine: str, number: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = {"state_folder": tmp_path} if settings.get("model_name") == "dropout" else {}
    one, many = run(name, engine, 1, **settings), run(name, engine, number, **settings, **folder)
    assert_same(outcome(one), outcome(many))
    assert (one.traffic, one.states.clients, one.ledger) == (many.traffic, many.states.clients, many.ledger)
    assert len(team_of(many).pids) == number
    assert bool(one.ledger) == ("train" in settings)


@pytest.mark.parametrize("engine", KINDS)
def test_losses_and_evaluations_are_those_of_one_process(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "WORTH", 0)
    monkeypatch.setattr("tailorfl.training.cohort.INPUT_BYTES", 2000)  # some samples at a time
    protocol = Protocol(("val", "local", "heldout"), (0, 2))
    one, two = (run("ditto", engine, number, rounds=1) for number in (1, 2))
    assert one.step().losses == two.step().losses
    assert evaluate(one, protocol) == evaluate(two, protocol)


def test_clients_with_different_architectures() -> None:
    models = {"small": model("mlp"), "large": model("batch_norm")}
    assignment = ("large", "small", "small", "large", "small", "large")
    one, two = (
        Simulation(
            make("perfed_ckt"), federation(), models, TRAIN, assignment=assignment,
            engine=make_engine("sequential", None, number),
        )
        for number in (1, 2)
    )  # fmt: skip
    one.step()
    two.step()
    assert_same(one.dump()[0], two.dump()[0])


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
    engines: tuple[Any, ...] = (Sequential(), Auto(choice="vectorized", pool=ProcessPool(2)))
    with caplog.at_level(logging.WARNING, logger="tailorfl"):
        one, two = (Simulation(FedAvg(), federation(), Model(Undecided), TRAIN, engine=e) for e in engines)
        one.step()
        two.step()
    assert caplog.text.count("vectorized engine cannot run this model") == 1
    assert two.engine.name == "sequential"
    assert_same(everything(one), everything(two))


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
    messages = []
    for number in (1, 2):
        engine = make_engine("sequential", None, number)
        sim = Simulation(FedAvg(), federation(), Model(Broken), TRAIN, engine=engine)
        with pytest.raises(ClientError, match=r"client 0, round 1, stage 'train'") as caught:
            sim.step()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
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


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"workers": 2}, r"engine\.workers needs Linux or macOS"),
        ({"cluster": "auto"}, r"engine\.cluster=auto needs engine\.workers"),
        ({"workers": 2, "gpus": 1.0}, r"engine\.gpus is for the workers of a cluster"),
    ],
)
def test_workers_that_cannot_be_are_refused(
    engine: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == {"workers": 2}:
        monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match=message):
        make_engine("auto", **engine)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    sim = simulation("fedavg", "mlp", make_engine("sequential", workers=2, cluster="local"))
    with pytest.raises(MissingExtraError, match=r"pip install 'ray>=2.40'"):
        sim.step()


# -- how they start and end ---------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    """Whether a process runs (one that has ended and not been waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_workers_end_with_their_simulation() -> None:
    gc.freeze()  # only what comes now is looked at
    sim = run("ditto", "sequential", 2, rounds=1)
    pids = team_of(sim).pids
    assert all(alive(pid) for pid in pids)
    del sim
    gc.collect()
    gc.unfreeze()
    assert not any(alive(pid) for pid in pids)


def test_a_parent_with_several_threads_that_has_used_them() -> None:
    """A fork copies one thread alone; workers have one, so they never wait for the others."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.randn(600, 600) @ torch.randn(600, 600)
        torch.randn(2_000_000).exp().sum()
        sim = run("fedavg", "vectorized", 2, "cnn2", rounds=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    one = run("fedavg", "vectorized", 1, "cnn2", rounds=1)
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
    end = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(alive, pids))
    if how is signal.SIGINT:
        assert "KeyboardInterrupt" in said.read()


def small_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, CLASSES))


@pytest.mark.slow
def test_without_fork_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "START", "spawn")
    engines = (make_engine("sequential", None, number) for number in (1, 2))
    one, two = (
        Simulation(make("ditto"), federation(), Model(small_network), TRAIN, engine=e) for e in engines
    )
    for sim in (one, two, one, two):
        sim.step()
    assert_same(everything(one), everything(two))


def test_without_fork_what_cannot_be_pickled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "START", "spawn")
    message = r"cannot be pickled: .*lambda.*; .*engine.workers"
    with pytest.raises(WorkerError, match=message):
        run("ditto", "sequential", 2, "mlp", rounds=1)


def test_workers_that_end_at_their_start_are_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a script starts them without `if __name__ == "__main__"`, or for lack of memory."""
    monkeypatch.setattr(process_pool, "_begin", lambda *_: os._exit(3))
    with pytest.raises(WorkerError, match=r"ended at their start .*exit code 3.*__main__"):
        run("ditto", "sequential", 2, "logistic", rounds=1)


@pytest.mark.slow
def test_a_cluster_of_two_nodes_has_the_bits_of_one_process_and_survives_lost_workers() -> None:
    pytest.importorskip("ray", reason="needs ray (pip install 'tailorfl[cluster]')")
    program = Path(__file__).with_name("on_two_nodes.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert (seen["addresses"], seen["nodes"]) == (["127.0.0.1"], 2)
    assert len({name.split()[1] for name in seen["workers"]}) == 2, seen["workers"]
    assert seen["same"] == dict.fromkeys((*METHODS, "ditto, 20 clients"), True)
    assert seen["resumed"] == [True, True]
    for fact in ("ledger", "unchanged", "went_on", "kept"):
        assert seen[fact], fact
    assert seen["error"][0] == "DivergenceError"
    assert any("worker 1 of 4" in word for word in seen["words"])
    kind, message = seen["lost"]
    assert kind == "WorkerError"
    assert "no other worker is left" in message
    assert "--resume" in message
