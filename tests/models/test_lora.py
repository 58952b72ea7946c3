"""Where LoRA can be merged into a weight, weights that may change again, and numbers that clients draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from methods.small import SIZES, simulation
from methods.test_lora_factors import FromZero, network
from tailorfl.core.client import Client
from tailorfl.errors import ModelError
from tailorfl.models.functional import Model
from tailorfl.models.lora import check_merges, inject_lora, merges


class Louder(FromZero):
    """A scale that its layer does not tell."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2.0 * self.lora_B(self.lora_A(x))
        return out


def test_layers_of_ones_own_are_found_with_the_weight_beside_their_factors() -> None:
    net = network()
    found = merges(net)
    assert [(m.layer, m.base, m.scale, m.turned) for m in found] == [
        ("1", "1.base.weight", 1.0, False),
        ("3", "3.base.weight", 1.0, False),
    ]
    check_merges(net, found)
    alone = FromZero(4, 3)
    assert merges(alone)[0].base == "base.weight"
    check_merges(alone, merges(alone))


@pytest.mark.parametrize("kind", ["linear", "turned"])
def test_layers_of_peft_tell_their_scale_and_how_their_weight_lies(kind: str) -> None:
    pytest.importorskip("peft")
    made: nn.Module = nn.Linear(6, 4)
    if kind == "turned":
        made = pytest.importorskip("transformers").pytorch_utils.Conv1D(4, 6)
    net = nn.Sequential(made)
    inject_lora(net, 2, 8.0, 0.1, ["0"])
    (place,) = merges(net)
    assert (place.scale, place.turned) == (4.0, kind == "turned")
    check_merges(net, (place,))
    assert net.training  # and every layer in it
    a, b = torch.randn(2, 6), torch.randn(4, 2)
    left, right = place.sides(a, b.T)
    wanted = 4.0 * b @ a
    torch.testing.assert_close(left.T @ right, wanted.T if kind == "turned" else wanted)


def test_what_cannot_be_merged_is_named() -> None:
    net = nn.Sequential(Louder(4, 3))
    with pytest.raises(
        ModelError, match=r"the layer '0' is not W x \+ 1 B A x with the weight '0.base.weight'"
    ):
        check_merges(net, merges(net))
    two: Any = nn.Sequential(FromZero(4, 3))
    two[0].other = nn.Linear(4, 3)
    with pytest.raises(ModelError, match=r"in '0' can be merged only .* there are 2"):
        merges(two)


def test_thawed_weights_begin_as_they_were_and_may_change() -> None:
    """Also where initial states are drawn with another seed than the frozen tensors were."""
    still = Model(network, trainable=["*lora_*"], seed=3)
    moving = still.thawing(["*.base.weight"])
    held = still.module.state_dict()
    state = moving.init(8)
    assert set(moving.parameters) - set(still.parameters) == {"1.base.weight", "3.base.weight"}
    assert all(torch.equal(state[n], held[n]) for n in ("1.base.weight", "3.base.weight"))
    assert torch.equal(state["1.lora_A.weight"], still.init(8)["1.lora_A.weight"])
    assert still.thawing(["*lora_A*"]) is still
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(moving(state, x), still(still.init(8), x))
    changed = {**dict(state.items()), "3.base.weight": state["3.base.weight"] * 2}
    assert not torch.allclose(moving(changed, x), moving(state, x))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_clients_draw_by_seed_client_round_purpose_and_name(engine: str) -> None:
    def drawn(ids: tuple[int, ...], purpose: str = "start", rounds: int = 0, seed: int = 0) -> Tensor:
        sim = simulation("local", engine=engine, rounds=rounds, seed=seed)

        def draw(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict]:
            return (client.drawn(client.shapes(["fc1.weight", "head.weight"]), purpose),)

        (found,) = sim.run(ids, sim.states.get(ids), sim.init, draw)
        return torch.cat([t.flatten(1) for t in found.values()], 1)

    every = drawn(tuple(range(len(SIZES))))
    assert torch.equal(drawn((3, 1)), every[[3, 1]])  # alone or in any company
    others = torch.cat([every, drawn((0,), "else"), drawn((0,), rounds=1), drawn((0,), seed=1)])
    assert len({tuple(row.tolist()) for row in others}) == len(SIZES) + 3
    assert 0 < float(others.min()) < 0.01
    assert 0.99 < float(others.max()) < 1
    assert len(set(every[0, :32].tolist()) & set(every[0, -32:].tolist())) == 0  # names differ, too
