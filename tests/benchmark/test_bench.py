"""`tailorfl.bench`: what is measured, on whom, what is advised, and that nothing is left behind."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import tailorfl
from tailorfl.benchmark import measure
from tailorfl.benchmark.clock import alternate, timed
from tailorfl.benchmark.measure import LoopRound, Round, candidates
from tailorfl.benchmark.result import LOOP, Way, recommend
from tailorfl.engines import devices
from tailorfl.engines.in_process import Sequential
from tailorfl.errors import ConfigError
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.settings.loading import load
from tailorfl.training import tree

SMALL: dict[str, Any] = {
    "data": {"clients": 5, "samples": 200}, "model": {"name": "logistic"}, "method": "fedavg", "seeds": 1,
}  # fmt: skip


def way(name: str, *seconds: float, wall: float = 1.0, **more: Any) -> Way:
    """A way whose repetitions took `seconds`, where the loop took one; `wall` times as long on the wall."""
    middle = sorted(seconds)[len(seconds) // 2]
    usual: dict[str, Any] = {
        "name": name, "settings": "" if name == LOOP else f"engine.name={name}", "kind": name, "chunk": 1, "workers": 1,
        "precision": "float32", "seconds": seconds, "wall_seconds": tuple(wall * s for s in seconds),
        "seconds_min": min(seconds), "seconds_median": middle, "clients_per_second": 1 / middle,
        "times_faster": 1 / middle, "spread": (1 / max(seconds), 1 / min(seconds)),
    }  # fmt: skip
    return Way(**{**usual, **more})


def simulated(method: str = "fedavg", **changes: Any) -> Simulation:
    config = load({**SMALL, "method": method}, changes)
    return make_simulation(Job(config, config.methods[0], 0), make_federation(config, 0))


def test_a_small_run_measures_the_loop_and_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST", 3)
    state = torch.random.get_rng_state()
    found = tailorfl.bench(SMALL, seconds=600)
    assert torch.equal(torch.random.get_rng_state(), state)
    names = [one.name for one in found.ways]
    assert names[:4] == [LOOP, "auto", "vectorized, 5 by itself", "sequential"]
    assert {"vectorized, chunk 1", "vectorized, chunk 3"} <= set(names)
    assert {len(one.seconds) for one in found.ways} == {3}
    assert found.way(LOOP).times_faster == 1.0
    assert found.way("auto").note in ("chose sequential", "chose vectorized")
    assert (found.clients, found.model) == (5, "logistic")
    assert found.recommendation.settings in {one.settings for one in found.ways}
    load(None, found.recommendation.settings.split())
    json.dumps(found.to_dict())


def test_a_long_round_of_the_first_method_is_measured_on_a_part_of_its_clients() -> None:
    found = tailorfl.bench({**SMALL, "method": ["ditto", "fedavg"]}, seconds=1e-6, train={"epochs": 5})
    assert (found.method, found.clients, found.measured) == ("ditto", 5, 3)
    assert {len(one.seconds) for one in found.ways} == {2}


@pytest.mark.parametrize(("method", "times"), [("fedavg", 1), ("ditto", 2), ("fedsam", 2)])
def test_the_loop_takes_as_many_gradients_as_the_method(method: str, times: int) -> None:
    sim = simulated(method, train={"epochs": 2, "batch_size": 7})
    round_ = Round(sim, (0, 1, 2), (0, 1, 2))
    ((_, cohort),) = round_.cohorts
    clients = list(LoopRound(round_)._clients(cohort))
    for client, rows, loop in zip(cohort.ids, cohort.members, clients, strict=True):
        assert round_.gradients[client] == 2 * times * len(rows)
        assert sum(map(len, loop.batches)) == round_.gradients[client]
    assert len(clients[0].batches) == 2 * times * -(-len(cohort.members[0]) // 7)


def test_a_method_that_trains_in_some_rounds_only_is_measured_in_one() -> None:
    found = tailorfl.bench({**SMALL, "method": {"name": "l2gd", "per_round": "coin", "p": 0.5}}, seconds=1e-6)
    assert found.gradients > 0


@pytest.mark.parametrize(
    ("settings", "seconds", "named"),
    [
        ({}, 0.0, "must be positive"),
        ({}, -1.0, "must be positive"),
        ({}, math.nan, "must be positive"),
        ({"variants": {"a": {"rounds": 2}}}, 1.0, r"has variants \(a\).*variants=\{\}"),
        ({"method": "fedavgg"}, 1.0, "fedavg"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings: dict[str, Any], seconds: float, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tailorfl.bench({**SMALL, **settings}, seconds=seconds)


def test_a_round_can_be_done_again_from_the_same_state() -> None:
    sim = simulated("ditto")
    sim.step()
    again = Round(sim, (0, 1, 2), (0, 1, 2))
    before, found = sim.states.get((0, 1, 2)).clone(), []
    for _ in range(2):
        again.run(Sequential())
        found.append(sim.server.clone())
        again.reset()
        assert (sim.states.get((0, 1, 2)) == before).all()
        assert sim.round == 1
    assert all(torch.equal(t, dict(tree.leaves(found[1]))[p]) for p, t in tree.leaves(found[0]))


def test_chunks_that_make_sense_are_at_most_the_cohort_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_processor_has_bfloat16", lambda: True)
    round_ = Round(simulated(), tuple(range(5)), tuple(range(5)))
    found = candidates(round_, 3)
    several = [c for c in found if c.workers > 1]
    assert all(c.settings == f"engine.name=auto engine.chunk=3 engine.workers={c.workers}" for c in several)
    assert all(c.kind is found[0].kind for c in several)
    assert len(several) == len({c.workers for c in several}) <= 3
    found = found[: len(found) - len(several)]
    assert [c.settings for c in found] == [
        "engine.name=auto engine.chunk=3",
        "engine.name=vectorized",
        "engine.name=sequential",
        "engine.name=auto engine.chunk=3 engine.precision=bfloat16",
        "engine.name=vectorized engine.chunk=1",
        "engine.name=vectorized engine.chunk=3",
    ]
    assert [round_.chunk(c.kind) for c in found[1:] if c.kind.precision == "float32"] == [5, 1, 1, 3]


def test_the_fastest_way_is_advised_and_the_simpler_of_equals() -> None:
    loop, auto = way(LOOP, *[1.0] * 5), way("auto", *[2.0] * 5)
    fast, close = way("vectorized", *[0.5] * 5), way("sequential", *[0.505] * 5)
    assert recommend([loop, auto, fast, close]).way == "vectorized"
    found = recommend([loop, auto, close, fast])
    assert found.way == "sequential"
    assert any("within the noise" in text and "vectorized" in text for text in found.warnings)
    assert found.why[0] == "sequential: 1.98 x the speed of the plain loop"
    assert "3.96 x the speed of auto" in found.why


def test_a_lower_precision_is_named_and_not_taken() -> None:
    ways = [way(LOOP, *[1.0] * 5), way("auto", *[0.6] * 5)]
    half = way("auto, bfloat16", *[0.5] * 5, precision="bfloat16")
    found = recommend([*ways, half])
    assert found.way == "auto"
    assert [text for text in found.warnings if "bfloat16" in text] == [
        "engine.precision=bfloat16 is 1.20 x the speed of auto, but rounds the factors of products to 8 bits; if "
        "that does no harm, set engine.name=auto, bfloat16"
    ]
    near = replace(half, seconds=(0.5, 0.54, 0.54, 0.54, 0.5), seconds_median=0.54)
    assert any("is not worth it here: 1.11 x" in text for text in recommend([*ways, near]).warnings)


ONE = way(LOOP, *[1.0] * 5)
AUTO, TWICE = way("auto", *[1.0] * 5), way("auto", *[2.0] * 5)


@pytest.mark.parametrize(
    ("ways", "advised"),
    [
        # what the automatic engine chose is as fast as itself
        ([ONE, way("auto", *[0.6] * 5, kind="vectorized"), way("vectorized", *[0.5] * 5)], "auto"),
        # few repetitions tell large differences only
        ([way(LOOP, 1.0, 1.0), way("auto", 0.54, 0.54), way("vectorized", 0.5, 0.5)], "auto"),
        ([way(LOOP, 1.0, 1.0), way("auto", 0.54, 0.54), way("vectorized", 0.4, 0.4)], "vectorized"),
        # a difference that half of the repetitions deny is noise
        ([way(LOOP, *[1.0] * 6), way("auto", *[0.9, 1.2] * 3), way("vectorized", *[1.0] * 6)], "auto"),
        # a way that was left out is not advised
        ([ONE, TWICE, way("vectorized", 0.1, seconds=(), wall_seconds=(), note="left out")], "auto"),
        # several processes are advised where the wall says so
        ([ONE, AUTO, way("two", *[0.6] * 5, workers=2)], "two"),
        ([ONE, AUTO, way("two", *[0.95] * 5, workers=2)], "auto"),
        ([ONE, AUTO, way("two", 0.6, 0.6, 0.6, 1.2, 1.2, workers=2)], "auto"),
    ],
)
def test_what_is_advised(ways: list[Way], advised: str) -> None:
    assert recommend(ways).way == advised


def test_what_is_weak_about_the_measurement_is_said() -> None:
    ways = [way(LOOP, 1.0, 1.0, wall=2.0), way("auto", 1.5, 1.5)]
    found = recommend(ways)
    assert any("only 2 repetitions" in text for text in found.warnings)
    assert any("2.0 x the process time" in text for text in found.warnings)
    assert any("plain loop is 1.50 x as fast" in text for text in found.warnings)


def test_measuring_alternates_and_ends() -> None:
    calls: list[str] = []
    runs = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    found = alternate(runs, 0.0, 2, 9, lambda: calls.append("-"), lambda _: None)
    assert calls == ["-", "a", "-", "b"] * 2
    assert {name: len(times) for name, times in found.items()} == {"a": 2, "b": 2}
    assert len(alternate(runs, 1e18, 2, 9, lambda: None, lambda _: None)["a"]) == 9


def test_clocks_run() -> None:
    found = timed(lambda: sum(range(10**5)))
    assert found.process > 0 < found.wall
