"""FedDPA: two sets of LoRA in one network, of which one travels; sums over some samples."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from methods.reductions import fedavg, nothing_personal
from methods.settings import Card, Row
from methods.small import NEWCOMER, SIZES, assert_same, personal, shared, simulation
from methods.test_lora_factors import IN, OUT, RANK, WIDE, FromZero, simulation_with_lora
from tailorfl.core.client import Client
from tailorfl.errors import ModelError
from tailorfl.models.frozen_features import find_boundary
from tailorfl.models.functional import Model
from tailorfl.models.lora import inject_lora
from tailorfl.models.two_adapters import with_two_adapters
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree

CONTRACTS = {
    "feddpa": Row(
        Card(whole, whole, whole, True, True),
        chooses=True,
        same=(fedavg("no LoRA", said=True), nothing_personal("no LoRA")),
    ),
}


def run(rounds: int = 3, engine: str = "vectorized", **options: Any) -> Simulation:
    return simulation_with_lora("feddpa", rounds, engine=engine, options=options, fraction=0.6)


@pytest.mark.parametrize("a", [0.2, 0.9])
def test_the_global_path_is_fedits_for_every_a(a: float) -> None:
    ours, it = run(a=a).server["w"], shared(simulation_with_lora("fedit", 3, fraction=0.6))
    assert_same({n.removeprefix("network.").replace(".shared", ""): t for n, t in ours.items()}, it)


def test_the_local_set_never_travels_and_late_clients_deploy_the_global_one() -> None:
    sim = run()
    adapter = RANK * (IN + OUT)
    assert sim.traffic.up == sim.traffic.down_unicast == 3 * 3 * adapter
    assert sim.trained_scalars == 2 * adapter
    assert not [n for n, _ in tree.leaves(sim.server["w"]) if ".own." in n]
    ((_, late),) = sim.newcomer_models((NEWCOMER,), 0)
    assert_same({n: t[0] for n, t in late.items()}, shared(sim))
    assert shared(sim)["mix"].tolist() == [1.0, 0.0]


def test_trained_after_it_begins_as_the_global_set_and_keeps_nothing() -> None:
    untuned = run(when="after", ft_epochs=0)
    models = personal(untuned)
    for n, t in untuned.server["w"].items():
        assert torch.equal(models[n.replace("shared", "own")], t.expand(len(SIZES), *t.shape))
    tuned = personal(run(when="after", ft_epochs=2))
    # Of client 1, which has one sample, two epochs are two steps.
    in_steps = personal(run(when="after", ft_steps=2))
    assert_same({n: t[1] for n, t in tuned.items()}, {n: t[1] for n, t in in_steps.items()})
    assert not torch.equal(tuned["network.1.lora_B.own.weight"], models["network.1.lora_B.own.weight"])


def test_layers_of_peft_have_two_sets_too() -> None:
    """With its scale α/r, and what it looks for in a factor."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.value = nn.Linear(64, WIDE), nn.Linear(WIDE, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.value(torch.tanh(self.query(x.flatten(1))))
            return out

    def prepare(block: nn.Module) -> None:
        inject_lora(block, 2, 8.0, 0.0, ["query"])
        for name, tensor in block.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(tensor)

    plain = Model(Block, prepare, trainable="lora")
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

    def factory() -> nn.Module:
        return Net(nn.Flatten(), nn.Linear(64, WIDE), nn.Tanh(), FromZero(WIDE, 4))

    model = Model(factory, trainable=["*lora_*"]).inside(with_two_adapters, "network")
    assert find_boundary(model, model.init(0), torch.randn(5, 1, 8, 8)).name == "network.2"


def test_networks_without_lora_have_no_second_set() -> None:
    with pytest.raises(ModelError, match="0 layers with LoRA"):
        with_two_adapters(nn.Sequential(nn.Linear(2, 2)))
