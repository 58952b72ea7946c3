"""The seconds of a dry run: what rounds take with the experiment's engine, and what to do where that is long."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tailorfl
from tailorfl.cli.estimates import LONG, shorter
from tailorfl.runs import cost_estimate as module
from tailorfl.runs.cost_estimate import estimate
from tailorfl.settings.loading import load
from tailorfl.training.gradients import LocalObjective

CONFIG = load(None, ["methods=fedavg,fedavg_ft,ditto", "rounds=10", "seeds=2", "eval.every=5"])


TINY = {
    "data": {"name": "digits", "clients": 4, "samples": 200, "partition": "iid"},
    "methods": ["fedavg"],
    "model": "logistic",
    "train": {"steps": 4, "batch_size": 5},
    "eval": {"sets": ["local"], "every": 5},
    "rounds": 10,
    "seeds": 2,
}
"""140 samples train, 35 of each client."""


def priced(monkeypatch: pytest.MonkeyPatch, client: float, gradient: float, **changes: Any) -> Any:
    """The estimate of one method where a client takes `client` seconds and a gradient of a sample `gradient`."""
    monkeypatch.setattr(module, "_step_seconds", lambda *given: (client, gradient))
    monkeypatch.setattr(module, "clock", lambda: 0.0)  # the server takes none
    (row,) = estimate(load(None, {**TINY, **changes})).methods.values()
    return row


def test_a_round_takes_its_clients_and_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four clients, and four steps of five samples each."""
    row = priced(monkeypatch, 0.5, 0.1)
    assert row["gradients_per_round"] == 4 * 4 * 5
    assert row["seconds_per_round"] == pytest.approx(4 * 0.5 + 80 * 0.1)
    ditto = priced(monkeypatch, 0.5, 0.1, methods=["ditto"])
    assert ditto["seconds_per_round"] == pytest.approx(4 * 0.5 + 160 * 0.1)
    by_two = priced(monkeypatch, 0.5, 0.1, engine={"workers": 2})
    assert by_two["seconds_per_round"] == pytest.approx(row["seconds_per_round"] / 2)


def test_an_evaluation_takes_as_long_as_rounds_of_as_many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models, on a fifth of 50 samples a client: forward passes, of which a gradient has three."""
    row = priced(monkeypatch, 0.5, 0.1)
    passes, gradients = 2 * 4 * 10, 80
    assert row["seconds_per_evaluation"] == pytest.approx(row["seconds_per_round"] * passes / (3 * gradients))


def test_rounds_and_evaluations_of_all_seeds_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rounds, one evaluation before them and one every five, with two seeds."""
    row = priced(monkeypatch, 0.5, 0.1)
    assert (row["rounds"], row["evaluations"]) == (10, 3)
    expected = 2 * (10 * row["seconds_per_round"] + 3 * row["seconds_per_evaluation"])
    assert row["seconds"] == pytest.approx(expected)


@pytest.mark.parametrize(("engine", "seconds"), [("sequential", 0.1), ("auto", 0.02), ("vectorized", 0.02)])
def test_the_faster_way_counts_where_the_engine_may_take_it(
    engine: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a gradient of a cohort that trains together takes a fifth of one alone."""
    times = {"sequential": 0.1, "vectorized": 0.02}
    monkeypatch.setattr(module, "_step_seconds", lambda sim, clients, engine: (0.0, times[engine.kind]))
    monkeypatch.setattr(module, "clock", lambda: 0.0)
    (row,) = estimate(load(None, {**TINY, "engine": engine})).methods.values()
    assert row["seconds_per_round"] == pytest.approx(80 * seconds)


def test_clients_of_slow_steps_are_not_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def step(sim: Any, clients: tuple[int, ...], engine: Any) -> tuple[float, float]:
        timed.append(len(clients))
        time.sleep(0.05)
        return 0.0, 0.1

    monkeypatch.setattr(module, "_step_seconds", step)
    for seconds, expected in ((1e3, [1, 4]), (0.15, [1, 2]), (0.05, [1])):
        monkeypatch.setattr(module, "PROBE_SECONDS", seconds)
        estimate(load(None, TINY))
        assert timed == expected
        timed.clear()


def test_what_the_clock_of_the_day_says_of_the_server_is_no_part_of_the_clients_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine with others, where a day's millisecond is a fraction of the processor's."""
    gradient = LocalObjective.value

    def slow(self: Any, *arguments: Any, **options: Any) -> Any:
        end = time.process_time() + 0.002
        while time.process_time() < end:
            pass
        return gradient(self, *arguments, **options)

    monkeypatch.setattr(LocalObjective, "value", slow)
    monkeypatch.setattr(
        "tailorfl.rounds.simulation.time", SimpleNamespace(perf_counter=count(0, 100).__next__)
    )
    data = {"name": "digits", "clients": 4, "samples": 200, "partition": "iid"}
    settings = {
        "data": data,
        "methods": ["local"],
        "model": "logistic",
        "engine": "sequential",
        "train": {"epochs": 1, "batch_size": 5},
    }
    (row,) = estimate(load(None, settings)).methods.values()
    steps = row["gradients_per_round"] / 5
    assert steps == 4 * 35 / 5  # seven tenths of 50 samples train
    assert 0.002 * steps < row["seconds_per_round"] < 3 * 0.002 * steps


@pytest.mark.usefixtures("a_quick_estimate")
@pytest.mark.parametrize("kind", ["gradients", "bytes"])
def test_rounds_are_those_that_a_budget_has(kind: str, tmp_path: Path) -> None:
    """As they then are: methods that take or send more get fewer."""
    methods = [{"name": name} for name in ("fedavg", "ditto", "scaffold")]
    data = {"name": "digits", "clients": 4, "samples": 240, "partition": "iid"}
    settings = {
        "data": data,
        "model": "logistic",
        "methods": methods,
        "rounds": 7,
        "seeds": 1,
        "budget": kind,
    }
    settings |= {"train": {"steps": 2, "batch_size": 4}, "eval": {"every": 0}}
    foreseen = {label: row["rounds"] for label, row in estimate(load(None, settings)).methods.items()}
    assert foreseen["fedavg"] == 7
    assert min(foreseen.values()) < 7
    result = tailorfl.compare(settings, out=tmp_path / "out", progress=False)
    assert foreseen == {label: result.table.loc[label, "rounds"] for label in foreseen}


@pytest.mark.usefixtures("a_quick_estimate")
def test_it_says_what_it_tries() -> None:
    said: list[str] = []
    config = load(None, ["methods=local,fedavg", "data.samples=200", "data.clients=4", "model=logistic"])
    estimate(config, said.append)
    assert said == ["estimating local (1 of 2)", "estimating fedavg (2 of 2)"]


def test_a_long_run_comes_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert shorter(CONFIG, LONG - 1) == []
    text = " ".join(shorter(CONFIG, 67 * 3600))
    assert all(word in text for word in ("engine.workers=8", "data.samples", "seeds=1", "tailorfl bench"))
    few = load(None, ["engine.workers=4", "seeds=1", "data.samples=100", "fraction=0.1"])
    text = " ".join(shorter(few, 67 * 3600))
    assert not any(word in text for word in ("engine.workers", "data.samples", "seeds=1"))
