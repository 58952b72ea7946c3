"""Every example of the documents runs: the blocks of one file in order, in one namespace and one folder.

Experiments are cut down to two rounds, one seed and few samples; the calls are those of the document.
"""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from blocks import ROOT, SHELL, Block, blocks, commands, file_of, lines, refuse, try_command, unquoted

import tailorfl
from tailorfl.errors import DataError
from tailorfl.runs import privacy
from tailorfl.runs.build import check
from tailorfl.settings.experiment import COMPARED
from tailorfl.settings.loading import load

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FIRST = ("README.md", "first-run.md")
"""Documents that are read first; those of the others are slow tests."""
RUN = tailorfl.run
EXTRAS = ("datasets",)
CODE = re.compile(r"^(import |from \w+ import |\$ tailorfl |\w+ = \w+\(|pip install )", re.MULTILINE)


def small_run(*arguments: Any, **settings: Any) -> tailorfl.ExperimentResult:
    """`tailorfl.run` with fewer rounds and seeds; the clients and methods are the document's."""
    if not settings.get("resume"):
        settings |= {"rounds": min(settings.get("rounds", 2), 2), "seeds": 1}
    return RUN(*arguments, **settings)


def some_noise(target: float, delta: float, entries: Any, accountant: str) -> float:
    """Noise without a search for a wanted ε: that it is the right one is tested with the settings."""
    return 2.0


def uses_missing_extra(text: str) -> bool:
    """Whether an example needs an optional package that is not installed here."""
    return any(f"import {name}" in text and find_spec(name) is None for name in EXTRAS)


@pytest.mark.parametrize(
    "document",
    [pytest.param(d, marks=[] if d.name in FIRST else [pytest.mark.slow]) for d in DOCUMENTS],
    ids=lambda path: path.name,
)
@pytest.mark.usefixtures("a_quick_estimate")
def test_examples_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tailorfl, "run", small_run)
    monkeypatch.setattr(privacy, "noise_for", some_noise)  # the search takes seconds
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    namespace: dict[str, Any] = {"__name__": "__example__"}
    printed = ""
    for before, block in pairwise([Block("", "", 0), *blocks(document)]):
        place = f"{document.name}, block at line {block.line}"
        if block.left is not None or (block.language == "python" and uses_missing_extra(block.text)):
            continue
        if (file := file_of(block)) is not None:
            Path(file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            with redirect_stdout(StringIO()) as out:
                exec(compile(block.text, place, "exec", dont_inherit=True), namespace)
            printed = out.getvalue()
        elif block.language == "console" and "\nerror:" in block.text:
            refuse(block)
        elif block.language == "console":
            for words in commands(block):
                try_command(words)
        elif block.language == "yaml":
            loaded_and_checked(block)
        elif block.language == "text" and before.language == "python":
            assert block.text == printed, f"{place} shows what the code before it does not print"


def loaded_and_checked(block: Block) -> None:
    """Settings that are shown without a file's name are settings, too."""
    Path("shown.yaml").write_text(block.text, encoding="utf-8")
    try:
        check(load("shown.yaml", [], methods=COMPARED))
    except DataError as error:
        if "TAILORFL_DATA" not in str(error):  # else data that are not on this machine
            raise


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_is_tried_or_says_why_not(document: Path) -> None:
    """Code stands in blocks that are run; a shell takes every command as it is written, zsh too."""
    fences = re.findall(r"^.*```", document.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(blocks(document)), "a fence that does not stand at the beginning of a line"
    for block in blocks(document):
        place = f"{document.name}, block at line {block.line}"
        assert block.language in ("console", "python", "yaml", "toml", "text", "bibtex", "bash"), place
        assert block.language != "bash" or block.left, (
            f"{place}: a script, which nothing here runs, says why not"
        )
        if block.language == "console":
            assert list(commands(block)), f"{place}: no line begins with $"
            assert not [line for line in lines(block) if SHELL.search(unquoted(line))], place
        if block.language == "text":
            assert not CODE.search(block.text), f"{place} holds code: make it python, or console"
