"""Instructions with answers, as multiple choice or as text to be generated, and the ROUGE-1 of an answer.

The data are a user's own, or eight sets of FLAN.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tailorfl.data.registry import data_source
from tailorfl.data.source import NO_TARGET, Source
from tailorfl.data.storage import data_file
from tailorfl.data.text import left_of, numbered, token_info
from tailorfl.data.tokenizers import Tokenizer, load_tokenizer, room_for, shortened, single, stacked
from tailorfl.errors import ConfigError, DataError, check_known, needs_extra
from tailorfl.partition.rows import spread_indices
from tailorfl.printable import shown

OPTIONS = "OPTIONS:"
SUFFIXES = (".jsonl", ".json")
_PARTS = ("train", "test")
FORMS = ("choice", "generation")

ANSWER = "\nAnswer:"
"""The text between an instruction and its response in the form generation, which marks the end of the instruction."""

FLAN8 = {
    "snli": "entailment",
    "anli": "entailment",
    "sst2": "sentiment",
    "sentiment140": "sentiment",
    "glue_mrpc": "paraphrase",
    "stsb": "paraphrase",
    "openbook_qa": "reading_comprehension",
    "record": "reading_comprehension",
}
"""The task of each of FedOA's data sets (their files name a category, but two for reading comprehension)."""


@data_source("own instructions and answers: JSON lines (options path, form, tokenizer, length, ...)")
def instructions(
    path: str | Path,
    form: str = "choice",
    tokenizer: str = "byte",
    length: int = 64,
    options: int = 6,
    option_length: int = 12,
    padding: str = "right",
    samples: int | None = None,
) -> Source:
    """Return a source from JSON lines.

    Lines are objects with `instruction`, `output`, and optionally `client` and `category` or `task`.

    Clients are the files unless lines name them; categories (or else tasks) are the domains. If a file's name ends in
    _test, its lines are the official test part, and those of all others train.

    choice: the instruction lists its options at its end, "OPTIONS:" and below it one line "- ..." for each. Samples
    are a prompt of `length` tokens, without the list, and `options` slots of `option_length` tokens; the class is the
    slot of the right option. Of too many options, evenly spaced wrong ones are kept. `credit` is the ROUGE-1 of every
    option.

    generation: samples are the whole instruction, "Answer:", and the response with an end token.

    Args:
        path: a file, or a folder of .jsonl or .json files.
        form: choice or generation.
        tokenizer: byte, minilm, a folder, or a name on the Hugging Face hub.
        length: tokens of a prompt, marks included, or of the whole sample for generation; a prompt that is too long
            keeps a third of its room from the start, the rest from the end; a response gets at most half of a sample.
        options: slots of a prompt, one for each of its options.
        option_length: tokens of a slot; a longer option is cut at its end.
        padding: of form choice: right for encoders, left for causal models. Generation pads on the left.
        samples: maximum number of lines of each file, evenly spaced.

    Raises:
        ConfigError: for an unknown form, or numbers that are too small.
        DataError: for files or lines that cannot be used (names file and line), or a missing tokenizer.
        MissingExtraError: if a package of the extra `text` is needed and not installed.
    """
    files = files_of(path)
    examples = read_examples(files, {"train": samples, "test": samples})
    split = any(part_of(file)[1] == "test" for file in files)
    layout = _Layout(form, load_tokenizer(tokenizer), length, options, option_length, padding)
    domains = _domains(examples)
    return _source("instructions", examples, domains, layout, split, ())


@data_source(
    "FLAN instructions, 8 sets of 4 tasks, as choice or generation (groups 'client', 'domain')",
    files="flan8/*.jsonl",
)
def flan8(
    form: str = "choice",
    tokenizer: str = "byte",
    length: int = 64,
    options: int = 6,
    option_length: int = 12,
    padding: str = "right",
    samples: int | None = None,
    test_samples: int | None = None,
) -> Source:
    """FedOA's eight sets of FLAN instructions, 1,000 + 200 lines each (Chung et al., JMLR 2024; each set's own terms).

    Group `client` is the data set, `domain` its task: entailment, sentiment, paraphrase, reading_comprehension.

    Args:
        form, tokenizer, length, options, option_length, padding: as for `instructions`.
        samples: maximum number of training lines of each set, evenly spaced.
        test_samples: maximum number of test lines of each set, evenly spaced.

    Raises:
        ConfigError, DataError, MissingExtraError: as for `instructions`.
    """
    files = [data_file(f"flan8/{name}_{part}.jsonl") for part in ("train", "test") for name in FLAN8]
    examples = read_examples(files, {"train": samples, "test": test_samples})
    layout = _Layout(form, load_tokenizer(tokenizer), length, options, option_length, padding)
    return _source("flan8", examples, [FLAN8[e.client] for e in examples], layout, True, tuple(FLAN8))


class _Layout:
    """The layout of an example as a row of token ids."""

    def __init__(
        self, form: str, words: Tokenizer, length: int, options: int, option_length: int, padding: str
    ) -> None:
        check_known("form", form, FORMS)
        if options < 2:
            raise ConfigError(f"form=choice needs at least 2 options, but options={options}")
        self.form, self.words, self.length = form, words, length
        self.options, self.option_length, self.left = options, option_length, left_of(padding)

    def fields(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Return `x`, `y`, `task`, `outputs`, `credit` and `info` of a source."""
        return self._choices(examples) if self.form == "choice" else self._responses(examples)

    def _choices(self, examples: Sequence[Example]) -> dict[str, Any]:
        words, slots, option_ids = self.words, self.options, dict[str, list[int]]()
        prompts, listed, y = [], [], []
        credit = torch.zeros(len(examples), slots)
        for row, example in enumerate(examples):
            prompt, options = split_options(example.instruction)
            right = example.output.strip()
            if right not in options:
                raise DataError(_not_listed(example, options))
            offered_options = kept_options(options, right, slots)
            prompts.append(single(words, prompt, self.length))
            for option in offered_options:
                if option not in option_ids:
                    option_ids[option] = self._option(option)
            listed += [option_ids[option] for option in offered_options] + [[]] * (
                slots - len(offered_options)
            )
            y.append(offered_options.index(right))
            credit[row, : len(offered_options)] = torch.tensor(
                [rouge1(option, right).f1 for option in offered_options]
            )
        prompt_ids = stacked(prompts, self.length, words.pad, left=self.left)
        offered = stacked(listed, self.option_length, words.pad, left=self.left)
        return {
            "x": torch.cat([prompt_ids, offered.reshape(len(examples), -1)], dim=1),
            "y": torch.tensor(y),
            "task": "classification",
            "outputs": slots,
            "credit": credit,
            "info": {
                **token_info(words),
                "choice": {"length": self.length, "options": slots, "option_length": self.option_length},
            },
        }

    def _option(self, option: str) -> list[int]:
        """Return the ids of an option, its end cut off if it is too long.

        Options often differ in their first words.
        """
        marks = self.words.marks
        room = room_for(self.option_length, len(marks.before) + len(marks.after))
        return [*marks.before, *self.words.encode(option)[:room], *marks.after]

    def _responses(self, examples: Sequence[Example]) -> dict[str, Any]:
        words, texts, targets = self.words, [], []
        before = list(words.marks.before)
        half = room_for(self.length, 2 * (len(before) + 1)) // 2 + 1
        for example in examples:
            response = [*words.encode(example.output.strip())[: half - 1], words.end]
            room = self.length - len(before) - len(response)
            prompt = [*before, *shortened(words.encode(example.instruction.strip() + ANSWER), room)]
            texts.append([*prompt, *response])
            targets.append([*[NO_TARGET] * len(prompt), *response])
        return {
            "x": stacked(texts, self.length, words.pad, left=True),
            "y": stacked(targets, self.length, NO_TARGET, left=True),
            "task": "generation",
            "outputs": words.size,
            "info": token_info(words),
        }


def _source(
    name: str,
    examples: Sequence[Example],
    domains: Sequence[str] | None,
    layout: _Layout,
    split: bool,
    order: Sequence[str],
) -> Source:
    groups, names = {}, {}
    groups["client"], names["client"] = numbered([e.client for e in examples], order)
    if domains is not None:
        groups["domain"], names["domain"] = numbered(domains, tuple(FLAN8.values()) if order else ())
    return Source(
        name=name,
        test=torch.tensor([e.test for e in examples]) if split else None,
        groups=groups,
        group_names=names,
        **layout.fields(examples),
    )


def _domains(examples: Sequence[Example]) -> list[str] | None:
    """Return the domain of every example; None if no example has one."""
    without = [e for e in examples if e.domain is None]
    if len(without) == len(examples):
        return None
    if without:
        raise DataError(
            f"{without[0].location}: has neither 'category' nor 'task', but other lines do; give one to all lines, or "
            "to none"
        )
    return [str(e.domain) for e in examples]


def _not_listed(example: Example, options: Sequence[str]) -> str:
    if not options:
        return (
            f"{example.location}: lists no options; end the instruction with a line 'OPTIONS:' and a line '- ...' for "
            "each option, or use form=generation"
        )
    return f"{example.location}: the output is not one of its {len(options)} options; write it as one of them"


@dataclass(frozen=True)
class Example:
    """One line of a file.

    Attributes:
        instruction, output: the question, and the right answer.
        client: the client that has it.
        domain: its task or category; None if the line names none.
        test: whether it is in the official test part.
        location: file and line, for messages.
    """

    instruction: str
    output: str
    client: str
    domain: str | None
    test: bool
    location: str


def files_of(path: str | Path) -> list[Path]:
    """Return the JSON-lines files that a path means: the file itself, or those of a folder by name.

    Raises:
        DataError: if there is none.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    files = sorted(f for f in root.glob("*") if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))
    if not files:
        raise DataError(
            f"'{root}' is neither a file of JSON lines nor a folder of such files ({', '.join(SUFFIXES)})"
        )
    return files


def part_of(file: Path) -> tuple[str, str]:
    """Return (name, part) of a file: ("snli", "test") for snli_test.jsonl; without a suffix the part is "train"."""
    name, _, part = file.stem.rpartition("_")
    return (name, part) if name and part in _PARTS else (file.stem, "train")


def read_examples(files: Sequence[Path], samples: Mapping[str, int | None]) -> list[Example]:
    """Return the examples of files, in their order.

    Args:
        files: of JSON lines, see `read_line`; empty lines are skipped.
        samples: maximum number of lines of a "train" and of a "test" file, evenly spaced; None: all.

    Raises:
        DataError: a file cannot be read or is empty, or a line is invalid (names file and line).
    """
    examples: list[Example] = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"file '{file}' cannot be read: {error}") from error
        filled = [number for number, line in enumerate(lines) if line.strip()]
        if not filled:
            raise DataError(f"file '{file}' holds no lines")
        client, part = part_of(file)
        for k in spread_indices(len(filled), samples[part]):
            location = f"file '{file}', line {filled[k] + 1}"
            examples.append(read_line(lines[filled[k]], location, client, part == "test"))
    return examples


def read_line(line: str, location: str, client: str, test: bool) -> Example:
    """Return the example of a line.

    The line is an object with `instruction`, `output`, and optionally `client` and `category` or `task`.

    Args:
        line: the text.
        location: for messages.
        client: its client, unless the line names one.
        test: whether it is in the test part.

    Raises:
        DataError: the line is not such an object.
    """
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:  # also for thousands of digits or of nested brackets
        raise DataError(f"{location}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{location}: expected an object with 'instruction' and 'output', got {type(content).__name__}"
        )
    instruction, output = (_text(content, key, location) for key in ("instruction", "output"))
    given = {key: value for key, value in content.items() if value is not None}  # null: a missing cell
    domain, owner = given.get("category", given.get("task")), given.get("client", client)
    return Example(instruction, output, str(owner), None if domain is None else str(domain), test, location)


def _text(content: Mapping[str, Any], key: str, location: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not value.strip():
        have = (
            f"is {shown(value)}"
            if key in content
            else f"is missing; it has {', '.join(content) or 'nothing'}"
        )
        raise DataError(f"{location}: '{key}' should be a text, but {have}")
    return value


def split_options(instruction: str) -> tuple[str, list[str]]:
    """Return (the instruction without its list of options, the options), each option once and stripped.

    The list begins after the last "OPTIONS:"; each option begins on a new line with "- " and may span further lines.
    An empty line ends the list; the rest belongs to the instruction. Without options: the instruction and an empty
    list.
    """
    before, marker, after = instruction.rpartition(OPTIONS)
    listed, _, following = after.strip("\n").partition("\n\n")
    if not marker or not listed.startswith("- "):
        return instruction.strip(), []
    options = [option.strip() for option in f"\n{listed}".split("\n- ")[1:]]
    return f"{before.strip()}\n{following.strip()}".strip(), list(dict.fromkeys(options))


def kept_options(options: Sequence[str], right: str, slots: int) -> list[str]:
    """Return at most `slots` of the options, in their order: the right one, and evenly spaced wrong ones.

    Taking the first wrong ones would nearly always put the right one of a long list into the last slot.
    """
    if len(options) <= slots:
        return list(options)
    wrong = [option for option in options if option != right]
    chosen = {wrong[k] for k in spread_indices(len(wrong), slots - 1)} | {right}
    return [option for option in options if option in chosen]


class Rouge(NamedTuple):
    """Shares in [0, 1]."""

    precision: float
    recall: float
    f1: float


@functools.lru_cache(maxsize=1 << 16)  # the same few pairs of answers occur thousands of times
def rouge1(text: str, reference: str) -> Rouge:
    """Return ROUGE-1 of a text against a reference: the overlap of their words, each counted as often as in both.

    Lower case, no stemming, words of a-z and 0-9 (Lin, 2004, as the package rouge-score computes it). 0 if one of the
    two has no word.

    Raises:
        MissingExtraError: if rouge-score is not installed.
    """
    score = _scorer().score(reference, text)["rouge1"]
    return Rouge(float(score.precision), float(score.recall), float(score.fmeasure))


@functools.cache
def _scorer() -> Any:
    with needs_extra("rouge-score", "text"):
        from rouge_score.rouge_scorer import RougeScorer
    return RougeScorer(["rouge1"], use_stemmer=False)
