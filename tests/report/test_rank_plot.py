"""The critical-difference diagram: places of ranks, bars over groups, and the same picture in three forms."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tailorfl.report.matrix import AXIS, TOP, Diagram, diagram, draw, svg, tikz

NAMES = ["a", "b & <c>", "d", "e", "f"]
RANKS = [3.0, 1.5, 5.0, 2.5, 3.0]


@pytest.fixture(scope="module")
def drawn() -> Diagram:
    return diagram(NAMES, RANKS, [(1, 3), (3, 0, 4)], 2.0)


def test_methods_hang_from_their_ranks_best_first_and_on_the_left(drawn: Diagram) -> None:
    scale, left = AXIS / 4, drawn.lines[0].x1
    named = {label.text: label for label in drawn.labels}
    assert named["b & <c> (1.50)"].anchor == "end"
    assert named["d (5.00)"].anchor == "start"
    for name, rank in zip(NAMES, RANKS, strict=True):
        label = named[f"{name} ({rank:.2f})"]
        falls = [n for n in drawn.lines if n.x1 == n.x2 == left + (rank - 1) * scale and n.y1 == TOP < n.y2]
        assert any(abs(n.y2 + 4 - label.y) < 1e-9 for n in falls), name
        assert 0 < label.y < drawn.height
    better = sorted((label for label in drawn.labels if label.anchor == "end"), key=lambda label: label.y)
    assert [label.text[0] for label in better] == ["b", "e", "a"]


def test_bars_reach_over_their_groups_and_the_difference_is_to_scale(drawn: Diagram) -> None:
    scale, left = AXIS / 4, drawn.lines[0].x1
    bars = [n for n in drawn.lines if n.width == 3.5]
    ends = [((n.x1 + 3 - left) / scale + 1, (n.x2 - 3 - left) / scale + 1) for n in bars]
    assert ends == [pytest.approx((1.5, 2.5)), pytest.approx((2.5, 3.0))]
    assert bars[0].y1 != bars[1].y1
    (length,) = [n.x2 - n.x1 for n in drawn.lines if n.width == 2 and n.y1 == n.y2]
    assert length == pytest.approx(2.0 * scale)


def test_it_is_the_same_picture_in_all_forms(drawn: Diagram, tmp_path: Path) -> None:
    image = ET.fromstring(svg(drawn, 'what "it" shows'))
    space = "{http://www.w3.org/2000/svg}"
    assert image.get("aria-label") == 'what "it" shows'
    assert [e.text for e in image.iter(f"{space}text")] == [label.text for label in drawn.labels]
    assert len(list(image.iter(f"{space}line"))) == len(drawn.lines)
    latex = tikz(drawn)
    assert latex.count(r"\draw") == len(drawn.lines)
    assert r"b \& \textless{}c\textgreater{} (1.50)" in latex
    assert latex.count("{") == latex.count("}")
    draw(drawn, tmp_path / "ranks.png")
    from PIL import Image

    with Image.open(tmp_path / "ranks.png") as picture:
        assert picture.width == pytest.approx(drawn.width / 72 * 150, abs=2)
    draw(drawn, tmp_path / "ranks.pdf")
    assert (tmp_path / "ranks.pdf").read_bytes().startswith(b"%PDF")


def test_long_names_have_room_on_both_sides() -> None:
    """A letter of DejaVu Sans, the widest of usual fonts, is 0.6 of its size wide on average."""
    names = ["m" * 60, "b", "n" * 50]
    drawn = diagram(names, [1.0, 2.0, 3.0], [], None)
    for label in (label for label in drawn.labels if label.text[0] in "mn"):
        reach = len(label.text) * 0.6 * 12 * (-1 if label.anchor == "end" else 1)
        assert 0 < label.x + reach < drawn.width
    short = diagram(["a", "b", "c"], [1.0, 2.0, 3.0], [], None)
    assert short.width < drawn.width
    assert short.lines[0].x2 - short.lines[0].x1 == drawn.lines[0].x2 - drawn.lines[0].x1 == AXIS
    assert len(diagram(["a"], [1.0], [], None).labels) == 2
