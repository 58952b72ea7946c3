"""FedAS: what aligns, what weighs, and FedPer where neither does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch.nn.functional import cross_entropy

from methods.reductions import in_run, local
from methods.settings import Card, Row, make
from methods.small import NEWCOMER, TRAIN, assert_close, assert_same, replies_of, simulation
from tailorfl.core.client import Client
from tailorfl.core.messages import Replies
from tailorfl.errors import TailorflError
from tailorfl.testing.contract import whole
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    # F_i goes up beside the body.
    "fedas": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head + 1, whole, True, False),
        {"align_lr": 0.05},
        still={"align_epochs": 0},
        unweighted=True,
        same=(in_run(local(line="one round", align_epochs=0), rounds=1),),
    ),
}


HEAD = ("head.weight", "head.bias")


def information(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict]:
    return (TensorDict({"F": client.fisher(received)}),)


def test_without_alignment_and_information_bodies_are_fedpers() -> None:
    ours = simulation(make("fedas", align_epochs=0, fisher=False), fraction=0.6, rounds=3)
    theirs = simulation("fedper", fraction=0.6, rounds=3)
    assert_same(dict(ours.server.items()), dict(theirs.server.items()))


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
    assert_close(
        server, {n: torch.tensordot(torch.tensor(shares), stack[n], dims=1) for n in server}, atol=1e-6
    )


def test_information_is_of_a_model_that_is_evaluated() -> None:
    """Without dropout; what is frozen has no share."""
    sim = simulation("local", "dropout", train=replace(TRAIN, batch_size=0))
    (information_of,) = sim.run((0,), sim.states.get((0,)), sim.init, information)
    values = {n: t.clone().requires_grad_() for n, t in sim.init.items()}
    rows = sim.federation.train[0]
    loss = cross_entropy(sim.model(values, sim.federation.source.x[rows]), sim.federation.source.y[rows])
    gradients = torch.autograd.grad(loss, list(values.values()))
    assert float(information_of["F"][0]) == pytest.approx(
        sum(float(g.square().sum()) for g in gradients), rel=1e-4
    )


def test_a_newcomer_has_the_servers_body_and_the_initial_head() -> None:
    sim = simulation("fedas", rounds=2)
    ((_, models),) = sim.newcomer_models((NEWCOMER,), 0)
    heads = {n: sim.init[n] for n in HEAD}
    assert_same({n: t[0] for n, t in models.items()}, {**dict(sim.server.items()), **heads})


def test_information_is_refused_under_sample_level_privacy() -> None:
    private = replace(TRAIN, momentum=0.0, weight_decay=0.0, dp=SampleDP(1.0, 1.0, "shuffle"))
    sim = simulation("local", train=private)
    with pytest.raises(TailorflError, match="fisher"):
        sim.run((0,), sim.states.get((0,)), sim.init, information)
