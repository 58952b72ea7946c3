"""Transformers as models: padding does not matter, options are scored one by one, vmap is the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import (
    CHOICE,
    LENGTH,
    OPTION_LENGTH,
    OPTIONS,
    TOKENS,
    assert_vmap_is_the_loop,
    batch,
    made,
    padded,
    ragged,
    side_of,
    text,
)
from torch import Tensor, nn
from torch.nn import functional as F

from tailorfl.errors import ConfigError, ModelError
from tailorfl.models import build, load_weights, save_weights, select
from tailorfl.models.functional import Model
from tailorfl.models.heads import SCALE, UNUSED
from tailorfl.models.layers import replace_head
from tailorfl.models.registry import options_of

WHOLE = LENGTH + OPTIONS * OPTION_LENGTH
"""Tokens of a prompt and its options."""
LANGUAGE = {"head": "language"}


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("bert", {}, (5, 4)),
        ("bert", {"pooling": "mean"}, (5, 4)),
        ("bert", CHOICE, (5, OPTIONS)),
        ("llama", {}, (5, 4)),
        ("llama", CHOICE, (5, OPTIONS)),
        ("llama", LANGUAGE, (5, WHOLE, TOKENS)),
        ("vit", {}, (5, 4)),
        ("vit", {"pooling": "mean"}, (5, 4)),
    ],
)
def test_outputs_and_features_of_every_head(name: str, options: Any, expected: tuple[int, ...]) -> None:
    net = Model(lambda: made(name, **options))
    x = torch.randn(5, 1, 8, 12) if name == "vit" else text(5, WHOLE)
    outputs, features = net.outputs_and_features(net.init(0), x)
    assert outputs.shape == expected
    assert features.shape == (5, 32)
    assert net.buffers == ()
    assert (name != "llama") or "base.rotary_emb.inv_freq" in net.frozen


def test_names_and_parts_do_not_depend_on_the_head() -> None:
    heads = {name: made("llama", **options) for name, options in (("", {}), ("c", CHOICE), ("l", LANGUAGE))}
    names = [{n for n, _ in net.named_parameters() if n.startswith("base.")} for net in heads.values()]
    assert names[0] == names[1] == names[2]
    assert select(heads[""], "head") == {"head.weight", "head.bias"}
    assert select(heads["l"], "head") == {"head.weight"}
    with pytest.raises(ModelError, match=r"has no head.*'feature'"):
        select(made("bert", **CHOICE), "head")
    assert [len(select(made(name), "norm")) for name in ("llama", "bert", "vit")] == [5, 2 * 5, 2 * 5]


@pytest.mark.parametrize(("dtype", "atol", "rtol"), [(torch.float32, 1e-5, 1e-4), (torch.float64, 1e-6, 0)])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("bert", {"pooling": pooling}) for pooling in ("first", "mean", "last")),
        *(("llama", {}), ("llama", LANGUAGE)),
    ],
)
def test_padding_changes_nothing(
    name: str, options: Any, attention: str, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    net, x = made(name, spread=True, attention=attention, **options).to(dtype), text(4, 7)
    out = net(padded(x, 5, side_of(name)))
    torch.testing.assert_close(out[:, 5:] if options == LANGUAGE else out, net(x), atol=atol, rtol=rtol)
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)
    if name == "bert":
        assert not torch.allclose(out, net(F.pad(x, (0, 5), value=3)), atol=1e-3)


def test_a_causal_model_does_not_look_ahead() -> None:
    net, x = made("llama", spread=True, **LANGUAGE), text(2, 8)
    changed = x.clone()
    changed[:, 5:] = text(2, 3, seed=9)
    torch.testing.assert_close(net(changed)[:, :5], net(x)[:, :5])


@pytest.mark.parametrize("options", [{}, {"pooling": "mean"}, CHOICE])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_row_of_padding_has_finite_outputs_and_gradients(name: str, options: Any) -> None:
    """Engines fill short batches up with such rows."""
    net = made(name, spread=True, **options)
    out = net(torch.cat([text(1, WHOLE), torch.zeros(1, WHOLE, dtype=torch.int64)]))
    assert out.isfinite().all()
    out[0].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_options_are_scored_by_the_cosine_with_the_prompt(name: str) -> None:
    net, side = made(name, spread=True, **CHOICE), side_of(name)
    prompt = ragged(5, LENGTH, side)
    options = ragged(5 * OPTIONS, OPTION_LENGTH, side, seed=3).reshape(5, OPTIONS, OPTION_LENGTH)
    options[0, 2] = options[3, 1] = 0
    x = torch.cat([prompt, options.flatten(1)], 1)
    logits = net(x)
    embedded = [net.pooled(options[:, k]) for k in range(OPTIONS)]
    expected = torch.stack([F.cosine_similarity(net.pooled(prompt), e) for e in embedded], 1)
    used = options.any(-1)
    torch.testing.assert_close(logits[used], SCALE * expected[used], atol=1e-4, rtol=1e-4)
    assert logits[~used].tolist() == [UNUSED, UNUSED]
    order = torch.tensor([2, 0, 1])
    moved = net(torch.cat([prompt, options[:, order].flatten(1)], 1))
    torch.testing.assert_close(moved, logits[:, order], atol=1e-5, rtol=1e-5)
    net.train()(x).clamp(min=-100).sum().backward()
    assert all(p.grad.isfinite().all() for n, p in net.named_parameters() if p.grad is not None)


def test_the_feature_of_a_choice_is_the_embedding_of_the_prompt() -> None:
    net = Model(lambda: made("bert", spread=True, **CHOICE))
    state, x = net.init(0), text(5, WHOLE)
    _, features = net.outputs_and_features(state, x)
    with net.bound(state) as module:
        torch.testing.assert_close(features, F.normalize(module.pooled(x[:, :LENGTH]), dim=-1))


LORA, ADAPTER = {"lora": 3, "lora_dropout": 0.0}, {"adapter_size": 5}


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("bert", {}, "all"),
        ("bert", {"pooling": "mean", **CHOICE}, "all"),
        ("llama", {}, "all"),
        ("llama", LANGUAGE, "all"),
        ("vit", {}, "all"),
        ("bert", LORA, "lora"),
        ("llama", LORA, "lora"),
        ("llama", {**LORA, **LANGUAGE}, "lora"),
        ("vit", LORA, "lora"),
        ("bert", ADAPTER, "adapter+head"),
        ("llama", ADAPTER, "adapter+head"),
        ("vit", ADAPTER, "adapter+head"),
    ],
)
def test_vmap_over_clients_is_the_loop(name: str, options: Any, part: str) -> None:
    net = made(name, spread=part == "all", **options).train(part != "all")
    picked = select(net, part)
    x = torch.stack([batch(name, seed, WHOLE if part == "all" else LENGTH) for seed in range(3)])
    assert_vmap_is_the_loop(net, [n for n, _ in net.named_parameters() if n in picked], x)


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_both_kinds_of_attention_agree_and_training_mode_without_dropout(name: str) -> None:
    x, net = batch(name), made(name, spread=True)
    expected = net(x)
    fused = made(name, spread=True, attention="sdpa")
    torch.testing.assert_close(fused(x), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(net.train()(x), expected)


class Doubled(nn.Linear):
    """A head with twice the outputs of another one."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, bias=False)
        self.weight = nn.Parameter(2 * head.weight.detach())


def greedy(net: nn.Module, ids: Tensor, count: int) -> Tensor:
    """The likeliest next token, again and again, until the end token; then padding."""
    done = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(count):
        token = torch.where(done, 0, net(ids)[:, -1].argmax(-1))
        ids = torch.cat([ids, token[:, None]], 1)
        done |= token == 1
    return ids


def test_greedy_generation_is_the_argmax_loop() -> None:
    net = made("llama", spread=True, **LANGUAGE)
    ids = ragged(6, LENGTH, "left")
    assert torch.equal(net.generate(ids, 8), torch.cat([greedy(net, row[None], 8) for row in ids]))
    model = Model(lambda: net)
    with model.bound(model.init(0)) as module:
        assert module.generate(ids, 3).shape == (6, LENGTH + 3)
    with pytest.raises(ModelError, match=r"model\.bound"):
        model._eval.module.generate(ids, 3)


def test_a_replaced_head_of_a_language_model_makes_its_outputs() -> None:
    net, x = made("llama", **LANGUAGE), text(3, 7)
    before = net(x)
    replace_head(net, lambda head: Doubled(head), "doubling needs")
    torch.testing.assert_close(net(x), 2 * before)
    assert net.generate(x, 2).shape == (3, 9)
    model = Model(lambda: net)
    state = model.init(0)
    assert not torch.equal(model({**dict(state.items()), "head.weight": state["head.weight"] + 1}, x), net(x))


def test_the_end_of_a_response_is_followed_by_padding() -> None:
    responses = made("llama", spread=True, end=7, **LANGUAGE).generate(text(40, 4), 12)[:, 4:]
    ended = (responses == 7).any(1)
    assert ended.any()
    for row in responses[ended]:
        assert not row[int((row == 7).nonzero()[0]) + 1 :].any()


def test_beams_find_a_likelier_response_than_greedy() -> None:
    net = made("llama", spread=True, end=0, **LANGUAGE)  # nothing ends, so all responses have one length

    def likelihood(ids: Tensor) -> Tensor:
        scores = net(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return scores[:, -5:].sum(1)

    ids = text(20, 4)
    one, several = (likelihood(net.generate(ids, 5, num_beams=n)) for n in (1, 6))
    assert several.mean() > one.mean()


def test_a_model_is_a_function_of_the_random_state() -> None:
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        states.append(build("bert", (128,), 3, lora=2).state_dict())  # the longest texts that it reads
    first, same, other = states
    assert all(torch.equal(first[n], same[n]) for n in first)
    assert any(not torch.equal(first[n], other[n]) for n in first)


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "minilm", "huggingface"])
def test_every_transformer_is_tuned_by_the_same_options(name: str) -> None:
    tuning = {
        "lora": 0, "lora_alpha": 16, "lora_dropout": 0.05, "lora_targets": None,
        "adapter_size": 0, "adapter_dropout": 0.0,
    }  # fmt: skip
    assert options_of(name).items() >= tuning.items()
    assert "tuning" not in options_of(name)
    with pytest.raises(ConfigError, match="Did you mean 'lora_alpha'"):
        build(name, (6,), 3, lora_alfa=1)


@pytest.mark.parametrize(
    ("name", "shape", "options", "error", "message"),
    [
        ("bert", (129,), {}, ModelError, "at most 128 tokens.* 129"),
        ("bert", (1, 8, 8), {}, ModelError, r"token ids of shape \(length,\).*'vit'"),
        ("bert", (8,), {"hidden": 30, "heads": 4}, ModelError, "hidden 30.* heads 4"),
        ("bert", (8,), {"pad": 2000}, ModelError, "padding id 2000 is not among 1024"),
        ("bert", (16,), CHOICE, ModelError, "cannot be a prompt and 4 options of 4"),
        ("llama", (8,), {**LANGUAGE, "vocabulary": 3}, ModelError, "3 tokens.* 4;"),
        ("vit", (8,), {}, ModelError, "takes images"),
        ("vit", (1, 9, 8), {}, ModelError, "9x8 pixels cannot be cut into patches of 4x4"),
        ("vit", (1, 8, 8), {"patch": 0}, ModelError, "cannot be made with the options {'patch': 0}"),
        ("bert", (8,), {"layers": 1.5}, ModelError, r"cannot be made with the options {'layers': 1\.5}"),
        ("huggingface", (8,), {}, ModelError, "needs the option checkpoint"),
        ("bert", (8,), {"lora": 4, "adapter_size": 4}, ModelError, "not both"),
        ("bert", (8,), LANGUAGE, ConfigError, "kind encoder 'language'"),
        ("bert", (8,), {"head": "classificaton"}, ConfigError, "Did you mean 'classification'"),
        ("llama", (8,), {"pooling": "lst"}, ConfigError, "Did you mean 'last'"),
        ("bert", (8,), {"attention": "flash"}, ConfigError, "unknown attention 'flash'"),
    ],
)
def test_what_does_not_fit_is_an_error(
    name: str, shape: tuple[int, ...], options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(name, shape, 4, **options)


def test_weights_of_a_language_model_start_a_classifier_with_lora(tmp_path: Path) -> None:
    talker, classifier, again = (made("llama", **options) for options in (LANGUAGE, {"lora": 2}, {"lora": 2}))
    file = save_weights(dict(talker.named_parameters()), tmp_path / "talker.safetensors")
    report = load_weights(classifier, file, skip_head=1)
    assert report.unexpected == ()
    assert all(".lora_" in n or "head." in n or n.endswith("inv_freq") for n in report.missing)
    x = text(3, LENGTH)
    with torch.no_grad():
        seen: list[Tensor] = []
        talker.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        talker(x)
        torch.testing.assert_close(classifier.pooled(x), seen[0][:, -1])
    # What was saved with LoRA is read back with it.
    nn.init.normal_(again.head.weight)
    load_weights(again, save_weights(dict(classifier.named_parameters()), tmp_path / "lora.safetensors"))
    torch.testing.assert_close(again(x), classifier(x))
