"""FedPer, FedRep, LG-FedAvg and FedBN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from methods import plain
from methods.reductions import ONE, SHARED_HEAD, THREE, Same, local, nothing_personal
from methods.settings import Card, Limit, Row, make
from methods.small import SIZES, TRAIN, assert_close, assert_same, model, personal, simulation
from tailorfl.core.method import make_method
from tailorfl.errors import ModelError
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree

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
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        limit=Limit("pooled", 1, {"personal_part": "none"}),
        same=(
            nothing_personal(personal_part="none"),
            local(personal_part="all"),
            Same("T04", {}, "fedsim", {}, "personal", "personal"),
        ),
        remarks=(
            (
                {"personal_part": "all", "final_personal_epochs": 1},
                "more epochs",
                "test_reduction_remarks.py",
            ),
        ),
    ),
    "fedrep": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        {"head_epochs": 2},
        Limit("pooled", 1, {"personal_part": "none", "head_epochs": 0}),
        same=(
            replace(nothing_personal(**SHARED_HEAD, head_epochs=0, body_epochs=1), other_train=ONE),
            replace(nothing_personal(**SHARED_HEAD, head_epochs=2, body_epochs=3), other_train=THREE),
            replace(local(personal_part="all", head_epochs=1, body_epochs=1), other_train=ONE),
            replace(local(personal_part="all", head_epochs=3, body_epochs=2), other_train=THREE),
            Same(
                "T04",
                {"head_epochs": 2},
                "fedalt",
                {"head_epochs": 2},
                "personal",
                "personal",
            ),
            Same(
                "T04",
                {"head_epochs": 0, "body_epochs": 3},
                "fedbabu",
                {"ft_epochs": 0},
                "personal",
                "personal",
                said=True,
                other_train=THREE,
            ),
        ),
        remarks=(({"body_epochs": 0}, "never trains what clients share", "test_reduction_remarks.py"),),
    ),
    "lg_fedavg": Row(
        Card(lambda s: s.head, lambda s: s.head, whole, True, False),
        limit=Limit("pooled", 1, {"personal_part": "none"}),
        not_on=("logistic",),
        same=(nothing_personal(**SHARED_HEAD), local(personal_part="all")),
    ),
}


HEAD = {"mlp": ("head.weight", "head.bias"), "batch_norm": ("8.weight", "8.bias")}
NORM = tuple(
    f"{n}.{p}" for n in "16" for p in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
)


def follow(
    sim: Simulation, own: set[str], weights: str, phases: object, rounds: int = 3, step: float = 1.0
) -> None:
    """Run a split method beside a plain loop whose `phases(model, client)` trains the whole model of one client.

    `step` is the server's.
    """
    u: plain.State = {n: t for n, t in sim.init.items() if n not in own}
    v: list[plain.State] = [{n: t for n, t in sim.init.items() if n in own} for _ in SIZES]
    for _ in range(rounds):
        ids = sim.sample(sim.round)
        uploads = []
        for i in ids:
            whole = phases({**u, **v[i]}, i)  # type: ignore[operator]
            v[i] = {n: whole[n] for n in own}
            uploads.append({n: whole[n] for n in u})
        mean = plain.average(uploads, [SIZES[i] if weights == "samples" else 1 for i in ids])
        u = {n: u[n] + step * (mean[n] - u[n]) if n in sim.model.parameters else mean[n] for n in u}
        sim.step()
        assert_close(dict(sim.server.items()), dict(u))
    for i in range(len(SIZES)):
        assert_close({n: t[i] for n, t in personal(sim).items()}, {**u, **v[i]})


@pytest.mark.parametrize("model_name", ["mlp", "batch_norm"])
def test_fedper_trains_body_and_head_together(model_name: str) -> None:
    sim = simulation("fedper", model_name, fraction=0.6)
    follow(sim, set(HEAD[model_name]), "samples", lambda m, i: plain.train(sim, m, plain.batches(sim, i)))


@pytest.mark.parametrize("model_name", ["mlp", "batch_norm"])
def test_fedrep_trains_the_head_and_then_the_body(model_name: str) -> None:
    """While the head alone trains, the norm layers of the fixed body must not gather statistics."""
    sim = simulation(make("fedrep", head_epochs=3, body_epochs=2), model_name, fraction=0.6)
    head = set(HEAD[model_name])
    body = set(sim.model.parameters) - head

    def phases(state: plain.State, i: int) -> plain.State:
        fixed = {n: state[n] for n in sim.model.buffers}
        state = _head_only(sim, state, i, head)
        assert all(torch.equal(state[n], fixed[n]) for n in fixed)
        return plain.train(sim, state, plain.batches(sim, i, 2), body)

    follow(sim, head, "samples", phases)


def _head_only(
    sim: Simulation,
    state: plain.State,
    i: int,
    head: set[str],
    epochs: int = 3,
    prox: tuple[float, plain.State] | None = None,
) -> plain.State:
    """Epochs on the head of a network whose body is in evaluation mode, with the penalty (λ/2)‖head − centre‖²."""
    import copy

    module = copy.deepcopy(sim.model.module).eval()
    module.load_state_dict({n: t.clone() for n, t in state.items()})
    named = {n: p for n, p in module.named_parameters() if n in head}
    c = sim.train
    optimizer = torch.optim.SGD(named.values(), lr=c.lr, momentum=c.momentum, weight_decay=c.weight_decay)
    source = sim.federation.source
    for rows in plain.batches(sim, i, epochs):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(source.take(rows)), source.y[rows])
        if prox is not None:
            loss = loss + prox[0] / 2 * sum((p - prox[1][n]).square().sum() for n, p in named.items())
        loss.backward()
        optimizer.step()
    return {n: t.detach().clone() for n, t in module.state_dict().items()}


def test_lg_fedavg_keeps_the_extractor_and_averages_the_head() -> None:
    sim = simulation("lg_fedavg", fraction=0.6, weights="uniform")
    own = set(sim.init.keys()) - set(HEAD["mlp"])
    follow(sim, own, "uniform", lambda m, i: plain.train(sim, m, plain.batches(sim, i)))


def test_fedbn_keeps_norm_layers_with_their_statistics() -> None:
    sim = simulation("fedbn", "batch_norm", fraction=0.6)
    follow(sim, set(NORM), "samples", lambda m, i: plain.train(sim, m, plain.batches(sim, i)))
    assert sim.traffic.buffers_up == sim.traffic.buffers_down == 0


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg_fedavg", "fedbn"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_shared_and_personal_parts_make_up_the_model(name: str, engine: str) -> None:
    """After a round all receivers deploy the same u; the personal parts are the clients' own and differ."""
    sim = simulation(name, "batch_norm", engine, rounds=2)
    models = personal(sim)
    server, private = {p for p, _ in tree.leaves(sim.server)}, {p for p, _ in tree.leaves(sim.start)}
    assert server | private == set(models)
    assert not server & private
    for n in server:
        assert torch.equal(models[n], sim.server[n].expand_as(models[n]))
    trained = [n for n in private if n in sim.model.parameters]
    assert trained
    assert all(not torch.equal(models[n][0], models[n][3]) for n in trained)


def test_fedrep_without_body_epochs_never_changes_the_body() -> None:
    sim = simulation(make("fedrep", body_epochs=0), "batch_norm", rounds=3, fraction=0.6)
    for n, t in sim.server.items():
        # An average of equal numbers is that number up to rounding.
        torch.testing.assert_close(t, sim.init[n], atol=1e-6, rtol=1e-6)
    assert_same(
        {n: t for n, t in sim.server.items() if "num_batches" in n},
        {n: t for n, t in sim.init.items() if "num_batches" in n},
    )


def test_fedrep_without_head_epochs_never_changes_the_head() -> None:
    sim = simulation(make("fedrep", head_epochs=0), rounds=2)
    for n in HEAD["mlp"]:
        assert (personal(sim)[n] == sim.init[n]).all()


def test_fedrep_order_matters() -> None:
    """Head first is not body first.

    Swapping the two phases changes the result (they share batches, not the other's outcome).
    """
    sim = simulation(make("fedrep", head_epochs=1, body_epochs=1))
    head = set(HEAD["mlp"])
    rows = plain.batches(sim, 0)
    swapped = plain.train(
        sim, plain.train(sim, dict(sim.init.items()), rows, set(sim.model.parameters) - head), rows, head
    )
    sim.step()
    assert not torch.allclose(personal(sim)["head.weight"][0], swapped["head.weight"], atol=1e-4)


def test_lg_fedavg_can_share_more_layers() -> None:
    sim = simulation(make("lg_fedavg", personal_part="extractor:2"), "batch_norm")
    assert set(sim.server.keys()) == {"5.weight", "5.bias", "8.weight", "8.bias"}


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg_fedavg"])
def test_a_personal_part_that_matches_nothing_is_an_error(name: str) -> None:
    """Only FedBN may find nothing: it is FedAvg then."""
    with pytest.raises(ModelError, match="norm"):
        simulation(make(name, personal_part="norm"), "mlp")
    assert set(simulation("fedbn", "mlp").server.keys()) == set(model("mlp").init(0).keys())


def test_fedbn_running_statistics_of_a_client_do_not_move_when_others_train() -> None:
    sim = simulation("fedbn", "batch_norm", rounds=1)
    idle = [i for i in range(len(SIZES)) if i not in (0, 3)]
    before = dict(tree.leaves(sim.states.get(idle)))
    states = sim.states.get((0, 3))
    new, _ = sim.run((0, 3), states, sim.server, lambda c, s, r: sim.method.local(c, s, r))
    sim.states.put((0, 3), new)
    assert_same(before, dict(tree.leaves(sim.states.get(idle))))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("centre", ["start", "zero"])
@pytest.mark.parametrize("method", ["fedalt", "fedsim"])
def test_the_penalty_holds_the_personal_part_alone_and_the_server_takes_its_step(
    method: str, centre: str, engine: str
) -> None:
    """FedAlt: v along ∇_v F + λ(v − c), then u along ∇_u F; FedSim: both at once, the penalty on v alone."""
    lam, step = 0.8, 0.5
    options = {"lam": lam, "centre": centre, "server_lr": step}
    sim = simulation(
        make_method(method, {**options, "weights": "uniform"}), "batch_norm", engine, fraction=0.6
    )
    head = set(HEAD["batch_norm"])
    body = set(sim.model.parameters) - head
    held = {n: sim.init[n] if centre == "start" else torch.zeros_like(sim.init[n]) for n in head}

    def alternate(state: plain.State, i: int) -> plain.State:
        state = _head_only(sim, state, i, head, 1, (lam, held))
        return plain.train(sim, state, plain.batches(sim, i), body)

    def together(state: plain.State, i: int) -> plain.State:
        return plain.train(sim, state, plain.batches(sim, i), prox=(lam, held))

    follow(sim, head, "uniform", alternate if method == "fedalt" else together, step=step)


@pytest.mark.parametrize("method", ["fedalt", "fedsim"])
def test_a_strong_penalty_leaves_the_personal_part_at_its_start(method: str) -> None:
    train = replace(TRAIN, lr=0.05, momentum=0.0, weight_decay=0.0)
    sim = simulation(make_method(method, {"lam": 19.0}), rounds=3, train=train)
    found = personal(sim)
    free = personal(simulation(make_method(method), rounds=3, train=train))
    for n in HEAD["mlp"]:
        assert (found[n] - sim.init[n]).abs().max() < 0.2 * (free[n] - sim.init[n]).abs().max()
