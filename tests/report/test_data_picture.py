"""The picture of a federation shows its numbers: bars are sizes, cells are shares, names stand beside their rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from tailorfl.data.build import build
from tailorfl.data.overview import Overview, overview
from tailorfl.errors import ConfigError
from tailorfl.report import plots
from tailorfl.report.plots import draw_federation


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures as they are saved, without painting them."""
    figures: list[Figure] = []

    def savefig(figure: Figure, path: Path, **options: Any) -> None:
        figures.append(figure)
        Path(path).write_bytes(b"painted")

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def bars(figure: Figure) -> dict[str, tuple[list[float], list[float]]]:
    """Where the bars of each part begin and how long they are, from the top."""
    axes = figure.axes[1]
    return {
        str(held.get_label()): ([bar.get_x() for bar in held], [bar.get_width() for bar in held])
        for held in axes.containers
    }


@pytest.fixture(scope="module")
def found() -> Overview:
    return overview(build(samples=300, clients=4, heldout_clients=1, seed=0))


def test_bars_are_the_sizes_of_the_parts_end_to_end_and_cells_the_shares(
    found: Overview, drawn: list[Figure], tmp_path: Path
) -> None:
    draw_federation(found, tmp_path / "all.png")
    (figure,) = drawn
    train, val, test = (found.sizes[part].astype(float) for part in ("train", "val", "test"))
    ends = {"train": (0 * train, train), "validation": (train, val), "test": (train + val, test)}
    assert bars(figure) == {part: (start.tolist(), size.tolist()) for part, (start, size) in ends.items()}
    cells = figure.axes[0]
    np.testing.assert_array_equal(cells.images[0].get_array(), found.shares)
    assert cells.images[0].get_clim() == (0, found.shares.max())
    assert cells.images[0].colorbar is not None, "a key to the colours"
    assert [label.get_text() for label in cells.get_xticklabels()] == list(found.cells)
    assert [label.get_text() for label in cells.get_yticklabels()] == list(found.clients)
    low, high = cells.get_ylim()
    assert low > high, "the first client on top"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(ends)


def test_of_many_clients_some_are_drawn_from_large_to_small(
    found: Overview, drawn: list[Figure], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "MOST_CLIENTS", 3)
    monkeypatch.setattr(plots, "MOST_NAMES", 2)
    draw_federation(found, tmp_path / "some.svg")
    ranked = np.sort(found.sizes["train"])[::-1]
    assert bars(drawn[0])["train"][1] == ranked[[0, len(ranked) // 2, -1]].tolist()
    assert drawn[0].axes[0].get_yticks().tolist() == []
    with pytest.raises(ConfigError, match=r"some\.gif"):
        draw_federation(found, tmp_path / "some.gif")


def test_names_of_clients_do_not_touch(drawn: list[Figure], tmp_path: Path) -> None:
    clients = plots.MOST_NAMES
    draw_federation(overview(build(samples=10 * clients, clients=clients, seed=0)), tmp_path / "all.png")
    drawn[0].canvas.draw()
    names = [label.get_window_extent() for label in drawn[0].axes[0].get_yticklabels()]
    assert len(names) == clients
    assert not any(upper.overlaps(lower) for upper, lower in pairwise(names))
