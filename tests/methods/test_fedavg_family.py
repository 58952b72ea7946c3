"""FedAvg, its server optimizers, FedProx and FedAvg+FT against plain loops and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from methods import plain
from methods.quadratics import CLIENTS, LR, Reference, global_weight, quadratic_simulation, shares
from methods.reductions import Same, fedavg, in_run, nothing_personal
from methods.settings import LAM, PROX_STEPS, Card, Limit, Row, make
from methods.small import NEWCOMER, SIZES, assert_close, assert_same, personal, shared, simulation
from tailorfl.core.method import make_method
from tailorfl.testing.contract import whole

CONTRACTS = {
    "fedavg": Row(
        Card(whole, whole, whole, False, True),
        limit=Limit("pooled"),
        same=(
            Same("one client", {}, "centralized", said=True, data={"sizes": (11,)}),
            in_run(Same("visits", {}, "cyclic"), sampling="cyclic", fraction=1.0),
            in_run(Same("visits", {}, "cyclic", {"order": "fixed"}), sampling="cyclic_fixed", fraction=1.0),
        ),
        proved="everything else is compared with it; test_fedavg_family.py and docs/test_fedavg_from_scratch.py",
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
}


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("model_name", ["mlp", "batch_norm"])
def test_fedavg_is_the_textbook_loop(weights: str, model_name: str) -> None:
    """Including running statistics, which are averaged like parameters, and batches too small for batch
    norm.
    """
    sim = simulation(make("fedavg", weights=weights), model_name, fraction=0.6)
    w: plain.State = dict(sim.init.items())
    for _ in range(3):
        ids = sim.sample(sim.round)
        local = [plain.train(sim, w, plain.batches(sim, i)) for i in ids]
        w = plain.average(local, [SIZES[i] if weights == "samples" else 1 for i in ids])
        sim.step()
        assert_close(shared(sim), dict(w))


def test_one_full_batch_step_of_all_clients_is_one_step_on_the_pooled_data() -> None:
    from dataclasses import replace

    from methods.small import TRAIN

    gd = replace(TRAIN, batch_size=0, momentum=0.0, weight_decay=0.0)
    fedavg, pooled = (simulation(name, train=gd, rounds=5) for name in ("fedavg", "centralized"))
    assert_close(shared(fedavg), shared(pooled))


def numpy_server(kind: str, lr: float, momentum: float, beta2: float, eps: float, initial: float) -> Any:
    """Reddi et al., Algorithm 2, without bias correction: (w, Δ) -> w."""
    m, v = np.zeros(3), np.full(3, initial)

    def step(w: np.ndarray[Any, Any], delta: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        nonlocal m, v
        if kind == "sgd":
            m = momentum * m + delta
            return w + lr * m
        m = momentum * m + (1 - momentum) * delta
        if kind == "adam":
            v = beta2 * v + (1 - beta2) * delta**2
        elif kind == "yogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = v + delta**2
        return w + lr * m / (np.sqrt(v) + eps)

    return step


@pytest.mark.parametrize(
    ("kind", "lr", "momentum", "beta2", "eps", "initial"),
    [
        ("sgd", 0.7, 0.0, 0.999, 1e-8, 0.0),
        ("sgd", 0.5, 0.9, 0.999, 1e-8, 0.0),
        ("sgd", 1.0, 0.5, 0.999, 1e-8, 0.0),
        ("adam", 0.1, 0.9, 0.99, 1e-3, 0.0),
        ("adam", 0.1, 0.9, 0.99, 1e-3, 1e-6),
        ("yogi", 0.1, 0.9, 0.99, 1e-3, 1e-6),
        ("adagrad", 0.3, 0.0, 0.99, 1e-3, 0.1),
        ("adagrad", 0.3, 0.9, 0.99, 1e-3, 0.0),
    ],
)
def test_server_optimizers_follow_the_paper_over_rounds(
    kind: str, lr: float, momentum: float, beta2: float, eps: float, initial: float
) -> None:
    options = {"kind": kind, "lr": lr, "momentum": momentum, "beta2": beta2, "eps": eps, "initial": initial}
    sim = quadratic_simulation(make("fedavg", server=options), steps=2, fraction=0.5)
    local, server, sizes = (
        Reference(),
        numpy_server(kind, lr, momentum, beta2, eps, initial),
        sim.federation.sizes(),
    )
    w = global_weight(sim)
    for _ in range(12):
        ids = list(sim.sample(sim.round))
        a = sizes[ids] / sizes[ids].sum()
        w = server(w, sum(a[k] * (local.descend(i, w, 2) - w) for k, i in enumerate(ids)))
        sim.step()
        np.testing.assert_allclose(global_weight(sim), w, atol=3e-5, rtol=1e-4)


def test_adaptive_servers_have_no_bias_correction() -> None:
    """The first FedAdam step is (1−β₁)Δ/(√(1−β₂)|Δ|) coordinate by coordinate, not the sign of Δ that bias
    correction gives.
    """
    sim = quadratic_simulation(
        make("fedavg", server={"kind": "adam", "lr": 0.1, "momentum": 0.9, "beta2": 0.99, "eps": 1e-12})
    )
    before = global_weight(sim)
    sim.step()
    np.testing.assert_allclose(np.abs(global_weight(sim) - before), 0.1 * 0.1 / np.sqrt(0.01), rtol=1e-4)


def test_buffers_become_the_average_whatever_the_server_optimizer() -> None:
    """Running variances must never be driven below 0 by momentum."""
    fancy = simulation(
        make("fedavg", server={"kind": "sgd", "lr": 1.7, "momentum": 0.9}), "batch_norm", rounds=1
    )
    simple = simulation("fedavg", "batch_norm", rounds=1)
    assert_same(
        {b: shared(fancy)[b] for b in fancy.model.buffers},
        {b: shared(simple)[b] for b in fancy.model.buffers},
    )
    for name in fancy.model.parameters:
        moved = shared(simple)[name] - simple.init[name]
        torch.testing.assert_close(shared(fancy)[name], simple.init[name] + 1.7 * moved, atol=1e-6, rtol=1e-5)


class TestFedProx:
    def test_local_training_descends_the_penalised_loss(self) -> None:
        sim = simulation(make("fedprox", mu=0.8), "batch_norm", fraction=0.6)
        w: plain.State = dict(sim.init.items())
        for _ in range(3):
            ids = sim.sample(sim.round)
            local = [plain.train(sim, w, plain.batches(sim, i), prox=(0.8, w)) for i in ids]
            w = plain.average(local, [SIZES[i] for i in ids])
            sim.step()
            assert_close(shared(sim), dict(w))

    def test_an_infinite_penalty_leaves_w_where_it_is(self) -> None:
        sim = quadratic_simulation(make("fedprox", mu=1e6), steps=20, lr=1 / (3 + 1e6))
        before = global_weight(sim)
        for _ in range(5):
            sim.step()
        np.testing.assert_allclose(global_weight(sim), before, atol=1e-4)

    def test_enough_steps_solve_the_proximal_problem(self) -> None:
        """θ_i = (H_i + μ)⁻¹(H_i c_i + μ w), every round."""
        mu, local = 2.0, Reference()
        sim = quadratic_simulation(make("fedprox", mu=mu), steps=15, fraction=0.5)
        sizes, w = sim.federation.sizes(), global_weight(sim)
        for _ in range(6):
            ids = list(sim.sample(sim.round))
            w = sum(sizes[i] / sizes[ids].sum() * local.solve(i, mu, w) for i in ids)
            sim.step()
            np.testing.assert_allclose(global_weight(sim), w, atol=2e-5)


class TestFineTuning:
    def test_no_epochs_deploy_the_global_model(self) -> None:
        sim = simulation(make("fedavg_ft", ft_epochs=0), "batch_norm", rounds=2)
        for i in range(len(SIZES)):
            assert_same({n: t[i] for n, t in personal(sim).items()}, shared(sim))

    @pytest.mark.parametrize("scope", ["all", "head"])
    def test_the_personal_model_is_w_after_tuning_and_w_stays(self, scope: str) -> None:
        sim = simulation(make("fedavg_ft", ft_epochs=2, ft_scope=scope), rounds=2)
        w = {n: t.clone() for n, t in shared(sim).items()}
        only = ("head.weight", "head.bias") if scope == "head" else None
        expected = [plain.train(sim, w, plain.batches(sim, i, 2, purpose="finetune"), only) for i in (0, 2)]
        found = personal(sim, (0, 2))
        for k in range(2):
            assert_close({n: t[k] for n, t in found.items()}, expected[k])
        assert_same(w, shared(sim))

    def test_tuning_the_head_leaves_the_body_and_its_statistics(self) -> None:
        sim = simulation(make("fedavg_ft", ft_epochs=3, ft_scope="head"), "batch_norm", rounds=1)
        tuned, w = personal(sim, (0, NEWCOMER)), shared(sim)
        head = ("8.weight", "8.bias")
        for n, t in tuned.items():
            assert torch.equal(t, w[n].expand_as(t)) == (n not in head), n

    def test_on_quadratics_tuning_contracts_towards_the_local_optimum(self) -> None:
        """v_i = c_i + (I − ηH_i)^E (w − c_i)."""
        from methods.quadratics import personal_weights

        sim, local = quadratic_simulation(make("fedavg_ft", ft_epochs=3)), Reference()
        for _ in range(4):
            sim.step()
        expected = [local.descend(i, global_weight(sim), 3, LR) for i in range(CLIENTS)]
        np.testing.assert_allclose(personal_weights(sim), expected, atol=1e-5)


def test_sample_weights_are_shares_of_the_sampled_clients_only() -> None:
    sim = quadratic_simulation(make_method("fedavg"), steps=3)
    w, local = global_weight(sim), Reference()
    sim.step()
    expected = sum(float(shares("samples")[i]) * local.descend(i, w, 3) for i in range(CLIENTS))
    np.testing.assert_allclose(global_weight(sim), expected, atol=1e-5)
