"""FedProto, FedGH and FedTGP: class means that travel, and what answers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from methods.reductions import in_run, local
from methods.settings import Card, Row, make, prototypes
from methods.small import (
    CLASSES,
    NEWCOMER,
    SIZES,
    TRAIN,
    after,
    assert_close,
    assert_same,
    federation,
    model,
    personal,
    replies_of,
    simulation,
)
from tailorfl.core.messages import Replies
from tailorfl.engines.choice import make_engine
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.methods.class_features import near
from tailorfl.methods.fedgh import stepped
from tailorfl.methods.fedproto import FedTGP, apart
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.objective import LOSSES, Seen

CONTRACTS = {
    "fedproto": Row(
        Card(prototypes, prototypes, whole, True, False),
        {"lam": 0.5},
        at_most=True,
        same=(local(lam=0.0), in_run(local(line="one round", lam=5.0), rounds=1)),
    ),
    # Its head has names that networks of all kinds have in common.
    "fedgh": Row(
        Card(lambda s: s.head, prototypes, whole, True, False, lambda s: -s.head),
        {"server_lr": 0.1},
        still={"server_lr": 0.0},
        alike={"server_lr": 0.0},
        at_most=True,
        unweighted=True,
        same=(in_run(local(line="one round"), rounds=1),),
    ),
    "fedtgp": Row(
        Card(prototypes, prototypes, whole, True, False),
        {"lam": 0.5, "server_passes": 2, "server_batch": 3},
        still={"predict": "head"},
        alike={"server_passes": 0},
        at_most=True,
        same=(
            local(lam=0.0, predict="head"),
            in_run(local(line="one round", lam=5.0, predict="head"), rounds=1),
        ),
    ),
}


KINDS = ("normed", "plain", "plain", "normed", "plain", "normed")
ALIKE = {"plain": model("mlp"), "normed": model("batch_norm")}
"""Of 8 features each."""
WIDTH = 8


def of_two_kinds(engine: str, **options: Any) -> Simulation:
    settings = {"assignment": KINDS, "engine": make_engine(engine)}
    return after(Simulation(make("fedproto", **options), federation(), ALIKE, TRAIN, **settings), 2)


@pytest.mark.parametrize("name", ["fedproto", "fedgh", "fedtgp"])
def test_what_goes_up_are_the_means_of_own_classes(name: str) -> None:
    """d_z each; down those of FedProto that anybody had before, all of FedTGP's, and FedGH's head."""
    sim = simulation(name, fraction=0.6)
    received: set[int] = set()
    for t in range(3):
        ids, labels = sim.sample(sim.round), sim.federation.source.y
        classes = [set(labels[sim.federation.train[i]].tolist()) for i in ids]
        traffic = sim.step().traffic
        assert traffic.up == WIDTH * sum(map(len, classes))
        assert traffic.bytes_up == 4 * traffic.up + len(ids) * CLASSES
        down = {"fedproto": WIDTH * len(received), "fedgh": CLASSES * (WIDTH + 1)}
        assert traffic.down_unicast == len(ids) * down.get(name, CLASSES * WIDTH if t else 0)
        received |= set().union(*classes)


def aggregated(sim: Simulation, ids: tuple[int, ...], **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """The server after replies of these clients, of which some tensors are changed."""
    stack, sizes = replies_of(sim, ids).update(changes), sim.federation.sizes()[list(ids)]
    replies = Replies(stack, ids, sizes, "uniform", sim.context)
    return dict(sim.method.aggregate(sim.server, replies).items())


def test_a_class_that_nobody_sends_keeps_its_prototype_and_without_any_the_head_stays() -> None:
    """Client 2 has class 2 alone."""
    sim = simulation("fedproto", rounds=1)
    before, server = sim.server["prototypes"].clone(), aggregated(sim, (2,))
    kept = [torch.equal(server["prototypes"][c], before[c]) for c in range(CLASSES)]
    assert kept == [True, True, False, True]
    assert server["present"].all()
    sim = simulation("fedgh", rounds=1)
    nobody = torch.zeros(2, CLASSES, dtype=torch.bool)
    assert_same(aggregated(sim, (0, 3), present=nobody), dict(sim.server.items()))


def deployed(sim: Simulation, client: int) -> tuple[nn.Module, nn.Linear]:
    """A client's network in evaluation mode, and its head."""
    ((_, states),) = sim.personal_models((client,))
    group = next(g for g in sim.groups if client in g.clients)
    module = copy.deepcopy(group.model.module).eval()
    module.load_state_dict({n: t[0] for n, t in states.items()})
    return module, [part for part in module.modules() if isinstance(part, nn.Linear)][-1]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_nearest_prototype_of_the_clients_own_classes_answers(engine: str) -> None:
    """By hand, on features of networks of two kinds; what trains and what is sent is as with the head."""
    sim, heads = of_two_kinds(engine, predict="prototype"), of_two_kinds(engine)
    assert_same(dict(sim.server.items()), dict(heads.server.items()))
    data, source = sim.federation, sim.federation.source
    records = evaluate(sim, Protocol(sets=("local", "global")))
    turned = 0
    for i in range(len(SIZES)):
        module, head = deployed(heads, i)
        classes = source.y[data.train[i]].unique()
        for name, rows in (("local", data.test[i]), ("global", data.global_test())):
            inputs: list[torch.Tensor] = []
            with (
                torch.no_grad(),
                head.register_forward_pre_hook(lambda _, given, seen=inputs: seen.append(given[0])),
            ):
                out = module(source.x[rows])
            z = inputs[0]
            distances = torch.stack([((z - sim.server["prototypes"][c]) ** 2).sum(1) for c in classes], 1)
            answers = classes[distances.argmin(1)]
            (accuracy,) = [r["accuracy"] for r in records if r["client"] == i and r["set"] == name]
            assert accuracy == pytest.approx(float((answers == source.y[rows]).float().mean()))
            turned += int((answers != out.argmax(1)).sum())
    assert turned > 0


@pytest.mark.parametrize("name", ["fedproto", "fedtgp"])
def test_before_there_are_prototypes_the_head_answers(name: str) -> None:
    by_head, by_prototype = (simulation(make(name, predict=p)) for p in ("head", "prototype"))
    assert_same(personal(by_head), personal(by_prototype))


def test_a_newcomer_deploys_fedghs_head_on_its_own_body() -> None:
    sim = simulation("fedgh", rounds=2)
    ((_, models),) = sim.newcomer_models((NEWCOMER,), 0)
    expected = {**dict(sim.init.items()), **{f"head.{n}": t for n, t in sim.server.items()}}
    assert_same({n: t[0] for n, t in models.items()}, expected)


def test_the_margin_is_the_largest_gap_to_the_nearest() -> None:
    """Q = (0, 3, 4) on a line: gaps (3, 1, 1)."""
    line = torch.tensor([[0.0], [3.0], [4.0]])
    assert make("fedtgp").margin(line) == pytest.approx(3.0)  # type: ignore[attr-defined]
    assert make("fedtgp", tau=2.0).margin(line) == 2.0  # type: ignore[attr-defined]
    assert FedTGP().margin(line[:1]) == 100.0


def test_prototypes_at_their_means_have_a_finite_slope() -> None:
    means = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    at = means.clone().requires_grad_()
    (slope,) = torch.autograd.grad(apart(means, torch.arange(3), at, 0.0), at)
    assert torch.isfinite(slope).all()


def test_a_sample_of_a_class_without_prototype_adds_nothing_and_counts() -> None:
    """λ/(B d_z) Σ_b ‖z_b − P̄_{y_b}‖² by hand: of four samples the second has no prototype."""
    z, y = torch.tensor([[1.0, 2.0], [5.0, 5.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 1, 0, 2])
    means = torch.tensor([[1.0, 0.0], [9.0, 9.0], [1.0, 1.0]])
    seen = Seen(model("mlp"), LOSSES["classification"], (z, y, None), torch.zeros(4, 3), lambda: z, {})
    term = near(0.5, means, torch.tensor([True, False, True]))
    assert float(term.function(seen, *term.given)) == pytest.approx(0.5 / (4 * 2) * (4 + 2 + 5))


def test_a_step_of_the_head_is_that_of_torch() -> None:
    """Also where the gradient is clipped; without a bias as well."""
    rng = torch.Generator().manual_seed(1)
    for bias in (True, False):
        for size in (1.0, 90.0):
            z = size * torch.randn(5, generator=rng)
            layer = nn.Linear(5, 3, bias=bias)
            start = {n: t.detach().clone() for n, t in layer.named_parameters()}
            y = int(layer(z).argmin())  # a sample that is learned already has no gradient to clip
            cross_entropy(layer(z)[None], torch.tensor([y])).backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(layer.parameters(), 50.0)
            assert (float(norm) > 50) == (size > 1)
            torch.optim.SGD(layer.parameters(), lr=0.3).step()
            expected = {n: t.detach() for n, t in layer.named_parameters()}
            assert_close(stepped(start, z, y, 0.3), expected, atol=1e-5)
