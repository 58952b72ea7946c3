"""LoRA and bottleneck adapters: little or nothing changes at first, and LoRA merges into the same network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import LENGTH, TOKENS, batch, disturbed, made, text
from torch import Tensor, nn
from torch.func import functional_call

from tailorfl.errors import ModelError
from tailorfl.models import Dropout, build, dropout_key, load_weights, replace_dropout, save_weights, select
from tailorfl.models.adapters import BottleneckAdapter, insert_adapters
from tailorfl.models.functional import Model
from tailorfl.models.lora import find_targets, inject_lora

CASES = [("bert", {}), ("llama", {"head": "language"}), ("vit", {})]
HIDDEN, SIZE, BLOCKS = 32, 5, 2
ENDS = {
    "bert": ("attention.output.dense", "output.dense"),
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    # as transformers calls them today, and as it did in 5.0
    "vit": ("attention.o_proj", "mlp.fc2", "attention.output.dense", "output.dense"),
}
NORMS = {"bert": 2 * 2 * HIDDEN, "llama": 2 * HIDDEN, "vit": 2 * 2 * HIDDEN}
"""Scalars of the norms of a block."""


def gpt2(layers: int) -> nn.Module:
    import transformers as hf

    return hf.GPT2Model(hf.GPT2Config(vocab_size=TOKENS, n_embd=32, n_layer=layers, n_head=2)).eval()


def scalars(net: nn.Module, selector: str) -> int:
    picked = select(net, selector)
    return sum(p.numel() for n, p in net.named_parameters() if n in picked)


def tuned_state(net: nn.Module) -> dict[str, Tensor]:
    """All parameters, those of LoRA disturbed."""
    names = [name for name, _ in net.named_parameters() if ".lora_" in name]
    state = {n: t.detach().clone() for n, t in net.named_parameters()}
    return state | {n: t[0] for n, t in disturbed(net, names, 1).items()}


@pytest.mark.parametrize(("name", "options"), CASES)
def test_scalars_start_and_default_part(name: str, options: Any) -> None:
    net = made(name, lora=3, **options)
    tensors = {n: t.detach() for n, t in net.named_parameters()}
    factors = [t for n, t in tensors.items() if ".lora_" in n]
    assert len(factors) == 2 * 2 * 2  # blocks, projections, factors
    assert sum(t.numel() for t in factors) == scalars(net, "lora") == 2 * 2 * 3 * (32 + 32)
    for n, tensor in tensors.items():
        if ".lora_B." in n:
            assert not tensor.any()
        elif ".lora_A." in n:  # Kaiming-uniform with a = sqrt(5): U(-1/sqrt(in), 1/sqrt(in))
            assert 0.9 / 32**0.5 < tensor.abs().max() <= 1 / 32**0.5
            assert float(tensor.std()) == pytest.approx((3 * 32) ** -0.5, rel=0.2)
    language = options.get("head") == "language"
    assert net.default_trainable == ("lora" if language else "lora+head")
    model = Model(lambda: net)
    assert model.scalars == 2 * 2 * 3 * 64 + (0 if language else 33 * 4)
    assert model.frozen >= {n for n in tensors if "lora_" not in n and not n.startswith("head.")}


def test_llama_7b_has_as_many_scalars_as_printed() -> None:
    with torch.device("meta"):
        net = build("llama", (LENGTH,), 2, hidden=4096, layers=32, heads=32, intermediate=11008, lora=8)
    assert scalars(net, "lora") == 4_194_304
    assert all(t.is_meta for t in net.parameters())


@pytest.mark.parametrize(("name", "options"), CASES)
def test_merged_weights_give_the_same_outputs(name: str, options: Any) -> None:
    """W + (alpha / r) B A, here with alpha / r = 2; at first B is 0."""
    plain, tuned = made(name, **options), made(name, lora=8, lora_alpha=16, **options)
    state, x = tuned_state(tuned), batch(name)
    merged = {}
    for n, tensor in state.items():
        if ".base_layer.weight" in n:
            a, b = (state[n.replace("base_layer", f"lora_{f}.default")] for f in "AB")
            tensor = tensor + 2 * b @ a
        if ".lora_" not in n:
            merged[n.replace(".base_layer.", ".")] = tensor
    expected = functional_call(tuned, state, (x,))
    torch.testing.assert_close(functional_call(plain, merged, (x,)), expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(expected, tuned(x), atol=1e-3)
    names = {n.replace(".base_layer.", "."): t for n, t in tuned.named_parameters()}
    start = {n: names[n] for n, _ in plain.named_parameters()}
    torch.testing.assert_close(functional_call(plain, start, (x,)), tuned(x))


def test_dropout_is_keyed() -> None:
    net = replace_dropout(made("bert", lora=3, lora_dropout=0.5))
    inside = [part for path, part in net.named_modules() if path.endswith(".lora_dropout.default")]
    inside_adapters = [
        part.dropout
        for part in replace_dropout(made("bert", adapter_size=SIZE, adapter_dropout=0.3)).modules()
        if isinstance(part, BottleneckAdapter)
    ]
    assert [(type(part), part.p) for part in inside] == [(Dropout, 0.5)] * 4
    assert [(type(part), part.p) for part in inside_adapters] == [(Dropout, 0.3)] * 4
    state, x = tuned_state(net), batch("bert")

    def run(key: int) -> Tensor:
        with dropout_key(torch.tensor(key)):
            return functional_call(net.train(), state, (x,))

    assert torch.equal(run(1), run(1))
    assert not torch.allclose(run(1), run(2))


def test_generation_with_the_state_of_a_client() -> None:
    net = Model(lambda: made("llama", head="language", lora=3))
    state, ids = net.init(0), text(6, 4)
    source = torch.Generator().manual_seed(1)
    other = state.clone()
    for name in net.parameters:
        other[name] = other[name] + 0.5 * torch.randn(other[name].shape, generator=source)
    responses = []
    for part in (other, state):
        with net.bound(part) as module:
            responses.append(module.generate(ids, 6))
    personal, common = responses
    assert not torch.equal(personal, common)
    assert torch.equal(personal[:, 4], net(other, ids)[:, -1].argmax(-1))


def test_targets_are_found_by_inspection_or_named() -> None:
    base = made("bert").base
    layer = "encoder.layer.{}.attention.{}"
    assert find_targets(base) == [
        layer.format(i, f"self.{part}") for i in (0, 1) for part in ("query", "value")
    ]
    output = "attention.output.dense"
    assert find_targets(base, [output]) == [layer.format(i, "output.dense") for i in (0, 1)]
    assert len(find_targets(base, ["dense", "key"])) == 2 * 4
    net, x = gpt2(2), text(3, LENGTH)
    before = net(x).last_hidden_state
    inject_lora(net, 2, 4, 0.0, ["c_attn"])  # query, key and value in one
    assert scalars(net, "lora") == 2 * 2 * (32 + 96)
    torch.testing.assert_close(net(x).last_hidden_state, before)


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (
            lambda: made("bert", lora=2, lora_targets=["query", "keys"]),
            r"ends in 'keys'.*query \(2\), key \(2\), value \(2\), dense \(6\)",
        ),
        (lambda: made("bert", lora=2, lora_targets="query"), r"is a list of names.*'query'"),
        (
            lambda: made("bert", lora=2, lora_dropout=1.0),
            r"rank of at least 1 and a dropout in \[0, 1\), got 2 and 1\.0",
        ),
        (
            lambda: inject_lora(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), 2, 4, 0.0),
            r"LoRA's usual targets.*0 \(1\), 1 \(1\)",
        ),
        (
            lambda: inject_lora(gpt2(2), 2, 4, 0.0),
            r"c_attn hold query, key and value in one.*c_attn \(2\), c_proj \(4\)",
        ),
        (lambda: select(made("bert"), "lora"), "'lora' needs layers that LoRA wraps.*lora=8"),
        (lambda: select(build("mlp", (3,), 2), "lora"), "'lora' needs layers"),
        (
            lambda: insert_adapters(nn.Sequential(nn.Linear(3, 3)), 3, 2, 0.0),
            r"Sequential has .*Its linear layers: 0 \(1\)",
        ),
        (
            lambda: insert_adapters(gpt2(1), 33, 4, 0.0),
            r"attention of a GPT2Block does not end in a linear layer of 33 outputs",
        ),
    ],
)
def test_where_nothing_fits_the_layers_are_listed(failing: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        failing()


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


def adapter_places(net: nn.Module) -> list[str]:
    return [n for n, part in net.named_modules() if isinstance(part, BottleneckAdapter)]


@pytest.mark.parametrize("name", ENDS)
def test_the_adapter_part_is_adapters_and_the_norms_of_the_blocks(name: str) -> None:
    net = made(name, adapter_size=SIZE)
    assert len(adapter_places(net)) == 2 * BLOCKS
    ends = tuple(f"{end}.adapter" for end in ENDS[name])
    assert all(place.endswith(ends) for place in adapter_places(net))
    assert net.default_trainable == "adapter+head"
    assert scalars(net, "adapter") == BLOCKS * (2 * (2 * HIDDEN * SIZE + HIDDEN + SIZE) + NORMS[name])
    blocks = (".layer.0.", ".layer.1.", ".layers.0.", ".layers.1.")
    assert all(any(block in n for block in blocks) for n in select(net, "adapter"))
    assert Model(lambda: net).scalars == scalars(net, "adapter+head")


def test_adapters_of_another_architecture() -> None:
    net = gpt2(1)
    insert_adapters(net, 32, 4, 0.0)
    assert adapter_places(net) == ["h.0.attn.c_proj.adapter", "h.0.mlp.c_proj.adapter"]


@pytest.mark.parametrize("name", ENDS)
def test_at_first_the_network_is_nearly_the_one_without(name: str, tmp_path: Path) -> None:
    """So weights of a plain network can be loaded, and what they do is kept."""
    plain, adapted = made(name), made(name, adapter_size=SIZE)
    file = save_weights(dict(plain.named_parameters()), tmp_path / "plain.safetensors")
    report = load_weights(adapted, file)
    assert report.unexpected == ()
    assert set(report.loaded) == {n for n, _ in adapted.named_parameters() if ".adapter." not in n}
    x = batch(name)
    torch.testing.assert_close(adapted(x), plain(x), atol=0.02, rtol=0.02)
    for part in adapted.modules():
        if isinstance(part, BottleneckAdapter):
            nn.init.zeros_(part.up.weight)
    torch.testing.assert_close(adapted(x), plain(x))
