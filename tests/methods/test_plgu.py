"""PLGU-LF and PLGU-GRep: the reductions that their algorithms have (the printed ones contradict each other)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from methods.reductions import FULL_STEP, THREE, Same, fedavg, local
from methods.settings import Card, Row
from methods.small import TRAIN, assert_close, everything, simulation
from tailorfl.core.client import Client
from tailorfl.core.method import make_method
from tailorfl.methods.plgu import PLGULF, largest
from tailorfl.runs.reductions import setup_of
from tailorfl.testing.contract import twice, whole
from tailorfl.training.ascent import layer_scores, layerwise_perturbation
from tailorfl.training.custom_gradient import gradients_asked
from tailorfl.training.plan import Length

CONTRACTS = {
    # ω and θ are both new; θ takes plain steps, so on quadratics with D = 0 it is not a fixed point of anything simple.
    # All three layers of the largest model of these tests are personal; θ takes plain steps beside ω's.
    "plgu_lf": Row(
        Card(whole, whole, twice, True, True),
        {"rho": 0.02, "personal_layers": 1},
        same=(
            local(exact=False, personal_layers=3),
            fedavg("T09", exact=False, rho=0.0, said=True),
            Same(
                "T09",
                {"rho": 0.02, "personal_layers": 0, "score_norm": "ones"},
                "fedsam",
                {"rho": 0.02},
                exact=False,
                train=FULL_STEP,
                models=("mlp",),
            ),
        ),
        remarks=(({"personal_layers": 0}, "no layer stays personal", "test_plgu.py"),),
    ),
    "plgu_grep": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        {"head_epochs": 2, "rho": 0.02},
        same=(
            Same(
                "T09",
                {"body_steps": 0},
                "fedrep",
                {"head_epochs": 2, "body_epochs": 0},
                "personal",
                "personal",
                said=True,
            ),
            replace(local(personal_part="all", head_epochs=3), other_train=THREE),
        ),
        remarks=(({"rho": 0.0}, "two plain steps", "test_plgu.py"),),
        proved="FedRep with two steps on one batch at ρ = 0: test_plgu.py",
    ),
}


PLAIN = replace(TRAIN, momentum=0.0, weight_decay=0.0)


def test_the_largest_scores_are_personal_and_of_equals_the_deeper() -> None:
    assert largest(torch.tensor([0.1, 0.4, 0.3, 0.2]), 2).tolist() == [False, True, True, False]
    assert largest(torch.full((4,), 0.25), 2).tolist() == [False, False, True, True]
    assert largest(torch.tensor([0.5, 0.0, 0.5]), 1).tolist() == [False, False, True]
    assert largest(torch.tensor([0.5, 0.5]), 0).tolist() == [False, False]
    assert largest(torch.tensor([0.5, 0.5]), 9).tolist() == [True, True]


@pytest.mark.parametrize("p", [1.2, 1.5, 3.0, 10.0, float("inf")])
@pytest.mark.parametrize("form", ["paper", "asam"])
@pytest.mark.parametrize("score", [1.0, 0.5])
def test_with_equal_scores_no_other_ascent_of_its_length_climbs_more(
    p: float, form: Any, score: float
) -> None:
    """ε has ‖ε‖_p = ρξ (asam: ρ in units of ε/ξ), and ⟨g, ε⟩ is Hölder's bound, above that of any other direction."""
    rng = torch.Generator().manual_seed(1)
    g = TensorDict(
        {"one": torch.randn(3, generator=rng), "two": torch.randn(2, 2, generator=rng)}, batch_size=[]
    )
    eps = layerwise_perturbation(g, torch.full((2,), score), (("one",), ("two",)), 0.2, form, p)
    flat, slope = (torch.cat([t["one"], t["two"].flatten()]).double() for t in (eps, g))
    q = 1.0 if p == float("inf") else p / (p - 1)
    assert float(flat.norm(p)) == pytest.approx(0.2 * score, rel=1e-5)
    assert float(flat @ slope) == pytest.approx(0.2 * score * float(slope.norm(q)), rel=1e-5)
    directions = torch.randn(4000, 7, generator=rng, dtype=torch.float64)
    directions = torch.cat([directions, directions.sign()])
    directions = 0.2 * score * directions / directions.norm(p, dim=1, keepdim=True)
    assert float(flat @ slope) >= float((directions @ slope).max())


@pytest.mark.parametrize("p", [1.001, 1.5, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e15])
def test_the_ascent_does_not_depend_on_the_scale_of_the_gradient(p: float, scale: float) -> None:
    g = TensorDict({"one": torch.tensor([3.0, -4.0, 0.0])}, batch_size=[])
    ones = torch.ones(1)
    eps = layerwise_perturbation(g * scale, ones, (("one",),), 0.1, p=p)["one"]
    torch.testing.assert_close(
        eps, layerwise_perturbation(g, ones, (("one",),), 0.1, p=p)["one"], rtol=1e-4, atol=0
    )
    assert eps[2] == 0.0
    assert float(eps.double().norm(p)) == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0, float("inf")])
def test_without_a_gradient_there_is_no_ascent(p: float) -> None:
    g = TensorDict({"one": torch.zeros(3)}, batch_size=[])
    assert layerwise_perturbation(g, torch.ones(1), (("one",),), 0.1, p=p)["one"].tolist() == [0.0] * 3


def test_a_layer_of_score_zero_is_not_perturbed() -> None:
    g = TensorDict({"a": torch.ones(2), "b": torch.ones(3)}, batch_size=[])
    forms: tuple[Any, ...] = ("paper", "asam")
    for form in forms:
        scores = torch.tensor([0.0, 1.0])
        eps = layerwise_perturbation(g, scores, (("a",), ("b",)), 0.5, form)
        assert float(eps["a"].abs().sum()) == 0.0
        assert float(eps["b"].abs().min()) > 0.0


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_scores_are_uniform_where_distances_say_nothing(bad: float) -> None:
    """In the first round the personal model still is the received one."""
    a = TensorDict({"x": torch.full((2,), bad), "y": torch.zeros(3)}, batch_size=[])
    zero = TensorDict({"x": torch.zeros(2), "y": torch.zeros(3)}, batch_size=[])
    assert layer_scores(a, zero, (("x",), ("y",))).tolist() == [0.5, 0.5]


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
    torch.testing.assert_close(layer_scores(a, b, (("a",), ("b",)), norm), torch.tensor(expected[norm]))


@pytest.mark.parametrize(("engine", "reuse"), [("sequential", False), ("vectorized", True)])
def test_grep_without_radius_is_two_plain_body_steps_on_one_batch(engine: str, reuse: bool) -> None:
    class Reference(type(make_method("fedrep"))):  # type: ignore[misc]
        def train(self, client: Client, model: TensorDict) -> TensorDict:
            model = client.fit(model, train=client.split.personal, length=Length(epochs=2))
            return client.fit(model, train=client.split.shared, length=Length(steps=1, repeat=2))

    grep = make_method("plgu_grep", {"rho": 0.0, "head_epochs": 2, "reuse_grad": reuse})
    runs = (simulation(method, train=PLAIN, rounds=3, engine=engine) for method in (grep, Reference()))
    assert_close(*map(everything, runs), atol=1e-6)


@pytest.mark.parametrize("eps_from", ["personal", "global"])
def test_the_ascent_at_the_global_model_takes_a_third_gradient(eps_from: str) -> None:
    method = make_method("plgu_lf", {"eps_from": eps_from})
    state = TensorDict({"theta": {"x": torch.ones(2)}, "omega": {"x": torch.ones(2)}}, batch_size=[])
    step = method.step((("x",),))  # type: ignore[attr-defined]
    assert gradients_asked(step, state, (torch.ones(1),), 1) == [3 if eps_from == "global" else 2]


@pytest.mark.parametrize(
    ("model_name", "personal", "layers"),
    [("logistic", 0, 1), ("mlp", 1, 2), ("cnn2", 1, 4), ("batch_norm", 1, 3)],
)
def test_the_default_number_of_personal_layers_is_a_share_of_the_models(
    model_name: str, personal: int, layers: int
) -> None:
    """5 of 21 as in the paper: never all of them, which would be LocalTrain."""
    sim = simulation(make_method("plgu_lf"), model_name)
    facts = setup_of(sim, 3)
    assert facts.layers == layers
    assert sim.method.kept(layers) == personal  # type: ignore[attr-defined]
    assert not any(r.other == "local" for r in sim.method.reductions(facts))


def test_the_share_of_personal_layers_is_five_of_twenty_one() -> None:
    method = PLGULF()
    assert [method.kept(n) for n in (1, 2, 5, 8, 21, 42)] == [0, 1, 1, 2, 5, 10]
    assert all(1 <= method.kept(n) < n for n in range(2, 200))
    assert [PLGULF(personal_layers=d).kept(4) for d in (0, 3, 9)] == [0, 3, 9]
