"""Transformers as models: padding does not matter, options are scored one by one, vmap is the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_transformers import TOKENS, assert_vmap_is_the_loop, padded, ragged, text
from torch import Tensor, nn
from torch.nn import functional as F

from tailorfl.errors import ConfigError, ModelError
from tailorfl.models import available, build, load_weights, save_weights, select
from tailorfl.models.functional import Model
from tailorfl.models.heads import SCALE, UNUSED
from tailorfl.models.registry import options_of

L, O, LO = 9, 3, 4
CHOICE = {"head": "choice", "option_length": LO, "vocabulary": TOKENS}


def made(name: str, seed: int = 0, **options: object) -> nn.Module:
    """A tiny model in evaluation mode, of 4 classes, 3 option slots or 40 tokens."""
    torch.manual_seed(seed)
    head = options.get("head")
    outputs = TOKENS if head == "language" else O if head == "choice" else 4
    shape = (1, 8, 12) if name == "vit" else (L + O * LO,)
    if name != "vit":
        options.setdefault("vocabulary", TOKENS)
    module = build(name, shape, outputs, **options).eval()
    for parameter in module.parameters():  # far from the start, where attention is uniform
        nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("bert", {}, (5, 4)),
        ("bert", {"pooling": "mean"}, (5, 4)),
        ("bert", CHOICE, (5, O)),
        ("llama", {}, (5, 4)),
        ("llama", CHOICE, (5, O)),
        ("llama", {"head": "language"}, (5, L + O * LO, TOKENS)),
        ("vit", {}, (5, 4)),
        ("vit", {"pooling": "mean"}, (5, 4)),
    ],
)
def test_outputs_and_features_of_every_head(
    name: str, options: dict[str, object], expected: tuple[int, ...]
) -> None:
    net = Model(lambda: made(name, **options))
    x = torch.randn(5, 1, 8, 12) if name == "vit" else text(5, L + O * LO)
    outputs, features = net.outputs_and_features(net.init(0), x)
    assert outputs.shape == expected
    assert features.shape == (5, 32)
    assert net.buffers == ()
    assert (name != "llama") or "base.rotary_emb.inv_freq" in net.frozen


def test_state_names_of_a_base_do_not_depend_on_the_head() -> None:
    names = [
        {n for n, _ in made("llama", **options).named_parameters() if n.startswith("base.")}
        for options in ({}, CHOICE, {"head": "language"})
    ]
    assert names[0] == names[1] == names[2]
    assert select(made("llama"), "head") == {"head.weight", "head.bias"}
    assert select(made("llama", head="language"), "head") == {"head.weight"}
    with pytest.raises(ModelError, match=r"has no head.*'feature'"):
        select(made("bert", **CHOICE), "head")


def test_norms_of_every_family_are_norms() -> None:
    assert len(select(made("llama"), "norm")) == 5
    assert len(select(made("bert"), "norm")) == len(select(made("vit"), "norm")) == 2 * 5


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_padding_on_the_right_changes_nothing_for_an_encoder(pooling: str) -> None:
    net, x = made("bert", pooling=pooling), text(4, 7)
    torch.testing.assert_close(net(padded(x, 5, "right")), net(x), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(net(padded(x, 5, "right")), net(F.pad(x, (0, 5), value=3)), atol=1e-3)


def test_padding_on_the_left_changes_nothing_for_a_causal_model() -> None:
    net, x = made("llama"), text(4, 7)
    torch.testing.assert_close(net(padded(x, 5, "left")), net(x), atol=1e-5, rtol=1e-4)
    talker = made("llama", head="language")
    torch.testing.assert_close(talker(padded(x, 5, "left"))[:, 5:], talker(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_on_the_left_changes_nothing_in_float64(attention: str) -> None:
    net, x = made("llama", attention=attention).double(), text(4, 7)
    torch.testing.assert_close(net(padded(x, 5, "left")), net(x), atol=1e-6, rtol=0)
    net(padded(x, 5, "left")).sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)


def test_a_causal_model_does_not_look_ahead() -> None:
    net, x = made("llama", head="language"), text(2, 8)
    changed = x.clone()
    changed[:, 5:] = text(2, 3, seed=9)
    torch.testing.assert_close(net(changed)[:, :5], net(x)[:, :5])


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_row_of_padding_has_finite_outputs_and_gradients(name: str) -> None:
    """Engines fill short batches up with such rows."""
    for options in ({}, {"pooling": "mean"}, CHOICE):
        net = made(name, **options)
        x = torch.cat([text(1, L + O * LO), torch.zeros(1, L + O * LO, dtype=torch.int64)])
        out = net(x)
        assert out.isfinite().all()
        out[0].sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_options_are_scored_by_the_cosine_with_the_prompt(name: str) -> None:
    net, side = made(name, **CHOICE), "right" if name == "bert" else "left"
    prompt, options = ragged(5, L, side), ragged(5 * O, LO, side, seed=3).reshape(5, O, LO)
    options[0, 2] = options[3, 1] = 0
    x = torch.cat([prompt, options.flatten(1)], 1)
    logits = net(x)
    expected = torch.stack(
        [F.cosine_similarity(net.pooled(prompt), net.pooled(options[:, k])) for k in range(O)], 1
    )
    used = options.any(-1)
    torch.testing.assert_close(logits[used], SCALE * expected[used], atol=1e-4, rtol=1e-4)
    assert logits[~used].tolist() == [UNUSED, UNUSED]
    order = torch.tensor([2, 0, 1])
    moved = net(torch.cat([prompt, options[:, order].flatten(1)], 1))
    torch.testing.assert_close(moved, logits[:, order], atol=1e-5, rtol=1e-5)
    net.train()(x).clamp(min=-100).sum().backward()
    assert all(p.grad.isfinite().all() for n, p in net.named_parameters() if p.grad is not None)


def test_the_feature_of_a_choice_is_the_embedding_of_the_prompt() -> None:
    net = Model(lambda: made("bert", **CHOICE))
    state, x = net.init(0), text(5, L + O * LO)
    _, features = net.outputs_and_features(state, x)
    with net.bound(state) as module:
        torch.testing.assert_close(features, F.normalize(module.pooled(x[:, :L]), dim=-1))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert", {}),
        ("bert", {"pooling": "mean", **CHOICE}),
        ("llama", {}),
        ("llama", {"head": "language"}),
        ("vit", {}),
    ],
)
def test_vmap_over_clients_is_the_loop(name: str, options: dict[str, object]) -> None:
    net, side = made(name, **options), "left" if name == "llama" else "right"
    x = torch.stack([ragged(4, L + O * LO, side, seed=i) for i in range(3)])
    if name == "vit":
        x = torch.randn(3, 4, 1, 8, 12, generator=torch.Generator().manual_seed(0))
    assert_vmap_is_the_loop(net, [n for n, _ in net.named_parameters()], x)


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_both_kinds_of_attention_agree(name: str) -> None:
    x = torch.randn(3, 1, 8, 12) if name == "vit" else ragged(5, L, "left" if name == "llama" else "right")
    torch.testing.assert_close(made(name, attention="sdpa")(x), made(name)(x), atol=1e-4, rtol=1e-4)


def test_training_and_evaluation_mode_agree_without_dropout() -> None:
    for name, x in (("bert", text(3, 6)), ("llama", text(3, 6)), ("vit", torch.randn(3, 1, 8, 12))):
        net = made(name)
        torch.testing.assert_close(net.train()(x), net.eval()(x))


def greedy(net: nn.Module, ids: Tensor, count: int) -> Tensor:
    """The likeliest next token, again and again, until the end token; then padding."""
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(count):
        token = torch.where(done, 0, net(ids)[:, -1].argmax(-1))
        ids = torch.cat([ids, token[:, None]], 1)
        done |= token == 1
    return ids


def test_greedy_generation_is_the_argmax_loop_and_stops_at_the_end() -> None:
    net = made("llama", head="language")
    ids = ragged(6, L, "left")
    expected = torch.cat([greedy(net, row[None], 8) for row in ids])
    assert torch.equal(net.generate(ids, 8), expected)
    # A head that always ends: one token, then padding.
    with torch.no_grad():
        net.head.weight.zero_()
    likely = Model(lambda: net)
    state = likely.init(0)
    with likely.bound(state) as module:
        alone = module.generate(ids, 3)
    assert alone.shape == (6, L + 3)
    with pytest.raises(ModelError, match=r"model\.bound"):
        likely._eval.module.generate(ids, 3)


def test_the_end_of_a_response_is_followed_by_padding() -> None:
    net = made("llama", head="language", end=7)
    ids = text(40, 4)
    made_up = net.generate(ids, 12)[:, 4:]
    ended = (made_up == 7).any(1)
    assert ended.any()
    for row in made_up[ended]:
        assert not row[int((row == 7).nonzero()[0]) + 1 :].any()


def test_beams_find_a_likelier_response_than_greedy() -> None:
    net = made("llama", head="language", end=0)  # nothing ends, so all responses have one length

    def likelihood(ids: Tensor) -> Tensor:
        scores = net(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return scores[:, -5:].sum(1)

    ids = text(20, 4)
    one, several = (likelihood(net.generate(ids, 5, num_beams=n)) for n in (1, 6))
    assert several.mean() > one.mean()


def test_seeds_and_options() -> None:
    one, same, other = (dict(build_seeded(s).named_parameters()) for s in (3, 3, 4))
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert any(not torch.equal(one[n], other[n]) for n in one)
    assert {"bert", "llama", "vit", "minilm", "huggingface"} <= set(available())


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "minilm", "huggingface"])
def test_every_transformer_is_tuned_by_the_same_options(name: str) -> None:
    tuning = {
        "lora": 0, "lora_alpha": 16, "lora_dropout": 0.05, "lora_targets": None,
        "adapter_size": 0, "adapter_dropout": 0.0,
    }  # fmt: skip
    found = options_of(name)
    assert {option: found[option] for option in tuning} == tuning
    assert "tuning" not in found
    with pytest.raises(ConfigError, match="Did you mean 'lora_alpha'"):
        build(name, (6,), 3, lora_alfa=1)


def build_seeded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build("bert", (6,), 3, lora=2)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("bert", (200,), {}, "at most 128 tokens, the data has 200"),
        ("bert", (1, 8, 8), {}, r"token ids of shape \(length,\).*'vit'"),
        ("bert", (8,), {"hidden": 30, "heads": 4}, "attention heads divide"),
        ("bert", (8,), {"pad": 2000}, "padding id 2000 is not among 1024"),
        ("bert", (12,), {"head": "choice", "option_length": 4}, "cannot be a prompt and 4 options of 4"),
        ("llama", (8,), {"head": "language", "vocabulary": 3}, "knows 3 tokens, the data has 4"),
        ("vit", (8,), {}, "takes images"),
        ("vit", (1, 9, 8), {}, "9x8 pixels cannot be cut into patches of 4x4"),
        ("huggingface", (8,), {}, "needs the option checkpoint"),
        ("bert", (8,), {"lora": 4, "adapter_size": 4}, "not both"),
    ],
)
def test_what_does_not_fit_is_said(
    name: str, shape: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        build(name, shape, 4, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert", {"head": "language"}, "kind encoder 'language'"),
        ("bert", {"head": "classificaton"}, "Did you mean 'classification'"),
        ("llama", {"pooling": "lst"}, "Did you mean 'last'"),
        ("bert", {"attention": "flash"}, "unknown attention 'flash'"),
    ],
)
def test_unknown_choices_suggest_the_nearest(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, (8,), 4, **options)


def test_weights_of_a_language_model_start_a_classifier_with_lora(tmp_path: Path) -> None:
    talker = made("llama", head="language")
    file = save_weights(dict(talker.named_parameters()), tmp_path / "talker.safetensors")
    classifier = build("llama", (L,), 4, vocabulary=TOKENS, lora=2).eval()
    report = load_weights(classifier, file, skip_head=1)
    assert report.unexpected == ()
    assert all(".lora_" in n or "head." in n or n.endswith("inv_freq") for n in report.missing)
    x = text(3, L)
    with torch.no_grad():
        seen: list[Tensor] = []
        talker.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        talker(x)
        torch.testing.assert_close(classifier.pooled(x), seen[0][:, -1])
    # What was saved with LoRA is read back with it.
    again = build("llama", (L,), 4, vocabulary=TOKENS, lora=2).eval()
    load_weights(again, save_weights(dict(classifier.named_parameters()), tmp_path / "lora.safetensors"))
    torch.testing.assert_close(again(x), classifier(x))
