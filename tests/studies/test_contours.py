"""Lines of equal height: where they are drawn, what is marked, and what cannot be drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from studies.landscape import LEVELS, contours
from tailorfl.errors import RunError

A, B = np.linspace(-2, 2, 41), np.linspace(-1, 3, 41)
BOWL = A[None, :] ** 2 + (B[:, None] - 1) ** 2
"""[b, a], lowest at a = 0, b = 1, and 8 in the corners."""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures as they are saved."""
    figures: list[Figure] = []
    real = Figure.savefig

    def savefig(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        real(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def test_lines_lie_where_the_height_is_theirs_denser_towards_the_lowest_point(
    drawn: list[Figure], tmp_path: Path
) -> None:
    """Levels are 1 % to 100 % of the height of 8, each a fixed multiple of the one before; radii are their roots."""
    contours(A, B, BOWL, {"w": (0.5, 1.5), "v": (-1.0, 0.0)}, tmp_path / "plot.png", title="A bowl")
    (axes,) = drawn[0].axes
    lines = axes.collections[0]
    levels = np.asarray(lines.get_array())
    assert len(levels) == LEVELS
    np.testing.assert_allclose([levels[0], levels[-1]], [0.08, 8.0])
    np.testing.assert_allclose(levels[1:] / levels[:-1], 100 ** (1 / (LEVELS - 1)))
    for level, path in zip(levels, lines.get_paths(), strict=True):
        if level < 3.9:  # a whole circle within the picture
            radius = np.linalg.norm(path.vertices - [0.0, 1.0], axis=1)
            np.testing.assert_allclose(radius, np.sqrt(level), atol=0.03)
    marks = {str(line.get_label()): (line.get_xdata()[0], line.get_ydata()[0]) for line in axes.get_lines()}
    assert marks == {"w": (0.5, 1.5), "v": (-1.0, 0.0)}
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == list(marks)
    assert axes.get_aspect() == 1.0
    assert axes.get_title() == "A bowl"
    with Image.open(tmp_path / "plot.png") as image:
        assert image.format == "PNG"
        assert image.size == (960, 810)


def test_what_is_not_finite_counts_as_the_highest(drawn: list[Figure], tmp_path: Path) -> None:
    broken = BOWL.copy()
    broken[0, 0] = np.nan
    broken[-1, -1] = np.inf
    contours(A, B, broken, {}, tmp_path / "plot.png", title="")
    levels = np.asarray(drawn[0].axes[0].collections[0].get_array())
    np.testing.assert_allclose(levels[-1], 8.0)
    with pytest.raises(RunError, match="no loss on the grid is finite"):
        contours(A, B, np.full_like(BOWL, np.nan), {}, tmp_path / "none.png", title="")
    assert not (tmp_path / "none.png").exists()


def test_a_plain_of_one_height_is_drawn_all_the_same(drawn: list[Figure], tmp_path: Path) -> None:
    contours(A, B, np.ones_like(BOWL), {}, tmp_path / "plot.png", title="of one height " * 20)
    assert (tmp_path / "plot.png").is_file()
    assert drawn[0].axes[0].title.get_wrap()  # else a long one leaves the picture
