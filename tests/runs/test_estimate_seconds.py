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
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.cost_estimate import _add_seconds, _Tried, estimate
from tailorfl.runs.job import Job
from tailorfl.settings.loading import load
from tailorfl.training.gradients import LocalObjective

CONFIG = load(None, ["methods=fedavg,fedavg_ft,ditto", "rounds=10", "seeds=2", "eval.every=5"])


def seconds(
    tried: list[tuple[float, ...] | None], predicted: list[float], kinds: str = "aab", worth: float = 0.0
) -> list[float]:
    rows: dict[str, dict[str, Any]] = {
        m.label: {"seconds_per_round": p, "rounds": 10, "evaluations": 3}
        for m, p in zip(CONFIG.methods, predicted, strict=True)
    }
    found = [t if t is None else _Tried(*t, *[0.0] * (3 - len(t))) for t in tried]
    _add_seconds(CONFIG, rows, found, list(kinds), [worth] * 3)
    return [row["seconds"] for row in rows.values()]


def test_rounds_and_evaluations_of_all_seeds_are_summed() -> None:
    """10 rounds and 3 evaluations with 2 seeds."""
    assert seconds([(1.0, 0.5), (1.0, 2.0), (3.0, 0.0)], [1.0] * 3) == [23.0, 32.0, 60.0]


def test_what_a_first_round_takes_more_comes_once_a_seed_and_in_proportion_where_nothing_was_tried() -> None:
    assert seconds([(1.0, 0.0, 0.5), (1.0, 0.0, 0.5), (2.0, 0.0, 1.0)], [1.0] * 3) == [21.0, 21.0, 42.0]
    assert seconds([(1.0, 0.0, 0.5), (1.0, 0.0, 0.5), None], [1.0, 1.0, 2.0])[2] == 42.0


def test_what_was_not_tried_is_corrected_by_what_was() -> None:
    """A cohort at once takes a quarter of one client after another, and so it does for Ditto."""
    assert seconds([(1.0, 0.0), (1.0, 0.0), None], [4.0, 4.0, 8.0])[2] == 40.0
    assert seconds([None, None, None], [4.0, 4.0, 8.0]) == [80.0, 80.0, 160.0]


def test_an_evaluation_that_was_not_tried_takes_as_long_as_rounds_of_as_many_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two seeds of 10 rounds and 3 evaluations, of 4 s and half of that."""
    assert seconds([None, None, None], [4.0, 4.0, 8.0], worth=0.5) == [92.0, 92.0, 184.0]
    assert seconds([(4.0, 1.0), None, None], [4.0, 4.0, 4.0], "abc", worth=0.5) == [86.0] * 3
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    settings = {
        "data": {"name": "digits", "clients": 4, "samples": 200, "partition": "iid"},
        "methods": ["fedavg"],
        "model": "logistic",
        "train": {"steps": 4, "batch_size": 5},
        "eval": {"sets": ["local"]},
    }
    config = load(None, settings)
    (row,) = estimate(config).methods.values()
    passes, gradients = (
        2 * 4 * 10,
        4 * 4 * 5,
    )  # two models, a fifth of 50 samples a client; four steps of four clients
    assert row["seconds_per_evaluation"] == pytest.approx(row["seconds_per_round"] * passes / (3 * gradients))


def test_tuning_makes_no_method_quicker() -> None:
    """However the measurements scatter: FedAvg and FedAvg+FT train alike, and the latter tunes besides."""
    fedavg, tuned, _ = seconds([(1.0, 0.5), (0.7, 0.3), (1.0, 0.0)], [1.0] * 3)
    assert tuned >= fedavg
    config = load(None, ["methods=fedavg,fedavg_ft", "data.samples=200", "data.clients=4", "model=logistic"])
    rows = estimate(config).methods
    assert rows["fedavg_ft"]["seconds"] >= rows["fedavg"]["seconds"] > 0
    assert rows["fedavg_ft"]["seconds_per_round"] == rows["fedavg"]["seconds_per_round"]


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
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setattr(
        "tailorfl.rounds.simulation.time", SimpleNamespace(perf_counter=count(0, 100).__next__)
    )
    data = {"name": "digits", "clients": 4, "samples": 200, "partition": "iid"}
    settings = {
        "data": data,
        "methods": ["local"],
        "model": "logistic",
        "train": {"epochs": 1, "batch_size": 5},
    }
    (row,) = estimate(load(None, settings)).methods.values()
    steps = row["gradients_per_round"] / 5
    assert steps == 4 * 35 / 5  # seven tenths of 50 samples train
    assert 0.002 * steps < row["seconds_per_round"] < 3 * 0.002 * steps


def test_rounds_are_tried_while_they_fit_into_half_of_what_is_left() -> None:
    config = load(None, ["method=fedavg", "data.samples=200", "data.clients=4", "model=logistic"])
    federation = make_federation(config, 0)

    def tried(predicted: float, patience: float) -> int:
        sim = make_simulation(Job(config, config.methods[0], 0), federation)
        return sim.round if module._really(sim, sim.engine, config, predicted, patience) else 0

    assert [tried(2.9, 6.0), tried(3.0, 6.0), tried(0.0, 1e-6)] == [module.TRIED, 0, 1]


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


def test_it_says_what_it_tries_and_tries_no_long_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setattr(module, "evaluate", lambda *given: pytest.fail("that would take long"))
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
