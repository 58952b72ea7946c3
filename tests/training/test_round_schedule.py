"""A learning rate that falls over the rounds: what it multiplies, in every engine, and where it does not reach."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from methods.quadratics import CLIENTS, L, Reference, global_weight, quadratic_simulation
from methods.settings import NAMES, make, one_of
from methods.small import TRAIN, assert_close, everything, personal, simulation
from tailorfl.core.method import make_method
from tailorfl.errors import ConfigError
from tailorfl.runs.build import train_config
from tailorfl.runs.job import Job
from tailorfl.settings.loading import load
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.round_schedule import RoundSchedule

HALVED = RoundSchedule("step", milestones=(1,), factor=0.5)
OWN_RATES = {
    "pfedme": {"lr": 0.1, "personal_lr": 0.04},
    "perada": {"personal_lr": 0.03},
    "fedas": {"align_lr": 0.05},
}


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (RoundSchedule(), [1.0] * 8),
        (RoundSchedule("step", 8), [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),
        (RoundSchedule("step", 10, (0.7,), 0.5), [1] * 7 + [0.5] * 3),
        (RoundSchedule("step", milestones=(2, 3), factor=0.5), [1, 1, 0.5, 0.25]),
        (RoundSchedule("cosine", 4), [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0]),
        (RoundSchedule("cosine", 2, floor=0.2), [1, 0.6, 0.2]),
        (RoundSchedule("inverse"), [1, 1 / 2, 1 / 3, 1 / 4]),
        (RoundSchedule("inverse", shift=4), [1, 4 / 5, 4 / 6]),
    ],
)
def test_shares_are_those_of_the_formulas(schedule: RoundSchedule, wanted: list[float]) -> None:
    assert [schedule.share(t) for t in range(len(wanted))] == pytest.approx(wanted)


def test_a_schedule_that_needs_the_number_of_rounds_says_so() -> None:
    for kind in ("cosine", "step"):
        with pytest.raises(ConfigError, match="say how many there are"):
            RoundSchedule(kind)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="inverse"):
        RoundSchedule("invers")  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_gradient_descent_with_it_is_that_of_the_formula(engine: str) -> None:
    """One step a round on quadratics: w = w − lr s(t) mean_i ∇F_i(w)."""
    sim, local = (
        quadratic_simulation(make_method("fedavg", {"weights": "uniform"}), engine=engine),
        Reference(),
    )
    sim.train = replace(sim.train, round_schedule=RoundSchedule("cosine", 6))
    w = global_weight(sim)
    for t in range(6):
        rate = sim.train.lr * (1 + math.cos(math.pi * t / 6)) / 2
        w = w - rate * np.mean([local.grad(i, w) for i in range(CLIENTS)], axis=0)
        sim.step()
        np.testing.assert_allclose(global_weight(sim), w, atol=1e-5)


@pytest.mark.parametrize("name", one_of(3, NAMES))
def test_a_round_with_half_the_rate_is_a_round_of_half_the_rate(name: str) -> None:
    """Of every method: the run's rate and those of its own, and nothing else."""
    own = OWN_RATES.get(name, {})
    falling = simulation(make(name, **own), "mlp", "vectorized", train=replace(TRAIN, round_schedule=HALVED))
    told = simulation(make(name, **own), "mlp", "vectorized")
    for sim in (falling, told):
        sim.step()
    told.train = replace(TRAIN, lr=TRAIN.lr / 2)
    told.method = make(name, **{key: rate / 2 for key, rate in own.items()})
    for sim in (falling, told):
        sim.step()
    assert_close(everything(falling), everything(told), atol=1e-6, rtol=1e-5)
    assert_close(personal(falling), personal(told), atol=1e-6, rtol=1e-5)


def test_fedclups_steps_by_theory_want_a_constant_rate() -> None:
    method = make("fedclup", lam=1.0, local_steps="theory", gamma="theory", smoothness=L, convexity=1.0)
    with pytest.raises(ConfigError, match="round_schedule = constant"):
        simulation(method, "logistic", train=replace(TRAIN, momentum=0.0, round_schedule=HALVED))


@pytest.mark.parametrize(("deployment", "share"), [("last", 0.25), ("first", 1.0)])
def test_tuning_for_deployment_takes_the_rate_of_the_last_round_or_the_first(
    deployment: Any, share: float
) -> None:
    """Three rounds done, and the fourth would have an eighth of the rate."""
    falls = RoundSchedule("step", milestones=(1, 2, 3), factor=0.5, deployment=deployment)
    sim = simulation("fedavg_ft", rounds=3, train=replace(TRAIN, round_schedule=falls))
    found = personal(sim)
    sim.train = replace(TRAIN, lr=TRAIN.lr * share)
    assert_close(found, personal(sim), atol=0, rtol=0)
    sim.train = replace(TRAIN, lr=TRAIN.lr * share / 2)
    assert any(not torch.equal(t, found[n]) for n, t in personal(sim).items())


def test_a_run_that_goes_on_from_a_checkpoint_has_the_rates_of_its_rounds() -> None:
    train = replace(TRAIN, round_schedule=RoundSchedule("cosine", 4))
    whole, cut = (simulation("apfl", train=train, rounds=2) for _ in range(2))
    other = simulation("apfl", train=train)
    other.load(*cut.dump())
    for sim in (whole, other):
        sim.step()
    assert_close(everything(whole), everything(other), atol=0, rtol=0)


def test_without_a_schedule_settings_are_as_given() -> None:
    assert TrainConfig().decay == 1.0
    assert TrainConfig(lr=0.2).decayed(0.5) == replace(TrainConfig(lr=0.1), decay=0.5)


def test_an_experiments_schedule_knows_the_rounds_of_its_method() -> None:
    config = load(
        None,
        {
            "methods": ["fedavg", {"name": "ditto", "rounds": 8}],
            "rounds": 40,
            "train": {"round_schedule": "step"},
        },
    )
    found = [train_config(Job(config, method, 0)).round_schedule for method in config.methods]
    assert found == [RoundSchedule("step", 40), RoundSchedule("step", 8)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("cosin", "train.round_schedule = 'cosin': should be one of constant, step, cosine, inverse"),
        ({"kind": "cosine", "factor": 0.5}, "has factor, which belongs to kind=step, but kind=cosine"),
        ({"kind": "step", "milestones": [0]}, "milestones"),
    ],
)
def test_mistakes_in_it_are_named(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, {"train": {"round_schedule": settings}})
