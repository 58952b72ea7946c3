"""Small data files in the formats that sources read, so that their tests run where the real files are not.

A test that takes `files_of` runs twice: on the real files, where they are, and on these.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

CENTRES = {"cleveland": (41, 20), "hungarian": (30, 3), "switzerland": (18, 2), "va": (25, 11)}
"""Heart: complete patients of each centre, and how many of them are well; with 2 no class can be in both parts."""
REGIONS = (9, 7, 6, 5, 5, 4)
SCHOOLS = (12, 7, 9, 15, 11)


LARGE = pytest.param("real", marks=pytest.mark.slow)
"""A real file that takes long to read."""


def data_of(make: Callable[[Path], None], file: str, real: Any = "real") -> Any:
    """Return a fixture: the data folder, real and small, of a test; `real` is `LARGE` for a large real file."""

    @pytest.fixture(params=[real, "twin"])
    def files(request: pytest.FixtureRequest) -> Path:
        return files_of(request, make, file)

    return files


def files_of(request: pytest.FixtureRequest, make: Callable[[Path], None], file: str) -> Path:
    """Return the data folder of a test with the parameter "real" or "twin"; skip it where the real file is not.

    Args:
        request: of the fixture.
        make: writes the twin into a folder.
        file: one of the real files.
    """
    if request.param == "real":
        found: Path = request.getfixturevalue("need_data")(file)
        return found.parents[file.count("/")]
    folder: Path = request.getfixturevalue("tmp_path") / "data"
    (folder / file).parent.mkdir(parents=True)
    make(folder)
    request.getfixturevalue("monkeypatch").setenv("TAILORFL_DATA", str(folder))
    return folder


def heart(folder: Path) -> None:
    """Patients of four centres; cells are missing in columns that are dropped, and in rows that are."""
    rng = np.random.default_rng(0)
    for centre, (count, well) in CENTRES.items():
        lines = []
        for number in range(count + 4):
            row: list[Any] = [
                rng.integers(30, 75), rng.integers(0, 2), rng.integers(1, 5), rng.integers(80, 210),
                0 if centre == "switzerland" else rng.integers(120, 500), rng.integers(0, 2), rng.integers(0, 3),
                rng.integers(60, 200), rng.integers(0, 2), round(float(rng.random() * 5), 1),
                "?", rng.integers(0, 4), "?", 0 if number < well else rng.integers(1, 5),
            ]  # fmt: skip
            if number >= count:
                row[number % 8] = "?"
            lines.append(row)
        order = rng.permutation(len(lines))
        text = "\n".join(",".join(map(str, lines[k])) for k in order)
        (folder / f"flamby/processed.{centre}.data").write_text(text + "\n")


def heart_rows(folder: Path, centre: str) -> tuple[np.ndarray, np.ndarray]:
    """(features of the complete patients of a centre as the protocol encodes them, the last column), in file order."""
    rows = []
    with (folder / f"flamby/processed.{centre}.data").open(newline="") as file:
        for cells in csv.reader(file):
            kept = cells[:10] + cells[13:]
            if "?" not in kept:
                rows.append([float(cell) for cell in kept])
    raw = np.array(rows)
    kinds = [raw[:, column] == level for column, levels in ((2, (2, 3, 4)), (6, (1, 2))) for level in levels]
    return np.column_stack([raw[:, [0, 1, 3, 4, 5, 7, 8, 9]], *kinds]), raw[:, -1]


def tcga(folder: Path) -> None:
    """Patients of six regions in two files that list them in another order."""
    rng = np.random.default_rng(1)
    count = sum(REGIONS)
    names = [f"feature {number}" for number in range(39)]
    patients = pd.DataFrame(rng.integers(0, 2, (count, 39)), columns=names)
    patients["feature 0"] = rng.integers(30, 90, count)
    patients.insert(0, "pid", [f"P{number:03}" for number in range(count)])
    patients = patients.assign(E=rng.integers(0, 2, count), T=rng.exponential(500, count).round())
    region = rng.permutation(np.repeat(np.arange(6), REGIONS))
    part = np.where(np.arange(count) % 5 == 4, "test", "train")
    folds = pd.DataFrame({"pid": patients["pid"], "fold": part})
    folds["fold2"] = [f"{p}_{r}" for p, r in zip(part, region, strict=True)]
    patients.to_csv(folder / "flamby/brca.csv", index=False)
    folds.sample(frac=1, random_state=0).to_csv(folder / "flamby/brca_train_test_split.csv", index=False)


def school(folder: Path) -> None:
    """Pupils of five schools; two percentages are of a school, all else is 0 or 1."""
    rng = np.random.default_rng(2)
    x = rng.integers(0, 2, (sum(SCHOOLS), 28)).astype(np.float32)
    for column in (3, 4):
        x[:, column] = np.repeat(rng.integers(0, 101, len(SCHOOLS)), SCHOOLS)
    y = rng.integers(1, 71, sum(SCHOOLS)).astype(np.float32)
    y[:2] = 1, 70
    np.savez(folder / "school/school.npz", x=x, y=y, sizes=np.array(SCHOOLS))


def grey(mean: float, std: float, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes with this mean and deviation after / 255: black, and one light grey that falls between two bytes."""
    share = 1 / (1 + (std / mean) ** 2)
    level = mean / share * 255
    count = int(np.prod(shape))
    light = round(count * share)
    above = round(light * (level - np.floor(level)))
    values = np.zeros(count, dtype=np.uint8)
    values[:light] = np.floor(level)
    values[:above] += 1
    return np.random.default_rng(3).permutation(values).reshape(shape)


def parts(file: str, mean: float, std: float, side: int, classes: int, named: bool) -> Callable[[Path], None]:
    """Grey images in two parts, of which each class has its number more than the one before."""

    def make(folder: Path) -> None:
        y_train, y_test = (
            np.repeat(np.arange(classes), np.arange(first, first + classes)) for first in (4, 1)
        )
        arrays = {
            "x_train": grey(mean, std, (len(y_train), side, side)), "y_train": y_train.astype(np.uint8),
            "x_test": grey(0.5, 0.2, (len(y_test), side, side)), "y_test": y_test.astype(np.uint8),
        }  # fmt: skip
        names = {"classes": np.array([f"class {number}" for number in range(classes)])} if named else {}
        np.savez(folder / file, **arrays, **names)

    return make


def jpegs(count: int, side: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(JPEG files of noise one behind another, where each begins and the last one ends)."""
    rng = np.random.default_rng(seed)
    files = []
    for _ in range(count):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, "JPEG")
        files.append(np.frombuffer(file.getvalue(), dtype=np.uint8))
    return np.concatenate(files), np.cumsum([0, *map(len, files)])


def cifar10(folder: Path) -> None:
    """Two parts of small pictures, ten classes in random order."""
    arrays: dict[str, Any] = {"classes": np.array([f"class {number}" for number in range(10)])}
    for seed, (part, count) in enumerate({"train": 45, "test": 10}.items()):
        arrays[f"jpeg_{part}"], arrays[f"offsets_{part}"] = jpegs(count, 8, seed)
        labels = np.random.default_rng(seed).permutation(np.arange(count) % 10)
        arrays[f"y_{part}"] = labels.astype(np.uint8)
    np.savez(folder / "cifar10_jpeg.npz", **arrays)


def pacs(folder: Path) -> None:
    """Pictures of four domains and seven classes in random order."""
    jpeg, offsets = jpegs(60, 64, 5)
    rng = np.random.default_rng(6)
    np.savez(
        folder / "pacs64_jpeg.npz", jpeg=jpeg, offsets=offsets, y=rng.integers(0, 7, 60).astype(np.uint8),
        domain=rng.permutation(np.arange(60) % 4).astype(np.uint8),
        classes=np.array([f"class {number}" for number in range(7)]),
        domains=np.array(["art_painting", "cartoon", "photo", "sketch"]),
    )  # fmt: skip


def omniglot(folder: Path) -> None:
    """Three alphabets of 2, 3 and 4 characters, each drawn once by each of its 20 writers."""
    rows = [
        (sum(range(2, 2 + alphabet)) + character, alphabet, 20 * alphabet + writer)
        for alphabet in range(3)
        for writer in range(20)
        for character in range(2 + alphabet)
    ]
    y, alphabet, writer = np.random.default_rng(7).permutation(np.array(rows)).T
    np.savez(
        folder / "omniglot28.npz", x=grey(0.0806, 0.236, (len(rows), 28, 28)), y=y, alphabet=alphabet, writer=writer,
        alphabets=np.array(["Anglo", "Early_Aramaic", "Zeta"]),
        characters=np.array([f"character {number}" for number in range(9)]),
    )  # fmt: skip
