"""LoRA: nothing changes at first, only A and B are trained, and merging them gives the same network."""

from __future__ import annotations

import pytest
import torch
from tiny_transformers import LENGTH, TOKENS, assert_vmap_is_the_loop, batch, disturbed, made, text
from torch import Tensor, nn
from torch.func import functional_call

from tailorfl.core.method import make_method
from tailorfl.data.build import build as build_federation
from tailorfl.engines.make import make_engine
from tailorfl.errors import ModelError
from tailorfl.models import Dropout, build, dropout_key, replace_dropout, select
from tailorfl.models.functional import Model
from tailorfl.models.lora import find_targets, inject_lora
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

CASES = [("bert", {}), ("llama", {}), ("llama", {"head": "language"}), ("vit", {})]


def lora_names(module: nn.Module) -> list[str]:
    picked = select(module, "lora")
    return [name for name, _ in module.named_parameters() if name in picked]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_outputs_are_unchanged_at_first(name: str, options: dict[str, object]) -> None:
    plain, tuned = made(name, **options), made(name, lora=3, **options)
    renamed = {n.replace(".base_layer.", "."): t for n, t in tuned.named_parameters()}
    x = batch(name)
    torch.testing.assert_close(
        functional_call(plain, {n: renamed[n] for n, _ in plain.named_parameters()}, (x,)), tuned(x)
    )


@pytest.mark.parametrize(("name", "options"), CASES)
def test_scalars_start_and_default_part(name: str, options: dict[str, object]) -> None:
    net = made(name, lora=3, **options)
    tensors = dict(net.named_parameters())
    names = lora_names(net)
    assert len(names) == 2 * 2 * 2  # blocks, projections, factors
    assert sum(tensors[n].numel() for n in names) == 2 * 2 * 3 * (32 + 32)
    for n in names:
        if ".lora_B." in n:
            assert not tensors[n].any()
        else:  # Kaiming-uniform with a = sqrt(5): U(-1/sqrt(in), 1/sqrt(in))
            assert 0.9 / 32**0.5 < tensors[n].abs().max() <= 1 / 32**0.5
            assert float(tensors[n].detach().std()) == pytest.approx((3 * 32) ** -0.5, rel=0.2)
    language = options.get("head") == "language"
    assert net.default_trainable == ("lora" if language else "lora+head")
    model = Model(lambda: made(name, lora=3, **options))
    assert model.scalars == 2 * 2 * 3 * 64 + (0 if language else 33 * 4)
    assert model.frozen >= {n for n in tensors if "lora_" not in n and not n.startswith("head.")}


def test_llama_7b_has_as_many_scalars_as_printed() -> None:
    with torch.device("meta"):
        net = build("llama", (LENGTH,), 2, hidden=4096, layers=32, heads=32, intermediate=11008, lora=8)
    tensors = dict(net.named_parameters())
    assert sum(tensors[n].numel() for n in select(net, "lora")) == 4_194_304
    assert all(t.is_meta for t in tensors.values())


@pytest.mark.parametrize(("name", "options"), CASES)
def test_merged_weights_give_the_same_outputs(name: str, options: dict[str, object]) -> None:
    """W + (alpha / r) B A, here with alpha / r = 2."""
    plain, tuned = made(name, **options), made(name, lora=8, lora_alpha=16, **options)
    state = {n: t.detach().clone() for n, t in tuned.named_parameters()}
    state |= {n: t[0] for n, t in disturbed(tuned, lora_names(tuned), 1).items()}
    merged = {}
    for n, tensor in state.items():
        if ".base_layer.weight" in n:
            a, b = (state[n.replace("base_layer", f"lora_{f}.default")] for f in "AB")
            tensor = tensor + 2 * b @ a
        if ".lora_" not in n:
            merged[n.replace(".base_layer.", ".")] = tensor
    x = batch(name)
    expected = functional_call(tuned, state, (x,))
    torch.testing.assert_close(functional_call(plain, merged, (x,)), expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(expected, tuned(x), atol=1e-3)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_vmap_over_clients_is_the_loop(name: str, options: dict[str, object]) -> None:
    net = made(name, lora=3, lora_dropout=0.0, **options).train()
    assert_vmap_is_the_loop(net, lora_names(net), torch.stack([batch(name, seed) for seed in range(3)]))


def test_dropout_is_keyed() -> None:
    net = replace_dropout(made("bert", lora=3, lora_dropout=0.5))
    inside = [part for path, part in net.named_modules() if path.endswith(".lora_dropout.default")]
    assert len(inside) == 4
    assert all(type(part) is Dropout and part.p == 0.5 for part in inside)
    state = {n: t[0] for n, t in disturbed(net, lora_names(net), 1).items()}
    x = batch("bert")

    def run(key: int) -> Tensor:
        with dropout_key(torch.tensor(key)):
            return functional_call(net.train(), state, (x,))

    assert torch.equal(run(1), run(1))
    assert not torch.allclose(run(1), run(2))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_federated_training_changes_the_factors_and_nothing_else(engine: str) -> None:
    """FedAvg on the LoRA part is FedIT; what is sent are A, B and the head."""
    federation = build_federation("digits", samples=60, clients=3, partition="iid")
    net = Model(lambda: build("vit", (1, 8, 8), 10, lora=2, lora_dropout=0.1))
    tensors = {**dict(net.module.named_parameters()), **dict(net.module.named_buffers())}
    before = {n: tensors[n].clone() for n in net.frozen}
    train = TrainConfig(epochs=None, steps=3, batch_size=5, lr=0.1)
    sim = Simulation(make_method("fedavg"), federation, net, train, engine=make_engine(engine))
    start = sim.global_model()
    for _ in range(2):
        sim.step()
    after = sim.global_model()
    assert start is not None
    assert after is not None
    assert all(torch.equal(tensors[n], before[n]) for n in before)
    assert all(not torch.equal(after[n], start[n]) for n in net.parameters)
    assert sim.traffic.up == 2 * 3 * (2 * 2 * 2 * 64 + 33 * 10)


def test_engines_agree() -> None:
    federation = build_federation("digits", samples=60, clients=3, partition="iid")
    net = Model(lambda: build("vit", (1, 8, 8), 10, lora=2, lora_dropout=0.1))
    train = TrainConfig(epochs=None, steps=3, batch_size=5, lr=0.1)
    ends = []
    for engine in ("sequential", "vectorized"):
        sim = Simulation(make_method("ditto"), federation, net, train, engine=make_engine(engine))
        sim.step()
        ends.append(sim.global_model())
    for name in net.parameters:
        torch.testing.assert_close(ends[0][name], ends[1][name], atol=1e-5, rtol=1e-3)


def test_generation_with_the_state_of_a_client() -> None:
    net = Model(lambda: made("llama", head="language", lora=3))
    state = net.init(0)
    other = state.clone()
    for name in net.parameters:
        other[name] = other[name] + 0.5 * torch.randn(
            other[name].shape, generator=torch.Generator().manual_seed(1)
        )
    ids = text(6, 4)
    with net.bound(other) as module:
        personal = module.generate(ids, 6)
    with net.bound(state) as module:
        common = module.generate(ids, 6)
    assert not torch.equal(personal, common)
    step = net(other, ids)[:, -1].argmax(-1)
    assert torch.equal(personal[:, 4], step)


def test_targets_are_found_by_inspection_or_named() -> None:
    base = made("bert").base
    assert find_targets(base) == [
        f"encoder.layer.{i}.attention.self.{part}" for i in (0, 1) for part in ("query", "value")
    ]
    assert find_targets(base, ["attention.output.dense"]) == [
        f"encoder.layer.{i}.attention.output.dense" for i in (0, 1)
    ]
    assert len(find_targets(base, ["dense", "key"])) == 2 * 4
    with pytest.raises(ModelError, match=r"ends in 'keys'.*query \(2\), key \(2\), value \(2\), dense \(6\)"):
        made("bert", lora=2, lora_targets=["query", "keys"])
    with pytest.raises(ModelError, match=r"is a list of names.*'query'"):
        made("bert", lora=2, lora_targets="query")
    with pytest.raises(ModelError, match=r"rank of at least 1 and a dropout in \[0, 1\), got 2 and 1\.0"):
        made("bert", lora=2, lora_dropout=1.0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(ModelError, match=r"called like queries.*0 \(1\), 1 \(1\)"):
        inject_lora(plain, 2, 4, 0.0)


def test_fused_projections_are_named_by_the_user_or_refused() -> None:
    import transformers as hf

    def gpt2() -> nn.Module:
        return hf.GPT2Model(hf.GPT2Config(vocab_size=TOKENS, n_embd=32, n_layer=2, n_head=2)).eval()

    with pytest.raises(
        ModelError, match=r"c_attn hold query, key and value in one.*c_attn \(2\), c_proj \(4\)"
    ):
        inject_lora(gpt2(), 2, 4, 0.0)
    net = gpt2()
    x = text(3, LENGTH)
    before = net(x).last_hidden_state
    inject_lora(net, 2, 4, 0.0, ["c_attn"])
    tensors = dict(net.named_parameters())
    assert sum(tensors[n].numel() for n in select(net, "lora")) == 2 * 2 * (32 + 96)
    torch.testing.assert_close(net(x).last_hidden_state, before)


def test_a_network_without_lora_has_no_such_part() -> None:
    with pytest.raises(ModelError, match="'lora' needs layers that LoRA wraps, as lora=8"):
        select(made("bert"), "lora")
    with pytest.raises(ModelError, match="'lora' needs layers"):
        select(build("mlp", (3,), 2), "lora")
