"""Sharpness-aware ascent: closed forms on quadratics, and what it must reduce to."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tailorfl.methods.ascent import layer_scores, layerwise_perturbation, sam
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort
from tailorfl.training.objective import Loss
from tailorfl.training.plan import Length
from training.cohorts import (
    ENGINES,
    SIZES,
    alone,
    assert_states,
    cohort_of,
    fit,
    model_of,
    regression,
    run,
    source,
    spread,
)

engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
GROUPS = (("fc1.weight", "fc1.bias"), ("fc2.weight", "fc2.bias"), ("head.weight", "head.bias"))


def setting(**train: object) -> tuple[Cohort, TensorDict]:
    data = source(sum(SIZES))
    model = model_of("mlp", data, hidden=(8, 6))
    return cohort_of(model, data, **train), model.init(1)


def quadratic(rho: float, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights found by SAM, weights by the closed form of every step) of ½(w−c)'H(w−c), full batches."""
    rng = torch.Generator().manual_seed(0)
    x, c = torch.randn(12, 4, generator=rng), torch.randn(4, generator=rng)
    cohort = cohort_of(
        model_of("linear", regression(x, x @ c)), regression(x, x @ c), (12,), batch_size=0, lr=0.1
    )
    start = cohort.model.init(0)
    found = alone(cohort).fit(start, length=Length(steps=steps), direction=sam(rho))["head.weight"][0]
    H, c, w = (x.T @ x / 12).double(), c.double(), start["head.weight"][0].double()
    for _ in range(steps):
        g = H @ (w - c)
        w = w - 0.1 * H @ (w - c + rho * g / g.norm())
    return found.double(), w


@pytest.mark.parametrize("rho", [0.0, 0.05, 1.0])
def test_sam_on_a_quadratic_takes_the_steps_of_its_closed_form(rho):
    found, expected = quadratic(rho, steps=8)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@engines
def test_radius_zero_is_sgd(engine):
    cohort, start = setting(momentum=0.5)
    flat, plain = fit(engine, cohort, start, direction=sam(0.0)), fit(engine, cohort, start)
    for n in start.keys():  # noqa: SIM118
        torch.testing.assert_close(flat[n], plain[n], rtol=1e-5, atol=1e-7)


@engines
def test_a_linear_loss_has_one_gradient_so_sam_is_sgd(engine):
    data = source(sum(SIZES))
    cohort = cohort_of(model_of("logistic", data), data)
    cohort = Cohort(
        **{**vars(cohort), "loss": Loss(lambda outputs, y, weight: linear(outputs, weight)), "plans": {}}
    )
    start = cohort.model.init(0)
    flat, plain = fit(engine, cohort, start, direction=sam(2.0)), fit(engine, cohort, start)
    for n in start.keys():  # noqa: SIM118
        torch.testing.assert_close(flat[n], plain[n], rtol=1e-4, atol=1e-6)


def linear(outputs, weight):
    terms = (outputs * torch.tensor([1.0, -2.0, 0.5])).sum(1)
    return terms.mean() if weight is None else (terms * weight).sum() / weight.sum().clamp(min=1.0)


@engines
def test_the_ascent_has_length_rho_over_all_layers_of_one_client(engine):
    """The second gradient is taken exactly ρ away from the first, for each client by itself."""
    cohort, start = setting()
    points = []

    def watched(state, grad):
        def record(at, of=""):
            points.append(tree.norm(at - state))
            return grad(at, of)

        sam(0.3)(state, record)
        return state * 0.0 + points[-1]

    found = fit(engine, cohort, start, direction=watched, steps=1, lr=1.0)
    for n in start.keys():  # noqa: SIM118
        torch.testing.assert_close(
            start[n].expand_as(found[n]) - found[n], torch.full_like(found[n], 0.3), rtol=1e-3, atol=0
        )


def test_layer_wise_perturbation_by_hand():
    """g = (3, 4) and (0, 0, 12): ‖g‖ = 13 over both layers, so ρ/‖g‖ = 0.01 for ρ = 0.13."""
    g = TensorDict({"one": torch.tensor([3.0, 4.0]), "two": torch.tensor([0.0, 0.0, 12.0])}, batch_size=[])
    eps = layerwise_perturbation(g, torch.tensor([0.25, 0.75]), (("one",), ("two",)), 0.13)
    torch.testing.assert_close(eps["one"], torch.tensor([0.0075, 0.01]))
    torch.testing.assert_close(eps["two"], torch.tensor([0.0, 0.0, 0.09]))


@pytest.mark.parametrize("p", [1.2, 1.5, 3.0, 10.0, float("inf")])
@pytest.mark.parametrize("form", ["paper", "asam"])
@pytest.mark.parametrize("score", [1.0, 0.5])
def test_with_equal_scores_no_other_ascent_of_its_length_climbs_more(p, form, score):
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
    others = torch.randn(4000, 7, generator=rng, dtype=torch.float64)
    others = torch.cat([others, others.sign()])
    others = 0.2 * score * others / others.norm(p, dim=1, keepdim=True)
    assert float(flat @ slope) >= float((others @ slope).max())


def test_the_general_ascent_by_hand():
    """p = 3, q = 3/2, g = (4, −1) and (9): |g|^{1/2} = 2, 1, 3 and Σ|g|^{3/2} = 8 + 1 + 27 = 36."""
    g = TensorDict({"one": torch.tensor([4.0, -1.0]), "two": torch.tensor([9.0])}, batch_size=[])
    groups, scores = (("one",), ("two",)), torch.tensor([0.25, 0.75])
    eps = layerwise_perturbation(g, scores, groups, 0.5, p=3.0)
    scale = 0.5 / 36 ** (1 / 3)
    torch.testing.assert_close(eps["one"], torch.tensor([2.0, -1.0]) * 0.25 * scale)
    torch.testing.assert_close(eps["two"], torch.tensor([3.0]) * 0.75 * scale)
    sign = layerwise_perturbation(g, scores, groups, 0.5, p=float("inf"))
    assert sign["one"].tolist() == [0.125, -0.125]
    assert sign["two"].tolist() == [0.375]


@pytest.mark.parametrize("p", [1.001, 1.5, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e15])
def test_the_ascent_does_not_depend_on_the_scale_of_the_gradient(p, scale):
    g = TensorDict({"one": torch.tensor([3.0, -4.0, 0.0])}, batch_size=[])
    ones = torch.ones(1)
    eps = layerwise_perturbation(g * scale, ones, (("one",),), 0.1, p=p)["one"]
    torch.testing.assert_close(
        eps, layerwise_perturbation(g, ones, (("one",),), 0.1, p=p)["one"], rtol=1e-4, atol=0
    )
    assert eps[2] == 0.0
    assert float(eps.double().norm(p)) == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0, float("inf")])
def test_without_a_gradient_there_is_no_ascent(p):
    g = TensorDict({"one": torch.zeros(3)}, batch_size=[])
    assert layerwise_perturbation(g, torch.ones(1), (("one",),), 0.1, p=p)["one"].tolist() == [0.0] * 3


def test_the_asam_form_maximises_the_first_order_gain():
    """ε = Λδ with ‖δ‖ = ρ, and no other δ of that length has a larger ⟨g, Λδ⟩."""
    rng = torch.Generator().manual_seed(0)
    g = TensorDict(
        {"one": torch.randn(3, generator=rng), "two": torch.randn(2, 2, generator=rng)}, batch_size=[]
    )
    scores = torch.tensor([0.3, 0.7])
    eps = layerwise_perturbation(g, scores, (("one",), ("two",)), 0.2, "asam")
    delta = torch.cat([(eps["one"] / 0.3), (eps["two"] / 0.7).flatten()])
    assert float(delta.norm()) == pytest.approx(0.2, rel=1e-5)
    scaled = torch.cat([g["one"] * 0.3, g["two"].flatten() * 0.7])
    others = torch.randn(1000, 7, generator=rng)
    others = 0.2 * others / others.norm(dim=1, keepdim=True)
    assert float(delta @ scaled) >= float((others @ scaled).max())
    assert float(delta @ scaled) == pytest.approx(0.2 * float(scaled.norm()), rel=1e-5)


def layerwise(client, start, scores, rho, form):
    def direction(state, grad, scores):
        return grad(state + layerwise_perturbation(grad(state), scores, GROUPS, rho, form))

    return client.fit(start, direction=direction, given=(scores,))


@pytest.mark.parametrize("form", ["paper", "asam"])
def test_equal_scores_of_one_are_plain_sam(form):
    cohort, start = setting()
    plain = alone(cohort).fit(start, direction=sam(0.2))
    assert_states(
        layerwise(alone(cohort), start, torch.ones(3), 0.2, form), dict(plain.items()), rtol=1e-4, atol=1e-6
    )


def test_a_layer_of_score_zero_is_not_perturbed():
    g = TensorDict({"a": torch.ones(2), "b": torch.ones(3)}, batch_size=[])
    for form in ("paper", "asam"):
        scores = torch.tensor([0.0, 1.0])
        eps = layerwise_perturbation(g, scores, (("a",), ("b",)), 0.5, form)
        assert float(eps["a"].abs().sum()) == 0.0
        assert float(eps["b"].abs().min()) > 0.0


@engines
@pytest.mark.parametrize("form", ["paper", "asam"])
def test_scores_differ_from_client_to_client(engine, form):
    cohort, start = setting()
    starts = spread(start, len(SIZES), scale=0.5)

    def local(client, state, received):
        scores = layer_scores(client.parameters(state), client.parameters(received), GROUPS)
        return layerwise(client, received, scores, 0.5, form)

    found = run(engine, cohort, local, starts, start)
    for i in range(len(SIZES)):
        scores = layer_scores(starts[i], start, GROUPS)
        expected = layerwise(alone(cohort, i), start, scores, 0.5, form)
        assert_states(found[i], dict(expected.items()))


def test_scores_are_distances_per_scalar_and_sum_to_one():
    a = TensorDict(
        {"x": torch.tensor([3.0, 4.0]), "y": torch.tensor([0.0]), "z": torch.zeros(3)}, batch_size=[]
    )
    b = TensorDict({"x": torch.zeros(2), "y": torch.tensor([1.0]), "z": torch.zeros(3)}, batch_size=[])
    groups = (("x",), ("y", "z"))
    # 5/2 for two scalars at distance 5, 1/4 for four at distance 1.
    torch.testing.assert_close(layer_scores(a, b, groups), torch.tensor([2.5, 0.25]) / 2.75)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_a_distribution_that_ignores_the_scale_of_the_distance(seed):
    rng = torch.Generator().manual_seed(seed)
    a = TensorDict(
        {n: torch.randn(n_, generator=rng) for n, n_ in (("x", 4), ("y", 7), ("z", 2))}, batch_size=[]
    )
    b = TensorDict({n: torch.randn(t.shape, generator=rng) for n, t in a.items()}, batch_size=[])
    groups = (("x", "y"), ("z",))
    scores = layer_scores(a, b, groups)
    assert float(scores.sum()) == pytest.approx(1.0, rel=1e-6)
    assert (scores > 0).all()
    torch.testing.assert_close(layer_scores(b + (a - b) * 5.0, b, groups), scores)
    torch.testing.assert_close(layer_scores(b, a, groups), scores)


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_scores_are_uniform_where_distances_say_nothing(bad):
    """In the first round the personal model still is the received one."""
    a = TensorDict({"x": torch.full((2,), bad), "y": torch.zeros(3)}, batch_size=[])
    zero = TensorDict({"x": torch.zeros(2), "y": torch.zeros(3)}, batch_size=[])
    assert layer_scores(a, zero, (("x",), ("y",))).tolist() == [0.5, 0.5]


def test_scores_under_vmap_are_each_clients():
    rng = torch.Generator().manual_seed(0)
    stack = TensorDict(
        {"x": torch.randn(3, 2, generator=rng), "y": torch.randn(3, 4, generator=rng)}, batch_size=[3]
    )
    stack["x"][1], stack["y"][1] = 0.0, 0.0
    zero = TensorDict({"x": torch.zeros(2), "y": torch.zeros(4)}, batch_size=[])
    groups = (("x",), ("y",))
    mapped = torch.func.vmap(
        lambda x, y: layer_scores(TensorDict({"x": x, "y": y}, batch_size=[]), zero, groups)
    )(stack["x"], stack["y"])
    for i in range(3):
        torch.testing.assert_close(mapped[i], layer_scores(stack[i], zero, groups))
    assert mapped[1].tolist() == [0.5, 0.5]
