"""PerAda's distillation and FedOA's pull, as their papers state them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from methods.reductions import ALONE, THREE, WITHOUT, Same, ditto_of_perada, drawn, fedavg, in_run, local
from methods.settings import LAM, Card, Limit, Row, make
from methods.small import CLASSES, TRAIN, after, federation, simulation
from tailorfl.core.context import Context
from tailorfl.errors import ConfigError
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import twice, whole

CONTRACTS = {
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
        remarks=(
            ({"lam": 0.0, "personal_start": 1}, "trains personal models alone", "test_reduction_remarks.py"),
        ),
    ),
    "fedsdr": Row(
        Card(whole, whole, twice, True, True),
        {"lam": 0.5, "personal_start": 0},
        still={"own_init": False},
        mixes_samples=True,
        same=(
            Same("T07", {"lam": 0.7}, "fedit"),
            Same("T07", ALONE, "fedoa", ALONE, "personal", "personal"),
            local(lam=0.0, own_init=False, personal_start=0),
            replace(
                local(exact=False, lam=0.7, own_init=False, personal_start=0),
                train={"batch_size": 1},
                models=("mlp",),
            ),
            in_run(drawn("personal", personal_start=2, own_init=False), rounds=2),
        ),
        remarks=(
            ({"lam": 0.0, "own_init": True}, "trains personal models alone", "test_reduction_remarks.py"),
        ),
    ),
}


PLAIN = replace(TRAIN, momentum=0.0, weight_decay=0.0)


def context() -> Context:
    return simulation("perada").context


def test_the_released_code_distils_in_the_first_rounds_only() -> None:
    method = make("perada", variant="released")
    assert method._distillation("classification").rounds == 30  # type: ignore[attr-defined]
    assert method._distillation("multilabel").rounds == 5  # type: ignore[attr-defined]
    method = make("perada", variant="released", distil={"rounds": 2})
    assert method._distillation("classification").rounds == 2  # type: ignore[attr-defined]
    assert make("perada")._distillation("classification").rounds is None  # type: ignore[attr-defined]


def test_without_distillation_no_public_set_is_needed() -> None:
    bare = replace(federation(), public=None)
    simulation(make("perada", distil={"steps": 0}), data=bare, rounds=1)
    with pytest.raises(ConfigError, match="public"):
        simulation("perada", data=bare)


@pytest.mark.parametrize("method", ["perada", "fedoa", "fedlora", "pfedme"])
def test_on_a_frozen_backbone_only_the_rest_is_trained_and_sent(method: str) -> None:
    net = Model(lambda: build("mlp", (1, 8, 8), CLASSES, hidden=(8, 6), activation="tanh"), trainable="head")
    frozen = {n: t.clone() for n, t in net.module.named_parameters() if n in net.frozen}
    sim = Simulation(make(method), federation(), net, PLAIN, seed=0)
    head = 6 * CLASSES + CLASSES
    assert after(sim, 3).traffic.up == 3 * 5 * head
    assert sim.trained_scalars == head * sim.method.models_trained
    for name, tensor in net.module.named_parameters():
        if name in frozen:
            assert torch.equal(tensor, frozen[name])
