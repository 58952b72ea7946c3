"""A user's own data comes back as it was given, and every mistake in it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from data.test_own_mistakes import FRAME
from tailorfl.data.folder import from_client_folder
from tailorfl.data.own import from_folder, from_table, from_tensors
from tailorfl.data.registry import load_source
from tailorfl.errors import DataError

NAN = float("nan")


def save(folder: Path, name: str, value: int | tuple[int, int, int], size: tuple[int, int] = (5, 4)) -> None:
    """An image of one colour; size is (width, height)."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(value, int) else "RGB", size, value).save(folder / name)


@pytest.fixture
def frame() -> pd.DataFrame:
    return FRAME.copy()


# folders


def test_a_folder_of_clients_and_classes(tmp_path: Path) -> None:
    for name, value in (("b/dog/1.png", 10), ("a/cat/1.png", 20), ("a/dog/1.png", 30)):
        save(tmp_path, name, value)
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    source = load_source("folder", path=str(tmp_path))
    assert (source.x.shape, source.x[:, 0, 0, 0].tolist()) == ((3, 1, 4, 5), [20, 30, 10])
    assert (source.y.tolist(), source.info["classes"], source.test) == ([0, 1, 1], ("cat", "dog"), None)
    assert (source.groups["client"].tolist(), source.group_names["client"]) == ([0, 0, 1], ("a", "b"))


def test_hidden_folders_are_neither_clients_nor_classes(tmp_path: Path) -> None:
    for name in ("a/cat/1.png", "a/dog/1.png", "a/.thumbnails/1.png", ".trash/cat/1.png", ".cache/1.png"):
        save(tmp_path, name, 20)
    for source in (from_folder(tmp_path), from_client_folder(tmp_path / "a")):
        assert (len(source), source.info["classes"]) == (2, ("cat", "dog"))


def test_a_folder_with_parts_keeps_its_split_and_takes_statistics_from_training(tmp_path: Path) -> None:
    for name, value in (("train/photo/cat/1", 0), ("train/photo/cat/2", 255), ("test/sketch/dog/1", 100)):
        save(tmp_path, f"{name}.png", value)
    source = from_folder(tmp_path, group="domain")
    assert set(source.x[source.test].flatten().tolist()) == {100}
    assert (source.group_names["domain"], source.outputs) == (("photo", "sketch"), 2)
    assert (source.mean, source.std) == (pytest.approx((0.5,)), pytest.approx((0.5,)))


def test_images_of_other_kinds_and_sizes_join(tmp_path: Path) -> None:
    save(tmp_path, "a/cat/1.png", 7)
    save(tmp_path, "a/dog/1.png", (1, 2, 3), size=(9, 9))
    source = from_folder(tmp_path, size=(6, 8))
    assert source.x.shape == (2, 3, 6, 8)
    assert (set(source.x[0].flatten().tolist()), source.x[1, :, 0, 0].tolist()) == ({7}, [1, 2, 3])
    # 16 bits are scaled and not cut off
    Image.fromarray(np.full((4, 4), 0x1234, dtype=np.uint16)).save(tmp_path / "a/cat/1.png")
    (tmp_path / "a/dog/1.png").unlink()
    assert set(from_folder(tmp_path).x.flatten().tolist()) == {0x12}


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "holds no images"),
        ([("cat/1.png", (5, 4))], "client/class/image.*'cat/1.png'"),
        ([("a/cat/1.png", (5, 4)), ("a/cat/2.png", (6, 6))], r"2.png' is 6x6.* 4x5 .*size=\(4, 5\)"),
        ([("a/cat/1.png", (5, 4)), ("a/cat/2.png", None)], "2.png' cannot be read"),
        ([("test/a/cat/1.png", (5, 4))], "'train'"),
        (None, "none"),
    ],
)
def test_mistakes_in_a_folder_are_named(tmp_path: Path, images: Any, words: str) -> None:
    for name, size in images or ():
        save(tmp_path, name, 1, size or (1, 1))
        if size is None:
            (tmp_path / name).write_bytes(b"broken")
    with pytest.raises(DataError, match=words):
        from_folder(tmp_path / "none" if images is None else tmp_path)


@pytest.mark.parametrize("size", [(100_000, 100_000), (0, 5), (5,), (5.5, 5), 5])
def test_a_size_that_no_image_can_have_is_refused_before_any_is_made(tmp_path: Path, size: Any) -> None:
    save(tmp_path, "north/ill/a.png", 3)
    for load in (from_folder, from_client_folder):
        with pytest.raises(DataError, match="size"):
            load(tmp_path, size=size)


# tables


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_table_comes_back_from_every_format(tmp_path: Path, frame: pd.DataFrame, suffix: str) -> None:
    path = tmp_path / f"patients{suffix}"
    if suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, sep="," if suffix == ".csv" else "\t", index=False)
    source = load_source("table", path=str(path), label="outcome", client="site", split="part")
    assert source.x.tolist() == [[30, 0.5, 1], [40, 1.5, 0], [50, 2.5, 0], [60, 3.5, 1]]
    assert source.info["features"] == ("age", "dose", "smoker")
    assert (source.y.tolist(), source.info["classes"]) == ([0, 1, 1, 0], ("ill", "well"))
    assert source.group_names["client"] == ("east", "north", "south")
    assert source.groups["client"].tolist() == [1, 2, 1, 0]
    assert source.test.tolist() == [False, False, True, False]


def test_each_file_of_a_folder_is_a_client_of_its_name(tmp_path: Path, frame: pd.DataFrame) -> None:
    for site, rows in frame.groupby("site"):
        file, plain = tmp_path / str(site), rows.drop(columns="site")
        if site == "east":
            plain.to_parquet(file.with_suffix(".parquet"))
        else:
            plain[[*reversed(plain.columns)]].to_csv(file.with_suffix(".csv"), index=False)
    (tmp_path / "notes.txt").write_text("no table")
    options: dict[str, Any] = {"label": "outcome", "features": ["age", "dose"], "split": "part"}
    source = load_source("table", path=str(tmp_path), **options)
    expected = from_table(frame.sort_values("site", kind="stable"), client="site", **options)
    assert torch.equal(source.x, expected.x)
    assert torch.equal(source.y, expected.y)
    assert source.group_names["client"] == ("east", "north", "south")
    assert torch.equal(source.groups["client"], expected.groups["client"])
    by_smoking = from_table(tmp_path, client="smoker", **{**options, "features": ["age"]})
    assert by_smoking.group_names["client"] == ("False", "True")


def test_a_table_serves_every_task(frame: pd.DataFrame) -> None:
    frame = frame.assign(first=[0, 0, 1, 1])
    for task, label, outputs, y in (
        ("binary", "outcome", 1, [0, 1, 1, 0]),
        ("regression", ["dose", "age"], 2, [[0.5, 30], [1.5, 40], [2.5, 50], [3.5, 60]]),
        ("survival", ["smoker", "age"], 1, [[1, 30], [0, 40], [0, 50], [1, 60]]),
        ("multilabel", "smoker", 1, [[1], [0], [0], [1]]),
        ("multilabel", ["first", "smoker"], 2, [[0, 1], [0, 0], [1, 0], [1, 1]]),
    ):
        rest = [column for column in ("age", "dose", "smoker") if column not in label]
        source = from_table(frame, label=label, features=rest, task=task)
        assert (source.outputs, source.y.tolist()) == (outputs, y)


@pytest.mark.parametrize(
    ("ids", "names", "clients"),
    [([10, 9], ("9", "10"), [1, 0]), ([10, 9, "9", "10", "b"], ("10", "9", "b"), [0, 1, 1, 0, 2])],
)
def test_clients_are_ordered_as_numbers_or_where_kinds_are_mixed_as_text(
    ids: Any, names: tuple[str, ...], clients: list[int]
) -> None:
    who, y = np.array(ids, dtype=object if "b" in ids else int), np.arange(len(ids)) % 2
    frame = pd.DataFrame({"who": who, "x": np.arange(len(ids)), "y": y})
    for source in (from_table(frame, "y", client="who"), from_tensors(np.eye(len(ids)), y, clients=who)):
        assert (source.group_names["client"], source.groups["client"].tolist()) == (names, clients)


# tensors


def test_tensors_and_arrays_of_every_task() -> None:
    x = np.arange(6.0).reshape(3, 2)
    source = from_tensors(x, np.array([0, 2, 1]), clients=["b", "a", "b"], test=[False, True, False])
    assert (source.x.dtype, source.x.tolist(), source.outputs) == (torch.float32, x.tolist(), 3)
    assert (source.groups["client"].tolist(), source.test.tolist()) == ([1, 0, 1], [False, True, False])
    assert from_tensors(x, [1.5, 2.5, 3.5], task="regression").y.tolist() == [[1.5], [2.5], [3.5]]
    assert from_tensors(x, [1.0, 0.0, 1.0], task="binary").y.tolist() == [1, 0, 1]
    assert from_tensors(x, torch.zeros(3, 5), task="multilabel").outputs == 5


def test_image_tensors_stay_bytes() -> None:
    source = from_tensors(torch.randint(0, 256, (3, 2, 4, 4), dtype=torch.uint8), [0, 1, 0])
    assert source.x.dtype == torch.uint8
    taken = source.take(torch.arange(3))
    torch.testing.assert_close(taken.mean((0, 2, 3)), torch.zeros(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(taken.std((0, 2, 3), correction=0), torch.ones(2), rtol=1e-4, atol=0)
    constant = from_tensors(torch.full((2, 1, 4, 4), 9, dtype=torch.uint8), [0, 1])
    torch.testing.assert_close(constant.take(torch.arange(2)), torch.zeros(2, 1, 4, 4), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 1, 8, 4), (6, 3, 4, 4), (6, 3, 32, 32), (6, 16, 8, 8), (6, 3, 3, 3)])
def test_images_with_the_channels_first_pass(shape: tuple[int, ...]) -> None:
    assert from_tensors(torch.rand(shape), [0, 1] * 3).input_shape == shape[1:]
