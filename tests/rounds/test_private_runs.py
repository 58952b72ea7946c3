"""The ledger of whole runs: known beforehand, the same in every engine, complete, and part of a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from methods.settings import NAMES, make, one_of
from methods.small import FACTORIES, NEWCOMER, SIZES, TRAIN, federation, replaced, simulation
from rounds.helpers import server_vector
from tailorfl.core.client import Client
from tailorfl.core.method import Method
from tailorfl.engines.base import CohortTask, Parts
from tailorfl.engines.choice import Auto
from tailorfl.engines.in_process import Vectorized
from tailorfl.errors import ConfigError, TailorflError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.functional import Model
from tailorfl.privacy import PrivacyLedger, Use
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.participation import TOO_FEW, ClientOutcome, RoundTrace, Trace
from tailorfl.rounds.planning import planned_ledger
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs import checkpoints
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.update import Optimizer

NOISE = 0.8
PRIVATE = replace(TRAIN, momentum=0.0, weight_decay=0.0, dp=SampleDP(0.5, NOISE, "poisson"))
TOGETHER = {"fedsdr"}
"""Methods whose loss sees the samples of a batch together, which clipping by sample cannot bound."""
COVERED = [name for name in NAMES if not make(name).unprotected("sample") and name not in TOGETHER]
TRAINING = range(len(SIZES))


def private(method: str | Method, engine: Any = "vectorized", rounds: int = 0, **settings: Any) -> Simulation:
    return simulation(method, "mlp", engine, train=PRIVATE, rounds=rounds, **{"fraction": 0.6, **settings})


def look(sim: Simulation, *adapt_steps: int) -> None:
    """An evaluation of all models, held-out clients included."""
    evaluate(sim, Protocol(("val", "local", "heldout"), adapt_steps))


@pytest.mark.parametrize("name", one_of(8, COVERED))
def test_a_run_uses_what_was_planned_in_every_engine(name: str) -> None:
    for engine in ("sequential", "vectorized"):
        sim = private(name, engine)
        planned = planned_ledger(sim, 2, 4)
        assert not sim.ledger
        for _ in range(2):
            sim.step()
        look(sim, 0, 4, 1)
        assert sim.ledger == planned
        assert planned


@pytest.mark.parametrize("given", [{"train": PRIVATE}, {"train": TRAIN, "client_dp": ClientDP(1.0, NOISE)}])
def test_the_plan_of_a_recorded_run_is_that_of_its_rounds(given: dict[str, Any]) -> None:
    """Of those that are asked, one cannot be reached, and one is lost, perhaps after it has trained.

    The updates of the last round, which has too few, do not leave their clients.
    """
    answers = tuple(ClientOutcome(i, fate) for i, fate in enumerate(("accepted", "unavailable", "lost")))
    rounds = [RoundTrace(number, (0, 1, 2), answers) for number in (1, 2)]
    trace = Trace([rounds[0], rounds[1].refused((0,), TOO_FEW)])
    sim = simulation("fedavg", weights="uniform", fraction=0.2, trace=trace, **given)
    planned = planned_ledger(sim, 2)
    for _ in range(2):
        sim.step()
    assert sim.ledger == planned
    assert planned.clients == ((0,) if sim.level == "client" else (0, 2))


def test_steps_by_hand() -> None:
    """Ditto: two trainings a round, each ⌈n/4⌉ batches, of the clients that took part; pooled data are one client's."""
    sim = private("ditto", rounds=4)
    taken = Counter(client for round in range(4) for client in sim.sample(round))
    for client, n in enumerate(SIZES):
        steps = 2 * taken[client] * math.ceil(n / 4)
        assert sim.ledger.entries(client) == (((min(1.0, 4 / n), NOISE, steps),) if steps else ())
    n = sum(SIZES)
    assert private("centralized", rounds=2).ledger.entries(0) == ((4 / n, NOISE, 2 * math.ceil(n / 4)),)


def test_the_deployed_model_counts_once_however_often_it_is_evaluated() -> None:
    sim = private("fedavg_ft", rounds=2)
    training = PrivacyLedger.restore(sim.ledger.dump())
    look(sim, 0)
    once = PrivacyLedger.restore(sim.ledger.dump())
    look(sim, 0)
    assert sim.ledger == once != training
    deployed = [(c, u, n) for purpose, c, u, n in once.rows() if purpose == "deployment"]
    assert deployed == [(c, Use(min(1.0, 4 / n), NOISE), math.ceil(n / 4)) for c, n in enumerate(SIZES)]
    sim.step()  # a later model takes the place of the earlier one
    look(sim, 0)
    assert sorted(r for r in sim.ledger.rows() if r[0] == "deployment") == sorted(
        r for r in once.rows() if r[0] == "deployment"
    )


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 2), (2, 0)])
def test_a_held_out_client_counts_once_with_its_longest_adaptation(order: tuple[int, ...]) -> None:
    sim = private("ditto", rounds=1)
    look(sim, *order)
    look(sim, *order)
    # Two trainings of two batches of 4 of its 5 samples.
    assert sim.ledger.entries(NEWCOMER) == ((0.8, NOISE, 4),)


class Stumbling(Vectorized):
    """Fails after its first chunk, as where `vmap` has no rule for something of one architecture only."""

    def run(self, visit: CohortTask, states: TensorDict) -> Parts:
        super().run(visit, states)
        raise RuntimeError("Batching rule not implemented")


@pytest.mark.parametrize(
    ("engine", "ends"),
    [
        (Auto(), {"sequential", "vectorized"}),
        (Auto(vectorized=Stumbling(), choice="vectorized"), {"sequential"}),
    ],
)
def test_measuring_an_engine_and_a_pass_that_is_made_again_count_once(engine: Auto, ends: set[str]) -> None:
    """To measure, the first round is run several times with a limit, and that is thrown away."""
    by_auto, by_loop = private("ditto", engine, rounds=1), private("ditto", "sequential", rounds=1)
    assert by_auto.engine.name in ends
    assert by_auto.ledger == by_loop.ledger


class Breaking(FedAvg):
    """Trains, and then the client of nine samples sends no numbers."""

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        new = client.fit(received)
        return state, new.apply(lambda t: torch.where(client.samples == 9, torch.nan, t))


def test_clients_whose_update_was_rejected_looked_at_their_data_too() -> None:
    sim = private(Breaking(), fraction=1.0)
    assert sim.step().rejected == (SIZES.index(9),)
    assert sim.ledger.clients == tuple(TRAINING)


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
@pytest.mark.parametrize("broken", [math.nan, math.inf, 1e30])
def test_a_sample_that_is_no_number_does_not_show_but_by_its_clipped_gradient(
    engine: str, broken: float
) -> None:
    """Nobody is rejected, and the others' gradients count as they do without it."""
    base = federation()
    data = replaced(base, 3, lambda x: torch.cat([torch.full_like(x[:1], broken), x[1:]]))
    dp = SampleDP(0.5, 0.0, "poisson")
    train = replace(PRIVATE, dp=dp, steps=1, batch_size=0)
    without, with_it = (simulation("fedavg", "logistic", engine, train=train, data=d) for d in (base, data))
    assert without.step().rejected == with_it.step().rejected == ()
    moved = server_vector(without) - server_vector(with_it)
    share = len(base.train[3]) / sum(SIZES)
    # One gradient of norm 0.5 at most is missing, of the nine of client 3.
    assert 0 < float(moved.norm()) <= 0.05 * 0.5 / 9 * share * (1 + 1e-4)


@pytest.mark.parametrize("name", ["ditto", "fedavg_ft"])
def test_a_resumed_run_has_the_ledger_of_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole, first = private(name, rounds=3), private(name, rounds=2)
    look(first, 0, 4)
    tensors, facts = first.dump()
    checkpoints.save(tmp_path, 2, tensors, facts)
    loaded = checkpoints.load_latest(tmp_path)
    assert loaded is not None
    resumed = private(name)
    resumed.load(loaded[1], loaded[2])
    assert resumed.ledger == first.ledger
    resumed.step()
    for sim in (whole, resumed):
        look(sim, 0, 4)
    assert resumed.ledger == whole.ledger


class Leaking(FedAvg):
    """Looks at its data without noise, and does not say so."""

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        return state, client.fit(received, optimizer=Optimizer(lr=client.loss(received)))


@pytest.mark.parametrize(
    ("method", "exposure"),
    [
        (make("fedala"), "FedALA uses a number of steps"),
        (make("ditto", dynamic_lam=(0.1, 1.0)), r"Ditto uses the validation losses .*\(dynamic_lam\)"),
        (make("fedclup", schedule={"kind": "dynamic"}), "FedCLUP uses the losses .* schedule = dynamic"),
    ],
)
def test_methods_that_look_without_noise_are_refused_at_the_start(method: Method, exposure: str) -> None:
    with pytest.raises(ConfigError, match=f"{exposure}.*sample-level privacy does not cover"):
        private(method)


def test_a_look_that_a_method_does_not_own_up_to_is_refused() -> None:
    with pytest.raises(TailorflError, match="uses a client's train samples without noise"):
        private(Leaking()).step()


@pytest.mark.parametrize("trainable", ["head", "all"])
def test_batch_norm_of_a_frozen_backbone_is_no_obstacle(trainable: str) -> None:
    of = Model(FACTORIES["batch_norm"], trainable=trainable)
    sim = Simulation(make("fedper", personal_part="none"), federation(), of, PRIVATE)
    if trainable == "all":
        with pytest.raises(TailorflError, match="cannot train batch norm"):
            sim.step()
        return
    sim.step()
    assert sim.ledger == planned_ledger(sim, 1)
