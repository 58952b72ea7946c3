"""Instructions as sources: every token stands where it belongs, and every mistake in a file is named."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tailorfl.data.build import build
from tailorfl.data.instructions import FLAN8, kept_options, part_of, rouge1, split_options
from tailorfl.data.registry import load_source
from tailorfl.data.source import NO_TARGET, Source
from tailorfl.data.tokenizers import load_tokenizer
from tailorfl.errors import ConfigError, DataError, MissingExtraError
from tailorfl.partition.rows import spread_indices

WORDS = load_tokenizer("byte")
TASKS = {"colours": ("red", "blue"), "sums": ("one", "two"), "fruit": ("fig", "kiwi"), "pets": ("cat", "dog")}
SETS = ("first", "second")
LONG = "a question that is longer than a row can hold, and then says what it wants"


def write(file: Path, rows: list[Any]) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def need_rouge() -> None:
    pytest.importorskip("rouge_score", reason="the extra 'text' is not installed")


def loaded(path: Path, rows: list[dict[str, Any]] | None = None, **options: Any) -> Source:
    """The source of a folder, into whose file a.jsonl the rows are written first."""
    if rows is not None:
        write(path / "a.jsonl", rows)
    return load_source("instructions", path=path, **options)


def question(number: int, options: tuple[str, ...], right: int, **more: Any) -> dict[str, Any]:
    listed = "\n".join(f"- {option}" for option in options)
    return {"instruction": f"Item {number}?\n\nOPTIONS:\n{listed}", "output": options[right], **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four tasks with two sets each: 6 training and 3 test lines a set."""
    for task, options in TASKS.items():
        for name in SETS:
            for part, count in (("train", 6), ("test", 3)):
                rows = [question(k, options, k % 2, category=task) for k in range(count)]
                write(tmp_path / f"{task}_{name}_{part}.jsonl", rows)
    return tmp_path


def read(row: torch.Tensor) -> str:
    return WORDS.decode(row.tolist())


# what a line says


@pytest.mark.parametrize(
    ("text", "prompt", "options"),
    [
        ("Why?\n\nOPTIONS:\n- yes\n- no", "Why?", ["yes", "no"]),
        ("OPTIONS:\n- a - b\n- -5\n\nWhy?", "Why?", ["a - b", "-5"]),
        (
            "OPTIONS:\n- not these\nWhy?\nOPTIONS:\n- a\n  goes on\n-b\n- c \n",
            *("OPTIONS:\n- not these\nWhy?", ["a\n  goes on\n-b", "c"]),
        ),
        ("Why?\nOPTIONS:\n- a\n- a\n- b", "Why?", ["a", "b"]),
        ("Which of the OPTIONS: is it?", "Which of the OPTIONS: is it?", []),
        ("No list - at all", "No list - at all", []),
    ],
)
def test_options_are_cut_out_wherever_the_list_stands(text: str, prompt: str, options: list[str]) -> None:
    assert split_options(text) == (prompt, options)


def test_the_right_option_stays_among_many_and_in_its_place() -> None:
    options = [f"o{k}" for k in range(13)]
    slots = Counter()
    for right in options:
        kept = kept_options(options, right, 5)
        assert len(kept) == 5
        assert kept == sorted(kept, key=options.index)
        slots[kept.index(right)] += 1
    assert max(slots.values()) <= 4  # no slot gives the answer away
    assert kept_options(options, "o3", 13) == options


def test_few_of_many_come_from_everywhere() -> None:
    assert spread_indices(10, 5) == [1, 3, 5, 7, 9]
    assert spread_indices(3, None) == spread_indices(3, 7) == [0, 1, 2]
    assert [len(set(spread_indices(101, k))) for k in (1, 50, 100)] == [1, 50, 100]
    with pytest.raises(ConfigError, match="at least 1"):
        spread_indices(4, 0)


def test_rouge_1_is_the_overlap_of_words(need_rouge: None) -> None:
    """3 of 4 words meet 3 of 6: P = 3/4, R = 1/2, F1 = 2PR/(P+R) = 3/5; a word counts as often as both have it."""
    assert rouge1("The CAT sat, sat", "the cat sat on the mat") == pytest.approx((3 / 4, 1 / 2, 3 / 5))
    assert rouge1("mats", "mat").f1 == 0.0
    assert rouge1("same thing", "same thing").f1 == 1.0
    assert rouge1("", "mat") == (0.0, 0.0, 0.0)


# instructions as choice


def test_files_are_clients_and_their_parts_the_official_split(folder: Path, need_rouge: None) -> None:
    source = loaded(folder)
    assert source.group_names["client"] == tuple(sorted(f"{t}_{n}" for t in TASKS for n in SETS))
    assert source.group_names["domain"] == tuple(sorted(TASKS))
    assert (len(source), source.task, source.outputs, int(source.test.sum())) == (72, "classification", 6, 24)
    assert torch.bincount(source.groups["client"]).tolist() == [9] * 8
    assert source.info["pad"] == 0
    assert source.info["choice"] == {"length": 64, "options": 6, "option_length": 12}
    assert torch.bincount(loaded(folder, samples=2).groups["client"]).tolist() == [4] * 8


def test_a_sample_is_a_prompt_and_its_slots(tmp_path: Path, need_rouge: None) -> None:
    rows = [question(7, ("red car", "a red bike now", "blue"), 0)]
    sizes = {"length": 20, "option_length": 8, "options": 4}
    source = loaded(tmp_path, rows, **sizes)
    prompt, slots = source.x[0, :20], source.x[0, 20:].view(4, 8)
    assert [read(prompt), *map(read, slots)] == ["Item 7?", "red car", "a red b", "blue", ""]
    assert slots[3].tolist() == [0] * 8
    assert (source.y.tolist(), source.test, list(source.groups)) == ([0], None, ["client"])
    # red car against it: "red" of 4 words, of 2: P = 1/4, R = 1/2, F1 = 1/3
    assert source.credit[0].tolist() == pytest.approx([1.0, 1 / 3, 0.0, 0.0])
    left = loaded(tmp_path / "a.jsonl", padding="left", **sizes).x[0]
    assert left[:20].tolist() == [0] * 12 + prompt[:8].tolist()
    assert left[20:28].tolist() == slots[0].tolist()
    assert left[36:44].tolist() == [0, 0, 0, *slots[2, :5].tolist()]


def test_more_options_than_slots_and_a_long_prompt(tmp_path: Path, need_rouge: None) -> None:
    options = tuple(f"option {k}" for k in range(9))
    row = question(0, options, 8)
    rows = [{**row, "instruction": LONG + row["instruction"]}]
    source = loaded(tmp_path, rows, length=31, options=3, option_length=10)
    assert read(source.x[0, :31]) == LONG[:10] + (LONG + "Item 0?")[-20:]
    assert [read(slot) for slot in source.x[0, 31:].view(3, 10)] == ["option 2", "option 6", "option 8"]
    assert source.y.tolist() == [2]


def test_lines_may_name_their_client_and_task(tmp_path: Path, need_rouge: None) -> None:
    rows = [question(k, ("a", "b"), 0, client=f"c{k % 3}", task=f"t{k % 2}") for k in range(6)]
    source = loaded(tmp_path, rows)
    assert source.group_names == {"client": ("c0", "c1", "c2"), "domain": ("t0", "t1")}
    assert source.groups["client"].tolist() == [0, 1, 2, 0, 1, 2]


def test_null_is_no_client_and_no_category(tmp_path: Path, need_rouge: None) -> None:
    """As pandas writes a missing cell."""
    empty = {"client": None, "category": None}
    rows = [question(k, ("a", "b"), 0, task=f"t{k}", **(empty if k else {"client": "c"})) for k in range(3)]
    source = loaded(tmp_path, rows)
    assert source.group_names == {"client": ("a", "c"), "domain": ("t0", "t1", "t2")}
    assert source.groups["client"].tolist() == [1, 0, 0]


# instructions as generation


def test_a_response_stands_at_the_end_after_its_prompt(tmp_path: Path) -> None:
    rows = [{"instruction": "Say it. ", "output": "hello "}, {"instruction": LONG, "output": "x"}]
    source = loaded(tmp_path, rows, form="generation", length=30)
    assert (source.task, source.outputs, source.credit) == ("generation", WORDS.size, None)
    x, y = source.x, source.y
    assert x[0].tolist() == [0] * 9 + WORDS.encode("Say it.\nAnswer:hello") + [WORDS.end]
    assert y[0].tolist() == [NO_TARGET] * 24 + WORDS.encode("hello") + [WORDS.end]
    assert read(x[1]) == LONG[:9] + (LONG + "\nAnswer:")[-19:] + "x"
    assert y[1].tolist() == [NO_TARGET] * 28 + WORDS.encode("x") + [WORDS.end]
    lines = tmp_path / "a.jsonl"
    lines.write_text(lines.read_text(), encoding="utf-8-sig")
    assert torch.equal(loaded(tmp_path, form="generation", length=30).x, x)


def test_a_long_response_takes_half_of_a_sample(tmp_path: Path) -> None:
    source = loaded(tmp_path, [{"instruction": LONG, "output": LONG}], form="generation", length=20)
    wanted = source.y[0] != NO_TARGET
    assert int(wanted.sum()) == 10
    assert read(source.y[0][wanted]) == LONG[:9]
    assert read(source.x[0][~wanted]) == LONG[:3] + "Answer:"


# mistakes


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: .* JSON"),
        ("[1]", "line 2: .* list"),
        ({"instruction": "a"}, "line 2: 'output' .* missing"),
        ({"instruction": 3, "output": "a"}, "line 2: 'instruction' .* 3"),
        ({"instruction": ["Miller"], "output": "a"}, "line 2: 'instruction' .* a list of 1 values"),
        ({"instruction": "Why?", "output": "so"}, "line 2: lists no options"),
        (question(1, ("a", "b"), 0) | {"output": "c"}, "line 2: the output is not one of its 2 options"),
        (question(1, ("a", "b"), 0, task="t"), "line 1: .*'category' nor 'task'"),
    ],
)
def test_a_bad_line_is_named(line: Any, words: str, tmp_path: Path, need_rouge: None) -> None:
    with pytest.raises(DataError, match=words):
        loaded(tmp_path, [question(0, ("a", "b"), 0), line])
    if "no options" in words:
        assert len(loaded(tmp_path, form="generation")) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"form": "choise"}, "'choise'.*'choice'"),
        ({"padding": "lefty"}, "'lefty'"),
        ({"options": 1}, "at least 2 options"),
        ({"option_length": 1}, "above 1"),
    ],
)
def test_bad_settings_are_named(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loaded(folder, **options)


def test_bad_folders_are_named(tmp_path: Path, need_rouge: None) -> None:
    with pytest.raises(DataError, match="nothing"):
        loaded(tmp_path / "nothing")
    write(tmp_path / "a_test.jsonl", [question(0, ("a", "b"), 0)])
    with pytest.raises(DataError, match="_test"):
        build("instructions", path=tmp_path)


def test_a_file_of_test_lines_can_be_a_test_set(tmp_path: Path, need_rouge: None) -> None:
    rows = [question(k, ("a", "b"), k % 2) for k in range(20)]
    for name in ("north.jsonl", "south.jsonl"):
        write(tmp_path / name, rows)
    later = tmp_path / "later" / "notes_test.jsonl"
    later.parent.mkdir()
    write(later, rows[:5])
    federation = build("instructions", path=tmp_path, options={"options": 2}, shifts={"later": str(later)})
    assert federation.shifted["later"].y.tolist() == [0, 1, 0, 1, 0]


def test_credit_needs_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tailorfl.data import instructions

    instructions._scorer.cache_clear()
    instructions.rouge1.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(MissingExtraError, match=r"'rouge-score'.*pip install .*'transformers"):
        load_source("instructions", path=folder)
    assert load_source("instructions", path=folder, form="generation").task == "generation"


# as federations


def test_a_task_left_out_leaves_six_clients_and_its_test_lines(folder: Path, need_rouge: None) -> None:
    federation = build("instructions", path=str(folder), heldout_domain="pets")
    clients = sorted(f"{task}_{name}" for task in TASKS if task != "pets" for name in SETS)
    assert (federation.num_clients, federation.names) == (6, (*clients, "pets"))
    source, shifted = federation.source, federation.shifted["pets"]
    pets = np.flatnonzero(source.groups["domain"].numpy() == source.group_names["domain"].index("pets"))
    official = source.test.numpy()
    tested = torch.from_numpy(pets[official[pets]])
    assert len(shifted) == 6
    assert torch.equal(shifted.x, source.x[tested])
    assert torch.equal(shifted.credit, source.credit[tested])
    used = [np.concatenate(federation.part(part)[:6]) for part in ("train", "val", "test")]
    assert not set(pets) & set(np.concatenate(used))
    assert (official[used[0]].any(), official[used[2]].all()) == (False, True)


def test_tokens_are_no_numbers(folder: Path, need_rouge: None) -> None:
    with pytest.raises(DataError, match="source 'instructions' holds tokens"):
        build("instructions", path=str(folder), normalise="client")
    with pytest.raises(DataError, match="corruptions need images"):
        build("instructions", path=str(folder), corruptions={})


def test_a_public_set_tells_no_answers(folder: Path, need_rouge: None) -> None:
    source = load_source("instructions", path=folder)
    public = build("instructions", path=str(folder), public="instructions", public_samples=8).public
    assert public.credit is None
    assert not public.y.any()
    spoken = load_source("instructions", path=folder, form="generation")
    with pytest.raises(DataError, match="inputs of a generation task hold the responses; use form=choice"):
        build(source=spoken, public=spoken.name)
    other = replace(source, name="other", info={**source.info, "tokenizer": "minilm"})
    with pytest.raises(DataError, match=r"'other'.*tokenizers"):
        build(source=source, public=other)


# the data folder


def test_flan_is_four_tasks_of_two_sets(need_data: Callable[[str], Path], need_rouge: None) -> None:
    need_data("flan8/snli_train.jsonl")
    federation = build("flan8", options={"samples": 40, "test_samples": 20}, heldout_domain="sentiment")
    assert federation.names == ("snli", "anli", "glue_mrpc", "stsb", "openbook_qa", "record", "sentiment")
    assert (federation.sizes("train") + federation.sizes("val")).tolist() == [40] * 6 + [80]
    assert federation.sizes("test").tolist() == [20] * 6 + [40]
    source, clients, domains = federation.source, *federation.source.groups.values()
    assert source.group_names["client"] == tuple(FLAN8)
    of_client = {(int(c), source.group_names["domain"][d]) for c, d in zip(clients, domains, strict=True)}
    assert of_client == set(enumerate(FLAN8.values()))
    assert bool((source.credit.gather(1, source.y[:, None]) == 1).all())
    # files are sorted by label: the few that are taken must not be of one class
    assert all(len(source.y[clients == c].unique()) > 1 for c in range(8))


def test_names_of_files() -> None:
    assert part_of(Path("glue_mrpc_test.jsonl")) == ("glue_mrpc", "test")
    assert part_of(Path("north.jsonl")) == ("north", "train")
    assert part_of(Path("test.jsonl")) == ("test", "train")
