"""Every example of the documents runs: the blocks of one file in order, in one namespace and one folder.

Experiments are cut down to two rounds, one seed and few samples; the calls are those of the document.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from blocks import ROOT, blocks, commands, file_of, try_command

import tailorfl

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
RUN = tailorfl.run
EXTRAS = ("datasets",)


def small_run(*arguments: Any, **settings: Any) -> tailorfl.ExperimentResult:
    """`tailorfl.run` with fewer rounds and seeds; the clients and methods are the document's."""
    if not settings.get("resume"):
        settings |= {"rounds": min(settings.get("rounds", 2), 2), "seeds": 1}
    return RUN(*arguments, **settings)


def uses_missing_extra(text: str) -> bool:
    """Whether an example needs an optional package that is not installed here."""
    return any(f"import {name}" in text and find_spec(name) is None for name in EXTRAS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tailorfl, "run", small_run)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    namespace: dict[str, Any] = {"__name__": "__example__"}
    for block in blocks(document):
        if (file := file_of(block)) is not None:
            Path(file).write_text(block.text, encoding="utf-8")
        elif block.language == "python" and uses_missing_extra(block.text):
            continue
        elif block.language == "python":
            place = f"{document.name}, block at line {block.line}"
            exec(compile(block.text, place, "exec", dont_inherit=True), namespace)
        elif block.language == "console":
            for words in commands(block):
                try_command(words)
