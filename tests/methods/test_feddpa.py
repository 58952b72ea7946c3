"""FedDPA: two sets of LoRA in one network, weighed for every input; sums over some samples; networks inside others."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, tanh

from methods.reductions import fedavg, nothing_personal
from methods.settings import Card, Row
from methods.small import NEWCOMER, SIZES, TRAIN, assert_close, assert_same, personal, shared, simulation
from methods.test_lora_factors import IN, OUT, RANK, WIDE, network, simulation_with_lora
from tailorfl.core.client import Client
from tailorfl.errors import ConfigError, ModelError
from tailorfl.export.source_code import written
from tailorfl.methods.two_adapters import TwoAdapters, with_two_adapters
from tailorfl.models.functional import Model
from tailorfl.models.lora import inject_lora
from tailorfl.rounds.simulation import Simulation
from tailorfl.testing.contract import whole
from tailorfl.training import tree
from tailorfl.training.sample_privacy import SampleDP

CONTRACTS = {
    "feddpa": Row(
        Card(whole, whole, whole, True, True),
        chooses=True,
        same=(fedavg("no LoRA", said=True), nothing_personal("no LoRA")),
    ),
}


ALL = 20
"""More than any client has samples: none is left out of the comparison."""


def run(rounds: int = 3, engine: str = "vectorized", **options: Any) -> Simulation:
    return simulation_with_lora("feddpa", rounds, engine=engine, options=options, fraction=0.6)


def two_sets(seed: int = 0) -> TwoAdapters:
    torch.manual_seed(seed)
    found = with_two_adapters(network()).eval()
    for name, tensor in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(tensor, std=0.3)
    return found


def by_hand(net: TwoAdapters, x: Tensor, w_g: Tensor, w_e: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and features; weights [batch]."""

    def layer(part: Any, z: Tensor) -> Tensor:
        a, b = part.lora_A, part.lora_B
        both = w_g[:, None] * b.shared(a.shared(z)) + w_e[:, None] * b.own(a.own(z))
        out: Tensor = part.base(z) + both
        return out

    z = tanh(layer(net.network[1], x.flatten(1)))  # type: ignore[index]
    return layer(net.network[3], z), z  # type: ignore[index]


@pytest.mark.parametrize("a", [0.2, 0.9])
def test_the_global_path_is_fedits_for_every_a(a: float) -> None:
    ours, it = run(a=a).server["w"], shared(simulation_with_lora("fedit", 3, fraction=0.6))
    assert_same({n.removeprefix("network.").replace(".shared", ""): t for n, t in ours.items()}, it)


def test_with_a_1_the_local_set_is_tuned_alone_from_the_second_round_on() -> None:
    """Its clients took part in rounds 1 and 2 of three; the rounds before have no part in it."""
    sim = simulation_with_lora("feddpa", 0, options={"a": 1.0})
    start = {n: t.clone() for n, t in sim.init.items()}
    alone = simulation_with_lora("local", 0)
    # The same network with the start of the local set, the base as it was drawn.
    with torch.no_grad():
        held = dict(sim.model.module.named_parameters())
        for name, tensor in alone.model.module.named_parameters():
            if "base" in name:
                assert torch.equal(tensor, held[f"network.{name}"])
    first = {n: start[f"network.{n.replace('weight', 'own.weight')}"] for n in alone.init.keys()}  # noqa: SIM118
    sim.step()
    alone.round = 1
    ids = tuple(range(len(SIZES)))
    states = {n: t.expand(len(ids), *t.shape).clone() for n, t in first.items()}
    for _ in range(2):
        (states,) = alone.run(ids, _td(states), tree.empty(), _fit)
        sim.step()
        alone.round += 1
    own = sim.states.get(ids)["own"]
    assert_close(
        {n: own[f"network.{n.replace('weight', 'own.weight')}"] for n in first}, dict(states.items())
    )


def _td(states: Any) -> Any:
    return TensorDict(dict(states.items()), batch_size=[])


def _fit(client: Client, state: Any, received: Any) -> Any:
    return (client.fit(state),)


def test_answers_are_the_papers_formula() -> None:
    net, x = two_sets(), torch.randn(6, 1, 8, 8)
    others = torch.randn(4, 1, 8, 8)
    zero, one = torch.zeros(6), torch.ones(6)
    e, near = by_hand(net, x, zero, one)[1], by_hand(net, others, zero[:4], one[:4])[1]
    omega = 0.5 * torch.stack([cosine_similarity(e, other[None]) for other in near]).mean(0)
    memory = 0.5 * (near / near.norm(dim=1, keepdim=True)).mean(0)
    for mix, sign, weights in (((0.0, 1.0), 1, (omega, 1 - omega)), ((1.0, 0.0), -1, (1 - omega, omega))):
        net.mix.copy_(torch.tensor(mix))
        net.memory.copy_(sign * memory)
        torch.testing.assert_close(net(x), by_hand(net, x, *weights)[0])
    net.memory.zero_()
    net.mix.copy_(torch.tensor([0.3, 0.7]))
    torch.testing.assert_close(net(x), by_hand(net, x, 0.3 * one, 0.7 * one)[0])
    torch.testing.assert_close(net.train()(x), by_hand(net, x, 0.3 * one, 0.7 * one)[0])


def test_nothing_dynamic_is_the_local_set_alone_and_a_remembered_input_has_the_largest_weight() -> None:
    sim = run(most_dynamic=0.0)
    models = personal(sim, sim.sample(2))
    assert float(models["memory"].abs().max()) == 0
    assert models["mix"].tolist() == [[0.0, 1.0]] * 3
    # One client whose samples are all the same: each is at cosine 1 with what is remembered.
    sim = run(compared=ALL)
    (i,) = [k for k, n in enumerate(SIZES) if n == 1]
    sim = simulation_with_lora("feddpa", 2, options={"most_dynamic": 0.4})
    model = {n: t[i] for n, t in personal(sim).items()}
    x = sim.federation.source.x[torch.from_numpy(sim.federation.train[i])]
    local = {**model, "mix": torch.tensor([0.0, 1.0]), "memory": model["memory"] * 0}
    _, e = sim.model.outputs_and_features(local, x)
    assert float(nn.functional.normalize(e[0], dim=0) @ model["memory"]) == pytest.approx(0.4, abs=1e-5)


def test_the_local_set_never_travels_and_late_clients_deploy_the_global_one() -> None:
    sim = run()
    each = RANK * (IN + OUT)
    assert sim.traffic.up == sim.traffic.down_unicast == 3 * 3 * each
    assert sim.trained_scalars == 2 * each
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


@pytest.mark.parametrize("options", [{}, {"when": "after", "dynamic_on": "local", "compared": 2}])
def test_engines_agree(options: dict[str, Any]) -> None:
    assert_close(*(personal(run(engine=e, **options)) for e in ("sequential", "vectorized")))


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


def test_a_deployed_model_is_written_out_as_code_that_needs_torch_alone() -> None:
    sim = run()
    model = {n: t[0] for n, t in personal(sim).items()}
    there: dict[str, Any] = {}
    exec(written(sim.model.alone(model)), there)
    network = there["network"]()
    network.load_state_dict(sim.model.alone(model).state_dict())
    x = sim.federation.source.x[:5]
    torch.testing.assert_close(network.eval()(x), sim.model(model, x))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_sum_may_be_of_some_samples_drawn_at_random(engine: str) -> None:
    sim = simulation("fedavg", engine=engine)

    def rows(client: Client, state: Any, received: Any) -> Any:
        return (_td({"x": client.summed(received, lambda seen: seen.x.flatten(1), most=3)}),)

    ids = tuple(range(len(SIZES)))
    found = []
    for _ in range(2):
        (sums,) = sim.run(ids, sim.states.get(ids), sim.init, rows)
        found.append(sums["x"])
        for i in ids:
            own = sim.federation.source.x[torch.from_numpy(sim.federation.train[i])].flatten(1).double()
            few = [list(c) for c in _subsets(len(own), min(3, len(own)))]
            assert any(torch.allclose(own[c].sum(0).float(), sums["x"][i], atol=1e-5) for c in few)
        sim.round += 1
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])  # of one sample there is no choice


def _subsets(of: int, size: int) -> Any:
    return combinations(range(of), size)


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(ConfigError, match="features of a client's own samples"):
        simulation_with_lora("feddpa", train=replace(TRAIN, dp=SampleDP(1.0, 1.0, "shuffle")))
    with pytest.raises(ModelError, match="0 layers with LoRA"):
        with_two_adapters(nn.Sequential(nn.Linear(2, 2)))
