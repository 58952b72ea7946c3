"""GPFL: two copies of the features, class embeddings that guide one, and a head that stays."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from methods.settings import CLASSES, Card, Row, make, with_guide
from methods.small import NEWCOMER, SIZES, TRAIN, after, assert_close, federation, personal, simulation
from tailorfl.core.client import Client
from tailorfl.engines.make import make_engine
from tailorfl.errors import ModelError
from tailorfl.methods.gpfl import GPFL, guided
from tailorfl.models.conditional_head import ConditionalHead, add_condition
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree
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


class Unguided(GPFL):
    """Without λ, μ and the embeddings' loss, from γ = β = 0."""

    def wrap(self, model: Model) -> Model:
        def flat(module: Any) -> None:
            for part in (module.head.conditioning.scale, module.head.conditioning.shift):
                nn.init.zeros_(part[2].weight)
                nn.init.zeros_(part[2].bias)

        return super().wrap(model).changed(flat)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        trained = client.fit(self.personal(client, state, received))
        return TensorDict({"head": trained.select(*state["head"].keys())}), trained.select(*received.keys())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_with_flat_conditioning_and_no_guide_a_step_is_fedpers(engine: str) -> None:
    """Features after a ReLU are not negative. In the first round q_i is the same for both; V moves in it."""
    model = Model(lambda: build("mlp", (1, 8, 8), CLASSES, hidden=(WIDE,)))
    ours, theirs = (
        personal(after(Simulation(method, federation(), model, PLAIN, engine=make_engine(engine)), 1))
        for method in (Unguided(), make("fedper"))
    )
    assert_close({n: ours[n] for n in theirs}, theirs)


def seen_of(layer: ConditionalHead, z: Tensor, y: Tensor) -> Any:
    state = {f"head.{n}": t for n, t in (*layer.named_parameters(), *layer.named_buffers())}

    def through(name: str, *inputs: Tensor) -> Tensor:
        return layer.get_submodule(name.removeprefix("head."))(*inputs)  # type: ignore[no-any-return]

    def mean(rows: Tensor) -> Tensor:
        return rows.mean(0)

    return SimpleNamespace(state=state, features=z, y=y, weight=None, mean=mean, through=through)


def test_at_its_embeddings_a_batch_has_no_pull() -> None:
    """The slope of a norm at 0 is 0."""
    layer, z, g = head(), torch.rand(3, 3), torch.zeros(3)
    embeddings = torch.zeros(4, 3)
    embeddings[:3] = layer.conditioning(z, g).detach()
    seen = seen_of(layer, z, torch.tensor([0, 1, 2]))
    values = [guided(seen, g, embeddings, "head.embeddings", lam, 0.0) for lam in (0.0, 2.0)]
    torch.testing.assert_close(
        *(torch.autograd.grad(v, layer.conditioning.scale[0].weight)[0] for v in values)
    )


def test_the_head_never_travels_and_traffic_is_that_of_body_embeddings_and_conditioning() -> None:
    sim = simulation("gpfl", rounds=2)
    assert not {"head.weight", "head.bias", "head.condition"} & {n for n, _ in tree.leaves(sim.server)}
    body = 64 * WIDE + WIDE
    sent = body + CLASSES * WIDE + 2 * (WIDE**2 + 3 * WIDE)
    assert sim.traffic.up == sim.traffic.down_unicast == 2 * len(SIZES) * sent
    assert sim.trained_scalars == sent + CLASSES * (WIDE + 1)
    ((_, late),) = sim.newcomer_models((NEWCOMER,), 0)
    assert torch.equal(late["head.weight"][0], sim.init["head.weight"])


def test_networks_without_a_head_of_their_own_cannot_be_conditioned() -> None:
    for network in (nn.Sequential(nn.Conv2d(1, 1, 1)), nn.Linear(2, 2)):
        with pytest.raises(ModelError, match=r"is not there|inside a network"):
            add_condition(network)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_term_may_run_a_layer_once_more_on_other_inputs(engine: str) -> None:
    """The gradient of Σ W v + c through `seen.through` alone, against that by hand."""

    def more(seen: Seen, v: Tensor) -> Tensor:
        return seen.through("head", v[None]).sum() + 0.0 * seen.loss + 2.0 * seen.state["fc1.bias"].sum()

    sim = simulation("fedavg", engine=engine, train=replace(PLAIN, lr=1.0), rounds=1)  # without a term first
    start = sim.init
    v = torch.arange(float(WIDE))

    def local(client: Client, state: Any, received: Any) -> Any:
        return (client.fit(received, term=Term(more, given=(v,), replaces=True)),)

    (trained,) = sim.run((0, 2), sim.states.get((0, 2)), start, local)
    for k in range(2):
        torch.testing.assert_close(trained["head.weight"][k], start["head.weight"] - v)
        torch.testing.assert_close(trained["head.bias"][k], start["head.bias"] - 1)
        torch.testing.assert_close(trained["fc1.bias"][k], start["fc1.bias"] - 2)
        torch.testing.assert_close(trained["fc1.weight"][k], start["fc1.weight"])
