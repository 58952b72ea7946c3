"""What docs/advisor.md prints is what the advisor finds."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

import pytest
from blocks import ROOT, blocks, commands
from typer.testing import CliRunner

from tailorfl.cli.main import app

PAGE = ROOT / "docs" / "advisor.md"
NUMBER = re.compile(r"\d+\.?\d*")


def numbers(text: str) -> list[float]:
    return [float(found) for found in NUMBER.findall(text)]


def test_the_example_prints_what_the_page_shows() -> None:
    shown = next(block for block in blocks(PAGE) if block.language == "console")
    ((_, *arguments),) = commands(shown)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    printed = result.stdout.splitlines()
    first, last = (part.splitlines() for part in shown.text.partition("\n")[2].split("...\n"))
    assert len(first) >= 20
    assert len(last) > 10
    start = printed.index(first[0])
    assert first == printed[start : start + len(first)]
    assert last == printed[-len(last) :]


@pytest.mark.parametrize("position", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_table_is_the_scripts(script: Callable[[str], ModuleType], position: int) -> None:
    made = script("advisor_accuracy")
    table = PAGE.read_text(encoding="utf-8").split(made.BEGIN)[1].split(made.END)[0].splitlines()
    assert len(table) == 2 + len(made.CASES)
    row = " | ".join(made.row(*made.CASES[position]))
    assert numbers(table[2 + position]) == pytest.approx(numbers(row), rel=0.02, abs=0.011)
