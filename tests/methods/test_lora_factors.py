"""LoRA: which factor travels, which stays, and what FedIT makes of products."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from methods.reductions import NO_LORA, SHARED_HEAD, Same, fedavg, local, nothing_personal
from methods.settings import Card, Limit, Row, body, make
from methods.small import (
    CLASSES,
    NEWCOMER,
    SIZES,
    TRAIN,
    after,
    assert_close,
    assert_same,
    everything,
    federation,
    personal,
    shared,
    simulation,
)
from references.world import LoRALinear
from tailorfl.core.client import Client
from tailorfl.engines.choice import make_engine
from tailorfl.methods.feddpa import with_two_adapters
from tailorfl.methods.fedit import mean_of_products
from tailorfl.models.frozen_features import find_boundary
from tailorfl.models.functional import Model
from tailorfl.models.lora import inject_lora
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig

CONTRACTS = {
    "ffa_lora": Row(
        Card(whole, whole, whole, False, True),
        limit=Limit("pooled"),
        same=NO_LORA[:1],
    ),
    "fedsa_lora": Row(
        Card(body, body, whole, True, False),
        {"personal_part": "head"},
        Limit("pooled", 1, {"personal_part": "none"}),
        same=(
            nothing_personal("no LoRA", personal_part="lora_B"),
            nothing_personal(**SHARED_HEAD),
            local(personal_part="all"),
        ),
    ),
    "fedit": Row(
        Card(whole, whole, whole, False, True),
        same=(
            fedavg("T07"),
            Same("one client", {}, "centralized", said=True, data={"sizes": (11,)}),
        ),
    ),
    "fedlora": Row(
        Card(whole, whole, whole, True, True),
        {"ft_epochs": 1},
        same=(
            Same("T07", {"ft_epochs": 3}, "fedit"),
            nothing_personal("T07", "fedit", ft_epochs=0),
            Same("T07", {"ft_epochs": 0}, "fedit", said=True),
        ),
    ),
    "feddpa": Row(Card(whole, whole, whole, True, True), chooses=True, same=NO_LORA),
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
    assert {p for p, _ in tree.leaves(sim.server["w"])} == {"1.lora_B.weight", "3.lora_B.weight"}
    assert sim.traffic.up == sim.traffic.down_unicast == 2 * len(SIZES) * RANK * OUT
    sim.step()
    assert torch.equal(sim.model.module.state_dict()["1.lora_A.weight"], start)
    assert float(shared(sim)["1.lora_B.weight"].abs().max()) > 0


def test_fedsa_keeps_b_and_sends_a() -> None:
    sim = simulation_with_lora("fedsa_lora", rounds=2)
    assert {p for p, _ in tree.leaves(sim.server)} == {"1.lora_A.weight", "3.lora_A.weight"}
    assert sim.traffic.up == 2 * len(SIZES) * RANK * IN
    factors = personal(sim)["1.lora_B.weight"].flatten(1)
    assert len({tuple(row) for row in factors.tolist()}) == len(SIZES)
    ((_, late),) = sim.newcomer_models((len(SIZES),), 0)
    assert float(late["1.lora_B.weight"].abs().max()) == 0


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


def test_the_mean_of_products_of_more_rank_than_outputs_and_before_b_has_learned() -> None:
    rng, half = torch.Generator().manual_seed(0), torch.tensor([0.5, 0.5])
    a, b = torch.randn(2, 6, 4, generator=rng), torch.randn(2, 3, 6, generator=rng)
    new_a, new_b = mean_of_products(a, b, half)
    torch.testing.assert_close(new_b @ new_a, (b @ a).mean(0), atol=1e-5, rtol=1e-5)
    a = torch.randn(2, 3, 7, generator=rng)
    new_a, new_b = mean_of_products(a, torch.zeros(2, 5, 3), half)
    assert not new_b.any()
    assert (new_a.norm(dim=1) > 0.5 * a.norm(dim=2).mean()).all()


def run_feddpa(**options: Any) -> Simulation:
    return simulation_with_lora("feddpa", 3, options=options, fraction=0.6)


def test_the_local_set_never_travels_and_late_clients_deploy_the_global_one() -> None:
    sim = run_feddpa()
    adapter = RANK * (IN + OUT)
    assert sim.traffic.up == sim.traffic.down_unicast == 3 * 3 * adapter
    assert sim.trained_scalars == 2 * adapter
    assert not [n for n, _ in tree.leaves(sim.server["w"]) if ".own." in n]
    ((_, late),) = sim.newcomer_models((NEWCOMER,), 0)
    assert_same({n: t[0] for n, t in late.items()}, shared(sim))
    assert shared(sim)["mix"].tolist() == [1.0, 0.0]


def test_trained_after_it_begins_as_the_global_set_and_keeps_nothing() -> None:
    untuned = run_feddpa(when="after", ft_epochs=0)
    models = personal(untuned)
    for n, t in untuned.server["w"].items():
        assert torch.equal(models[n.replace("shared", "own")], t.expand(len(SIZES), *t.shape))
    tuned = personal(run_feddpa(when="after", ft_epochs=2))
    # Of client 1, which has one sample, two epochs are two steps.
    in_steps = personal(run_feddpa(when="after", ft_steps=2))
    assert_same({n: t[1] for n, t in tuned.items()}, {n: t[1] for n, t in in_steps.items()})
    assert not torch.equal(tuned["network.1.lora_B.own.weight"], models["network.1.lora_B.own.weight"])


def test_layers_of_peft_have_two_sets_too() -> None:
    """With its scale α/r, and what it looks for in a factor."""

    def prepare(block: nn.Module) -> None:
        inject_lora(block, 2, 8.0, 0.0, ["1"])
        for name, tensor in block.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(tensor)

    layers = (nn.Flatten(), nn.Linear(64, WIDE), nn.Tanh(), nn.Linear(WIDE, 4))
    plain = Model(lambda: nn.Sequential(*copy.deepcopy(layers)), prepare, trainable="lora")
    both = plain.inside(with_two_adapters, "network")
    assert {n.rpartition("lora_")[2] for n in both.parameters} == {
        f"{f}.default.{which}.weight" for f in "AB" for which in ("shared", "own")
    }
    x = torch.randn(3, 1, 8, 8)
    state = {n: t.clone() for n, t in both.init(0).items()}
    one = {n: state[f"network.{n.removesuffix('weight')}shared.weight"] for n in plain.parameters}
    torch.testing.assert_close(both(state, x), plain(one, x))  # w = (1, 0)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_sum_may_be_of_some_samples_drawn_at_random(engine: str) -> None:
    sim = simulation("fedavg", engine=engine)

    def rows(client: Client, state: Any, received: Any) -> Any:
        sums = client.summed(received, lambda seen: seen.x.flatten(1), most=3)
        return (TensorDict({"x": sums}, batch_size=[]),)

    ids, rounds = tuple(range(len(SIZES))), []
    for _ in range(2):
        (sums,) = sim.run(ids, sim.states.get(ids), sim.init, rows)
        rounds.append(sums["x"])
        for i in ids:
            samples = sim.federation.source.x[torch.from_numpy(sim.federation.train[i])].flatten(1).double()
            subsets = map(list, combinations(range(len(samples)), min(3, len(samples))))
            assert any(torch.allclose(samples[c].sum(0).float(), sums["x"][i], atol=1e-5) for c in subsets)
        sim.round += 1
    assert not torch.equal(rounds[0][0], rounds[1][0])
    assert torch.equal(rounds[0][1], rounds[1][1])  # of one sample there is no choice


def test_a_network_inside_keeps_the_features_of_its_frozen_layers() -> None:
    class Net(nn.Sequential):
        feature_boundary = "2"

    layers = (nn.Flatten(), nn.Linear(64, WIDE), nn.Tanh(), FromZero(WIDE, 4))
    model = Model(lambda: Net(*copy.deepcopy(layers)), trainable=["*lora_*"]).inside(
        with_two_adapters, "network"
    )
    assert find_boundary(model, model.init(0), torch.randn(5, 1, 8, 8)).name == "network.2"
