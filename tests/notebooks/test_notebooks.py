"""The notebooks are valid, small and free of mistakes, and show what this code calculates."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from scripts import loaded

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
SECONDS = re.compile(r"\d[\d.]* (?:s|min)\b")
WIDTH = re.compile(r"[\s─━\ufffd]+")  # where a command's output is read in pieces, one may end within a sign
TRAINS = re.compile(r"tailorfl\.(run|compare|tune|export)\(|^!tailorfl", re.MULTILINE)
LARGEST = 300_000
"""Bytes of a notebook, which a reader's browser shows and every clone carries."""

each = pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each
def test_a_notebook_is_valid_and_its_cells_parse(file: Path) -> None:
    notebook = nbformat.read(file, 4)
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        ast.parse(TransformerManager().transform_cell(cell.source))
    first = code_cells(notebook)[0].source
    assert 'find_spec("tailorfl") is None' in first, "the first cell installs what is missing, and only that"
    assert f"/notebooks/{file.name})" in notebook.cells[0].source, "the badge opens this notebook"


@each
def test_a_notebook_has_small_outputs_a_picture_and_no_error(file: Path) -> None:
    assert file.stat().st_size < LARGEST
    notebook = nbformat.read(file, 4)
    outputs = [out for cell in code_cells(notebook) for out in cell.outputs]
    assert {out.output_type for out in outputs} <= {"stream", "display_data", "execute_result"}
    assert not [out for out in outputs if out.get("name") == "stderr"]
    assert [out for out in outputs if "image/png" in out.get("data", {})]
    assert [cell.execution_count for cell in code_cells(notebook)] == list(
        range(1, len(code_cells(notebook)) + 1)
    )
    assert str(Path.home()) not in "".join(texts(notebook))


def texts(notebook: Any) -> Iterator[str]:
    """What every output says in words and numbers; a picture says nothing, and neither does its memory address."""
    for cell in code_cells(notebook):
        # What a command prints comes in one piece or in several, as busy as the machine is.
        yield "".join(shown(out) + ("" if out.output_type == "stream" else "\n") for out in cell.outputs)


def shown(out: Any) -> str:
    data = out.get("data", {})
    return str(out.get("text", "") if not data else "" if "image/png" in data else data.get("text/plain", ""))


def same(found: str, kept: str) -> bool:
    """Whether two texts have the same words, and numbers that differ by what other processors' rounding makes."""
    found, kept = SECONDS.sub("", found), SECONDS.sub("", kept)
    if WIDTH.sub(" ", NUMBER.sub("#", found)) != WIDTH.sub(" ", NUMBER.sub("#", kept)):
        return False
    pairs = zip(map(float, NUMBER.findall(found)), map(float, NUMBER.findall(kept)), strict=True)
    return all(abs(a - b) <= 0.03 + 0.05 * abs(b) for a, b in pairs)


def test_texts_are_compared_by_words_and_by_numbers() -> None:
    assert same("mean 0.88  of 20 in 1.2 s", "mean 0.87 of 20 in 3 s")
    assert not same("mean 0.88 of 20", "mean 0.75 of 20")
    assert not same("mean 0.88", "worst 0.88")
    assert same("└──\ufffd\ufffd──┘", "└─────┘")


@each
def test_outputs_before_anything_trains_are_of_this_code(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    notebook = nbformat.read(file, 4)
    quick = list(takewhile(lambda cell: not TRAINS.search(cell.source), code_cells(notebook)))
    assert len(quick) > 1
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in quick:
        with redirect_stdout(StringIO()) as out:
            exec(compile(TransformerManager().transform_cell(cell.source), file.name, "exec"), namespace)
        kept = "".join(out.text for out in cell.outputs if out.output_type == "stream")
        assert same(out.getvalue().strip(), kept.strip()), cell.source


@pytest.fixture(scope="module")
def refresh() -> ModuleType:
    return loaded("notebooks/refresh.py")


@pytest.mark.slow
@each
def test_a_notebook_runs_and_shows_what_it_has(file: Path, refresh: ModuleType) -> None:
    found, kept = refresh.executed(file), nbformat.read(file, 4)
    for cell, now, before in zip(code_cells(kept), texts(found), texts(kept), strict=True):
        assert same(now, before), (
            f"run notebooks/refresh.py; this cell says\n{now}\ninstead of\n{before}\n{cell.source}"
        )
