"""Plots: valid pictures that show every line in its colour, from the data as they come."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from PIL import Image

from tailorfl.errors import RunError
from tailorfl.report import plots

LABELS = ("LocalTrain", "FedAvg", "FedAvg+FT", "Ditto")
T = 4.302653
"""t(0.975, 2 degrees of freedom), from a printed table."""


@pytest.fixture
def quick_pictures() -> None:
    """Here pictures are painted."""


def rounds_frame(labels: tuple[str, ...] = LABELS, seeds: int = 3) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = []
    for number, label in enumerate(labels):
        for seed in range(seeds):
            for round in range(1, 41):
                value = 0.55 + 0.1 * number - 0.4 * np.exp(-round / (6 + number)) + rng.normal(0, 0.01)
                sent = 0 if label == "LocalTrain" else round * 10.0 ** (5 + number)
                rows.append((label, seed, round, sent, value if round % 2 else np.nan))
    return pd.DataFrame(rows, columns=["label", "seed", "round", "bytes", "accuracy"])


def clients_frame() -> pd.DataFrame:
    rng = np.random.default_rng(1)
    values = {label: rng.beta(4 + 2 * number, 2, 60) for number, label in enumerate(LABELS)}
    return pd.DataFrame(values).melt(var_name="label", value_name="accuracy")


Plot = Callable[..., None]
PLOTS: list[tuple[Plot, Callable[[], pd.DataFrame]]] = [
    (plots.metric_per_round, rounds_frame),
    (plots.client_distribution, clients_frame),
    (plots.metric_by_bytes, rounds_frame),
]


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def share_of(picture: np.ndarray, colour: str) -> float:
    target = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    return float((np.abs(picture - target).max(axis=2) < 12).mean())


@pytest.fixture
def axes_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`axes_of(plot, frame, metric=...)` are the axes of a plot that is not written."""

    def draw(plot: Plot, frame: pd.DataFrame, **options: Any) -> Any:
        drawn: list[Any] = []
        monkeypatch.setattr(plots, "_save", lambda figure, axes, path: drawn.append(axes))
        plot(frame, tmp_path / "plot.png", **options)
        return drawn[0]

    return draw


@pytest.mark.parametrize(("plot", "frame"), PLOTS)
def test_picture_shows_every_label_in_its_colour(
    tmp_path: Path, plot: Plot, frame: Callable[[], pd.DataFrame]
) -> None:
    plot(frame(), tmp_path / "plot.png")
    picture = pixels(tmp_path / "plot.png")
    assert picture.shape[0] > 400
    assert picture.shape[1] > 1000
    for colour in plots.COLOURS[: len(LABELS)]:
        assert share_of(picture, colour) > 1e-4, colour
    assert share_of(picture, plots.COLOURS[len(LABELS)]) < 1e-5
    assert os.listdir(tmp_path) == ["plot.png"]


def test_more_labels_than_colours_stay_apart(axes_of: Callable[..., Any]) -> None:
    labels = tuple(f"method {k}" for k in range(2 * len(plots.COLOURS)))
    lines = axes_of(plots.metric_by_bytes, rounds_frame(labels, seeds=1)).get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(labels)


@pytest.mark.parametrize(("suffix", "begin"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_same_data_same_picture_in_the_format_of_the_suffix(
    tmp_path: Path, suffix: str, begin: bytes
) -> None:
    files = [tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix.upper()}"]
    for file in files:
        plots.client_distribution(clients_frame(), file)
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert first.startswith(begin)
    assert b"/Type3" not in first, "journals take no fonts of this kind"
    assert b"Date" not in first


WIDE = T * np.sqrt((4 + 1 + 9) / 2) / np.sqrt(3)
"""The half width of the interval of 1, 2 and 6."""
NARROW = T * 0.05 / np.sqrt(3)


@pytest.mark.parametrize(
    ("metric", "values", "ends"),
    [
        ("mse", ([1.0, 2.0, 6.0], [4.0, 4.0, 4.0]), ((3 - WIDE, 3 + WIDE), (4.0, 4.0))),
        ("mse", ([0.9, 0.95, 1.0], [0.0, 0.05, 0.1]), ((0.95 - NARROW, 0.95 + NARROW), (0.05 - NARROW, 0.05 + NARROW))),
        # no share is below 0 or above 1
        ("auc", ([0.9, 0.95, 1.0], [0.0, 0.05, 0.1]), ((0.95 - NARROW, 1.0), (0.0, 0.05 + NARROW))),
        ("accuracy", ([0.9, 0.95, 1.0], [0.0, 0.05, 0.1]), ((0.95 - NARROW, 1.0), (0.0, 0.05 + NARROW))),
    ],
)  # fmt: skip
def test_the_band_is_students_interval_of_95_percent(
    metric: str, values: Any, ends: Any, axes_of: Callable[..., Any]
) -> None:
    rows = [("a", seed, r, v) for r, of_round in enumerate(values, 1) for seed, v in enumerate(of_round)]
    frame = pd.DataFrame(rows, columns=["label", "seed", "round", metric])
    axes = axes_of(plots.metric_per_round, frame, metric=metric)
    (line,) = axes.get_lines()
    np.testing.assert_allclose(line.get_xydata(), [(r, np.mean(v)) for r, v in enumerate(values, 1)])
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    heights = [corners[corners[:, 0] == r, 1] for r in (1, 2)]
    np.testing.assert_allclose([(h.min(), h.max()) for h in heights], ends, rtol=1e-6, atol=1e-9)
    ticks = axes.get_xticks()
    assert (ticks == ticks.round()).all(), "rounds are whole"


def test_the_box_is_the_quartiles_and_the_whiskers_are_the_tails(axes_of: Callable[..., Any]) -> None:
    """Of 0, 1, ..., 99 and 200 the q-th percentile is q, and the mean is (4950 + 200) / 101."""
    frame = pd.DataFrame({"label": "a", "mse": [*range(100), 200]}).sample(frac=1, random_state=0)
    axes = axes_of(plots.client_distribution, frame, metric="mse")
    (box,) = axes.patches
    assert (box.get_x(), box.get_x() + box.get_width()) == pytest.approx((25, 75))
    assert box.get_y() + box.get_height() / 2 == pytest.approx(0)
    dots, whiskers, median = axes.collections
    assert sorted(dots.get_offsets()[:, 0]) == [*range(100), 200]
    assert np.abs(dots.get_offsets()[:, 1]).max() < box.get_height() / 2
    ends = sorted(tuple(segment[:, 0]) for segment in whiskers.get_segments())
    np.testing.assert_allclose(ends, [(5, 25), (75, 95)])
    np.testing.assert_allclose([segment[:, 0] for segment in median.get_segments()], [(50, 50)])
    (diamond,) = axes.get_lines()
    assert diamond.get_xdata()[0] == pytest.approx(5150 / 101)


def test_bytes_are_the_mean_over_seeds_and_silence_is_a_level(axes_of: Callable[..., Any]) -> None:
    rows = [("a", seed, r, r * 1000 * (seed + 1), r + seed) for r in (1, 2) for seed in (0, 1)]
    rows += [("b", 0, r, 0, 10.0 * r) for r in (1, 2)]
    frame = pd.DataFrame(rows, columns=["label", "seed", "round", "bytes", "mse"])
    axes = axes_of(plots.metric_by_bytes, frame, metric="mse")
    line, level = axes.get_lines()
    np.testing.assert_allclose(line.get_xydata(), [(1500, 1.5), (3000, 2.5)])
    np.testing.assert_allclose(level.get_ydata(), [20, 20])
    assert level.get_label() == "b (no communication)"
    assert axes.get_xlabel().startswith("bytes sent")


@pytest.mark.parametrize(
    ("metric", "name", "texts"),
    [
        ("accuracy", "accuracy in %", ("50", "50.0")),
        ("auc", "AUC in %", ("50", "50.0")),
        ("brier", "brier", ("0.5", "0.50")),
    ],
)
def test_shares_are_shown_in_percent_and_other_metrics_as_they_are(
    metric: str, name: str, texts: tuple[str, str], axes_of: Callable[..., Any]
) -> None:
    row = pd.DataFrame({"label": ["a"], "seed": [0], "round": [1], metric: [0.5]})
    rounds, clients = (axes_of(plot, row, metric=metric) for plot, _ in PLOTS[:2])
    for axis in (rounds.yaxis, clients.xaxis):
        assert axis.get_major_formatter().format_ticks([0.25, 0.5])[1] in texts
        assert axis.get_label_text().split(" (")[0] == name


@pytest.mark.parametrize(("plot", "frame"), PLOTS)
def test_what_cannot_be_plotted_or_written_is_a_run_error(
    tmp_path: Path, plot: Plot, frame: Callable[[], pd.DataFrame]
) -> None:
    with pytest.raises(RunError, match="accuracy"):
        plot(frame().assign(accuracy=np.nan), tmp_path / "plot.png")
    with pytest.raises(RunError, match="auc"):
        plot(frame(), tmp_path / "plot.png", metric="auc")
    with pytest.raises(RunError, match=r"absent/plot\.png"):
        plot(frame(), tmp_path / "absent" / "plot.png")
    assert not os.listdir(tmp_path)


def test_one_client_one_round_one_seed(tmp_path: Path) -> None:
    row = pd.DataFrame({"label": ["a"], "seed": [0], "round": [1], "bytes": [10], "mse": [2.5]})
    for plot, _ in PLOTS:
        plot(row, tmp_path / "plot.png", metric="mse")
        inside = pixels(tmp_path / "plot.png")[60:-120, 250:-250]  # without title, ticks and labels
        assert inside.min() < 100


IMPORTS = """
import sys
import tailorfl.evaluation.metrics, tailorfl.evaluation.comparisons, tailorfl.evaluation.summary
import tailorfl.report.plots, tailorfl.runs.store, tailorfl.report.tables
heavy = {"torch", "pandas", "matplotlib", "sklearn", "scipy", "rich", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
import pandas
tailorfl.report.plots.client_distribution(pandas.DataFrame({"label": ["a"], "accuracy": [1.0]}), sys.argv[1])
assert not {"matplotlib.pyplot", "torch"} & set(sys.modules)
"""


def test_heavy_packages_load_when_needed_and_pyplot_never(tmp_path: Path) -> None:
    words = [sys.executable, "-c", IMPORTS, tmp_path / "plot.png"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_long_labels_are_folded_and_never_cut(axes_of: Callable[..., Any]) -> None:
    label = "Ditto " + "lam=0.25 " * 12 + "x" * 70
    frame = clients_frame()
    long, short = (axes_of(plots.client_distribution, f) for f in (frame.replace({"Ditto": label}), frame))
    text = long.get_yticklabels()[3].get_text()
    assert text.replace("\n", "").replace(" ", "") == f"{label}n=60".replace(" ", "")
    assert max(map(len, text.splitlines())) <= plots.LONGEST_LINE
    added = long.figure.get_figheight() - short.figure.get_figheight()
    assert added == pytest.approx((text.count("\n") + 1) * plots.LINE_HEIGHT - 0.55)


@pytest.fixture
def figure_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`figure_of(plot, frame)` is a figure as it is laid out to be saved; a layout that fails only warns."""

    def draw(plot: Plot, frame: pd.DataFrame) -> Any:
        figures: list[Any] = []
        monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
        plot(frame, tmp_path / "plot.png")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figures[0].canvas.draw()
        return figures[0]

    return draw


@pytest.mark.parametrize("plot", [plots.metric_per_round, plots.metric_by_bytes])
def test_many_labels_leave_room_for_the_lines(plot: Plot, figure_of: Callable[..., Any]) -> None:
    """A legend higher than the figure would squeeze them away."""
    few, many = (
        figure_of(plot, rounds_frame(tuple(f"method {i}" for i in range(n)), seeds=1)).axes[0].bbox
        for n in (4, 40)
    )
    assert many.width >= few.width - 1
    assert many.height == pytest.approx(few.height, abs=1)


@pytest.mark.parametrize(
    ("plot", "frame", "label"),
    [
        pytest.param(*kind, label, marks=[] if k == n else pytest.mark.slow)
        for k, kind in enumerate(PLOTS)
        for n, label in enumerate(["Ditto", "W" * 60, "alone " * 10])
    ],
)
def test_no_text_of_a_picture_lies_outside_of_it(
    plot: Plot, frame: Callable[[], pd.DataFrame], label: str, figure_of: Callable[..., Any]
) -> None:
    figure = figure_of(plot, frame().replace({"Ditto": label}))
    paper = figure.bbox.padded(1)
    (axes,) = figure.axes
    texts = [text for text in figure.findobj(Text) if text not in axes.get_xticklabels(which="both")]
    boxes = {text.get_text(): text.get_window_extent() for text in texts}
    assert [text for text, box in boxes.items() if not (paper.x0 <= box.x0 and box.x1 <= paper.x1)] == []
    assert axes.get_window_extent().width > 4 * figure.dpi, "room for the lines"


def test_labels_are_shown_as_they_are_and_never_read_as_formulas(tmp_path: Path) -> None:
    labels = dict(zip(LABELS, ("[/x] $a$", r"$\frac{$", "50 $", "_{"), strict=True))
    for plot, frame in PLOTS:
        plot(frame().replace({"label": labels}), tmp_path / "plot.png")
        assert pixels(tmp_path / "plot.png").shape[0] > 400
