"""A learning rate that falls over the rounds: what it multiplies, in every engine, and where it does not reach."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from methods.quadratics import L
from methods.settings import NAMES, make, one_of
from methods.small import TRAIN, assert_close, everything, personal, simulation
from tailorfl.errors import ConfigError
from tailorfl.runs.build import train_config
from tailorfl.runs.job import Job
from tailorfl.settings.loading import load
from tailorfl.training.update import RoundSchedule

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


@pytest.mark.parametrize("name", one_of(6, NAMES))
def test_a_round_with_half_the_rate_is_a_round_of_half_the_rate(name: str) -> None:
    """Of every method: the run's rate and those of its own, and nothing else."""
    own = OWN_RATES.get(name, {})
    halved = replace(TRAIN, round_schedule=HALVED)
    falling = simulation(make(name, **own), "mlp", "vectorized", train=halved, rounds=2)
    by_hand = simulation(make(name, **own), "mlp", "vectorized", rounds=1)
    by_hand.train = replace(TRAIN, lr=TRAIN.lr / 2)
    by_hand.method = make(name, **{key: rate / 2 for key, rate in own.items()})
    by_hand.step()
    assert_close(everything(falling), everything(by_hand), atol=1e-6, rtol=1e-5)
    assert_close(personal(falling), personal(by_hand), atol=1e-6, rtol=1e-5)


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


def test_an_experiments_schedule_knows_the_rounds_of_its_method() -> None:
    methods = ["fedavg", {"name": "ditto", "rounds": 8}]
    config = load(None, {"methods": methods, "rounds": 40, "train": {"round_schedule": "step"}})
    schedules = [train_config(Job(config, method, 0)).round_schedule for method in config.methods]
    assert schedules == [RoundSchedule("step", 40), RoundSchedule("step", 8)]


def test_mistakes_in_it_are_named() -> None:
    for kind, message in (("cosine", "rounds=100"), ("step", "rounds=100"), ("invers", "inverse")):
        with pytest.raises(ConfigError, match=message):
            RoundSchedule(kind)  # type: ignore[arg-type]
    settings: list[tuple[Any, str]] = [
        ("cosin", "train.round_schedule = 'cosin'"),
        ({"kind": "cosine", "factor": 0.5}, "has factor, .*kind=step"),
        ({"kind": "step", "milestones": [0]}, "milestones"),
    ]
    for wrong, message in settings:
        with pytest.raises(ConfigError, match=message):
            load(None, {"train": {"round_schedule": wrong}})
