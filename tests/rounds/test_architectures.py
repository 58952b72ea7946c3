"""Clients with different architectures: grouped, counted, resumed, evaluated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from methods.settings import make
from methods.small import NEWCOMER, SIZES, TRAIN, assert_close, federation, model
from rounds.helpers import ASSIGNMENT, MODELS, dumped, stepped, two_architectures
from tailorfl.core.method import methods
from tailorfl.engines.auto import Auto
from tailorfl.engines.base import Engine
from tailorfl.engines.sequential import Sequential
from tailorfl.errors import ConfigError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.models.functional import Model
from tailorfl.rounds.groups import assign_by_size
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import check, make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import load
from tailorfl.training import tree

ABLE = tuple(name for name, method in methods().items() if method.heterogeneous)


def run(name: str, engine: str = "sequential", rounds: int = 3, **settings: Any) -> Simulation:
    done: Simulation = stepped(two_architectures(name, engine, **settings), rounds)
    return done


@pytest.mark.parametrize("name", ABLE)
def test_engines_agree(name: str) -> None:
    a, b = (dumped(run(name, engine, fraction=0.6)) for engine in ("sequential", "vectorized"))
    assert_close(a, b)


@pytest.mark.parametrize("name", ABLE)
def test_every_client_deploys_a_model_of_its_own_architecture(name: str) -> None:
    sim = run(name, rounds=1)
    if sim.method.has_personal:
        found = {i: models for ids, models in sim.personal_models(range(len(SIZES))) for i in ids}
        assert set(found) == set(range(len(SIZES)))
        for i, models in found.items():
            assert set(models.keys()) == set(MODELS[ASSIGNMENT[i]].init(0).keys())
        list(sim.newcomer_models((NEWCOMER,), 2))
    records = evaluate(sim, Protocol(sets=("val", "local", "global", "heldout"), adapt_steps=(0, 2)))
    local = [r for r in records if r["set"] == "local"]
    kinds = sim.method.has_personal + sim.method.has_global
    assert sorted(r["client"] for r in local) == sorted(list(range(len(SIZES))) * kinds)
    if sim.method.has_global:
        assert len([r for r in records if r["set"] == "global" and r["model"] == "global"]) == len(MODELS)


def test_local_training_of_a_group_does_not_depend_on_the_others() -> None:
    """Each client trains as it would if all had its architecture."""
    sim = run("local")
    for group in sim.groups:
        alone = Simulation(make("local"), federation(), group.model, TRAIN)
        for _ in range(3):
            alone.step()
        ids = tuple(i for i in range(len(SIZES)) if i in group.clients)
        # Rows of a table lie elsewhere in memory, which may change the rounding of matrix products.
        mine, theirs = group.states.get(ids), alone.states.get(ids)
        assert_close(dict(tree.leaves(mine)), dict(tree.leaves(theirs)), atol=1e-6)


def test_models_cross_the_network_as_large_as_they_are() -> None:
    sim = run("feddf", rounds=1, fraction=1.0)
    d = {name: m.scalars for name, m in MODELS.items()}
    held = [ASSIGNMENT[i] for i in range(len(SIZES))]
    assert sim.traffic.up == sim.traffic.down_unicast == sum(d[name] for name in held)
    assert sim.traffic.down_multicast == sum(d.values())


def test_a_client_that_diverges_is_left_out_and_the_others_go_on() -> None:
    base = federation()
    x = base.source.x.clone()
    x[torch.from_numpy(base.train[2])] = float("inf")
    broken = replace(base, source=replace(base.source, x=x))
    sim = Simulation(make("feddf"), broken, MODELS, TRAIN, assignment=ASSIGNMENT)
    assert sim.step().rejected == (2,)
    assert all(bool(torch.isfinite(t.float()).all()) for t in dumped(sim).values())


def test_methods_that_mix_weights_refuse_several_architectures() -> None:
    for name in sorted(set(methods()) - set(ABLE)):
        with pytest.raises(ConfigError, match=r"need the same architecture.*feddf"):
            Simulation(make(name), federation(), MODELS, TRAIN, assignment=ASSIGNMENT)


def test_larger_models_go_to_clients_with_more_data() -> None:
    assert assign_by_size([5, 9, 1, 7, 3, 8], ["a", "b", "c"]) == ["b", "c", "a", "b", "a", "c"]
    assert assign_by_size([4, 4, 4], ["a", "b"]) == ["a", "a", "b"]
    with pytest.raises(ConfigError, match="2 architectures are assigned, but the federation has 6 clients"):
        Simulation(make("local"), federation(), MODELS, TRAIN, assignment=("small", "large"))
    with pytest.raises(ConfigError, match=r"architecture 'smal'.*small"):
        Simulation(make("local"), federation(), MODELS, TRAIN, assignment=("smal", *ASSIGNMENT[1:]))

    with pytest.raises(ConfigError, match="must not contain '/'"):
        Simulation(make("local"), federation(), {"a/b": model("mlp")}, TRAIN, assignment=("a/b",) * 6)
    with pytest.raises(ConfigError, match="not one model"):
        Simulation(make("local"), federation(), model("mlp"), TRAIN, assignment=ASSIGNMENT)


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
    settings: dict[str, Any] = {
        "data": {"name": "digits", "clients": 10, "partition_options": {"alpha": 0.3}},
        "model": {"name": "logistic", "larger": [{"name": "mlp", "hidden": [16]}], "assign": "random"},
        "methods": ["local"],
        "seeds": [0, 1],
    }

    def owners(config: ExperimentConfig, seed: int) -> list[frozenset[int]]:
        [method] = config.methods
        sim = make_simulation(Job(config, method, seed), data)
        return [group.clients for group in sim.groups]

    config = load(settings)
    data = make_federation(config, 0)
    assert owners(config, 0) == owners(load(settings), 0)
    assert owners(config, 0) != owners(config, 1)
    assert [len(ids) for ids in owners(config, 0)] == [5, 5]
    del settings["model"]["assign"]
    fixed = load(settings)
    largest = {int(i) for i in np.argsort(data.sizes(), kind="stable")[-5:]}
    assert [set(ids) for ids in owners(fixed, 0)] == [set(range(10)) - largest, largest]
    assert owners(fixed, 0) == owners(fixed, 1)


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


class Untraced(nn.Module):
    """Works for one client at a time only."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x.flatten(1))
        return out * float(self.head.bias.sum().item() < 1e9)


def test_an_architecture_that_cannot_be_mapped_makes_the_automatic_engine_sequential(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even if the choice was made on another one."""
    models = {"plain": model("mlp"), "untraced": Model(Untraced)}
    assignment = ("plain", "untraced", "plain", "untraced", "plain", "plain")

    def after(engine: Engine) -> dict[str, torch.Tensor]:
        sim = Simulation(make("local"), federation(), models, TRAIN, assignment=assignment, engine=engine)
        sim.step()
        return dumped(sim)

    found = after(Auto(choice="vectorized"))
    assert "using the sequential one" in caplog.text
    assert_close(found, after(Sequential()))


def test_an_experiment_is_refused_before_its_first_job_where_one_method_cannot_run() -> None:
    settings = {"model": {"name": "logistic", "larger": ["mlp"]}, "methods": ["local", "fedavg"]}
    with pytest.raises(ConfigError, match="FedAvg exchanges or averages"):
        check(load(settings))
    with pytest.raises(ConfigError, match="FedDF needs a public set"):
        check(load({"methods": ["fedavg", "feddf"]}))
