"""One model for all: FedAvg and its relatives, whose turn it is, drift, fairness, MOON and FedNova."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from methods.quadratics import (
    global_weight,
    one_weight,
    optimum,
    quadratic_simulation,
    shares,
)
from methods.reductions import FULL_STEP, PLAIN, REFERENCE, SGD, Same, fedavg, in_run, local, nothing_personal
from methods.settings import LAM, PROX_STEPS, Card, Limit, Row, and_one, make, none
from methods.small import (
    CLASSES,
    NEWCOMER,
    SIZES,
    TRAIN,
    after,
    assert_same,
    federation,
    personal,
    replaced,
    replies_of,
    shared,
    simulation,
)
from tailorfl.core.messages import Replies
from tailorfl.core.method import make_method
from tailorfl.errors import ConfigError, DivergenceError
from tailorfl.methods.fednova import accumulated
from tailorfl.methods.mixtures import on_simplex
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.participation import sample_clients
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.cost_estimate import estimate
from tailorfl.settings.experiment import Weights
from tailorfl.settings.loading import load
from tailorfl.testing.contract import twice, whole
from tailorfl.training import tree

CONTRACTS = {
    "fedavg": Row(
        Card(whole, whole, whole, False, True),
        limit=Limit("pooled"),
        same=(
            Same("one client", {}, "centralized", said=True, data={"sizes": (11,)}),
            in_run(Same("visits", {}, "cyclic"), sampling="cyclic", fraction=1.0),
            in_run(Same("visits", {}, "cyclic", {"order": "fixed"}), sampling="cyclic_fixed", fraction=1.0),
        ),
        proved="everything else is compared with it; docs/test_fedavg_from_scratch.py",
    ),
    "fedprox": Row(
        Card(whole, whole, whole, False, True),
        {"mu": 0.5},
        Limit("coupled_global", PROX_STEPS, {"mu": LAM}),
        same=(
            fedavg("T01", mu=0.0, said=True),
            Same(
                "one step", {"mu": 0.5}, "fedavg", exact=False, said=True, train={"steps": 1, "epochs": None}
            ),
            Same(
                "one step",
                {"mu": 0.5},
                "fedavg",
                exact=False,
                said=True,
                train={"batch_size": 0, "epochs": 1},
            ),
        ),
    ),
    "fedavg_ft": Row(
        Card(whole, whole, whole, True, True),
        # 60 tuning epochs of one full batch each reach the client's own optimum.
        limit=Limit("pooled_and_local", 1, {"ft_epochs": 60}),
        same=(
            fedavg("T01", ft_epochs=3),
            nothing_personal("T01", ft_epochs=0),
            fedavg("T01", ft_epochs=0, said=True),
        ),
    ),
    "local": Row(
        Card(none, none, whole, True, False),
        limit=Limit("local"),
        unweighted=True,
        proved=REFERENCE,
        never="the end itself",
    ),
    # Only reports the mean of the local models: it is sent up and never comes back.
    "local_average": Row(
        Card(none, whole, whole, True, True),
        limit=Limit("local_and_mean"),
        same=(local(said=False),),
        never="LocalTrain's personal models whatever its settings",
    ),
    "centralized": Row(
        Card(none, none, whole, False, True),
        limit=Limit("pooled"),
        unweighted=True,
        proved="one client: test_method_reductions.py",
        never="the end itself",
    ),
    "cyclic": Row(
        Card(whole, whole, whole, False, True),
        by_id=True,
        in_turn=True,
        unweighted=True,
        same=(Same("one client", {}, "centralized", said=True, data={"sizes": (11,)}),),
    ),
    "fedsam": Row(
        Card(whole, whole, whole, False, True),
        {"rho": 0.02},
        same=(fedavg("T01", rho=0.0, said=True),),
    ),
    "scaffold": Row(
        Card(twice, twice, whole, False, True, whole),
        limit=Limit("pooled"),
        over_all=True,
        same=(
            in_run(replace(fedavg("one round", exact=False), other_train=PLAIN), rounds=1),
            # With batch norm a client of one sample takes no step, and no correction.
            in_run(
                replace(
                    fedavg("one step", exact=False),
                    train=FULL_STEP,
                    other_train=PLAIN,
                    models=("mlp", "dropout"),
                ),
                fraction=1.0,
            ),
        ),
    ),
    "feddyn": Row(
        Card(whole, whole, whole, False, True, whole),
        {"alpha": 0.1},
        Limit("pooled", PROX_STEPS, {"alpha": LAM}),
        over_all=True,
        never="α > 0, and its server step differs from an average from the first round on",
    ),
    "mr_mtl": Row(
        Card(whole, whole, whole, True, False, whole),
        {"lam": 0.5},
        Limit("coupled", PROX_STEPS, {"lam": LAM}),
        over_all=True,
        same=(local(lam=0.0),),
    ),
    # Beside a change of the model a number: its curvature, a loss, the steps taken.
    "qfedavg": Row(
        Card(whole, and_one, whole, False, True),
        {"q": 0.5},
        Limit("pooled", 1, {"q": 0.0}),
        same=(replace(fedavg("q = 0", exact=False, q=0.0, said=True), other_train=PLAIN),),
    ),
    "afl": Row(
        Card(whole, and_one, whole, False, True),
        unweighted=True,
        proved=REFERENCE,
        never="one plain step a round, and the model that is used is the mean over rounds",
    ),
    "fednova": Row(
        Card(whole, and_one, whole, False, True),
        limit=Limit("pooled"),
        same=(
            # With batch norm a client of one sample takes no step.
            replace(
                fedavg("equal steps", exact=False, said=True),
                train={"steps": 3, "epochs": None},
                models=("mlp", "dropout"),
                other_train=SGD,
            ),
            in_run(replace(fedavg("one client a round", exact=False), other_train=SGD), fraction=0.2),
        ),
    ),
    "moon": Row(
        Card(whole, whole, whole, False, True),
        {"mu": 0.5, "tau": 1.0},
        same=(
            fedavg("μ = 0", mu=0.0, said=True),
            fedavg("Q = 0", history=0, said=True),
            in_run(fedavg("one round"), rounds=1),
        ),
    ),
}


N = len(SIZES)


def test_buffers_become_the_average_whatever_the_server_optimizer() -> None:
    """Running variances must never be driven below 0 by momentum."""
    momentum = make("fedavg", server={"kind": "sgd", "lr": 1.7, "momentum": 0.9})
    fancy, simple = (simulation(method, "batch_norm", rounds=1) for method in (momentum, "fedavg"))
    models, buffers = (shared(fancy), shared(simple)), fancy.model.buffers
    assert_same(*({name: state[name] for name in buffers} for state in models))


def test_tuning_the_head_leaves_the_body_and_its_statistics() -> None:
    sim = simulation(make("fedavg_ft", ft_epochs=3, ft_scope="head"), "batch_norm", rounds=1)
    tuned, w = personal(sim, (0, NEWCOMER)), shared(sim)
    for n, t in tuned.items():
        assert torch.equal(t, w[n].expand_as(t)) == (n not in ("8.weight", "8.bias")), n


def test_centralized_never_sees_held_out_clients() -> None:
    sim = simulation("centralized")
    held_out = set(federation().train[NEWCOMER].tolist())
    assert not held_out & set(np.concatenate(sim.cohort((0,)).members).tolist())


@pytest.mark.parametrize("order", ["drawn", "fixed"])
def test_everyone_is_visited_once_in_a_cycle(order: str) -> None:
    """Whatever the run samples; orders differ from cycle to cycle and from seed to seed, or are 0..N-1."""
    sim = simulation(make("cyclic", order=order), fraction=0.4, sampling="bernoulli")
    turns = [sim.sample(t) for t in range(6 * N)]
    assert all(len(turn) == 1 for turn in turns)
    cycles = [tuple(i for (i,) in turns[N * c : N * (c + 1)]) for c in range(6)]
    assert all(sorted(cycle) == list(range(N)) for cycle in cycles)
    assert (len(set(cycles)) == 1) == (order == "fixed")
    other = simulation(make("cyclic", order=order), seed=1)
    assert ([other.sample(t) for t in range(6 * N)] == turns) == (order == "fixed")


def test_a_run_may_sample_in_turns_whatever_its_method() -> None:
    sim = simulation("ditto", sampling="cyclic")
    assert sim.sample(3) == simulation("cyclic").sample(3)
    assert sim.step().clients == sim.sample(0)
    with pytest.raises(ConfigError, match=r"one client per round, so fraction=0\.5"):
        simulation("ditto", sampling="cyclic", fraction=0.5)
    sizes = np.array([3, 1, 2])
    assert [sample_clients(0, t, sizes, 1.0, "cyclic_fixed") for t in range(4)] == [(0,), (1,), (2,), (0,)]


def test_a_dry_run_counts_one_client_a_round() -> None:
    settings = {"data": {"clients": 4, "samples": 200}, "methods": "fedavg", "rounds": 2, "seeds": 1}
    assert estimate(load({**settings, "sampling": "cyclic"})).clients_per_round == 1
    assert estimate(load(settings)).clients_per_round == 4


def test_a_visit_that_diverges_ends_the_run() -> None:
    """Nobody else is in the round, so there is nothing to go on with."""
    bad = replaced(federation(), 0, lambda x: x * torch.inf)
    sim = simulation(make("cyclic", order="fixed"), data=bad)
    with pytest.raises(DivergenceError):
        sim.step()


@pytest.mark.parametrize(
    ("name", "options", "steps", "weights"),
    [
        ("scaffold", {}, 4, "uniform"),
        ("feddyn", {"alpha": 2.0}, 6, "samples"),
        pytest.param("scaffold", {}, 4, "samples", marks=pytest.mark.slow),
        pytest.param("feddyn", {"alpha": 2.0}, 6, "uniform", marks=pytest.mark.slow),
    ],
)
def test_partial_participation_reaches_the_pooled_optimum_exactly(
    name: str, options: dict[str, float], steps: int, weights: Weights
) -> None:
    method, settings = make_method(name, options), {"fraction": 0.5, "lr": 0.1, "weights": weights}
    sim = after(quadratic_simulation(method, steps, engine="vectorized", **settings), 60)
    pooled, _ = optimum("pooled", shares(weights))
    np.testing.assert_allclose(global_weight(sim), pooled, atol=2e-5)


def test_of_a_large_q_only_the_largest_loss_matters() -> None:
    """Losses of ½·4 and ½·16 weigh 1 to 4⁴⁰: the step goes to the second client alone."""
    weights = []
    for targets in ([2.0, -4.0], [-4.0]):
        sim = one_weight(targets, "qfedavg", lr=0.1, q=40.0)
        (name,) = sim.server.keys()
        sim.server = TensorDict({name: torch.zeros(1, 1)})
        weights.append(shared(after(sim, 1))[name].item())
    assert weights[0] == pytest.approx(weights[1], rel=1e-5)
    assert weights[1] < 0


def test_the_projection_is_the_nearest_point_of_the_simplex() -> None:
    rng = torch.Generator().manual_seed(1)
    for _ in range(20):
        point = torch.randn(5, generator=rng, dtype=torch.float64)
        found = on_simplex(point)
        assert float(found.sum()) == pytest.approx(1.0)
        assert bool((found >= 0).all())
        # Nearest: no way from it to a corner comes nearer to the point.
        for corner in torch.eye(5, dtype=torch.float64):
            assert float((point - found) @ (corner - found)) <= 1e-12


def test_a_client_that_was_left_out_has_no_weight_whatever_the_losses() -> None:
    """Losses of counts may be negative, and the sum of the weights before the projection is then below 1."""
    sim = simulation("afl", data=federation().without(["client 1"]))
    stack = TensorDict({"theta": sim.init.expand(4), "loss": torch.full((4,), -40.0)}, batch_size=[4])
    replies = Replies(stack, (0, 2, 3, 4), np.ones(4, dtype=np.int64), "uniform", sim.context)
    mixture = sim.method.aggregate(sim.server, replies)["mixture"]
    torch.testing.assert_close(mixture, torch.tensor([0.25, 0.0, 0.25, 0.25, 0.25], dtype=torch.float64))


def test_a_client_that_takes_no_step_keeps_its_control_variate() -> None:
    """Client 1 has one sample, on which batch norm cannot train."""
    sim = simulation("scaffold", "batch_norm", rounds=3)
    assert all(not t.any() for _, t in tree.leaves(sim.states.get((1,))))
    assert any(t.any() for _, t in tree.leaves(sim.states.get((0,))))


def test_running_statistics_are_means_whatever_the_mixture_of_afl() -> None:
    """An estimate of a variance with a negative weight may be negative."""
    sim = simulation("afl", "batch_norm", fraction=0.2)
    (client,) = sim.sample(0)
    sim.server["mixture"] = torch.nn.functional.one_hot(torch.tensor(client), N).double()
    sent = replies_of(sim, (client,))["theta"]
    sim.step()
    for name in sim.model.buffers:
        torch.testing.assert_close(sim.server["w"][name], sent[name][0])


@pytest.mark.parametrize("left_out", [(), (0, 1)])
def test_without_transfer_the_model_of_the_first_client_that_takes_part_is_shown(
    left_out: tuple[int, ...],
) -> None:
    data = federation().without([f"client {i}" for i in left_out])
    sim = simulation(make("cyclic", transfer=False), data=data, rounds=N - len(left_out))
    assert_same(shared(sim), {n: t[0] for n, t in tree.tensors(sim.states.get((len(left_out),))).items()})
    assert any(not torch.equal(t, sim.init[n]) for n, t in shared(sim).items())


def test_effective_steps_in_numbers() -> None:
    """At the ends; the references have others."""
    three = torch.tensor(3.0, dtype=torch.float64)
    assert float(accumulated(three, 0.0, 1e-6)) == pytest.approx(3.0, abs=1e-5)
    assert float(accumulated(torch.tensor(0.0), 0.9, 0.0)) == 0.0


def test_frozen_layers_stay_frozen_under_a_projection() -> None:
    base = Model(lambda: build("mlp", (1, 8, 8), CLASSES, hidden=(8, 6)), trainable=["fc2.*"])
    sim = Simulation(make("moon", projection=5), federation(), base, TRAIN)
    assert set(sim.model.frozen) == {"fc1.weight", "fc1.bias"}
    for network in (sim.model, after(sim, 1).model):
        assert torch.equal(*(net.module.get_parameter("fc1.weight") for net in (network, base)))
