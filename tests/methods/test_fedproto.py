"""FedProto: what the server makes of class means, in closed form."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from methods.reductions import in_run, local
from methods.settings import Card, Row, make, prototypes
from methods.small import (
    CLASSES,
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    federation,
    model,
    personal,
    simulation,
)
from tailorfl.core.messages import Replies
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.methods.class_features import near
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training.objective import LOSSES
from tailorfl.training.terms import Seen

CONTRACTS = {
    "fedproto": Row(
        Card(prototypes, prototypes, whole, True, False),
        {"lam": 0.5},
        sparse=True,
        same=(local(lam=0.0), in_run(local(line="one round", lam=5.0), rounds=1)),
    ),
}


ENGINES = ["sequential", "vectorized"]


def features(sim: Simulation, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(z, y) of a client's training samples under its own model: an MLP's hidden layer."""
    own, data = personal(sim), sim.federation
    x, y = data.source.x[data.train[client]].flatten(1), data.source.y[data.train[client]]
    return torch.tanh(x @ own["fc1.weight"][client].T + own["fc1.bias"][client]), y


@pytest.mark.parametrize("engine", ENGINES)
def test_of_one_client_the_prototypes_are_its_own_class_means(engine: str) -> None:
    sim = simulation(make("fedproto", lam=3.0), engine=engine, rounds=2, data=federation((11,)))
    z, y = features(sim, 0)
    for c in range(CLASSES):
        assert bool(sim.server["present"][c]) == bool((y == c).any())
        if (y == c).any():
            torch.testing.assert_close(sim.server["prototypes"][c], z[y == c].mean(0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_prototypes_are_means_of_the_clients_that_have_the_class(weights: str) -> None:
    """Client 2 has class 2 alone, client 1 a single sample."""
    sim = simulation("fedproto", rounds=1, weights=weights)
    for c in range(CLASSES):
        own = [(i, *features(sim, i)) for i in range(len(SIZES))]
        sent = [
            (SIZES[i] if weights == "samples" else 1, z[y == c].mean(0)) for i, z, y in own if (y == c).any()
        ]
        assert 0 < len(sent) < len(SIZES) or c == 2
        mean = sum(a * p for a, p in sent) / sum(a for a, _ in sent)
        torch.testing.assert_close(sim.server["prototypes"][c], mean, atol=1e-5, rtol=1e-4)
        low, high = torch.stack([p for _, p in sent]).aminmax(dim=0)
        assert (
            (sim.server["prototypes"][c] >= low - 1e-6) & (sim.server["prototypes"][c] <= high + 1e-6)
        ).all()


def test_a_sample_of_a_class_without_prototype_adds_nothing_and_counts() -> None:
    """λ/(B d_z) Σ_b ‖z_b − P̄_{y_b}‖² by hand: of four samples the second has no prototype."""
    z, y = torch.tensor([[1.0, 2.0], [5.0, 5.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 1, 0, 2])
    prototypes = torch.tensor([[1.0, 0.0], [9.0, 9.0], [1.0, 1.0]])
    seen = Seen(model("mlp"), LOSSES["classification"], (z, y, None), torch.zeros(4, 3), lambda: z, {})
    term = near(0.5, prototypes, torch.tensor([True, False, True]))
    assert float(term.function(seen, *term.given)) == pytest.approx(0.5 / (4 * 2) * (4 + 2 + 5))


def test_a_class_that_nobody_sends_keeps_its_prototype() -> None:
    sim = simulation("fedproto", rounds=1)
    before = sim.server["prototypes"].clone()
    received = sim.method.broadcast(sim.server, (2,))
    _, reply = sim.run((2,), sim.states.get((2,)), received, sim.method.local)
    after = sim.method.aggregate(
        sim.server, Replies(reply, (2,), sim.federation.sizes()[2:3], "uniform", sim.context)
    )
    assert [torch.equal(after["prototypes"][c], before[c]) for c in range(CLASSES)] == [
        True,
        True,
        False,
        True,
    ]
    assert after["present"].all()


@pytest.mark.parametrize("engine", ENGINES)
def test_what_travels_are_the_prototypes_that_there_are(engine: str) -> None:
    """Up Σ |classes_i| · d_z; down nothing before the first round, then d_z for every class that anybody had."""
    sim = simulation("fedproto", engine=engine, fraction=0.6)
    width, source = 8, sim.federation.source
    known: set[int] = set()
    for _ in range(3):
        ids = sim.sample(sim.round)
        classes = [set(source.y[sim.federation.train[i]].tolist()) for i in ids]
        traffic = sim.step().traffic
        assert traffic.up == width * sum(map(len, classes))
        assert traffic.down_unicast == len(ids) * width * len(known)
        assert traffic.bytes_up == 4 * traffic.up + len(ids) * CLASSES
        known |= set().union(*classes)


def test_a_strong_pull_brings_the_features_of_clients_together() -> None:
    """Both terms of one step: with λ large the distance of a class's features between clients falls."""
    train = replace(TRAIN, epochs=10, lr=0.1)
    apart = []
    for lam in (0.0, 20.0):
        sim = simulation(make("fedproto", lam=lam), rounds=6, train=train)
        (z0, y0), (z3, y3) = features(sim, 0), features(sim, 3)
        shared = [c for c in range(CLASSES) if (y0 == c).any() and (y3 == c).any()]
        apart.append(sum(float((z0[y0 == c].mean(0) - z3[y3 == c].mean(0)).norm()) for c in shared))
    assert apart[1] < 0.7 * apart[0]


KINDS = ("normed", "plain", "plain", "normed", "plain", "normed")
WIDE = {"plain": model("mlp"), "normed": model("batch_norm")}
"""Of 8 features each."""


def of_two_kinds(
    method: str, engine: str, models: dict[str, Model] = WIDE, **options: float | str
) -> Simulation:
    sim = Simulation(
        make(method, **options), federation(), models, TRAIN, assignment=KINDS, engine=make_engine(engine)
    )
    for _ in range(2):
        sim.step()
    return sim


def deployed(sim: Simulation, client: int) -> tuple[nn.Module, nn.Linear]:
    """A client's network in evaluation mode, and its head."""
    ((_, states),) = sim.personal_models((client,))
    group = next(g for g in sim.groups if client in g.clients)
    module = copy.deepcopy(group.model.module).eval()
    module.load_state_dict({n: t[0] for n, t in states.items()})
    return module, [part for part in module.modules() if isinstance(part, nn.Linear)][-1]


def outputs_and_features(
    module: nn.Module, head: nn.Linear, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    seen: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        out = module(x)
    handle.remove()
    return out, seen[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_networks_of_several_kinds_agree_on_prototypes_and_keep_their_weights(engine: str) -> None:
    sim = of_two_kinds("fedproto", engine, lam=2.0, weights="uniform")
    source, sums, known = sim.federation.source, torch.zeros(CLASSES, 8), torch.zeros(CLASSES)
    for i in range(len(SIZES)):
        rows = sim.federation.train[i]
        _, z = outputs_and_features(*deployed(sim, i), source.x[rows])
        for c in source.y[rows].unique():
            sums[c] += z[source.y[rows] == c].mean(0)
            known[c] += 1
    torch.testing.assert_close(sim.server["prototypes"], sums / known[:, None], atol=1e-5, rtol=1e-4)
    assert sim.traffic.up == 2 * 8 * int(known.sum())


@pytest.mark.parametrize("engine", ENGINES)
def test_without_pull_networks_of_several_kinds_train_alone(engine: str) -> None:
    ours, alone = of_two_kinds("fedproto", engine, lam=0.0), of_two_kinds("local", engine)
    for a, b in zip(ours.groups, alone.groups, strict=True):
        ids = sorted(i for i in a.clients if i < len(SIZES))
        assert_same(dict(a.states.get(ids).items()), dict(b.states.get(ids).items()))


def test_one_kind_by_name_is_one_kind() -> None:
    named = Simulation(
        make("fedproto"), federation(), {"plain": model("mlp")}, TRAIN, assignment=("plain",) * 6
    )
    for _ in range(2):
        named.step()
    assert_close(everything(named), everything(simulation("fedproto", rounds=2)), atol=1e-6)


def test_features_of_unequal_widths_are_refused() -> None:
    narrow = {"plain": model("mlp"), "normed": model("group_norm")}
    with pytest.raises(ConfigError, match="all architectures need one width, but plain has 8, normed has 32"):
        of_two_kinds("fedproto", "sequential", narrow)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_nearest_prototype_of_the_clients_own_classes_answers(engine: str) -> None:
    """By hand, on features of networks of two kinds; what trains and what is sent is as with the head."""
    sim = of_two_kinds("fedproto", engine, predict="prototype")
    heads = of_two_kinds("fedproto", engine)
    assert_same(dict(sim.server.items()), dict(heads.server.items()))
    data, source = sim.federation, sim.federation.source
    records = evaluate(sim, Protocol(sets=("local", "global")))
    common = data.global_test()
    turned = 0
    for i in range(len(SIZES)):
        module, head = deployed(heads, i)
        own = source.y[data.train[i]].unique()
        for name, rows in (("local", data.test[i]), ("global", common)):
            out, z = outputs_and_features(module, head, source.x[rows])
            apart = torch.stack([((z - sim.server["prototypes"][c]) ** 2).sum(1) for c in own], 1)
            right = (own[apart.argmin(1)] == source.y[rows]).float().mean()
            (found,) = [r["accuracy"] for r in records if r["client"] == i and r["set"] == name]
            assert found == pytest.approx(float(right))
            turned += int((own[apart.argmin(1)] != out.argmax(1)).sum())
    assert turned > 0


def test_before_there_are_prototypes_the_head_answers() -> None:
    by_head, by_prototype = (simulation(make("fedproto", predict=p)) for p in ("head", "prototype"))
    assert_same(personal(by_head), personal(by_prototype))


def test_answers_by_prototypes_need_a_head_with_a_bias() -> None:
    bare = Model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES, bias=False)))
    with pytest.raises(ConfigError, match="through a head with a bias"):
        Simulation(make("fedproto", predict="prototype"), federation(), bare, TRAIN)
