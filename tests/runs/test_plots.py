"""Plots: valid pictures that show every line in its colour, from the data as they come."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from tailorfl.errors import RunError
from tailorfl.runs import plots

LABELS = ("LocalTrain", "FedAvg", "FedAvg+FT", "Ditto")


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


PLOTS = [
    (plots.metric_per_round, rounds_frame),
    (plots.client_distribution, clients_frame),
    (plots.metric_by_bytes, rounds_frame),
]
Plot = Callable[..., None]


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        image.verify()
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def share_of(picture: np.ndarray, colour: str) -> float:
    target = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    return float((np.abs(picture - target).max(axis=2) < 12).mean())


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


def test_more_labels_than_colours_stay_apart() -> None:
    count = 2 * len(plots.COLOURS)
    looks = {(plots._colour(number), plots.DASHES[number // len(plots.COLOURS)]) for number in range(count)}
    assert len(looks) == count


def test_band_is_drawn_for_several_seeds_only(tmp_path: Path) -> None:
    def faint_pixels(seeds: int) -> int:
        plots.metric_per_round(rounds_frame(("a",), seeds), tmp_path / "plot.png")
        picture = pixels(tmp_path / "plot.png")
        mixed = 255 - 0.18 * (
            255 - np.array([0x00, 0x72, 0xB2])
        )  # the first colour at the band's opacity on white
        return int((np.abs(picture - mixed).max(axis=2) < 3).sum())

    assert faint_pixels(3) > 500
    assert faint_pixels(1) < 50


def test_same_data_same_picture(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        plots.client_distribution(clients_frame(), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize(("plot", "frame"), PLOTS)
def test_nothing_to_plot_is_an_error(tmp_path: Path, plot: Plot, frame: Callable[[], pd.DataFrame]) -> None:
    with pytest.raises(RunError, match="no row has a value"):
        plot(frame().assign(accuracy=np.nan), tmp_path / "plot.png")
    with pytest.raises(RunError, match="column auc is missing"):
        plot(frame(), tmp_path / "plot.png", metric="auc")
    assert not os.listdir(tmp_path)


def test_unwritable_picture_is_a_run_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"absent/plot\.png.*check the name"):
        plots.client_distribution(clients_frame(), tmp_path / "absent" / "plot.png")


def test_one_client_one_round_one_seed(tmp_path: Path) -> None:
    row = pd.DataFrame({"label": ["a"], "seed": [0], "round": [1], "bytes": [10], "mse": [2.5]})
    for plot, _ in PLOTS:
        plot(row, tmp_path / "plot.png", metric="mse", title="A title")
        picture = pixels(tmp_path / "plot.png")
        inside = picture[60:-120, 250:-250]  # without title, ticks and labels: the mark itself
        assert inside.min() < 100


IMPORTS = """
import sys
import warnings
import tailorfl.evaluation.metrics, tailorfl.evaluation.seeds, tailorfl.evaluation.summary
import tailorfl.runs.plots, tailorfl.runs.store, tailorfl.runs.tables
heavy = {"torch", "pandas", "matplotlib", "sklearn", "scipy", "rich", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
import pandas
tailorfl.runs.plots.client_distribution(pandas.DataFrame({"label": ["a"], "accuracy": [1.0]}), sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules
assert "torch" not in sys.modules
"""


def test_heavy_packages_load_when_needed_and_pyplot_never(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, tmp_path / "plot.png"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_many_labels_leave_room_for_the_lines(tmp_path: Path) -> None:
    """A legend higher than the figure would squeeze them away; matplotlib then only warns."""
    many = rounds_frame(tuple(f"method {i}" for i in range(40)), seeds=1)
    for plot in (plots.metric_per_round, plots.metric_by_bytes):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plot(many, tmp_path / "many.png")
