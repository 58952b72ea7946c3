"""FFA-LoRA and FedSA-LoRA: which factor travels, which stays, and which never changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from methods.reductions import SHARED_HEAD, fedavg, local, nothing_personal
from methods.settings import CLASSES, Card, Limit, Row, make
from methods.small import (
    SIZES,
    TRAIN,
    after,
    assert_close,
    assert_same,
    everything,
    federation,
    personal,
    shared,
)
from references.world import LoRALinear
from tailorfl.engines.make import make_engine
from tailorfl.models.functional import Model
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
    defaults = {"personal_part": "lora_B"} if name == "fedsa_lora" else {}
    method = make(name, **{**defaults, **(options or {})})
    sim = Simulation(method, federation(), model, train, engine=make_engine(engine, None), **settings)
    return after(sim, rounds)


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


def test_fedsa_keeps_b_and_sends_a() -> None:
    sim = simulation_with_lora("fedsa_lora", rounds=2)
    assert {p for p, _ in tree.leaves(sim.server)} == {"1.lora_A.weight", "3.lora_A.weight"}
    assert sim.traffic.up == 2 * len(SIZES) * RANK * IN
    factors = personal(sim)["1.lora_B.weight"].flatten(1)
    assert len({tuple(row) for row in factors.tolist()}) == len(SIZES)
    ((_, late),) = sim.newcomer_models((len(SIZES),), 0)
    assert float(late["1.lora_B.weight"].abs().max()) == 0


def test_fedsa_with_nothing_personal_is_fedit_and_with_all_factors_local_training() -> None:
    none = simulation_with_lora("fedsa_lora", 2, options={"personal_part": "none"}, fraction=0.6)
    it = simulation_with_lora("fedit", 2, fraction=0.6)
    assert_same({n: t[0] for n, t in personal(none).items()}, shared(it))
    alone = simulation_with_lora("fedsa_lora", 2, options={"personal_part": "lora_A+lora_B"}, fraction=0.6)
    assert_same(personal(alone), personal(simulation_with_lora("local", 2, fraction=0.6)))


@pytest.mark.parametrize("name", ["fedit", *LORA])
def test_on_lora_engines_agree_and_a_resumed_run_goes_on_exactly(name: str) -> None:
    """The contract runs on models without LoRA; here clients have ranks of their own where a method has such."""
    options: dict[str, Any] = {"ranks": (2, 1)} if "ranks" in type(make(name)).model_fields else {}
    settings: dict[str, Any] = {"options": options, "fraction": 0.6}
    whole, begun, resumed = (simulation_with_lora(name, r, **settings) for r in (4, 2, 0))
    resumed.load(*begun.dump())
    assert_same(everything(whole), everything(after(resumed, 2)))
    assert (whole.traffic, personal(whole).keys()) == (resumed.traffic, personal(resumed).keys())
    in_turn = simulation_with_lora(name, 4, engine="sequential", **settings)
    assert_close(everything(whole) | personal(whole), everything(in_turn) | personal(in_turn), atol=1e-5)
