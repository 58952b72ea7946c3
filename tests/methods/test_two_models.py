"""A model of every client beside a global one: Ditto, pFedMe, APFL, Per-FedAvg, PerAda, FedOA and FedSDR."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from methods.quadratics import (
    CLIENTS,
    quadratic_simulation,
)
from methods.reductions import (
    ALONE,
    NUMBERS,
    PLAIN,
    REFERENCE,
    REMARKS,
    THREE,
    WITHOUT,
    Same,
    ditto_of_perada,
    drawn,
    fedavg,
    in_run,
    itself,
    local,
    of_mlp,
    personally,
)
from methods.settings import LAM, PROX_STEPS, Card, Limit, Row, make
from methods.small import (
    CLASSES,
    NEWCOMER,
    SIZES,
    TRAIN,
    after,
    assert_close,
    federation,
    simulation,
)
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
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
            of_mlp(local(False, dynamic_lam=(0.0, 0.0), dynamic_every="step"), other_train=PLAIN),
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
                {"lam": 4.0, "lr": 0.25, "inner_steps": 1, "beta": 0.5, "personal_lr": 0.02},
                "fedavg",
                {"server": {"lr": 0.5}},
                exact=False,
                said=True,
                other_train={**PLAIN, "weight_decay": 0.01, "steps": 3, "epochs": None, "lr": 0.02},
            ),
            replace(
                personally(
                    "ηλ = 1", "fedclup", {"lam": 0.5}, exact=False, lam=0.5, lr=2.0, personal_epochs=3
                ),
                said=True,
                other_train={**THREE, "weight_decay": 0.01},
            ),
            replace(
                personally(
                    "ηλ = 1",
                    "fedclup",
                    {"lam": 0.5},
                    exact=False,
                    lam=0.5,
                    lr=2.0,
                    inner_steps=1,
                    personal_steps=2,
                ),
                said=True,
                other_train={"epochs": None, "steps": 2, "weight_decay": 0.01},
            ),
            drawn("global", lam=0.0),
            drawn("global", beta=0.0),
        ),
        remarks=(({"lam": 4.0, "lr": 0.25, "inner_steps": 3}, "deploys what clients send", REMARKS),),
    ),
    "apfl": Row(
        Card(whole, whole, twice, True, True),
        {"alpha": 0.3, "adaptive": True},
        Limit("pooled_and_local", 1, {"alpha": 0.8}),
        same=(
            *(fedavg("T02", exact=False, alpha=a, adaptive=False) for a in (0.0, 0.4, 1.0)),
            local(exact=False, alpha=1.0, adaptive=False),
        ),
        remarks=(({"alpha": 0.0, "adaptive": False}, "deploys copies", NUMBERS),),
    ),
    "per_fedavg": Row(
        Card(whole, whole, whole, True, True),
        {"alpha": 0.05},
        still={"adapt_steps": 0},
        same=(itself("A = 0", "per_fedavg", adapt_steps=0),),
        remarks=(({"alpha": 0.0}, "second of every two", NUMBERS),),
        proved=REFERENCE,
    ),
    "perada": Row(
        Card(whole, whole, twice, True, True),
        # Of a linear model the mean of the teachers' logits is what the student already gives: a gradient of nothing
        # but rounding, which Adam scales up to whole steps.
        {"lam": 0.5, "distil": {"steps": 3, "batch_size": 4, "lr": 1e-3, "average": "probabilities"}},
        Limit("ditto", 1, {"lam": LAM, "distil": {"steps": 0}}),
        still={"distil": {"steps": 0}},
        same=(
            fedavg("T02", lam=0.7, **WITHOUT),
            ditto_of_perada("global", **WITHOUT),
            ditto_of_perada("personal", **WITHOUT),
            ditto_of_perada("global", lam=1.4, variant="released", **WITHOUT),
            ditto_of_perada("personal", lam=1.4, variant="released", **WITHOUT),
            ditto_of_perada("global", distil={"rounds": 0}),
            ditto_of_perada("personal", distil={"rounds": 0}),
            local(lam=0.0),
            replace(local(lam=0.0, personal_epochs=3, personal_lr=0.02), other_train={**THREE, "lr": 0.02}),
            drawn("personal", personal_epochs=0),
        ),
    ),
    # Some tests look at a single round, the first, in which personal models otherwise do not train yet.
    "fedoa": Row(
        Card(whole, whole, twice, True, True),
        {"lam": 0.5, "personal_start": 0},
        still={"own_init": False},
        same=(
            Same("T07", {"lam": 0.2}, "fedit"),
            Same("T07", {"lam": 0.7, "distance": "batch_l2"}, "fedit"),
            local(lam=0.0, own_init=False, personal_start=0),
            in_run(drawn("personal", personal_start=2, own_init=False), rounds=2),
        ),
        remarks=(({"lam": 0.0, "personal_start": 1}, "trains personal models alone", REMARKS),),
    ),
    "fedsdr": Row(
        Card(whole, whole, twice, True, True),
        {"lam": 0.5, "personal_start": 0},
        still={"own_init": False},
        mixes_samples=True,
        same=(
            Same("T07", {"lam": 0.7}, "fedit"),
            personally("T07", "fedoa", ALONE, **ALONE),
            local(lam=0.0, own_init=False, personal_start=0),
            of_mlp(local(False, lam=0.7, own_init=False, personal_start=0), train={"batch_size": 1}),
            in_run(drawn("personal", personal_start=2, own_init=False), rounds=2),
        ),
        remarks=(({"lam": 0.0, "own_init": True}, "trains personal models alone", REMARKS),),
    ),
}


BETA, ALPHA = 0.1, 0.2
PLAIN = replace(TRAIN, momentum=0.0, weight_decay=0.0)


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


def test_each_choice_of_a_step_costs_its_batch_and_nothing_once_a_client_has_finished() -> None:
    """Whoever trains together: those with fewer samples finish first."""
    sim = simulation(
        make("ditto", dynamic_lam=(0.0, 2.0), dynamic_every="step"), engine="vectorized", rounds=1
    )
    assert sim.gradients == (1 + 2) * sum(SIZES)


def test_apfls_alpha_stays_between_zero_and_one() -> None:
    sim, alphas = quadratic_simulation(make("apfl", alpha=0.5, weights="uniform"), 2, lr=0.5), []
    for _ in range(10):
        sim.step()
        alphas.append(sim.states.get(range(CLIENTS))["alpha"])
    assert 0 <= torch.stack(alphas).min() <= torch.stack(alphas).max() <= 1


def test_the_released_code_distils_in_the_first_rounds_only() -> None:
    methods = (make("perada", variant="released"), make("perada", variant="released", distil={"rounds": 2}))
    for method, rounds, of_labels in zip(
        (*methods, make("perada")), (30, 2, None), (5, 2, None), strict=True
    ):
        assert method._distillation("classification").rounds == rounds  # type: ignore[attr-defined]
        assert method._distillation("multilabel").rounds == of_labels  # type: ignore[attr-defined]


def test_without_distillation_no_public_set_is_needed() -> None:
    simulation(make("perada", distil={"steps": 0}), data=replace(federation(), public=None)).step()


@pytest.mark.parametrize("method", ["perada", "fedoa", "fedlora", "pfedme"])
def test_on_a_frozen_backbone_only_the_rest_is_trained_and_sent(method: str) -> None:
    net = Model(lambda: build("mlp", (1, 8, 8), CLASSES, hidden=(8, 6), activation="tanh"), trainable="head")
    frozen = {n: t.clone() for n, t in net.module.named_parameters() if n in net.frozen}
    train = replace(TRAIN, momentum=0.0, weight_decay=0.0)
    sim = Simulation(make(method), federation(), net, train, seed=0)
    head = 6 * CLASSES + CLASSES
    assert after(sim, 3).traffic.up == 3 * 5 * head
    assert sim.trained_scalars == head * sim.method.models_trained
    for name, tensor in net.module.named_parameters():
        if name in frozen:
            assert torch.equal(tensor, frozen[name])
