"""PLGU-LF and PLGU-GRep: the reductions that their algorithms have (the printed ones contradict each other)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from methods.small import TRAIN, simulation
from tailorfl.core import tree
from tailorfl.core.ascent import layer_scores, layerwise_perturbation
from tailorfl.core.client import Client
from tailorfl.core.method import make_method
from tailorfl.engines.simulation import Simulation
from tailorfl.methods.plgu import largest

PLAIN = replace(TRAIN, momentum=0.0, weight_decay=0.0)
ENGINES = ["sequential", "vectorized"]


def run(name: str, options: dict[str, Any], rounds: int = 3, **settings: Any) -> Simulation:
    return simulation(
        make_method(name, options), train=settings.pop("train", PLAIN), rounds=rounds, **settings
    )


def shared(sim: Simulation) -> dict[str, torch.Tensor]:
    model = sim.global_model()
    assert model is not None
    return tree.tensors(model)


def deployed(sim: Simulation) -> dict[str, torch.Tensor]:
    [(_, models)] = sim.personal_models(range(sim.federation.num_clients))
    return tree.tensors(models)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_radius_the_global_model_is_fedavg(engine: str) -> None:
    close(
        shared(run("plgu_lf", {"rho": 0.0}, engine=engine)),
        shared(run("fedavg", {"weights": "uniform"}, engine=engine)),
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_with_equal_scores_no_personal_layer_and_one_step_it_is_fedsam(engine: str) -> None:
    """θ starts at w, so the ascent at θ is the one at w; ones leave SAM's radius."""
    one = replace(PLAIN, epochs=None, steps=1)
    options = {"personal_layers": 0, "score_norm": "ones", "rho": 0.3}
    left = run("plgu_lf", options, engine=engine, train=one)
    right = run("fedsam", {"rho": 0.3}, engine=engine, train=one)
    close(shared(left), shared(right))
    plain = run("fedavg", {"weights": "uniform"}, engine=engine, train=one)
    assert any((shared(left)[n] - t).abs().max() > 1e-4 for n, t in shared(plain).items())


@pytest.mark.parametrize("engine", ENGINES)
def test_with_all_layers_personal_it_is_local_training(engine: str) -> None:
    close(
        deployed(run("plgu_lf", {"personal_layers": 99}, engine=engine)),
        deployed(run("local", {}, engine=engine)),
    )


def test_without_personal_layers_every_round_starts_at_the_received_model() -> None:
    sim = run("plgu_lf", {"personal_layers": 0}, rounds=2)
    method = sim.method

    def start(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, ...]:
        groups = client.layers()
        return (method.start(client, state, received, layer_scores(state, received, groups)),)  # type: ignore[attr-defined]

    ids = range(sim.federation.num_clients)
    [found] = sim.run(ids, sim.states.get(ids), sim.server, start)
    for name, tensor in tree.tensors(found).items():
        assert torch.equal(tensor, tree.tensors(sim.server)[name].expand_as(tensor))


def test_the_largest_scores_are_personal_and_of_equals_the_deeper() -> None:
    assert largest(torch.tensor([0.1, 0.4, 0.3, 0.2]), 2).tolist() == [False, True, True, False]
    assert largest(torch.full((4,), 0.25), 2).tolist() == [False, False, True, True]
    assert largest(torch.tensor([0.5, 0.0, 0.5]), 1).tolist() == [False, False, True]
    assert largest(torch.tensor([0.5, 0.5]), 0).tolist() == [False, False]
    assert largest(torch.tensor([0.5, 0.5]), 9).tolist() == [True, True]


def test_a_layer_without_score_is_not_perturbed() -> None:
    g = TensorDict({"a": torch.tensor([3.0, 4.0]), "b": torch.ones(3)}, batch_size=[])
    found = layerwise_perturbation(g, torch.tensor([0.0, 1.0]), (("a",), ("b",)), 0.1)
    assert not tree.tensors(found)["a"].any()
    assert tree.tensors(found)["b"].all()


@pytest.mark.parametrize("norm", ["sum", "mean", "none", "ones"])
def test_score_norms(norm: Any) -> None:
    a = TensorDict({"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(5)}, batch_size=[])
    b = TensorDict({"a": torch.zeros(2), "b": torch.tensor([0.0, 0.0, 0.0, 0.0, 10.0])}, batch_size=[])
    expected = {
        "sum": [2.5 / 4.5, 2 / 4.5],
        "mean": [5 / 4.5, 4 / 4.5],
        "none": [2.5, 2.0],
        "ones": [1.0, 1.0],
    }
    found = layer_scores(a, b, (("a",), ("b",)), norm)
    torch.testing.assert_close(found, torch.tensor(expected[norm]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reuse", [False, True])
def test_grep_without_radius_is_two_plain_body_steps_on_one_batch(engine: str, reuse: bool) -> None:
    class Reference(type(make_method("fedrep"))):  # type: ignore[misc]
        def train(self, client: Client, model: TensorDict) -> TensorDict:
            model = client.fit(model, train=client.split.personal, epochs=2)
            return client.fit(model, train=client.split.shared, steps=1, repeat=2)

    left = run("plgu_grep", {"rho": 0.0, "head_epochs": 2, "reuse_grad": reuse}, engine=engine)
    right = simulation(Reference(weights="uniform"), train=PLAIN, rounds=3, engine=engine)
    close(deployed(left), deployed(right))
    close(tree.tensors(left.server), tree.tensors(right.server))


def test_greps_head_never_leaves_the_client() -> None:
    sim = run("plgu_grep", {})
    assert set(tree.tensors(sim.server)) == set(sim.split.shared)
