"""The critical-difference diagram: places of ranks, bars over groups, and the same picture in three forms."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tailorfl.report.rank_plot import LEFT, RIGHT, TOP, WIDTH, Diagram, diagram, png, svg, tikz

NAMES = ["a", "b & <c>", "d", "e", "f"]
RANKS = [3.0, 1.5, 5.0, 2.5, 3.0]


@pytest.fixture(scope="module")
def drawn() -> Diagram:
    return diagram(NAMES, RANKS, [(1, 3), (3, 0, 4)], 2.0)


def test_methods_hang_from_their_ranks_best_first_and_on_the_left(drawn: Diagram) -> None:
    scale = (RIGHT - LEFT) / 4
    named = {label.text: label for label in drawn.labels}
    assert named["b & <c> (1.50)"].anchor == "end"
    assert named["d (5.00)"].anchor == "start"
    for name, rank in zip(NAMES, RANKS, strict=True):
        label = named[f"{name} ({rank:.2f})"]
        falls = [
            n for n in drawn.lines if n.x1 == n.x2 == LEFT + (rank - 1) * scale and n.y1 == TOP and n.y2 > TOP
        ]
        assert any(abs(n.y2 + 4 - label.y) < 1e-9 for n in falls), name
        assert 0 < label.y < drawn.height
    left = sorted((label for label in drawn.labels if label.anchor == "end"), key=lambda label: label.y)
    assert [label.text[0] for label in left] == ["b", "e", "a"]


def test_bars_reach_over_their_groups_and_the_difference_is_to_scale(drawn: Diagram) -> None:
    scale = (RIGHT - LEFT) / 4
    bars = [n for n in drawn.lines if n.width == 3.5]
    ends = [((n.x1 + 3 - LEFT) / scale + 1, (n.x2 - 3 - LEFT) / scale + 1) for n in bars]
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
    assert r"b \& <c> (1.50)" in latex
    assert latex.count("{") == latex.count("}")
    png(drawn, tmp_path / "ranks.png")
    from PIL import Image

    with Image.open(tmp_path / "ranks.png") as picture:
        assert picture.width == pytest.approx(WIDTH / 72 * 150, abs=2)


def test_one_method_and_no_difference_still_have_a_picture() -> None:
    assert len(diagram(["a"], [1.0], [], None).labels) == 2
