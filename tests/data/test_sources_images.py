"""Image sets hold what their origin says: counts by class, shapes, parts and groups."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data import twins
from tailorfl.data.build import build
from tailorfl.data.folder import channel_statistics
from tailorfl.data.registry import load_source
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError

Need = Callable[[str], Path]


def counts(source: Source, test: bool) -> list[int]:
    assert source.test is not None
    return torch.bincount(source.y[source.test == test], minlength=source.outputs).tolist()


def assert_statistics_are_those_of_the_training_part(source: Source, tolerance: float) -> None:
    train = source.x if source.test is None else source.x[~source.test]
    mean, std = channel_statistics(train)
    assert source.mean == pytest.approx(mean, abs=tolerance)
    assert source.std == pytest.approx(std, abs=tolerance)


def test_digits_are_bundled_and_scaled() -> None:
    source = load_source("digits")
    assert source.x.shape == (1797, 1, 8, 8)
    assert source.x.dtype == torch.float32
    assert (float(source.x.min()), float(source.x.max())) == (0.0, 1.0)
    assert source.test is None
    assert torch.bincount(source.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


GREY = {
    "mnist": ("mnist.npz", twins.parts("mnist.npz", 0.1307, 0.3081, 28, 10, False)),
    "chestxray": ("chestxray64.npz", twins.parts("chestxray64.npz", 0.5542, 0.2388, 64, 3, True)),
}


@pytest.fixture(params=["real", "twin"])
def grey_files(request: pytest.FixtureRequest, name: str) -> Path:
    file, make = GREY[name]
    return twins.files_of(request, make, file) / file


@pytest.mark.parametrize("name", GREY)
def test_grey_sets_have_the_images_of_their_files(grey_files: Path, name: str) -> None:
    source = load_source(name)
    assert source.test is not None
    with np.load(grey_files) as arrays:
        for test, part in ((False, "train"), (True, "test")):
            assert torch.equal(source.x[source.test == test][:, 0], torch.from_numpy(arrays[f"x_{part}"]))
            assert source.y[source.test == test].tolist() == arrays[f"y_{part}"].tolist()
        assert source.info["classes"] == tuple(arrays["classes"] if name == "chestxray" else "0123456789")
    assert_statistics_are_those_of_the_training_part(source, 1e-4)


def test_mnist_in_the_unit_interval(need_data: Need) -> None:
    need_data("mnist.npz")
    unit, rows = load_source("mnist", scaling="unit"), torch.arange(50)
    x = unit.take(rows)
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    torch.testing.assert_close((x - 0.1307) / 0.3081, load_source("mnist").take(rows), atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="unit"):
        load_source("mnist", scaling="units")


MNIST = (
    [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "shape", "train", "test", "tolerance"),
    [
        ("mnist", "mnist.npz", (70_000, 1, 28, 28), *MNIST, 1e-4),
        pytest.param(
            *("cifar10", "cifar10_jpeg.npz", (55_000, 3, 32, 32), [4500] * 10, [1000] * 10, 5e-3),
            marks=pytest.mark.slow,
        ),
        ("tinyimagenet", "tinyimagenet32_jpeg.npz", (14_000, 3, 32, 32), [60] * 200, [10] * 200, 1e-4),
        ("chestxray", "chestxray64.npz", (1123, 1, 64, 64), [99, 399, 400], [25, 100, 100], 1e-4),
    ],
)
def test_sets_in_two_parts_have_the_counts_of_their_origin(
    name: str,
    file: str,
    shape: tuple[int, ...],
    train: list[int],
    test: list[int],
    tolerance: float,
    need_data: Need,
) -> None:
    need_data(file)
    source = load_source(name)
    assert (source.x.shape, source.x.dtype) == (shape, torch.uint8)
    assert (counts(source, test=False), counts(source, test=True)) == (train, test)
    assert_statistics_are_those_of_the_training_part(source, tolerance)


@pytest.fixture(params=["real", "twin"])
def cifar_files(request: pytest.FixtureRequest) -> Path:
    return twins.files_of(request, twins.cifar10, "cifar10_jpeg.npz")


@pytest.fixture(params=["real", "twin"])
def pacs_files(request: pytest.FixtureRequest) -> Path:
    return twins.files_of(request, twins.pacs, "pacs64_jpeg.npz")


def decoded(arrays: Any, number: int, part: str = "") -> torch.Tensor:
    """One picture of a file of JPEG bytes, `[channels, height, width]`."""
    start, stop = arrays[f"offsets{part}"][number : number + 2]
    with Image.open(io.BytesIO(arrays[f"jpeg{part}"][start:stop].tobytes())) as picture:
        return torch.from_numpy(np.asarray(picture.convert("RGB")).copy()).permute(2, 0, 1)


def test_a_capped_set_is_the_start_of_both_parts_in_proportion(cifar_files: Path) -> None:
    with np.load(cifar_files / "cifar10_jpeg.npz") as arrays:
        for train, test in ((9, 2), (18, 4)):  # 45 to 10 in both files
            source = load_source("cifar10", samples=train + test)
            assert source.test is not None
            assert source.test.tolist() == [False] * train + [True] * test
            assert source.y.tolist() == [*arrays["y_train"][:train], *arrays["y_test"][:test]]
            for number in (0, train - 1):
                assert torch.equal(source.x[number], decoded(arrays, number, "_train"))
            assert torch.equal(source.x[train + 1], decoded(arrays, 1, "_test"))
        assert source.info["classes"] == tuple(arrays["classes"])
    assert load_source("cifar10", samples=1).x.shape[0] == 1
    with pytest.raises(ConfigError, match="samples must be at least 1"):
        load_source("cifar10", samples=0)


def test_pacs_has_the_images_of_its_file_in_four_domains(pacs_files: Path) -> None:
    source, smaller = load_source("pacs", samples=40), load_source("pacs", samples=40, side=16)
    with np.load(pacs_files / "pacs64_jpeg.npz") as arrays:
        for number in (0, 17, 39):
            picture = decoded(arrays, number)
            assert torch.equal(source.x[number], picture)
            squares = picture.double().unfold(1, 4, 4).unfold(2, 4, 4).mean((3, 4))
            assert (smaller.x[number] - squares).abs().max() <= 0.5
        assert source.y.tolist() == arrays["y"][:40].tolist()
        assert source.groups["domain"].tolist() == arrays["domain"][:40].tolist()
    assert source.group_names["domain"] == ("art_painting", "cartoon", "photo", "sketch")
    assert (source.test, source.outputs, len(source)) == (None, 7, 40)
    with pytest.raises(ConfigError, match="side must divide 64"):
        load_source("pacs", side=20)


def test_a_cap_of_samples_saves_decoding_the_others(pacs_files: Path) -> None:
    """The federation's source then holds no more; of a set that is not decoded it holds all, and clients a part."""
    assert len(build("pacs", samples=40, split={"train": 0.8}).source) == 40
    assert len(build("digits", samples=40, clients=2).source) == 1797


def test_one_sample_of_a_set_in_two_parts_is_possible(need_data: Need) -> None:
    need_data("tinyimagenet32_jpeg.npz")
    assert load_source("tinyimagenet", samples=1).x.shape == (1, 3, 32, 32)


def test_pacs_counts_by_domain_and_class(need_data: Need) -> None:
    need_data("pacs64_jpeg.npz")
    source = load_source("pacs")
    table = {
        "art_painting": [303, 204, 228, 147, 161, 236, 359],
        "cartoon": [311, 366, 277, 108, 259, 230, 324],
        "photo": [151, 161, 146, 149, 159, 224, 346],
        "sketch": [618, 592, 602, 486, 653, 64, 128],
    }
    assert source.x.shape == (7992, 3, 64, 64)
    assert source.test is None
    assert source.group_names["domain"] == tuple(table)
    for domain, expected in enumerate(table.values()):
        assert torch.bincount(source.y[source.groups["domain"] == domain]).tolist() == expected
    assert_statistics_are_those_of_the_training_part(source, 1e-4)


@pytest.fixture(params=["real", "twin"])
def omniglot_files(request: pytest.FixtureRequest) -> Path:
    return twins.files_of(request, twins.omniglot, "omniglot28.npz")


def test_omniglot_has_the_drawings_of_its_file_by_writer_and_alphabet(omniglot_files: Path) -> None:
    source = load_source("omniglot")
    writer, alphabet = source.groups["client"], source.groups["alphabet"]
    with np.load(omniglot_files / "omniglot28.npz") as arrays:
        assert torch.equal(source.x[:, 0], torch.from_numpy(arrays["x"]))
        assert source.y.tolist() == arrays["y"].tolist()
        assert (writer.tolist(), alphabet.tolist()) == (
            arrays["writer"].tolist(),
            arrays["alphabet"].tolist(),
        )
        assert source.outputs == len(arrays["characters"])
        alphabets = tuple(arrays["alphabets"])
    assert source.group_names["alphabet"] == alphabets
    assert source.group_names["client"][21] == f"{alphabets[1]}/01"
    assert len(source.group_names["client"]) == 20 * len(alphabets)
    assert torch.equal(writer // 20, alphabet)
    assert_statistics_are_those_of_the_training_part(source, 1e-4)


def test_omniglot_writers_draw_each_character_of_their_alphabet_once(need_data: Need) -> None:
    need_data("omniglot28.npz")
    source = load_source("omniglot")
    writer, alphabet = source.groups["client"], source.groups["alphabet"]
    assert source.x.shape == (4840, 1, 28, 28)
    assert torch.equal(writer // 20, alphabet)
    assert torch.bincount(source.y).tolist() == [20] * 242
    characters = [24, 22, 24, 47, 40, 26, 42, 17]
    assert torch.bincount(alphabet).tolist() == [20 * count for count in characters]
    assert torch.bincount(writer).tolist() == [count for count in characters for _ in range(20)]
    pairs = torch.stack([writer, source.y], dim=1)
    assert len(torch.unique(pairs, dim=0)) == len(source)
    assert source.group_names["client"][21] == "Early_Aramaic/01"
    assert_statistics_are_those_of_the_training_part(source, 1e-4)
