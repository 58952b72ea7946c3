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


cifar_files = twins.data_of(twins.cifar10, "cifar10_jpeg.npz", twins.LARGE)
pacs_files = twins.data_of(twins.pacs, "pacs64_jpeg.npz")
omniglot_files = twins.data_of(twins.omniglot, "omniglot28.npz")


def assert_statistics_are_those_of_the_training_part(source: Source, tolerance: float) -> None:
    train = source.x if source.test is None else source.x[~source.test]
    mean, std = channel_statistics(train)
    assert source.mean == pytest.approx(mean, abs=tolerance)
    assert source.std == pytest.approx(std, abs=tolerance)


def test_digits_are_bundled_and_scaled() -> None:
    source = load_source("digits")
    assert (source.x.shape, source.x.dtype, source.test) == ((1797, 1, 8, 8), torch.float32, None)
    assert (float(source.x.min()), float(source.x.max())) == (0.0, 1.0)
    assert torch.bincount(source.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


GREY = {
    "mnist": ("mnist.npz", twins.parts("mnist.npz", 0.1307, 0.3081, 28, 10, False)),
    "chestxray": ("chestxray64.npz", twins.parts("chestxray64.npz", 0.5542, 0.2388, 64, 3, True)),
}


@pytest.fixture(params=[twins.LARGE, "twin"])
def grey_files(request: pytest.FixtureRequest, name: str) -> Path:
    file, make = GREY[name]
    return twins.files_of(request, make, file) / file


@pytest.mark.parametrize("name", GREY)
def test_grey_sets_have_the_images_of_their_files(grey_files: Path, name: str) -> None:
    source = load_source(name)
    with np.load(grey_files) as arrays:
        for test, part in ((False, "train"), (True, "test")):
            assert torch.equal(source.x[source.test == test][:, 0], torch.from_numpy(arrays[f"x_{part}"]))
            assert source.y[source.test == test].tolist() == arrays[f"y_{part}"].tolist()
        assert source.info["classes"] == tuple(arrays["classes"] if name == "chestxray" else "0123456789")
    assert_statistics_are_those_of_the_training_part(source, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "shape", "counts", "tolerance"),
    [
        ("mnist", "mnist.npz", (70_000, 1, 28, 28), {0: 5923, 1: 6742, 9: 5949}, 1e-4),
        ("cifar10", "cifar10_jpeg.npz", (55_000, 3, 32, 32), dict.fromkeys(range(10), 4500), 5e-3),
        ("tinyimagenet", "tinyimagenet32_jpeg.npz", (14_000, 3, 32, 32), dict.fromkeys(range(200), 60), 1e-4),
        ("pacs", "pacs64_jpeg.npz", (7992, 3, 64, 64), {0: 1383, 5: 754, 6: 1157}, 1e-4),
    ],
)
def test_real_sets_have_the_counts_of_their_origin(
    name: str, file: str, shape: tuple[int, ...], counts: dict[int, int], tolerance: float, need_data: Need
) -> None:
    need_data(file)
    source = load_source(name)
    assert (source.x.shape, source.x.dtype) == (shape, torch.uint8)
    learned = torch.bincount(source.y if source.test is None else source.y[~source.test])
    assert {label: int(learned[label]) for label in counts} == counts
    assert_statistics_are_those_of_the_training_part(source, tolerance)


def decoded(arrays: Any, number: int, part: str = "") -> torch.Tensor:
    """One picture of a file of JPEG bytes, `[channels, height, width]`."""
    start, stop = arrays[f"offsets{part}"][number : number + 2]
    with Image.open(io.BytesIO(arrays[f"jpeg{part}"][start:stop].tobytes())) as picture:
        return torch.from_numpy(np.asarray(picture.convert("RGB")).copy()).permute(2, 0, 1)


def test_a_capped_set_is_the_start_of_both_parts_in_proportion(cifar_files: Path) -> None:
    with np.load(cifar_files / "cifar10_jpeg.npz") as arrays:
        for train, test in ((9, 2), (18, 4)):  # 45 to 10 in both files
            source = load_source("cifar10", samples=train + test)
            assert source.test.tolist() == [False] * train + [True] * test
            assert source.y.tolist() == [*arrays["y_train"][:train], *arrays["y_test"][:test]]
            for row in (0, train - 1):
                assert torch.equal(source.x[row], decoded(arrays, row, "_train"))
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


def test_omniglot_has_the_drawings_of_its_file_by_writer_and_alphabet(omniglot_files: Path) -> None:
    source = load_source("omniglot")
    writer, alphabet = source.groups["client"], source.groups["alphabet"]
    with np.load(omniglot_files / "omniglot28.npz") as arrays:
        assert torch.equal(source.x[:, 0], torch.from_numpy(arrays["x"]))
        for ours, theirs in ((source.y, "y"), (writer, "writer"), (alphabet, "alphabet")):
            assert ours.tolist() == arrays[theirs].tolist()
        assert source.outputs == len(arrays["characters"])
        alphabets = tuple(arrays["alphabets"])
    assert source.group_names["alphabet"] == alphabets
    writers = tuple(f"{name}/{number:02d}" for name in alphabets for number in range(20))
    assert source.group_names["client"] == writers
    assert torch.equal(writer // 20, alphabet)
    assert_statistics_are_those_of_the_training_part(source, 1e-4)
