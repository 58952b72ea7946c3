"""Bottleneck adapters: where they stand, how many scalars they have, and that they start near the identity."""

from __future__ import annotations

import pytest
import torch
from tiny_transformers import TOKENS, assert_vmap_is_the_loop, batch, made
from torch import nn

from tailorfl.core.method import make_method
from tailorfl.data.build import build as build_federation
from tailorfl.engines.make import make_engine
from tailorfl.errors import ModelError
from tailorfl.models import Dropout, build, load_weights, replace_dropout, save_weights, select
from tailorfl.models.adapters import BottleneckAdapter, insert_adapters
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

HIDDEN, SIZE, BLOCKS = 32, 5, 2
ENDS = {
    "bert": ("attention.output.dense", "output.dense"),
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    # as transformers calls them today, and as it did in 5.0
    "vit": ("attention.o_proj", "mlp.fc2", "attention.output.dense", "output.dense"),
}
NORMS = {"bert": 2 * 2 * HIDDEN, "llama": 2 * HIDDEN, "vit": 2 * 2 * HIDDEN}
"""Scalars of the norms of a block."""


def test_an_adapter_is_the_formula() -> None:
    adapter = BottleneckAdapter(200, 64)
    assert sum(p.numel() for p in adapter.parameters()) == 2 * 200 * 64 + 64 + 200
    for layer in (adapter.down, adapter.up):
        assert float(layer.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
        assert not layer.bias.any()
    nn.init.normal_(adapter.down.weight)
    x = torch.randn(3, 7, 200)
    expected = x + (x @ adapter.down.weight.T).clamp(min=0) @ adapter.up.weight.T
    torch.testing.assert_close(adapter(x), expected)


@pytest.mark.parametrize("name", ENDS)
def test_adapters_stand_behind_attention_and_mlp(name: str) -> None:
    net = made(name, adapter_size=SIZE)
    places = [n for n, part in net.named_modules() if isinstance(part, BottleneckAdapter)]
    assert len(places) == 2 * BLOCKS
    assert all(place.endswith(tuple(f"{end}.adapter" for end in ENDS[name])) for place in places)
    assert net.default_trainable == "adapter+head"


@pytest.mark.parametrize("name", ENDS)
def test_the_adapter_part_is_adapters_and_the_norms_of_the_blocks(name: str) -> None:
    net = made(name, adapter_size=SIZE)
    tensors = dict(net.named_parameters())
    picked = select(net, "adapter")
    assert sum(tensors[n].numel() for n in picked) == BLOCKS * (
        2 * (2 * HIDDEN * SIZE + HIDDEN + SIZE) + NORMS[name]
    )
    assert all(".layer.0." in n or ".layer.1." in n or ".layers.0." in n or ".layers.1." in n for n in picked)
    assert Model(lambda: made(name, adapter_size=SIZE)).scalars == sum(
        tensors[n].numel() for n in select(net, "adapter+head")
    )


@pytest.mark.parametrize("name", ENDS)
def test_at_first_the_network_is_nearly_the_one_without(name: str, tmp_path) -> None:
    """So weights of a plain network can be loaded, and what they do is kept."""
    plain, adapted = made(name), made(name, adapter_size=SIZE)
    report = load_weights(
        adapted, save_weights(dict(plain.named_parameters()), tmp_path / "plain.safetensors")
    )
    assert report.unexpected == ()
    assert set(report.loaded) == {n for n, _ in adapted.named_parameters() if ".adapter." not in n}
    x = batch(name)
    torch.testing.assert_close(adapted(x), plain(x), atol=0.02, rtol=0.02)
    for part in adapted.modules():
        if isinstance(part, BottleneckAdapter):
            nn.init.zeros_(part.up.weight)
    torch.testing.assert_close(adapted(x), plain(x))


@pytest.mark.parametrize("name", ENDS)
def test_vmap_over_clients_is_the_loop(name: str) -> None:
    net = made(name, adapter_size=SIZE).train()
    picked = select(net, "adapter+head")
    names = [n for n, _ in net.named_parameters() if n in picked]
    assert_vmap_is_the_loop(net, names, torch.stack([batch(name, seed=i) for i in range(3)]))


def test_dropout_is_keyed() -> None:
    net = replace_dropout(made("bert", adapter_size=SIZE, adapter_dropout=0.3))
    inside = [p for p in net.modules() if isinstance(p, BottleneckAdapter)]
    assert all(type(part.dropout) is Dropout and part.dropout.p == 0.3 for part in inside)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_training_leaves_the_rest_bit_identical(engine: str) -> None:
    federation = build_federation("digits", samples=60, clients=3, partition="iid")
    net = Model(lambda: build("vit", (1, 8, 8), 10, adapter_size=SIZE, adapter_dropout=0.1))
    tensors = {**dict(net.module.named_parameters()), **dict(net.module.named_buffers())}
    before = {n: tensors[n].clone() for n in net.frozen}
    train = TrainConfig(epochs=None, steps=2, batch_size=5, lr=0.1)
    sim = Simulation(make_method("ditto"), federation, net, train, engine=make_engine(engine))
    sim.step()
    assert all(torch.equal(tensors[n], before[n]) for n in before)
    per_block = 2 * (2 * HIDDEN * SIZE + HIDDEN + SIZE) + NORMS["vit"]
    assert sim.traffic.up == 3 * (BLOCKS * per_block + 33 * 10)


def test_where_no_adapter_fits_the_layers_are_listed() -> None:
    import transformers as hf

    with pytest.raises(ModelError, match=r"Sequential has none\. Its linear layers: 0 \(1\)"):
        insert_adapters(nn.Sequential(nn.Linear(3, 3)), 3, 2, 0.0)
    net = hf.GPT2Model(hf.GPT2Config(vocab_size=TOKENS, n_embd=32, n_layer=1, n_head=2))
    insert_adapters(net, 32, 4, 0.0)
    found = [n for n, part in net.named_modules() if isinstance(part, BottleneckAdapter)]
    assert found == ["h.0.attn.c_proj.adapter", "h.0.mlp.c_proj.adapter"]
    with pytest.raises(
        ModelError, match=r"attention of a GPT2Block does not end in a linear layer of 33 outputs"
    ):
        insert_adapters(hf.GPT2Model(net.config), 33, 4, 0.0)
