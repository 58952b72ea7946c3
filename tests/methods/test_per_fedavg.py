"""Per-FedAvg: its directions and optima on quadratics, plain loops, and what is left of it without adaptation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call

from methods import plain
from methods.quadratics import (
    CLIENTS,
    DIM,
    WEIGHT,
    curvature,
    global_weight,
    personal_weights,
    quadratic_simulation,
)
from methods.reductions import Same
from methods.settings import Card, Row
from methods.small import (
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    personal,
    shared,
    simulation,
)
from tailorfl.core.method import Method, make_method
from tailorfl.methods.per_fedavg import PerFedAvg
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    "per_fedavg": Row(
        Card(whole, whole, whole, True, True),
        {"alpha": 0.05},
        still={"adapt_steps": 0},
        same=(
            Same(
                "A = 0", {"adapt_steps": 0}, "per_fedavg", {"adapt_steps": 0}, "personal", "global", said=True
            ),
        ),
        remarks=(({"alpha": 0.0}, "second of every two", "test_per_fedavg.py"),),
        proved="directions on quadratics, α = 0: test_per_fedavg.py",
    ),
}


BETA, ALPHA = 0.1, 0.2
EYE = torch.eye(DIM, dtype=torch.float64)
VARIANTS = ("FO", "HF")
engines = pytest.mark.parametrize("engine", ["sequential", "vectorized"])
variants = pytest.mark.parametrize("variant", VARIANTS)


def per_fedavg(variant: str = "FO", **options: Any) -> Method:
    """With the paper's equal weights."""
    return PerFedAvg(**{"alpha": ALPHA, "variant": variant, "weights": "uniform", **options})


def replies(sim: Simulation) -> torch.Tensor:
    """The models that all clients send, [clients, dim] float64."""
    ids = tuple(range(CLIENTS))
    message = sim.method.broadcast(sim.server, ids)
    [_, reply] = sim.run(ids, sim.states.get(ids), message, lambda c, s, r: sim.method.local(c, s, r))
    return tree.tensors(reply)[WEIGHT][:, 0].double()


def matrices(variant: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(M_i [clients, dim, dim], c_i) of the direction M_i (w − c_i): FO H(I − αH), HF (I − αH)H(I − αH)."""
    H, c = curvature()
    inner = EYE - ALPHA * H
    return (H @ inner if variant == "FO" else inner @ H @ inner), c


@engines
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("variant", "delta"), [("FO", 1e-3), ("HF", 1e-2), ("HF", 0.3), ("HF", 1.0), ("HF", 50.0)]
)
def test_the_direction_on_quadratics(variant: str, delta: float, steps: int, engine: str) -> None:
    """Exact for every δ: differences of a linear gradient are its derivative."""
    sim = quadratic_simulation(per_fedavg(variant, delta=delta), steps, lr=BETA, engine=engine)
    M, c = matrices(variant)
    w = tree.tensors(sim.server)[WEIGHT][0].double().expand(CLIENTS, DIM)
    for _ in range(steps):
        w = w - BETA * torch.einsum("kij,kj->ki", M, w - c)
    torch.testing.assert_close(replies(sim), w, atol=2e-4, rtol=1e-4)


@variants
def test_it_goes_to_its_own_optimum(variant: str) -> None:
    """(Σ M_i)⁻¹ Σ M_i c_i, every client counting once whatever its samples."""
    sim = quadratic_simulation(per_fedavg(variant, delta=1.0), lr=0.25)
    for _ in range(100):
        sim.step()
    M, c = matrices(variant)
    expected = torch.linalg.solve(M.sum(0), torch.einsum("kij,kj->i", M, c))
    np.testing.assert_allclose(global_weight(sim), expected.numpy(), atol=5e-5)


def test_hf_minimises_the_loss_after_adaptation_and_others_do_not() -> None:
    """(1/N) Σ F_i(w − α∇F_i(w)), which is also the mean training loss of the deployed models."""
    H, c = curvature()

    def adapted_loss(method: Method) -> float:
        sim = quadratic_simulation(method, lr=0.25)
        for _ in range(100):
            sim.step()
        w = torch.from_numpy(global_weight(sim))
        v = w - ALPHA * torch.einsum("kij,kj->ki", H, w - c)
        return float(0.5 * torch.einsum("ki,kij,kj->k", v - c, H, v - c).mean())

    hf, fo = adapted_loss(per_fedavg("HF", delta=1.0)), adapted_loss(per_fedavg("FO"))
    fedavg = adapted_loss(make_method("fedavg", {"weights": "uniform"}))
    assert hf < fo < fedavg


@engines
def test_hf_follows_autograd_through_the_adaptation(engine: str) -> None:
    """On full batches of a model that is not quadratic: the gradient of F(w − α∇F(w)), up to O(δ²)."""
    full = replace(TRAIN, batch_size=0, momentum=0.0, weight_decay=0.0, lr=1.0)
    sim = simulation(per_fedavg("HF", alpha=0.05, delta=1e-3), "mlp", engine, train=full)
    ids, module = tuple(range(len(SIZES))), sim.model.module
    message = sim.method.broadcast(sim.server, ids)
    [_, reply] = sim.run(ids, sim.states.get(ids), message, lambda c, s, r: sim.method.local(c, s, r))
    for i, rows in zip(ids, sim.federation.train, strict=False):
        x, y = sim.federation.source.x[rows], sim.federation.source.y[rows]
        w = {n: t.clone().requires_grad_() for n, t in sim.init.items()}

        def loss(at: dict[str, torch.Tensor], x: Any = x, y: Any = y) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(functional_call(module, at, (x,)), y)

        inner = torch.autograd.grad(loss(w), list(w.values()), create_graph=True)
        outer = loss({n: p - 0.05 * g for (n, p), g in zip(w.items(), inner, strict=True)})
        expected = dict(zip(w, torch.autograd.grad(outer, list(w.values())), strict=True))
        for n, t in tree.tensors(reply).items():
            torch.testing.assert_close(sim.init[n] - t[i], expected[n], atol=3e-4, rtol=1e-2)
        at = {n: (p - 0.05 * g).detach().requires_grad_() for (n, p), g in zip(w.items(), inner, strict=True)}
        first_order = dict(zip(at, torch.autograd.grad(loss(at), list(at.values())), strict=True))
        assert any(not torch.allclose(first_order[n], expected[n], rtol=0.1, atol=3e-3) for n in w)


@engines
def test_an_epoch_is_a_pass_that_is_dealt_out_to_the_batches_of_each_step(engine: str) -> None:
    """FO with mini-batches, momentum and weight decay against a plain loop by torch."""
    sim = simulation(per_fedavg("FO"), "mlp", engine)
    ids = tuple(range(len(SIZES)))
    message = sim.method.broadcast(sim.server, ids)
    [_, reply] = sim.run(ids, sim.states.get(ids), message, lambda c, s, r: sim.method.local(c, s, r))
    for i, size in enumerate(SIZES):
        steps = math.ceil(math.ceil(size / 4) / 2)
        sequence = plain.batches(sim, i, epochs=None, steps=2 * steps)
        w = {n: t.clone() for n, t in sim.init.items()}
        velocity = {n: torch.zeros_like(t) for n, t in w.items()}
        for k in range(steps):
            g = autograd(sim, w, sequence[2 * k])
            g = autograd(sim, {n: t - ALPHA * g[n] for n, t in w.items()}, sequence[2 * k + 1])
            velocity = {n: 0.5 * velocity[n] + g[n] + 0.01 * w[n] for n in w}
            w = {n: t - 0.05 * velocity[n] for n, t in w.items()}
        assert_close({n: t[i] for n, t in tree.tensors(reply).items()}, w)


def autograd(sim: Simulation, at: dict[str, torch.Tensor], rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of the batch loss by ordinary autograd."""
    source = sim.federation.source
    leaves = {n: t.detach().clone().requires_grad_() for n, t in at.items()}
    outputs = functional_call(sim.model.module, leaves, (source.take(rows),))
    torch.nn.functional.cross_entropy(outputs, source.y[rows]).backward()
    return {n: p.grad for n, p in leaves.items() if p.grad is not None}


@variants
def test_without_adaptation_it_is_fedavg(variant: str) -> None:
    """α = 0 on full batches: FedAvg with uniform weights and learning rate β, also what is deployed."""
    one = quadratic_simulation(per_fedavg(variant, alpha=0.0), 3, lr=BETA, fraction=0.5)
    other = quadratic_simulation(make_method("fedavg", {"weights": "uniform"}), 3, lr=BETA, fraction=0.5)
    for _ in range(4):
        one.step()
        other.step()
    np.testing.assert_allclose(global_weight(one), global_weight(other), atol=1e-6, rtol=1e-5)
    np.testing.assert_allclose(personal_weights(one), personal_weights(other), atol=1e-6, rtol=1e-5)


@engines
def test_without_adaptation_fo_is_sgd_on_every_second_batch(engine: str) -> None:
    sim = simulation(per_fedavg("FO", alpha=0.0), "mlp", engine, train=replace(TRAIN, epochs=None, steps=3))
    w: plain.State = dict(sim.init.items())
    for _ in range(2):
        local = [
            plain.train(sim, w, plain.batches(sim, i, epochs=None, steps=6)[1::2]) for i in range(len(SIZES))
        ]
        w = plain.average(local, [1] * len(SIZES))
        sim.step()
        assert_close(shared(sim), dict(w))


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_client_deploys_what_a_few_steps_on_its_own_data_make_of_the_global_model(steps: int) -> None:
    """On training rows: the gradient is that of H_i and c_i, which test rows do not have."""
    sim = quadratic_simulation(per_fedavg("FO", adapt_steps=steps), lr=BETA)
    for _ in range(3):
        sim.step()
    H, c = curvature()
    v = torch.from_numpy(global_weight(sim)).expand(CLIENTS, DIM)
    for _ in range(steps):
        v = v - ALPHA * torch.einsum("kij,kj->ki", H, v - c)
    np.testing.assert_allclose(personal_weights(sim), v.numpy(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_name", ["mlp", "batch_norm", "dropout"])
@variants
def test_engines_and_chunks_agree(variant: str, model_name: str) -> None:
    """Clients of 15, 1, 7, 9 and 3 samples; some leave a step's second or third batch shorter than others."""
    method = per_fedavg(variant, delta=0.3)
    train = replace(TRAIN, lr=0.02)
    reference = simulation(method, model_name, rounds=2, fraction=0.6, train=train)
    for chunk in (2, 5):
        found = simulation(method, model_name, "vectorized", chunk=chunk, rounds=2, fraction=0.6, train=train)
        assert_close(everything(found), everything(reference), atol=2e-4, rtol=2e-3)
        assert_close(personal(found), personal(reference), atol=2e-4, rtol=2e-3)


@variants
def test_private_training_runs_alike_in_both_engines_and_is_not_the_public_one(variant: str) -> None:
    method = per_fedavg(variant, delta=0.3)
    private = replace(TRAIN, lr=0.01, dp=SampleDP(0.5, 1.0, "shuffle"))
    one, other = (simulation(method, "mlp", e, rounds=2, train=private) for e in ("sequential", "vectorized"))
    assert_close(everything(one), everything(other), atol=2e-4, rtol=2e-3)
    open_ = everything(simulation(method, "mlp", rounds=2, train=replace(private, dp=None)))
    assert all(torch.isfinite(t).all() for t in everything(one).values())
    assert all((t - open_[n]).abs().max() > 1e-3 for n, t in everything(one).items())


def test_nothing_is_kept_between_rounds() -> None:
    """A client's model follows from the global one and its data alone."""
    sim = simulation(per_fedavg(), rounds=2)
    assert not dict(tree.leaves(sim.states.get((0,))))
    assert_same(personal(sim), personal(sim))
