"""GPFL: two copies of the features, class embeddings that guide one, and a head that stays."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm

from methods.settings import CLASSES, Card, Row, make, with_guide
from methods.small import NEWCOMER, SIZES, TRAIN, assert_close, everything, federation, personal, simulation
from tailorfl.core.client import Client
from tailorfl.engines.make import make_engine
from tailorfl.errors import ConfigError, ModelError
from tailorfl.methods.conditional_head import ConditionalHead, add_condition
from tailorfl.methods.gpfl import GPFL, guided
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree
from tailorfl.training.sample_privacy import SampleDP
from tailorfl.training.terms import Seen, Term

CONTRACTS = {
    "gpfl": Row(
        Card(with_guide, with_guide, whole, True, False),
        {"lam": 0.1},
        chooses=True,
        proved="FedPer without its guide: test_gpfl.py",
        never="the loss of its embeddings cannot be turned off",
    ),
}


WIDE = 8
"""d_z."""
PLAIN = replace(TRAIN, epochs=None, steps=1, momentum=0.0, weight_decay=0.0)


def head(width: int = 3, classes: int = 4) -> ConditionalHead:
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(classes, width))
    return ConditionalHead(weight, nn.Parameter(torch.randn(classes)))


def test_the_head_is_the_papers_formula() -> None:
    layer, z, u = head(), torch.randn(5, 3), torch.randn(3)
    layer.condition.copy_(u)
    found = []
    for part in (layer.conditioning.scale, layer.conditioning.shift):
        inner, _, norm = part
        found.append(layer_norm((inner.weight @ u + inner.bias).relu(), (3,), norm.weight, norm.bias))
    changed = (z * (1 + found[0]) + found[1]).relu()
    torch.testing.assert_close(layer(z), changed @ layer.weight.T + layer.bias)


def still(layer: ConditionalHead) -> None:
    """γ = β = 0."""
    for part in (layer.conditioning.scale, layer.conditioning.shift):
        nn.init.zeros_(part[2].weight)
        nn.init.zeros_(part[2].bias)


class Unguided(GPFL):
    """Without λ, μ and the embeddings' loss, from γ = β = 0."""

    def wrap(self, model: Model) -> Model:
        def flat(module: nn.Module) -> None:
            still(module.head)  # type: ignore[arg-type]

        return super().wrap(model).changed(flat)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        trained = client.fit(self.personal(client, state, received))
        return TensorDict({"head": trained.select(*state["head"].keys())}), trained.select(*received.keys())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_with_flat_conditioning_and_no_guide_a_step_is_fedpers(engine: str) -> None:
    """Features after a ReLU are not negative. In the first round q_i is the same for both; V moves in it."""
    model = Model(lambda: build("mlp", (1, 8, 8), CLASSES, hidden=(WIDE,)))
    sims = [
        Simulation(m, federation(), model, PLAIN, engine=make_engine(engine))
        for m in (Unguided(), make("fedper"))
    ]
    for sim in sims:
        sim.step()
    ours, theirs = (personal(s) for s in sims)
    assert_close({n: ours[n] for n in theirs}, theirs)


def test_equal_shares_of_classes_make_the_personal_condition_the_general_one() -> None:
    """The labels of every client in turn 0, 1, 2, 3."""
    data = federation((8, 8))
    source = data.source
    y = source.y.clone()
    for rows in data.train:
        y[torch.from_numpy(rows)] = torch.arange(len(rows)) % CLASSES
    even = replace(data, source=replace(source, y=y))
    sim = simulation("gpfl", data=even)
    found = personal(sim, (0, 1))["head.condition"]
    assert_close({"q": found}, {"q": sim.server["head.embeddings"].mean(0).expand(2, -1)})
    assert float(personal(simulation("gpfl"))["head.condition"].std(0).max()) > 0.01


def seen_of(layer: ConditionalHead, z: Tensor, y: Tensor, weight: Tensor | None = None) -> Any:
    state = {f"head.{n}": t for n, t in (*layer.named_parameters(), *layer.named_buffers())}

    def mean(rows: Tensor) -> Tensor:
        return rows.mean(0) if weight is None else (rows * weight).sum() / weight.sum()

    def through(name: str, *inputs: Tensor) -> Tensor:
        return layer.get_submodule(name.removeprefix("head."))(*inputs)  # type: ignore[no-any-return]

    return SimpleNamespace(state=state, features=z, y=y, weight=weight, mean=mean, through=through)


def test_the_embeddings_learn_from_the_cosines_alone() -> None:
    """At λ = 0 as at λ = 5: what pulls features to E⁰ does not move E, nor does the personal task."""
    slopes = []
    for lam in (0.0, 5.0):
        layer = head()
        z, y = torch.rand(6, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3, 0, 1])
        e0 = layer.embeddings.detach().clone()
        seen = seen_of(layer, z, y)
        value = guided(seen, e0.mean(0), e0, "head.embeddings", lam, 0.0) + cross_entropy(layer(z), y)
        slopes.append(torch.autograd.grad(value, layer.embeddings)[0])
        changed = layer.conditioning(z, e0.mean(0)).detach()
    torch.testing.assert_close(slopes[0], slopes[1])
    e = e0.clone().requires_grad_()
    cosines = torch.stack([torch.cosine_similarity(row[None], e, dim=1) for row in changed])
    (wanted,) = torch.autograd.grad(cross_entropy(cosines, y), e)
    torch.testing.assert_close(slopes[0], wanted)


def test_the_norm_is_of_the_whole_batch_not_squared_and_flat_at_0_and_padding_has_no_share() -> None:
    layer, y = head(), torch.tensor([0, 1, 2])
    z = torch.rand(3, 3)
    g = torch.zeros(3)
    e0 = torch.randn(4, 3)
    with torch.no_grad():
        apart = layer.conditioning(z, g) - e0[y]
        parts = [guided(seen_of(layer, z, y), g, e0, "head.embeddings", lam, 0.0) for lam in (0.0, 2.0)]
    torch.testing.assert_close(parts[1] - parts[0], 2.0 * apart.square().sum().sqrt())
    at = layer.conditioning(z, g).detach()
    same = torch.zeros(4, 3)
    same[:3] = at
    values = [guided(seen_of(layer, z, y), g, same, "head.embeddings", lam, 0.0) for lam in (0.0, 2.0)]
    slopes = [torch.autograd.grad(v, layer.conditioning.scale[0].weight)[0] for v in values]
    torch.testing.assert_close(slopes[0], slopes[1])
    more = seen_of(
        layer, torch.cat([z, 9 * torch.rand(2, 3)]), torch.cat([y, y[:2]]), torch.tensor([1.0, 1, 1, 0, 0])
    )
    torch.testing.assert_close(
        guided(more, g, e0, "head.embeddings", 2.0, 0.3),
        guided(seen_of(layer, z, y), g, e0, "head.embeddings", 2.0, 0.3),
    )


def test_the_head_never_travels_and_traffic_is_that_of_body_embeddings_and_conditioning() -> None:
    sim = simulation("gpfl", rounds=2)
    sent = dict(tree.leaves(sim.server))
    assert not {"head.weight", "head.bias", "head.condition"} & set(sent)
    body = 64 * WIDE + WIDE
    each = body + CLASSES * WIDE + 2 * (WIDE**2 + 3 * WIDE)
    assert sim.traffic.up == sim.traffic.down_unicast == 2 * len(SIZES) * each
    assert sim.trained_scalars == each + CLASSES * (WIDE + 1)
    own = sim.states.get(range(len(SIZES)))["head"]["head.weight"]
    assert len({tuple(row.flatten().tolist()) for row in own}) == len(SIZES)
    ((_, late),) = sim.newcomer_models((NEWCOMER,), 0)
    assert torch.equal(late["head.weight"][0], sim.init["head.weight"])


def test_as_released_conditions_are_of_the_clients_own_last_embeddings() -> None:
    sim = simulation(make("gpfl", conditions="released"))
    assert float(personal(sim)["head.condition"].abs().max()) == 0
    sim.step()
    own = sim.states.get((0,))["embeddings"][0]
    counts = torch.bincount(sim.federation.source.y[torch.from_numpy(sim.federation.train[0])], minlength=4)
    wanted = (counts / counts.sum()) @ own
    torch.testing.assert_close(personal(sim, (0,))["head.condition"][0], wanted)
    assert not torch.equal(own, sim.server["head.embeddings"])


def test_engines_agree_with_dropout_and_norms() -> None:
    for model in ("batch_norm", "dropout"):
        runs = [simulation("gpfl", model, e, rounds=2, fraction=0.6) for e in ("sequential", "vectorized")]
        assert_close(everything(runs[0]), everything(runs[1]))


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(ConfigError, match="the share of each class"):
        simulation("gpfl", train=replace(TRAIN, dp=SampleDP(1.0, 1.0, "shuffle")))
    with pytest.raises(ModelError, match="is not there"):
        add_condition(nn.Sequential(nn.Conv2d(1, 1, 1)))
    with pytest.raises(ModelError, match="inside a network"):
        add_condition(nn.Linear(2, 2))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_term_may_run_a_layer_once_more_on_other_inputs(engine: str) -> None:
    """The gradient of Σ W v + c through `seen.through` alone, against that by hand."""

    def more(seen: Seen, v: Tensor) -> Tensor:
        return seen.through("head", v[None]).sum() + 0.0 * seen.loss + 2.0 * seen.state["fc1.bias"].sum()

    sim = simulation("fedavg", engine=engine, train=replace(PLAIN, lr=1.0), rounds=1)  # without a term first
    start = sim.init
    given = torch.arange(float(WIDE))

    def local(client: Client, state: Any, received: Any) -> Any:
        return (client.fit(received, term=Term(more, given=(given,), replaces=True)),)

    (found,) = sim.run((0, 2), sim.states.get((0, 2)), start, local)
    for k in range(2):
        torch.testing.assert_close(found["head.weight"][k], start["head.weight"] - given)
        torch.testing.assert_close(found["head.bias"][k], start["head.bias"] - 1)
        torch.testing.assert_close(found["fc1.bias"][k], start["fc1.bias"] - 2)
        torch.testing.assert_close(found["fc1.weight"][k], start["fc1.weight"])
