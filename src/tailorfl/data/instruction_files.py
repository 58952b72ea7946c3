"""Instructions and their answers out of JSON-lines files, and the options that an instruction lists."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailorfl.data.rows import spread_indices
from tailorfl.errors import DataError

OPTIONS = "OPTIONS:"
SUFFIXES = (".jsonl", ".json")
_PARTS = ("train", "test")


@dataclass(frozen=True)
class Example:
    """One line of a file.

    Attributes:
        instruction, output: what is asked, and the right answer.
        client: whose it is.
        domain: its task or category; None where the file names none.
        test: whether it is of the official test part.
        place: file and line, for messages.
    """

    instruction: str
    output: str
    client: str
    domain: str | None
    test: bool
    place: str


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
            f"'{root}' is neither a file of JSON lines nor a folder that holds any ({', '.join(SUFFIXES)})"
        )
    return files


def part_of(file: Path) -> tuple[str, str]:
    """(name without its part, part) of a file: ("snli", "test") of snli_test.jsonl; without suffix it is "train"."""
    name, _, part = file.stem.rpartition("_")
    return (name, part) if name and part in _PARTS else (file.stem, "train")


def read_examples(files: Sequence[Path], samples: Mapping[str, int | None]) -> list[Example]:
    """Return the examples of files, in their order.

    Args:
        files: of JSON lines, see `read_line`; empty lines are passed over.
        samples: at most so many of each file of the part "train" and "test", at even distances; None is all.

    Raises:
        DataError: a file cannot be read or is empty, or a line is not as it should be (names file and line).
    """
    examples: list[Example] = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
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

    An object with `instruction`, `output`, and if given `client` and `category` or `task`.

    Args:
        line: the text.
        location: for messages.
        client: whose it is unless the line says so.
        test: whether it is of the test part.

    Raises:
        DataError: it is no such object.
    """
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and as many brackets
        raise DataError(f"{location}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{location}: expected an object with 'instruction' and 'output', got {type(content).__name__}"
        )
    instruction, output = (_text(content, key, location) for key in ("instruction", "output"))
    domain = content.get("category", content.get("task"))
    owner = content.get("client", client)
    return Example(instruction, output, str(owner), None if domain is None else str(domain), test, location)


def _text(content: Mapping[str, Any], key: str, location: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not value.strip():
        have = f"is {value!r}" if key in content else f"is missing; it has {', '.join(content) or 'nothing'}"
        raise DataError(f"{location}: '{key}' should be a text, but {have}")
    return value


def split_options(instruction: str) -> tuple[str, list[str]]:
    """Return (the instruction without its options, the options) of one that lists them, each option once and stripped.

    The list begins after the last "OPTIONS:"; each option begins on a line of its own with "- " and may go on over
    further lines. An empty line ends the list, and what follows belongs to the instruction. No options: the
    instruction as it is, and an empty list.
    """
    before, marker, after = instruction.rpartition(OPTIONS)
    listed, _, following = after.strip("\n").partition("\n\n")
    if not marker or not listed.startswith("- "):
        return instruction.strip(), []
    options = [option.strip() for option in f"\n{listed}".split("\n- ")[1:]]
    return f"{before.strip()}\n{following.strip()}".strip(), list(dict.fromkeys(options))


def kept_options(options: Sequence[str], right: str, slots: int) -> list[str]:
    """At most `slots` of the options, in their order: the right one, and wrong ones at even distances.

    Taking the first wrong ones would put the right one of a long list into the last slot nearly always.
    """
    if len(options) <= slots:
        return list(options)
    wrong = [option for option in options if option != right]
    chosen = {wrong[k] for k in spread_indices(len(wrong), slots - 1)} | {right}
    return [option for option in options if option in chosen]
