"""FLoRA: what a round adds to the weights, who is sent what of it, and factors that begin anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from methods.reductions import fedavg
from methods.settings import CLASSES, Card, Limit, Row, make
from methods.small import NEWCOMER, SIZES, TRAIN, assert_close, assert_same, federation, personal, replies_of
from methods.test_lora_factors import IN, OUT, RANK, WIDE, FromZero, simulation_with_lora
from tailorfl.engines.make import make_engine
from tailorfl.models.functional import Model
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    "flora": Row(
        Card(whole, whole, whole, False, True),
        limit=Limit("pooled"),
        same=(fedavg("no LoRA", said=True),),
    ),
}


IDS = tuple(range(len(SIZES)))
LAYERS = ("1", "3")
BASES = {f"{k}.base.weight" for k in LAYERS}
SQUARES = 64 * WIDE + WIDE * CLASSES
"""Scalars of both base weights."""
MIXED = (2, 1)


def run(rounds: int = 0, *, ranks: tuple[int, ...] = (), **settings: Any) -> Simulation:
    return simulation_with_lora("flora", rounds, options={"ranks": ranks}, **settings)


def weights(sim: Simulation) -> dict[str, Tensor]:
    """The server's W."""
    return {n: sim.server["w"][n].clone() for n in BASES}


def product(replies: TensorDict, layer: str, client: int) -> Tensor:
    """B_i A_i."""
    rows = replies["lora"].get(f"{layer}.lora_A.weight")[client]
    return rows["B"].T @ rows["A"]


@pytest.mark.parametrize("ranks", [(), MIXED])
def test_the_stack_goes_to_who_was_there_and_nothing_at_first(ranks: tuple[int, ...]) -> None:
    sim = run(ranks=ranks)
    total = sum((ranks or (RANK,))[i % max(len(ranks), 1)] for i in IDS)
    first, second = sim.step().traffic, sim.step().traffic
    assert (first.down_unicast, first.up) == (0, total * (IN + OUT))
    assert (second.down_unicast, second.up) == (len(IDS) * total * (IN + OUT), total * (IN + OUT))


def assert_deployed(sim: Simulation, atol: float) -> None:
    """All clients deploy the server's W."""
    models = personal(sim)
    for name, w in weights(sim).items():
        torch.testing.assert_close(models[name], w.expand_as(models[name]), atol=atol, rtol=0)


def test_clients_that_missed_rounds_get_the_weights_and_all_hold_the_same() -> None:
    sim = run(ranks=MIXED, fraction=0.4)
    versions = dict.fromkeys(IDS, 0)
    kinds: set[int] = set()
    last = 0
    for version in range(6):
        ids = sim.sample(version)
        late = [min(version - versions[i], 2) for i in ids]
        kinds |= set(late)
        traffic = sim.step().traffic
        assert traffic.down_unicast == sum((0, last, SQUARES)[k] for k in late)
        last = sum(MIXED[i % 2] for i in ids) * (IN + OUT)
        versions |= dict.fromkeys(ids, version)
        assert_deployed(sim, 1e-6)
        ((_, late_one),) = sim.newcomer_models((NEWCOMER,), 0)
        assert_close({n: late_one[n][0] for n in BASES}, weights(sim), atol=1e-6)
    assert kinds == {0, 1, 2}
    assert sim.server["has"].tolist() == [versions[i] for i in IDS]


def test_a_client_that_has_the_weights_of_now_adds_nothing_twice() -> None:
    """It trained in a round from which the server took nothing: the server thinks that it is one behind."""
    sim = run(2)
    ids = (0, 3)
    message = sim.method.broadcast(sim.server, ids)
    new, _ = sim.run(ids, sim.states.get(ids), message, sim.method.local)
    assert new["version"].tolist() == [2, 2]
    again, _ = sim.run(ids, new, message, sim.method.local)
    assert_same(dict(tree.leaves(again)), dict(tree.leaves(new)))


def test_factors_are_drawn_anew_for_every_client_and_round() -> None:
    sim = run(train=replace(TRAIN, lr=1e-30, weight_decay=0.0))
    factors: list[Tensor] = []
    for _ in range(2):
        factors += replies_of(sim, IDS)["lora"].get("1.lora_A.weight")["A"]
        sim.step()
    assert len({tuple(a.flatten().tolist()) for a in factors}) == 2 * len(SIZES)
    entries = torch.stack(factors).flatten()
    assert float(entries.abs().max()) < 64**-0.5
    assert abs(float(entries.mean())) < 0.02
    assert float(entries.std()) == pytest.approx((64 * 3) ** -0.5, rel=0.05)


def test_what_else_trains_is_averaged() -> None:
    sim = run(trainable=("*lora_*", "3.base.bias"))
    share = torch.tensor(SIZES) / sum(SIZES)
    mean = torch.tensordot(share, replies_of(sim, IDS)["rest"]["3.base.bias"], dims=1)
    sim.step()
    torch.testing.assert_close(sim.server["w"]["3.base.bias"], mean)


def test_private_training_fills_no_rank_and_client_level_noise_is_in_every_reply() -> None:
    private = run(2, ranks=(1,), train=replace(TRAIN, dp=SampleDP(1.0, 1.0, "shuffle")))
    assert private.traffic.up == 2 * len(SIZES) * (IN + OUT)
    assert_deployed(private, 1e-5)
    noisy = run(2, client_dp=ClientDP(clip=1.0, noise=1.0), weights="uniform")
    quiet = run(2, client_dp=ClientDP(clip=1.0, noise=0.0), weights="uniform")
    assert not torch.allclose(weights(noisy)["1.base.weight"], weights(quiet)["1.base.weight"], atol=0.01)


class Scaled(FromZero):
    """With a scale s, as LoRA has it."""

    scaling = 3.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 3.0 * self.lora_B(self.lora_A(x))
        return out


def test_the_scale_of_a_layer_is_merged() -> None:
    model = Model(lambda: nn.Sequential(nn.Flatten(), Scaled(64, CLASSES)), trainable=["*lora_*"])
    sim = Simulation(
        make("flora", weights="uniform"), federation(), model, TRAIN, engine=make_engine("vectorized")
    )
    before, replies = sim.server["w"]["1.base.weight"].clone(), replies_of(sim, IDS)
    sim.step()
    gain = 3.0 * torch.stack([product(replies, "1", i) for i in IDS]).mean(0)
    torch.testing.assert_close(sim.server["w"]["1.base.weight"] - before, gain, atol=1e-6, rtol=1e-4)
    models = personal(sim)["1.base.weight"]
    torch.testing.assert_close(models, sim.server["w"]["1.base.weight"].expand_as(models), atol=1e-6, rtol=0)
