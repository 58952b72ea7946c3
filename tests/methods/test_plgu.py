"""PLGU-LF and PLGU-GRep: the reductions that their algorithms have (the printed ones contradict each other)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from methods.plain import batches
from methods.reductions import FULL_STEP, THREE, Same, fedavg, local
from methods.settings import Card, Row
from methods.small import TRAIN, simulation
from tailorfl.core.client import Client
from tailorfl.core.method import make_method
from tailorfl.methods.ascent import layer_scores, layerwise_perturbation
from tailorfl.methods.plgu import PLGULF, largest
from tailorfl.models.layers import layer_groups
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.reductions import setup_of
from tailorfl.testing.contract import twice, whole
from tailorfl.training import tree
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
        shared(run("fedavg", {}, engine=engine)),
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_with_equal_scores_no_personal_layer_and_one_step_it_is_fedsam(engine: str) -> None:
    """θ starts at w, so the ascent at θ is the one at w; ones leave SAM's radius."""
    one = replace(PLAIN, epochs=None, steps=1)
    options = {"personal_layers": 0, "score_norm": "ones", "rho": 0.3}
    left = run("plgu_lf", options, engine=engine, train=one)
    right = run("fedsam", {"rho": 0.3}, engine=engine, train=one)
    close(shared(left), shared(right))
    plain = run("fedavg", {}, engine=engine, train=one)
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
            model = client.fit(model, train=client.split.personal, length=Length(epochs=2))
            return client.fit(model, train=client.split.shared, length=Length(steps=1, repeat=2))

    left = run("plgu_grep", {"rho": 0.0, "head_epochs": 2, "reuse_grad": reuse}, engine=engine)
    right = simulation(Reference(), train=PLAIN, rounds=3, engine=engine)
    close(deployed(left), deployed(right))
    close(tree.tensors(left.server), tree.tensors(right.server))


def test_greps_head_never_leaves_the_client() -> None:
    sim = run("plgu_grep", {})
    assert set(tree.tensors(sim.server)) == set(sim.split.shared)


# -- one round in plain torch: batches alone are the library's -------------------------------------------------

LAYERS = (("fc1.weight", "fc1.bias"), ("head.weight", "head.bias"))


def slope(sim: Simulation, at: dict[str, torch.Tensor], rows: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = {n: t.clone().requires_grad_() for n, t in at.items()}
    source = sim.federation.source
    outputs = torch.func.functional_call(sim.model.module, leaves, (source.take(rows),))
    loss = torch.nn.functional.cross_entropy(outputs, source.y[rows])
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def ascent(g: dict[str, torch.Tensor], xi: list[float], rho: float, p: float) -> dict[str, torch.Tensor]:
    """ε_l = ρ ξ_l sign(g)|g|^{q−1} / (‖g‖_q^q)^{1/p}, in float64."""
    q = 1.0 if p == float("inf") else p / (p - 1)
    wide = {n: t.double() for n, t in g.items()}
    total = sum(float(t.abs().pow(q).sum()) for t in wide.values())
    score = {n: xi[k] for k, group in enumerate(LAYERS) for n in group}
    root = 1.0 if p == float("inf") else total ** (1 / p)
    return {n: (rho * score[n] * t.sign() * t.abs().pow(q - 1) / root).float() for n, t in wide.items()}


def round_of_lf(sim: Simulation, client: int, options: dict[str, Any], lr: float) -> tuple[Any, Any]:
    """(θ_i, ω) after the round that `sim` takes next, with D = 1."""
    w = {n: t.clone() for n, t in shared(sim).items()}
    own = {n: t[0].clone() for n, t in tree.tensors(sim.states.get((client,))).items()}
    distance = []
    for group in LAYERS:
        size = sum(w[n].numel() for n in group)
        distance.append(sum(float((own[n] - w[n]).square().sum()) for n in group) ** 0.5 / size)
    total = sum(distance)
    xi = [d / total for d in distance] if total > 0 else [0.5, 0.5]
    kept = LAYERS[0] if xi[0] > xi[1] else LAYERS[1]
    theta, omega = {n: own[n] if n in kept else w[n] for n in w}, dict(w)
    for rows in batches(sim, client):
        g = slope(sim, theta, rows)
        climbed = slope(sim, omega, rows) if options.get("eps_from") == "global" else g
        eps = ascent(climbed, xi, options["rho"], options["p"])
        at = theta if options.get("grad_at") == "personal" else omega
        flat = slope(sim, {n: at[n] + eps[n] for n in at}, rows)
        theta = {n: theta[n] - lr * g[n] for n in theta}
        omega = {n: omega[n] - lr * flat[n] for n in omega}
    return theta, omega


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("p", [1.5, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("where", [{}, {"eps_from": "global"}, {"eps_from": "global", "grad_at": "personal"}])
def test_rounds_of_layer_freezing_are_those_of_plain_torch(
    engine: str, p: float, where: dict[str, str]
) -> None:
    options = {"personal_layers": 1, "rho": 0.3 if p < 5 else 0.01, "p": p, **where}
    sim = run("plgu_lf", {**options, "weights": "uniform"}, rounds=1, engine=engine)
    clients = range(sim.federation.num_clients)
    expected = [round_of_lf(sim, i, options, PLAIN.lr) for i in clients]
    sim.step()
    found = tree.tensors(sim.states.get(clients))
    for i in clients:
        close({n: t[i] for n, t in found.items()}, expected[i][0])
    close(shared(sim), {n: torch.stack([e[1][n] for e in expected]).mean(0) for n in found})


@pytest.mark.parametrize("eps_from", ["personal", "global"])
def test_the_ascent_at_the_global_model_takes_a_third_gradient(eps_from: str) -> None:
    method = make_method("plgu_lf", {"eps_from": eps_from})
    from tailorfl.training.custom_gradient import gradients_asked

    state = TensorDict({"theta": {"x": torch.ones(2)}, "omega": {"x": torch.ones(2)}}, batch_size=[])
    step = method.step((("x",),))  # type: ignore[attr-defined]
    assert gradients_asked(step, state, (torch.ones(1),), 1) == [3 if eps_from == "global" else 2]


def test_the_body_of_grep_climbs_by_the_given_norm() -> None:
    """One batch, one client alone: φ' = φ − ηg, ε from g' in the norm of p = ∞, φ_i = φ' − η∇F(φ' + ε)."""
    options = {"p": float("inf"), "rho": 0.02, "head_epochs": 0, "score_norm": "sum"}
    sim = simulation(make_method("plgu_grep", options), train=replace(PLAIN, batch_size=0), rounds=1)
    client, lr = 0, PLAIN.lr
    phi = {n: t.clone() for n, t in tree.tensors(sim.server).items()}
    head = {n: t[0] for n, t in tree.tensors(sim.states.get((client,))).items()}
    [rows] = batches(sim, client, steps=1, epochs=None)
    g = slope(sim, {**phi, **head}, rows)
    moved = {n: phi[n] - lr * g[n] for n in phi}
    again = slope(sim, {**moved, **head}, rows)
    at = {n: moved[n] + 0.02 * again[n].sign() for n in moved}  # the body is one layer, of score 1
    last = slope(sim, {**at, **head}, rows)
    expected = {n: moved[n] - lr * last[n] for n in moved}
    ids = range(sim.federation.num_clients)
    _, replies = sim.run(ids, sim.states.get(ids), sim.server, sim.method.local)
    close({n: t[client] for n, t in tree.tensors(replies).items()}, expected)


@pytest.mark.parametrize(
    ("model_name", "kept", "layers"),
    [("logistic", 0, 1), ("mlp", 1, 2), ("cnn2", 1, 4), ("batch_norm", 1, 3)],
)
def test_the_default_number_of_personal_layers_is_a_share_of_the_models(
    model_name: str, kept: int, layers: int
) -> None:
    """5 of 21 as in the paper: never all of them, which would be LocalTrain."""
    sim = simulation(make_method("plgu_lf"), model_name)
    facts = setup_of(sim, 3)
    assert facts.layers == layers
    assert sim.method.kept(layers) == kept  # type: ignore[attr-defined]
    assert not any(r.other == "local" for r in sim.method.reductions(facts))


def test_the_share_of_personal_layers_is_five_of_twenty_one() -> None:
    method = PLGULF()
    assert [method.kept(n) for n in (1, 2, 5, 8, 21, 42)] == [0, 1, 1, 2, 5, 10]
    assert all(1 <= method.kept(n) < n for n in range(2, 200))
    assert [PLGULF(personal_layers=d).kept(4) for d in (0, 3, 9)] == [0, 3, 9]


@pytest.mark.parametrize("engine", ENGINES)
def test_by_default_personal_models_hear_from_others_and_keep_one_layer(engine: str) -> None:
    """The layer that differs most from what was received; the rest of θ starts at w."""
    sim = run("plgu_lf", {}, rounds=2, engine=engine)
    method = sim.method

    def start(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, ...]:
        return (method.start(client, state, received, layer_scores(state, received, client.layers())),)  # type: ignore[attr-defined]

    ids = range(sim.federation.num_clients)
    [found] = sim.run(ids, sim.states.get(ids), sim.server, start)
    w = tree.tensors(sim.server)
    moved = [
        [any(not torch.equal(tree.tensors(found)[n][i], w[n]) for n in group) for i in ids]
        for group in layer_groups(sim.model.module)
    ]
    assert [sum(of_client) for of_client in zip(*moved, strict=True)] == [1] * len(ids)
