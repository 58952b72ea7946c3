"""The dry run: what it says of traffic, seconds and a simulated system is what a run then does."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tailorfl
from cli.commands import invoke
from runs.small import first_job, simulation_of
from tailorfl.cli.results import LONG, shorter
from tailorfl.core.server_training import ServerDistillation
from tailorfl.rounds.participation import Trace
from tailorfl.runs import cost_estimate as module
from tailorfl.runs.cost_estimate import estimate, simulated_system
from tailorfl.runs.folders import experiment_in
from tailorfl.settings.loading import load
from tailorfl.training.gradients import LocalObjective

TINY: dict[str, Any] = {
    "data": {"name": "digits", "clients": 4, "samples": 200, "partition": "iid"},
    "methods": ["fedavg"],
    "model": "logistic",
    "train": {"steps": 4, "batch_size": 5},
    "eval": {"sets": ["local"], "every": 5},
    "rounds": 10,
    "seeds": 2,
}
"""140 samples train, 35 of each client."""
METHODS: list[dict[str, Any]] = [
    *({"name": name} for name in ("local", "centralized", "fedavg", "fedrep", "scaffold")),
    {"name": "hypcluster", "clusters": 3},
    {"name": "pfedhn", "hidden": 8, "depth": 1},
    {"name": "feddf", "distil": {"steps": 2}},
    {"name": "fedfomo", "downloads": 1},
    {"name": "perfed_ckt", "clusters": 2, "public_batch": 8},
]


def row_of(settings: dict[str, Any], **changes: Any) -> Any:
    """The estimate of the only method of an experiment."""
    (row,) = estimate(load(None, {**settings, **changes})).methods.values()
    return row


def slowed(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds_of: Any) -> list[Any]:
    """Make a function of a class work for so many seconds before what it does; return the objects that were used."""
    real, used = getattr(owner, name), []

    def slow(self: Any, *arguments: Any, **options: Any) -> Any:
        used.append(self)
        end = time.process_time() + seconds_of(self)
        while time.process_time() < end:
            pass
        return real(self, *arguments, **options)

    monkeypatch.setattr(owner, name, slow)
    return used


# -- traffic ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("a_quick_estimate")
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m["name"])
def test_traffic_of_a_round_is_that_of_the_second_round(method: dict[str, Any]) -> None:
    """The first one sends less in FedFomo and PerFed-CKT; clusters of two probed clients may be fewer than asked."""
    data = {"name": "digits", "samples": 300, "clients": 6, "public": "digits", "public_samples": 30}
    settings = {"data": data, "methods": [method], "train": {"steps": 2, "batch_size": 4}, "fraction": 0.5}
    config = load({**TINY, **settings, "eval": {}, "rounds": 30, "seeds": 1})
    (row,) = estimate(config).methods.values()
    sim = simulation_of(first_job(config))
    sim.step()
    traffic = sim.step().traffic
    assert row["scalars_up_per_round"] == traffic.up
    assert row["scalars_down_per_round"] == traffic.down_unicast
    assert row["bytes_per_round"] == traffic.bytes_up + traffic.bytes_down
    assert row["seconds"] > 0


@pytest.mark.usefixtures("a_quick_estimate")
@pytest.mark.parametrize("participation", ["sampled", "all"])
def test_a_client_that_was_left_out_is_not_counted(participation: str) -> None:
    data = {"name": "digits", "samples": 200, "clients": 4, "excluded_clients": ["client-0"]}
    ditto = {"name": "ditto", "participation": participation}
    config = load({**TINY, "data": data, "methods": [ditto], "eval": {}, "seeds": 1})
    foreseen = estimate(config)
    (row,) = foreseen.methods.values()
    sim = simulation_of(first_job(config))
    done = sim.step()
    assert row["gradients_per_round"] == done.gradients
    assert row["bytes_per_round"] == done.traffic.bytes_up + done.traffic.bytes_down
    assert foreseen.clients == foreseen.clients_per_round == 3
    assert foreseen.samples["train"]["smallest"] == min(sim.population.sizes[1:])


@pytest.mark.usefixtures("a_quick_estimate")
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_traffic_that_grows_from_round_to_round_is_that_of_all_rounds(
    fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of trees sends all trees so far to every client; two of the clients count for all."""
    monkeypatch.setattr(module, "PROBE_CLIENTS", 2)
    data = {"name": "synthetic_linear", "options": {"clients": 6, "samples": 20, "dim": 2}}
    trees = {"name": "federated_trees", "max_leaf_nodes": 2}
    settings = {**TINY, "data": data, "model": "linear", "methods": [trees], "fraction": fraction}
    config = load({**settings, "rounds": 7, "seeds": 1})
    (row,) = estimate(config).methods.values()
    sim = simulation_of(first_job(config))
    for _ in range(7):
        sim.step()
    total = sim.traffic
    assert 7 * row["bytes_per_round"] == pytest.approx(total.bytes_up + total.bytes_down, abs=7)
    assert 7 * row["scalars_down_per_round"] == pytest.approx(total.down_unicast, abs=7)
    assert 7 * row["scalars_up_per_round"] == total.up


# -- seconds ---------------------------------------------------------------------------------------------------


def priced(monkeypatch: pytest.MonkeyPatch, per_gradient: Any = lambda engine: 0.1, **changes: Any) -> Any:
    """The estimate of one method where a client takes half a second, and a gradient of a sample a tenth."""
    monkeypatch.setattr(module, "_step_seconds", lambda sim, clients, engine: (0.5, per_gradient(engine)))
    monkeypatch.setattr(module, "clock", lambda: 0.0)  # the server takes none
    return row_of(TINY, **changes)


def test_a_round_takes_its_clients_and_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four clients, and four steps of five samples each."""
    row = priced(monkeypatch)
    assert row["gradients_per_round"] == 4 * 4 * 5
    assert row["seconds_per_round"] == pytest.approx(4 * 0.5 + 80 * 0.1)
    ditto = priced(monkeypatch, methods=["ditto"])
    assert ditto["seconds_per_round"] == pytest.approx(4 * 0.5 + 160 * 0.1)
    by_two = priced(monkeypatch, engine={"workers": 2})
    assert by_two["seconds_per_round"] == pytest.approx(row["seconds_per_round"] / 2)


def test_evaluations_take_their_passes_and_seeds_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models, on a fifth of 50 samples a client: forward passes, of which a gradient has three."""
    row = priced(monkeypatch)
    evaluation = row["seconds_per_round"] * (2 * 4 * 10) / (3 * 80)
    assert row["seconds_per_evaluation"] == pytest.approx(evaluation)
    assert (row["rounds"], row["evaluations"]) == (10, 3)
    assert row["seconds"] == pytest.approx(2 * (10 * row["seconds_per_round"] + 3 * evaluation))


@pytest.mark.parametrize(("engine", "seconds"), [("sequential", 0.1), ("auto", 0.02), ("vectorized", 0.02)])
def test_the_faster_way_counts_where_the_engine_may_take_it(
    engine: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a gradient of a cohort that trains together takes a fifth of one alone."""
    times = {"sequential": 0.1, "vectorized": 0.02}
    row = priced(monkeypatch, lambda engine: times[engine.kind], engine=engine)
    assert row["seconds_per_round"] == pytest.approx(4 * 0.5 + 80 * seconds)


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


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_the_servers_time_is_that_of_all_its_steps(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of the distillation works 20 ms, beside which the rest is small; few are tried."""
    used = slowed(monkeypatch, ServerDistillation, "distil", lambda distil: 0.02 * distil.steps)
    monkeypatch.setattr(module, "PROBE_SECONDS", seconds)
    data = {"name": "digits", "clients": 8, "public": "digits"}
    methods = [{"name": "feddf", "distil": {"steps": 400}}]
    row = row_of({**TINY, "data": data, "methods": methods, "train": {"steps": 1}, "seeds": 1})
    assert 0.8 <= row["seconds_per_round"] / (0.02 * 400) <= 1.6
    assert max(distil.steps for distil in used) == (10 if seconds else 2)


SLOW: dict[str, tuple[int, dict[str, Any]]] = {
    "fedavg": (4, {}),
    "ditto": (8, {}),
    "fedrep": (8, {}),
    "per_fedavg": (12, {}),
    "pfedme": (20, {"inner_steps": 5, "local_rounds": 20}),
    "feddf": (4, {"distil": {"steps": 400}}),
}
"""Method -> the most gradients that are computed, and options."""


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_model_is_tried_for_a_few_steps_of_one_client(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step, one and two of every training, whatever the epochs; of the server's distillation at most two."""
    gradients = slowed(monkeypatch, LocalObjective, "value", lambda objective: 0.0)
    distilled = slowed(monkeypatch, ServerDistillation, "distil", lambda distil: 0.0)
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.0)
    data = {"name": "digits", "clients": 4, "samples": 400, "public": "digits"}
    most, options = SLOW[name]
    method, train = {"name": name, **options}, {"epochs": 50, "batch_size": 4}
    settings = {"data": data, "model": {"name": "mlp", "hidden": [4]}, "methods": [method], "seeds": 1}
    assert row_of(settings, train=train)["seconds"] > 0
    assert 0 < len(gradients) <= most
    assert max((distil.steps for distil in distilled), default=0) <= 2


@pytest.mark.parametrize("busy_machine", [False, True])
def test_seconds_of_a_slow_model_are_those_of_all_its_steps(
    busy_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every gradient works 5 ms, beside which the rest is small; the day's clock may say anything of the server."""
    slowed(monkeypatch, LocalObjective, "value", lambda objective: 0.005)
    if busy_machine:
        jumps = SimpleNamespace(perf_counter=count(0, 100).__next__)
        monkeypatch.setattr("tailorfl.rounds.simulation.time", jumps)
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.4)
    row = row_of(TINY, engine="sequential", train={"epochs": 2, "batch_size": 5})
    steps = row["gradients_per_round"] / 5
    assert steps == 2 * 4 * 35 / 5
    assert 0.7 <= row["seconds_per_round"] / (0.005 * steps) <= 2.5


def test_a_long_run_comes_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    config = load(None, ["methods=fedavg,fedavg_ft,ditto", "rounds=10", "seeds=2", "eval.every=5"])
    assert shorter(config, LONG - 1) == []
    text = " ".join(shorter(config, 67 * 3600))
    assert all(word in text for word in ("engine.workers=8", "data.samples", "seeds=1", "tailorfl bench"))
    few = load(None, ["engine.workers=4", "seeds=1", "data.samples=100", "fraction=0.1"])
    text = " ".join(shorter(few, 67 * 3600))
    assert not any(word in text for word in ("engine.workers", "data.samples", "seeds=1"))


# -- a simulated system ----------------------------------------------------------------------------------------

SPEED = {"kind": "lognormal", "median": 300, "spread": 1.0, "redraw": "round"}
SYSTEMS: dict[str, dict[str, Any]] = {
    "deadline": {"speed": SPEED, "bandwidth": 50_000, "deadline": 1.0, "dropout": 0.1},
    "too few": {"speed": SPEED, "deadline": 0.4, "min_replies": 4},
    "more are asked": {"speed": SPEED, "over_selection": 0.5},
    "nights": {"speed": SPEED, "availability": {"kind": "wave", "share": 0.4, "period": 20.0}},
    "no time": {"availability": {"kind": "share", "share": 0.4}},
    "buffered": {"mode": "buffered", "buffer": 3, "speed": SPEED, "bandwidth": 50_000, "dropout": 0.2},
}


def on_system(system: dict[str, Any], **changes: Any) -> tailorfl.ExperimentConfig:
    """Ten clients, twelve rounds."""
    data = {"name": "digits", "clients": 10, "samples": 600}
    settings = {"data": data, "model": "logistic", "methods": ["ditto"], "seeds": [3], "rounds": 12}
    settings |= {"fraction": 1.0 if system.get("mode") == "buffered" else 0.5, "system": system}
    return load({**settings, "train": {"epochs": 1, "batch_size": 20, "lr": 0.1}, **changes})


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_is_foreseen_of_a_system_happens(name: str) -> None:
    config = on_system(SYSTEMS[name])
    sim = simulation_of(first_job(config))
    foreseen = simulated_system(sim, config.rounds)
    assert (sim.round, sim.clock) == (0, 0.0)
    replies, without_effect = 0, 0
    for _ in range(config.rounds):
        before = sim.server.clone()
        trace = sim.step().trace
        assert trace is not None
        replies += len(trace.answered)
        without_effect += not bool((before != sim.server).any())
    assert foreseen["replies_per_round"] == pytest.approx(replies / 12)
    assert foreseen["rounds_without_effect"] == without_effect
    assert foreseen["simulated_seconds"] == pytest.approx(sim.clock)
    assert 0 < foreseen["replies_per_round"] < 8
    assert name != "too few" or without_effect > 0


@pytest.mark.usefixtures("a_quick_estimate")
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_replay_is_foreseen_from_its_trace(name: str, tmp_path: Path) -> None:
    """Also without a client, as `tailorfl unlearn` writes it, where buffered rounds cannot be simulated."""
    tailorfl.run(on_system(SYSTEMS[name]), out=tmp_path / "with", progress=False)
    invoke("unlearn", tmp_path / "with", "--client", 2, "--out", tmp_path / "without", "--quiet")
    row = estimate(experiment_in(tmp_path / "without")).methods["ditto"]
    rounds = list(Trace.read(tmp_path / "without" / "ditto" / "seed-3" / "trace.jsonl"))
    assert row["replies_per_round"] == sum(len(one.answered) for one in rounds) / 12
    assert row["simulated_seconds"] == pytest.approx(sum(one.seconds or 0.0 for one in rounds))
    if name != "buffered":
        changes = {"system": {"min_replies": 8}}
        idle = estimate(load(experiment_in(tmp_path / "without"), changes)).methods["ditto"]
        assert idle["rounds_without_effect"] == 12


@pytest.mark.usefixtures("a_quick_estimate")
def test_a_dry_run_has_what_is_foreseen() -> None:
    rows = estimate(on_system(SYSTEMS["deadline"], methods=["fedavg", "centralized"])).methods
    assert rows["fedavg"]["simulated_seconds"] > 0
    assert rows["fedavg"]["replies_per_round"] < 5
    assert "simulated_seconds" not in rows["centralized"]
    assert "replies_per_round" not in estimate(on_system({})).methods["ditto"]
