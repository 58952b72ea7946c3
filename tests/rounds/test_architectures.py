"""Clients with different architectures: grouped, counted, resumed, evaluated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engines.networks import Undecided
from methods.settings import make
from methods.small import NEWCOMER, SIZES, TRAIN, after, assert_close, federation, model, replaced
from rounds.helpers import ASSIGNMENT, MODELS, dumped, two_architectures
from tailorfl.core.method import methods
from tailorfl.engines.choice import Auto
from tailorfl.engines.in_process import Sequential
from tailorfl.errors import ConfigError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.models.functional import Model
from tailorfl.rounds.groups import assign_by_size
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import check, make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.settings.loading import load

ABLE = tuple(name for name, method in methods().items() if method.heterogeneous)


def run(name: str, engine: str = "sequential", rounds: int = 3, **settings: Any) -> Simulation:
    done: Simulation = after(two_architectures(name, engine, **settings), rounds)
    return done


@pytest.mark.parametrize("name", ABLE)
def test_every_client_deploys_a_model_of_its_own_architecture(name: str) -> None:
    sim, clients = run(name, rounds=1), list(range(len(SIZES)))
    if sim.method.has_personal:
        names = {i: set(models.keys()) for ids, models in sim.personal_models(clients) for i in ids}
        assert names == {i: set(MODELS[ASSIGNMENT[i]].init(0).keys()) for i in clients}
        list(sim.newcomer_models((NEWCOMER,), 2))
    records = evaluate(sim, Protocol(sets=("val", "local", "global", "heldout"), adapt_steps=(0, 2)))
    kinds = sim.method.has_personal + sim.method.has_global
    assert sorted(r["client"] for r in records if r["set"] == "local") == sorted(clients * kinds)
    if sim.method.has_global:
        assert [(r["set"], r["model"]) for r in records].count(("global", "global")) == len(MODELS)


def test_models_cross_the_network_as_large_as_they_are() -> None:
    sim = run("feddf", rounds=1, fraction=1.0)
    d = {name: m.scalars for name, m in MODELS.items()}
    held = [ASSIGNMENT[i] for i in range(len(SIZES))]
    assert sim.traffic.up == sim.traffic.down_unicast == sum(d[name] for name in held)
    assert sim.traffic.down_multicast == sum(d.values())


def test_a_client_that_diverges_is_left_out_and_the_others_go_on() -> None:
    broken = replaced(federation(), 2, lambda x: torch.full_like(x, torch.inf))
    sim = Simulation(make("feddf"), broken, MODELS, TRAIN, assignment=ASSIGNMENT)
    assert sim.step().rejected == (2,)
    assert all(bool(torch.isfinite(t.float()).all()) for t in dumped(sim).values())


def test_methods_that_mix_weights_refuse_several_architectures() -> None:
    for name in sorted(set(methods()) - set(ABLE)):
        with pytest.raises(ConfigError, match=r"need the same architecture.*feddf"):
            Simulation(make(name), federation(), MODELS, TRAIN, assignment=ASSIGNMENT)


@pytest.mark.parametrize(
    ("models", "assignment", "message"),
    [
        (MODELS, ("small", "large"), "2 architectures are assigned, but the federation has 6 clients"),
        (MODELS, ("smal", *ASSIGNMENT[1:]), r"architecture 'smal'.*small"),
        ({"a/b": model("mlp")}, ("a/b",) * 6, "must not contain '/'"),
        (model("mlp"), ASSIGNMENT, "not one model"),
    ],
)
def test_an_assignment_that_does_not_fit_is_refused(models: Any, assignment: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Simulation(make("local"), federation(), models, TRAIN, assignment=assignment)


def test_larger_models_go_to_clients_with_more_data() -> None:
    assert assign_by_size([5, 9, 1, 7, 3, 8], ["a", "b", "c"]) == ["b", "c", "a", "b", "a", "c"]
    assert assign_by_size([4, 4, 4], ["a", "b"]) == ["a", "a", "b"]


def test_who_has_a_larger_model_may_be_drawn_with_chances_that_grow_with_the_data() -> None:
    """Successive draws without replacement: n_i/Σn for the first of the largest, and the law of the others follows."""
    sizes, names, draws = [1, 2, 3, 10], ["small", "middle", "large"], 4000
    found = [assign_by_size(sizes, names, np.random.default_rng(k)) for k in range(draws)]
    # Shares as without chance: two of four are small, and one each of the others.
    assert all(sorted(f) == ["large", "middle", "small", "small"] for f in found)
    share = {name: np.array([[f == name for f in one] for one in found]).mean(0) for name in names}
    p = np.array(sizes) / sum(sizes)
    second = [sum(p[j] * p[i] / (1 - p[j]) for j in range(4) if j != i) for i in range(4)]
    np.testing.assert_allclose(share["large"], p, atol=0.03)
    np.testing.assert_allclose(share["middle"], second, atol=0.03)
    assert assign_by_size(sizes, names, np.random.default_rng(5)) == found[5]


def test_an_experiment_draws_the_architectures_by_its_seed() -> None:
    def owners(seed: int, **model: Any) -> list[set[int]]:
        larger = {"name": "logistic", "larger": [{"name": "mlp", "hidden": [16]}], **model}
        config = load({**settings, "model": larger})
        sim = make_simulation(Job(config, config.methods[0], seed), data)
        return [set(group.clients) for group in sim.groups]

    settings = {"data": {"name": "digits", "clients": 10}, "methods": ["local"], "seeds": [0, 1]}
    data = make_federation(load(settings), 0)
    drawn = owners(0, assign="random")
    assert owners(0, assign="random") == drawn != owners(1, assign="random")
    assert [len(ids) for ids in drawn] == [5, 5]
    largest = {int(i) for i in np.argsort(data.sizes(), kind="stable")[-5:]}
    assert owners(0) == owners(1) == [set(range(10)) - largest, largest]


def test_any_other_name_will_do() -> None:
    models = {"model": model("mlp"), "": model("logistic")}
    sim = Simulation(
        make("feddf"), federation(), models, TRAIN, assignment=("model", "", "", "", "model", "")
    )
    sim.step()
    for name, of in models.items():
        found = sim.global_model(name)
        assert found is not None
        assert set(found.keys()) == set(of.parameters)


def test_an_architecture_that_cannot_be_mapped_makes_the_automatic_engine_sequential(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even if the choice was made on another one."""
    models, owners = {"plain": model("mlp"), "undecided": Model(Undecided)}, ["plain", "undecided"] * 3
    sims = [
        Simulation(make("local"), federation(), models, TRAIN, assignment=owners, engine=engine)
        for engine in (Auto(choice="vectorized"), Sequential())
    ]
    for sim in sims:
        sim.step()
    assert "using the sequential one" in caplog.text
    assert_close(dumped(sims[0]), dumped(sims[1]))


def test_an_experiment_is_refused_before_its_first_job_where_one_method_cannot_run() -> None:
    settings = {"model": {"name": "logistic", "larger": ["mlp"]}, "methods": ["local", "fedavg"]}
    with pytest.raises(ConfigError, match="FedAvg exchanges or averages"):
        check(load(settings))
    with pytest.raises(ConfigError, match="FedDF needs a public set"):
        check(load({"methods": ["fedavg", "feddf"]}))
