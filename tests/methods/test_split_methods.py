"""Shared and personal parts: FedPer and its relatives, PLGU, FedAS and FedPAC."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.nn.functional import cross_entropy

from methods.reductions import (
    FULL_STEP,
    HALF,
    NUMBERS,
    ONE,
    REFERENCE,
    REMARKS,
    SHARED_HEAD,
    THREE,
    Same,
    drawn,
    fedavg,
    in_run,
    itself,
    local,
    nothing_personal,
    pac_is_rep,
    personally,
)
from methods.settings import Card, Limit, Row, body, head, make, prototypes, with_statistics
from methods.small import (
    NEWCOMER,
    TRAIN,
    assert_close,
    assert_same,
    model,
    replies_of,
    simulation,
)
from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.core.method import make_method
from tailorfl.methods.mixtures import least_quadratic, mixing_weights
from tailorfl.methods.plgu import PLGULF, largest
from tailorfl.testing.contract import twice, whole
from tailorfl.training.ascent import layer_scores, layerwise_perturbation
from tailorfl.training.custom_gradient import gradients_asked

CONTRACTS = {
    "fedbn": Row(
        Card(lambda s: s.d - s.norm, lambda s: s.d - s.norm, whole, True, False),
        limit=Limit("pooled"),
        same=(
            Same("T04", {}, "fedavg", {}, "personal", "global", models=("mlp", "dropout"), said=True),
            local(personal_part="all"),
        ),
    ),
    "fedper": Row(
        Card(body, body, whole, True, False),
        limit=Limit("pooled", 1, {"personal_part": "none"}),
        same=(
            nothing_personal(personal_part="none"),
            local(personal_part="all"),
            personally("T04", "fedsim"),
        ),
        remarks=(({"personal_part": "all", "final_personal_epochs": 1}, "more epochs", REMARKS),),
    ),
    "fedrep": Row(
        Card(body, body, whole, True, False),
        {"head_epochs": 2},
        Limit("pooled", 1, {"personal_part": "none", "head_epochs": 0}),
        same=(
            replace(nothing_personal(**SHARED_HEAD, head_epochs=0, body_epochs=1), other_train=ONE),
            replace(nothing_personal(**SHARED_HEAD, head_epochs=2, body_epochs=3), other_train=THREE),
            replace(local(personal_part="all", head_epochs=1, body_epochs=1), other_train=ONE),
            replace(local(personal_part="all", head_epochs=3, body_epochs=2), other_train=THREE),
            personally("T04", "fedalt", {"head_epochs": 2}, head_epochs=2),
            in_run(
                replace(
                    personally("T04", "fedbabu", {"ft_epochs": 0}, head_epochs=0, body_epochs=3),
                    other_train=THREE,
                )
            ),
        ),
        remarks=(({"body_epochs": 0}, "never trains the shared part", REMARKS),),
    ),
    "lg_fedavg": Row(
        Card(head, head, whole, True, False),
        limit=Limit("pooled", 1, {"personal_part": "none"}),
        not_on=("logistic",),
        same=(nothing_personal(**SHARED_HEAD), local(personal_part="all")),
    ),
    "fedalt": Row(
        Card(body, body, whole, True, False),
        {"head_epochs": 2},
        Limit("pooled", 1, {"personal_part": "none", "head_epochs": 0}),
        same=(
            replace(nothing_personal(**SHARED_HEAD, head_epochs=0, body_epochs=1), other_train=ONE),
            replace(local(personal_part="all", head_epochs=1, body_epochs=1), other_train=ONE),
        ),
        remarks=(({"body_epochs": 0}, "never trains the shared part", REMARKS),),
    ),
    "fedsim": Row(
        Card(body, body, whole, True, False),
        limit=Limit("pooled", 1, {"personal_part": "none"}),
        same=(
            nothing_personal(**SHARED_HEAD),
            local(personal_part="all"),
            replace(nothing_personal(**SHARED_HEAD, server_lr=0.5, lam=0.3), other_options=HALF, exact=False),
        ),
        remarks=(({"personal_part": "all", "lam": 0.5}, "with its penalty", REMARKS),),
    ),
    "fedbabu": Row(
        # The head is part of the model that trains and never moves.
        Card(body, body, whole, True, True, lambda s: -s.head),
        {"ft_epochs": 1},
        same=(
            itself("E_ft = 0", "fedbabu", ft_epochs=0),
            in_run(personally("T04", "fedavg_ft", {"ft_epochs": 2}, personal_part="none", ft_epochs=2)),
            drawn("global", personal_part="all"),
        ),
        proved=REFERENCE,
    ),
    "hypcluster": Row(
        Card(lambda s: 2 * s.d, whole, whole, True, False),
        limit=Limit("pooled", 1, {"clusters": 1}),
        chooses=True,
        same=(Same("T01", {"clusters": 1}, "fedavg", {}, "personal", "global", said=True),),
    ),
    # ω and θ are both new; θ takes plain steps, so on quadratics with D = 0 it is not a fixed point of anything simple.
    # All three layers of the largest model of these tests are personal; θ takes plain steps beside ω's.
    "plgu_lf": Row(
        Card(whole, whole, twice, True, True),
        {"rho": 0.02, "personal_layers": 1},
        same=(
            local(exact=False, personal_layers=3),
            fedavg("T09", exact=False, rho=0.0, said=True),
            replace(
                Same(
                    "T09", {"rho": 0.02, "personal_layers": 0, "score_norm": "ones"}, "fedsam", {"rho": 0.02}
                ),
                exact=False,
                train=FULL_STEP,
                models=("mlp",),
            ),
        ),
        remarks=(({"personal_layers": 0}, "no layer stays personal", NUMBERS),),
    ),
    "plgu_grep": Row(
        Card(body, body, whole, True, False),
        {"head_epochs": 2, "rho": 0.02},
        same=(
            in_run(personally("T09", "fedrep", {"head_epochs": 2, "body_epochs": 0}, body_steps=0)),
            replace(local(personal_part="all", head_epochs=3), other_train=THREE),
        ),
        remarks=(({"rho": 0.0}, "two plain steps", NUMBERS),),
        proved=REFERENCE,
    ),
    # F_i goes up beside the body.
    "fedas": Row(
        Card(body, lambda s: body(s) + 1, whole, True, False),
        {"align_lr": 0.05},
        still={"align_epochs": 0},
        unweighted=True,
        same=(in_run(local(line="one round", align_epochs=0), rounds=1),),
    ),
    # Up M_i and class means, class counts and V_i beside the model.
    "fedpac": Row(
        Card(lambda s: s.d + prototypes(s), with_statistics, whole, True, False),
        {"lam": 0.5},
        chooses=True,
        at_most=True,
        same=(
            pac_is_rep(lam=0.0, mix=False),
            pac_is_rep(lam=0.0, mix=False, head_epochs=2),
            in_run(pac_is_rep(lam=0.5, mix=False), rounds=1),
            in_run(pac_is_rep(lam=0.0), fraction=0.2),
        ),
    ),
}


def test_fedbn_without_norms_shares_everything() -> None:
    assert set(simulation("fedbn", "mlp").server.keys()) == set(model("mlp").init(0).keys())


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
    g = TensorDict({"one": torch.randn(3, generator=rng), "two": torch.randn(2, 2, generator=rng)})
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
    eps, unscaled = (layerwise_perturbation(t, ones, (("one",),), 0.1, p=p)["one"] for t in (g * scale, g))
    torch.testing.assert_close(eps, unscaled, rtol=1e-4, atol=0)
    assert eps[2] == 0.0
    assert float(eps.double().norm(p)) == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("p", [1.5, 2.0, 3.0, float("inf")])
def test_without_a_gradient_there_is_no_ascent(p: float) -> None:
    g = TensorDict({"one": torch.zeros(3)}, batch_size=[])
    assert layerwise_perturbation(g, torch.ones(1), (("one",),), 0.1, p=p)["one"].tolist() == [0.0] * 3


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_scores_are_uniform_where_distances_say_nothing(bad: float) -> None:
    """In the first round the personal model still is the received one."""
    a = TensorDict({"x": torch.full((2,), bad), "y": torch.zeros(3)}, batch_size=[])
    zero = TensorDict({"x": torch.zeros(2), "y": torch.zeros(3)}, batch_size=[])
    assert layer_scores(a, zero, (("x",), ("y",))).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("eps_from", ["personal", "global"])
def test_the_ascent_at_the_global_model_takes_a_third_gradient(eps_from: str) -> None:
    method = make_method("plgu_lf", {"eps_from": eps_from})
    state = TensorDict({"theta": {"x": torch.ones(2)}, "omega": {"x": torch.ones(2)}}, batch_size=[])
    step = method.step((("x",),))  # type: ignore[attr-defined]
    assert gradients_asked(step, state, (torch.ones(1),), 1) == [3 if eps_from == "global" else 2]


def test_the_share_of_personal_layers_is_five_of_twenty_one() -> None:
    method = PLGULF()
    assert [method.kept(n) for n in (1, 2, 5, 8, 21, 42)] == [0, 1, 1, 2, 5, 10]
    assert all(1 <= method.kept(n) < n for n in range(2, 200))
    assert [PLGULF(personal_layers=d).kept(4) for d in (0, 3, 9)] == [0, 3, 9]


def information(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict]:
    return (TensorDict({"F": client.fisher(received)}),)


@pytest.mark.parametrize(
    ("amounts", "shares"),
    [((7.0, 7.0, 7.0), (1 / 3,) * 3), ((0.0,) * 3, (1 / 3,) * 3), ((0, 3.0, 1.0), (0, 0.75, 0.25))],
)
def test_bodies_weigh_as_much_as_their_information_and_alike_without_any(
    amounts: tuple[float, ...], shares: tuple[float, ...]
) -> None:
    sim, ids = simulation("fedas", rounds=1), (0, 2, 3)
    stack = replies_of(sim, ids)
    stack["fisher"] = torch.tensor(amounts)
    replies = Replies(stack, ids, sim.federation.sizes()[list(ids)], "samples", sim.context)
    server = dict(sim.method.aggregate(sim.server, replies).items())
    mean = {n: torch.tensordot(torch.tensor(shares), stack[n], dims=1) for n in server}
    assert_close(server, mean, atol=1e-6)


def test_information_is_of_a_model_that_is_evaluated() -> None:
    """Without dropout; what is frozen has no share."""
    sim = simulation("local", "dropout", train=replace(TRAIN, batch_size=0))
    (information_of,) = sim.run((0,), sim.states.get((0,)), sim.init, information)
    values = {n: t.clone().requires_grad_() for n, t in sim.init.items()}
    rows = sim.federation.train[0]
    loss = cross_entropy(sim.model(values, sim.federation.source.x[rows]), sim.federation.source.y[rows])
    squares = [float(g.square().sum()) for g in torch.autograd.grad(loss, list(values.values()))]
    assert float(information_of["F"][0]) == pytest.approx(sum(squares), rel=1e-4)


def test_a_newcomer_has_the_servers_body_and_the_initial_head() -> None:
    sim = simulation("fedas", rounds=2)
    ((_, models),) = sim.newcomer_models((NEWCOMER,), 0)
    assert_same({n: t[0] for n, t in models.items()}, {**dict(sim.init.items()), **dict(sim.server.items())})


def test_a_client_without_variance_keeps_its_own_head() -> None:
    """One sample: its own head cannot be improved, and the matrix is singular."""
    weights = mixing_weights(torch.tensor([0.0, 0.5]), torch.tensor([[[0.0]], [[1.0]]]))
    torch.testing.assert_close(weights[0], torch.tensor([1.0, 0.0]).double())


def test_a_negative_variance_counts_as_none() -> None:
    """A hostile client of a deployment sends it; before, the server ended."""
    negative, none = (mixing_weights(torch.tensor([v, 0.5]), torch.ones(2, 1, 1)) for v in (-1.0, 0.0))
    torch.testing.assert_close(negative, none)


def test_weights_that_are_all_small_still_sum_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of more than a thousand alike clients."""
    monkeypatch.setattr("tailorfl.methods.mixtures.LEAST", 0.6)
    weights = mixing_weights(torch.ones(2), torch.zeros(2, 1, 1))
    torch.testing.assert_close(weights, torch.full((2, 2), 0.5, dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10**6), st.integers(-6, 6))
def test_a_minimum_over_the_simplex_has_its_conditions(size: int, seed: int, scale: int) -> None:
    """Aβ is the same where β > 0 and no smaller where β = 0."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(size, rng.integers(1, size + 2)))
    a = (root @ root.T + np.diag(rng.uniform(0.01, 1, size))) * 10.0**scale
    beta = least_quadratic(a)
    assert (beta >= 0).all()
    assert beta.sum() == pytest.approx(1)
    slope, value = a @ beta, beta @ a @ beta
    assert (slope >= value * (1 - 1e-6)).all()
    assert slope[beta > 0] == pytest.approx(value, rel=1e-6)


def test_a_newcomer_gets_the_mean_head_and_one_that_never_trained_the_first() -> None:
    sim = simulation(make("fedpac"), rounds=1, fraction=0.4)
    idle = next(i for i in range(5) if i not in sim.sample(0))
    late, mine = (
        sim.method.welcome(sim.server, (NEWCOMER,)),
        sim.method.broadcast(sim.server, (idle, NEWCOMER)),
    )
    for name, mean in sim.server["head"].items():
        assert torch.equal(late.payloads["head", name][0], mean)
        assert torch.equal(mine.payloads["head", name], torch.stack([sim.init[name], mean]))
        assert not torch.equal(mean, sim.init[name])


def test_a_layer_of_score_zero_is_not_perturbed() -> None:
    g = TensorDict({"a": torch.ones(2), "b": torch.ones(3)}, batch_size=[])
    forms: tuple[Any, ...] = ("paper", "asam")
    for form in forms:
        scores = torch.tensor([0.0, 1.0])
        eps = layerwise_perturbation(g, scores, (("a",), ("b",)), 0.5, form)
        assert float(eps["a"].abs().sum()) == 0.0
        assert float(eps["b"].abs().min()) > 0.0
