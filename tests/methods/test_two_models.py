"""Ditto, pFedMe and APFL: a model of every client beside a global one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from methods.quadratics import CLIENTS, quadratic_simulation
from methods.reductions import PLAIN, THREE, Same, drawn, fedavg, local
from methods.settings import LAM, PROX_STEPS, Card, Limit, Row, make
from methods.small import NEWCOMER, TRAIN, assert_close, personal, simulation
from tailorfl.errors import ConfigError
from tailorfl.testing.contract import twice, whole
from tailorfl.training import tree

CONTRACTS = {
    "ditto": Row(
        Card(whole, whole, twice, True, True),
        {"lam": 0.5},
        Limit("ditto", 1, {"lam": LAM}),
        same=(
            fedavg("T02", exact=False, lam=0.0),
            fedavg("T02", exact=False, lam=0.7),
            local(lam=0.0),
            local(lam=0.7, dynamic_lam=(0.0, 0.0)),
            replace(
                local(exact=False, dynamic_lam=(0.0, 0.0), dynamic_every="step"),
                other_train=PLAIN,
                models=("mlp",),
            ),
            replace(local(lam=0.0, personal_epochs=3), other_train=THREE),
            drawn("personal", personal_epochs=0),
        ),
    ),
    "pfedme": Row(
        Card(whole, whole, twice, True, True),
        {"lam": 1.0, "inner_steps": 2, "local_rounds": 3, "lr": 0.1},
        Limit("coupled", 1, {"lam": LAM, "inner_steps": PROX_STEPS, "local_rounds": 1, "lr": 1 / LAM}),
        own_rate=True,
        same=(
            Same(
                "ηλ = 1",
                {"lam": 4.0, "lr": 0.25, "inner_steps": 1, "local_rounds": 5},
                "fedavg",
                exact=False,
                said=True,
                other_train={**PLAIN, "weight_decay": 0.01, "steps": 5, "epochs": None},
            ),
            Same(
                "ηλ = 1",
                {
                    "lam": 4.0,
                    "lr": 0.25,
                    "inner_steps": 1,
                    "beta": 0.5,
                    "personal_lr": 0.02,
                },
                "fedavg",
                {"server": {"lr": 0.5}},
                exact=False,
                said=True,
                other_train={**PLAIN, "weight_decay": 0.01, "steps": 3, "epochs": None, "lr": 0.02},
            ),
            Same(
                "ηλ = 1",
                {"lam": 0.5, "lr": 2.0, "personal_epochs": 3},
                "fedclup",
                {"lam": 0.5},
                "personal",
                "personal",
                exact=False,
                said=True,
                other_train={**THREE, "weight_decay": 0.01},
            ),
            drawn("global", lam=0.0),
            drawn("global", beta=0.0),
        ),
        remarks=(
            (
                {"lam": 4.0, "lr": 0.25, "inner_steps": 3},
                "deploys what clients send",
                "test_reduction_remarks.py",
            ),
        ),
    ),
    "apfl": Row(
        Card(whole, whole, twice, True, True),
        {"alpha": 0.3, "adaptive": True},
        Limit("pooled_and_local", 1, {"alpha": 0.8}),
        same=(
            *(fedavg("T02", exact=False, alpha=a, adaptive=False) for a in (0.0, 0.4, 1.0)),
            local(exact=False, alpha=1.0, adaptive=False),
        ),
        remarks=(({"alpha": 0.0, "adaptive": False}, "deploys copies", "test_two_models.py"),),
    ),
}


def adapted(steps: int, **options: object) -> dict[str, torch.Tensor]:
    sim = simulation(make("pfedme", **options), rounds=1)
    [(_, models)] = sim.newcomer_models((NEWCOMER,), steps)
    return tree.tensors(models)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_training_of_many_one_step_fits_stops_after_k_batches(steps: int) -> None:
    """pFedMe's R batches are R fits: k of them must be what R = k gives to the personal model."""
    options = {"lr": 1e-9, "lam": 1.0}
    stopped, short = adapted(steps, local_rounds=7, **options), adapted(99, local_rounds=steps, **options)
    assert_close(stopped, short, atol=2e-3, rtol=1e-2)
    more = adapted(steps + 1, local_rounds=7, **options)
    assert any(not torch.equal(t, more[n]) for n, t in stopped.items())


def test_apfls_alpha_stays_between_zero_and_one() -> None:
    sim, alphas = quadratic_simulation(make("apfl", alpha=0.5, weights="uniform"), 2, lr=0.5), []
    for _ in range(10):
        sim.step()
        alphas.append(sim.states.get(range(CLIENTS))["alpha"])
    assert 0 <= torch.stack(alphas).min() <= torch.stack(alphas).max() <= 1


def test_apfl_with_alpha_zero_deploys_the_local_copies_of_fedavg() -> None:
    """Without weight decay, which would shrink even a v whose gradient is zero."""
    plain = replace(TRAIN, momentum=0.0, weight_decay=0.0)
    apfl = simulation(make("apfl", alpha=0.0, adaptive=False), train=plain, fraction=0.6)
    fedavg = simulation("fedavg", train=plain, fraction=0.6)
    for _ in range(3):
        ids = apfl.sample(apfl.round)
        w = fedavg.server["w"]
        (theta,) = fedavg.run(ids, fedavg.states.get(ids), w, lambda c, s, r: (c.fit(r),))
        apfl.step()
        fedavg.step()
        assert_close(personal(apfl, ids), dict(theta.items()))


def test_dittos_strength_by_steps_needs_some_to_choose_from() -> None:
    with pytest.raises(ConfigError, match="dynamic_lam"):
        make("ditto", dynamic_every="step")
