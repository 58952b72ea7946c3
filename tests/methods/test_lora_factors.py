"""FFA-LoRA and FedSA-LoRA: which factor travels, which stays, and which never changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from methods.reductions import SHARED_HEAD, fedavg, local, nothing_personal
from methods.settings import CLASSES, Card, Limit, Row, make
from methods.small import SIZES, TRAIN, assert_close, assert_same, federation, personal, shared
from references.world import LoRALinear
from tailorfl.engines.make import make_engine
from tailorfl.models.functional import Model
from tailorfl.models.selectors import select
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig

CONTRACTS = {
    "ffa_lora": Row(
        Card(whole, whole, whole, False, True),
        limit=Limit("pooled"),
        same=(fedavg("no LoRA", said=True),),
    ),
    "fedsa_lora": Row(
        Card(lambda s: s.d - s.head, lambda s: s.d - s.head, whole, True, False),
        {"personal_part": "head"},
        Limit("pooled", 1, {"personal_part": "none"}),
        same=(
            nothing_personal("no LoRA", personal_part="lora_B"),
            nothing_personal(**SHARED_HEAD),
            local(personal_part="all"),
        ),
    ),
}


LORA = ("ffa_lora", "fedsa_lora", "feddpa", "flexlora", "flora", "hetlora")
RANK, WIDE = 2, 8
IN, OUT = 64 + WIDE, WIDE + CLASSES
"""Inputs and outputs of both layers together."""


class FromZero(LoRALinear):
    """B = 0 at the start, as peft has it."""

    def __init__(self, inputs: int, outs: int) -> None:
        super().__init__(inputs, outs, RANK)
        nn.init.zeros_(self.lora_B.weight)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), FromZero(64, WIDE), nn.Tanh(), FromZero(WIDE, CLASSES))


def simulation_with_lora(
    name: str,
    rounds: int = 0,
    trainable: tuple[str, ...] = ("*lora_*",),
    engine: str = "vectorized",
    train: TrainConfig = TRAIN,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Simulation:
    model = Model(network, trainable=list(trainable))
    own = {"personal_part": "lora_B"} if name == "fedsa_lora" else {}
    method = make(name, **{**own, **(options or {})})
    sim = Simulation(method, federation(), model, train, engine=make_engine(engine, None), **settings)
    for _ in range(rounds):
        sim.step()
    return sim


def test_the_words_pick_one_factor_each() -> None:
    net = network()
    a, b = select(net, "lora_A"), select(net, "lora_B")
    assert a == {"1.lora_A.weight", "3.lora_A.weight"}
    assert b == {"1.lora_B.weight", "3.lora_B.weight"}
    assert select(net, "lora_A+lora_B") == a | b


def test_ffa_sends_b_alone_and_a_is_in_no_state() -> None:
    sim = simulation_with_lora("ffa_lora", rounds=2)
    start = sim.model.module.state_dict()["1.lora_A.weight"].clone()
    names = {p for p, _ in tree.leaves(sim.server["w"])}
    assert names == {"1.lora_B.weight", "3.lora_B.weight"}
    assert sim.traffic.up == 2 * len(SIZES) * RANK * OUT
    assert sim.traffic.down_unicast == 2 * len(SIZES) * RANK * OUT
    sim.step()
    assert torch.equal(sim.model.module.state_dict()["1.lora_A.weight"], start)
    assert float(shared(sim)["1.lora_B.weight"].abs().max()) > 0


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_ffa_is_fedit_with_a_frozen(engine: str) -> None:
    one = simulation_with_lora("ffa_lora", rounds=2, engine=engine, fraction=0.6)
    other = simulation_with_lora("fedit", 2, ("*lora_B*",), engine, fraction=0.6)
    assert_same(shared(one), shared(other))


def test_ffas_mean_of_factors_is_that_of_products_and_fedits_is_not() -> None:
    """mean(B) mean(A) = mean(B A) where all A are one."""
    gaps = {}
    for name in ("ffa_lora", "fedit"):
        sim = simulation_with_lora(name, rounds=1, weights="uniform")
        ids = tuple(range(len(SIZES)))
        (sent,) = sim.run(ids, sim.states.get(ids), sim.server["w"], lambda c, s, r: (c.fit(r),))
        sim.step()
        held = sim.model.module.state_dict()
        a = sent["1.lora_A.weight"] if name == "fedit" else held["1.lora_A.weight"].expand(len(ids), -1, -1)
        products = (sent["1.lora_B.weight"] @ a).mean(0)
        mean = shared(sim)
        gaps[name] = products - mean["1.lora_B.weight"] @ (
            mean["1.lora_A.weight"] if name == "fedit" else a[0]
        )
    assert float(gaps["ffa_lora"].abs().max()) < 1e-6
    assert float(gaps["fedit"].abs().max()) > 1e-6


def test_with_one_client_ffa_is_training_with_a_frozen_and_a_rate_of_nothing_is_the_base() -> None:
    still = simulation_with_lora("ffa_lora", rounds=1, train=replace(TRAIN, lr=1e-30))
    x = still.federation.source.x[:3]
    base = nn.Sequential(*(m.base if isinstance(m, FromZero) else m for m in still.model.module))
    torch.testing.assert_close(still.model(dict(still.server["w"].items()), x), base(x).detach())


def test_fedsa_keeps_b_and_sends_a() -> None:
    sim = simulation_with_lora("fedsa_lora", rounds=2)
    assert {p for p, _ in tree.leaves(sim.server)} == {"1.lora_A.weight", "3.lora_A.weight"}
    assert sim.traffic.up == 2 * len(SIZES) * RANK * IN
    own = personal(sim)["1.lora_B.weight"].flatten(1)
    assert len({tuple(row) for row in own.tolist()}) == len(SIZES)
    ((_, late),) = sim.newcomer_models((len(SIZES),), 0)
    assert float(late["1.lora_B.weight"].abs().max()) == 0


def test_one_plain_step_from_b_0_leaves_fedsas_a_as_it_was() -> None:
    """The gradient of A is Bᵀ times something."""
    plain = replace(TRAIN, epochs=None, steps=1, momentum=0.0, weight_decay=0.0)
    sim = simulation_with_lora("fedsa_lora", train=plain)
    before = {p: t.clone() for p, t in tree.leaves(sim.server)}
    sim.step()
    assert_close(dict(tree.leaves(sim.server)), before, atol=1e-7)
    assert float(personal(sim)["1.lora_B.weight"].abs().max()) > 0


@pytest.mark.parametrize("part", ["lora_B", "lora_B+head"])
def test_fedsa_is_fedsim_with_that_part(part: str) -> None:
    trainable = ("*lora_*", "3.base.*")
    one = simulation_with_lora("fedsa_lora", 2, trainable, options={"personal_part": part}, fraction=0.6)
    other = simulation_with_lora("fedsim", 2, trainable, options={"personal_part": part}, fraction=0.6)
    assert_same(personal(one), personal(other))


def test_fedsa_with_nothing_personal_is_fedit_and_with_all_factors_local_training() -> None:
    none = simulation_with_lora("fedsa_lora", 2, options={"personal_part": "none"}, fraction=0.6)
    it = simulation_with_lora("fedit", 2, fraction=0.6)
    assert_same({n: t[0] for n, t in personal(none).items()}, shared(it))
    alone = simulation_with_lora("fedsa_lora", 2, options={"personal_part": "lora_A+lora_B"}, fraction=0.6)
    assert_same(personal(alone), personal(simulation_with_lora("local", 2, fraction=0.6)))
