"""Gradients are counted as they are computed, and methods can be compared where all get as many."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from methods.small import PUBLIC, SIZES, TRAIN, simulation
from tailorfl.core.method import make_method
from tailorfl.errors import ConfigError
from tailorfl.report.document import write_report
from tailorfl.report.experiment import run_experiment
from tailorfl.runs.build import check
from tailorfl.settings.loading import load

N = sum(SIZES)


@pytest.mark.parametrize(
    ("name", "options", "passes"),
    [
        ("fedavg", {}, 1),
        ("centralized", {}, 1),
        ("fedsam", {}, 2),  # one where it is, one above
        ("ditto", {"personal_epochs": 2}, 3),
        ("fedrep", {"head_epochs": 4, "body_epochs": 1}, 5),
        ("apfl", {}, 2),
    ],
)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_gradients_are_those_of_single_samples(
    name: str, options: dict[str, Any], passes: int, engine: str
) -> None:
    """An epoch is one of every sample, whatever the batches; so many as methods take of a batch."""
    sim = simulation(make_method(name, options), engine=engine, rounds=2)
    epochs = TRAIN.epochs or 0
    extra = 0 if name not in {"ditto", "fedrep"} else passes - 1
    expected = N * (passes * epochs if not extra else _epochs(name, epochs, options))
    assert sim.gradients == 2 * expected


def _epochs(name: str, epochs: int, options: dict[str, Any]) -> int:
    return epochs + options["personal_epochs"] if name == "ditto" else sum(options.values())


@pytest.mark.parametrize(("batch", "each"), [(4, 4), (128, PUBLIC)])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_gradients_of_public_samples_count_too(engine: str, batch: int, each: int) -> None:
    """PerFed-CKT takes a public batch with every step, from the second round on."""
    method = make_method("perfed_ckt", {"clusters": 2, "public_batch": batch, "weights": "uniform"})
    sim = simulation(method, engine=engine, rounds=2)
    steps = sum(math.ceil(size / TRAIN.batch_size) for size in SIZES)
    assert sim.gradients == 2 * N + steps * each


def compared(budget: str, out: Path) -> dict[str, dict[str, Any]]:
    methods = "methods=[local, fedavg, {name: fedrep, head_epochs: 3}, scaffold, {name: ditto, rounds: 5}]"
    data = "data={name: digits, samples: 120, clients: 4}"
    config = load(None, [methods, data, "seeds=[0]", "rounds=8", "fraction=0.5", f"budget={budget}"])
    found = run_experiment(config, out)
    text = write_report(found)[0].read_text()
    assert ("Budget: " in text) == (budget != "rounds")
    assert "gradients / client / round" in text
    return {summary["label"]: summary for summary, _ in found.jobs}


@pytest.mark.slow
def test_a_budget_of_gradients_gives_every_method_those_of_fedavg(tmp_path: Path) -> None:
    found = compared("gradients", tmp_path / "out")
    assert found["fedavg"]["rounds"] == found["local"]["rounds"] == 8
    assert found["fedrep"]["rounds"] == 2  # four epochs a round in place of one
    assert found["ditto"]["rounds"] == 5  # its line says so
    allowed = found["fedavg"]["gradients"]
    assert abs(found["fedrep"]["gradients"] - allowed) <= found["fedrep"]["gradients"] / 2 / 2 + 1


@pytest.mark.slow
def test_a_budget_of_bytes_counts_both_ways_and_leaves_out_who_sends_nothing(tmp_path: Path) -> None:
    found = compared("bytes", tmp_path / "out")
    assert found["fedavg"]["rounds"] == found["local"]["rounds"] == 8
    assert found["scaffold"]["rounds"] == 4  # twice as much a round
    assert found["local"]["bytes_up"] == 0


@pytest.mark.slow
def test_without_a_budget_all_get_the_same_rounds(tmp_path: Path) -> None:
    found = compared("rounds", tmp_path / "out")
    assert [found[n]["rounds"] for n in ("local", "fedavg", "fedrep", "scaffold", "ditto")] == [8, 8, 8, 8, 5]


def test_privacy_needs_rounds_that_are_known_before() -> None:
    config = load(None, ["train.dp={clip: 1.0, epsilon: 8}", "budget=gradients", "methods=[fedavg]"])
    with pytest.raises(ConfigError, match="budget=gradients"):
        check(config)
