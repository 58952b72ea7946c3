"""FedDBE: its first round, its consensus, its private bias; and terms that keep something of a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from methods.settings import Card, Row, make, width
from methods.small import TRAIN, after, assert_close, personal, simulation
from tailorfl.core.client import Client
from tailorfl.errors import ModelError, TailorflError
from tailorfl.methods.feddbe import add_offset
from tailorfl.testing.contract import whole
from tailorfl.training import tree
from tailorfl.training.plan import Length
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.terms import Term

CONTRACTS = {
    # The first round keeps no model and sends the mean features up; those of all go down beside every model.
    "feddbe": Row(
        Card(lambda s: s.d + width(s), whole, whole, True, False, lambda s: -s.d),
        {"kappa": 2.0, "mu": 0.5},
        by_round=lambda r, s: (s.d + width(s), s.d if r else width(s)),
        proved="without pull and bias FedAvg from the second round on: test_feddbe.py",
        never="its first round keeps nothing, so it is FedAvg of a round less at most",
    ),
}


STILL = replace(TRAIN, lr=1e-30, momentum=0.0, weight_decay=0.0)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_without_pull_and_bias_it_is_fedavg_from_the_second_round_on(engine: str) -> None:
    sim = simulation(make("feddbe", kappa=0.0, bias=False), engine=engine, rounds=3, fraction=0.6)
    plain = simulation("fedavg", engine=engine, fraction=0.6)
    plain.round = 1
    after(plain, 2)
    models = personal(sim)
    assert_close({n: models[n][0] for n in plain.server["w"].keys()}, dict(plain.server["w"].items()))  # noqa: SIM118
    assert float(models["head.offset"].abs().max()) == 0


def test_a_bias_needs_a_linear_head() -> None:
    with pytest.raises(ModelError, match="is not there"):
        add_offset(nn.Conv2d(1, 1, 1))


def test_privacy_of_samples_does_not_cover_what_a_term_keeps() -> None:
    private = replace(STILL, dp=SampleDP(1.0, 1.0, "shuffle"))
    term = Term(lambda seen: (seen.mean(seen.outputs[:, 0]), {"kept": seen.own["kept"]}), keeps=("kept",))
    with pytest.raises(ModelError, match="keeps"):
        fit(simulation("fedavg", train=private), term)


def fit(sim, term: Term):
    start = tree.merge(sim.init, TensorDict({"kept": torch.zeros(2)}))

    def local(client: Client, state, received):
        return (client.fit(received, term=term, length=Length(epochs=2)),)

    (trained,) = sim.run((0, 2), sim.states.get((0, 2)), start, local)
    return trained


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_term_keeps_what_it_says_and_nothing_else_moves_it(engine: str) -> None:
    """It counts batches; clients of 15 and 7 samples have 4 and 2 of them an epoch. The momentum does not reach it."""

    def counting(seen):
        return seen.mean(seen.outputs[:, 0]) * 0.0, {"kept": seen.own["kept"] + 1}

    trained = fit(simulation("fedavg", engine=engine), Term(counting, keeps=("kept",)))
    assert trained["kept"].tolist() == [[8.0, 8.0], [4.0, 4.0]]


def test_a_term_that_does_not_return_what_it_keeps_is_told_so() -> None:
    for term in (
        Term(lambda seen: seen.loss, keeps=("kept",)),
        Term(lambda seen: (seen.loss, {}), keeps=("head.bias",)),
    ):
        with pytest.raises(TailorflError, match=r"new tensor|tensors of the start"):
            fit(simulation("fedavg"), term)
    with pytest.raises(TailorflError, match="public"):
        Term(lambda seen: seen.loss, public=2, keeps=("kept",))
