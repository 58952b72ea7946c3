"""Rounds that are evaluated where `eval.every` is open: a tenth of the work, by hand and by what is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from methods.settings import NAMES, one_of
from runs.small import first_job, records, simulation_of
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.report.experiment import run_experiment
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.cost_estimate import estimate
from tailorfl.runs.schedule import evaluation_passes, left_out, rounds_between, training_passes
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import load

SMALL = ["data=digits", "data.clients=6", "data.samples=300", "seeds=1", "rounds=60"]


def made(*more: str, method: str = "ditto") -> tuple[ExperimentConfig, Simulation]:
    config = load(None, [*SMALL, f"methods={method}", *more])
    return config, simulation_of(first_job(config))


def seen(sim: Simulation, protocol: Protocol) -> int:
    """How many samples pass through models in one evaluation, counted where the last layer gets them."""
    counted = 0
    forward = torch.nn.functional.linear

    def counting(x: Any, weight: Any, bias: Any = None) -> Any:
        nonlocal counted
        if weight.shape[0] == 10:
            counted += x.shape[0]
        return forward(x, weight, bias)

    evaluate(sim, protocol)  # with what is found out only once
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", counting)
        evaluate(sim, protocol)
    return counted


@pytest.mark.parametrize(
    "sets", [("val", "local"), ("local",), ("val", "local", "global"), ("local", "heldout")]
)
def test_passes_of_an_evaluation_are_those_that_it_makes(sets: tuple[str, ...]) -> None:
    """With one client after another every sample passes the last layer of its model."""
    _, sim = made("engine=sequential", "data.heldout_clients=2")
    protocol = Protocol(sets, adapt_steps=(0,))
    extra = seen(sim, protocol) - evaluation_passes(sim, protocol)
    assert extra in (0, 1)  # a sample by which the shape of outputs is found


@pytest.mark.parametrize("batch", [0, 8, 1000])
def test_passes_of_newcomers_are_three_for_every_sample_of_their_steps(batch: int) -> None:
    """Batches of 0 and of more samples than a client has are all of its samples."""
    _, sim = made(f"train.batch_size={batch}", "data.heldout_clients=2")
    sizes = sim.federation.sizes()[sim.federation.num_clients :]
    adapted = evaluation_passes(sim, Protocol(("heldout",), adapt_steps=(5,)))
    at_once = evaluation_passes(sim, Protocol(("heldout",), adapt_steps=(0,)))
    batches = [1 if batch in (0, 1000) else -(-size // batch) for size in sizes.tolist()]
    assert adapted - at_once == pytest.approx(3 * 5 * sum(s / b for s, b in zip(sizes, batches, strict=True)))


def test_passes_of_a_round_are_three_for_every_gradient_of_fedavg() -> None:
    """Of whole passes over the data; of steps on average, as the last batch of a pass is smaller."""
    steps = "train={epochs: null, steps: 7, batch_size: 8}"
    for lengths, exact in (("train.epochs=2", True), (steps, False)):
        _, sim = made(lengths, method="fedavg")
        for _ in range(20):
            sim.step()
        assert training_passes(sim) == pytest.approx(3 * sim.gradients / 20, rel=1e-9 if exact else 0.1)


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.1])
@pytest.mark.parametrize(
    "more", [(), ("train.epochs=1",), ("eval.sets=[val,local,global]", "train.epochs=1")]
)
def test_the_smallest_distance_is_taken_whose_evaluations_are_a_tenth(
    fraction: float, more: tuple[str, ...]
) -> None:
    config, sim = made(f"fraction={fraction}", *more)
    every = rounds_between(config, sim)
    passes, round = evaluation_passes(sim, Protocol(config.eval.sets)), training_passes(sim)
    doublings = {5 * 2**k for k in range(20)}
    assert every in doublings
    assert passes <= 0.1 * (round * every + passes)
    assert every == 5 or passes > 0.1 * (round * every / 2 + passes)
    said = left_out(config, sim, 60)
    assert said if every > 5 else not said
    assert not said or f" {100 * passes / (5 * round + passes):.0f} %" in said


def test_a_number_is_taken_as_it_is_and_says_nothing() -> None:
    for every in (0, 1, 7):
        config, sim = made(f"eval.every={every}", "train.epochs=1", "fraction=0.2")
        assert rounds_between(config, sim) == every
        assert left_out(config, sim, 60) == ""


@pytest.mark.parametrize("method", one_of(8, NAMES))
def test_no_method_computes_so_little_that_evaluations_are_more(method: str) -> None:
    """Gradients as they are counted, of all rounds between two evaluations."""
    config, sim = made("train.epochs=1", "fraction=0.5", "data.public=digits", method=method)
    every = rounds_between(config, sim)
    for _ in range(3):
        sim.step()
    models = sim.method.has_personal + sim.method.has_global
    passes = evaluation_passes(sim, Protocol(config.eval.sets)) * models / 2
    assert passes <= 0.1 * (sim.gradients * every + passes)  # of 3 rounds, 3 passes each


def test_choosing_models_counts_the_validation_parts_that_no_record_shows() -> None:
    """`eval.sets` has `local` alone, and every candidate is judged on its validation part."""
    split = "data.split={train: 0.2, val: 0.7, test: 0.1}"
    lengths = ("train.epochs=1", "fraction=0.5", "eval.sets=[local]", split)
    last, chosen = made(*lengths), made(*lengths, "eval.select=val")
    assert rounds_between(*chosen) > rounds_between(*last)


@pytest.mark.slow
def test_a_run_is_evaluated_then_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, sim = made("train.epochs=1", "fraction=0.5", "rounds=33", "seeds=2", method="fedavg,ditto")
    every = rounds_between(config, sim)
    assert 5 < every < 33
    run_experiment(config, tmp_path / "out")
    for label in ("fedavg", "ditto"):
        lines = records(tmp_path / "out" / label / "seed-0" / "rounds.jsonl")
        scored = [r["round"] for r in lines if any(key.startswith(("personal/", "global/")) for key in r)]
        assert scored == [*range(every, 33, every), 33]
    told = [r.getMessage() for r in caplog.records if "eval.every=5" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"evaluated every {every} rounds, so that")
    assert {row["evaluations"] for row in estimate(config).methods.values()} == {1 + 33 // every}
