"""A user's own data comes back as it was given, and every mistake in it is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from tailorfl.data import columns
from tailorfl.data.build import build
from tailorfl.data.folder import from_client_folder
from tailorfl.data.own import from_datasets, from_folder, from_table, from_tensors
from tailorfl.data.registry import load_source
from tailorfl.errors import DataError, MissingExtraError

NAN = float("nan")


def save(folder: Path, name: str, value: int | tuple[int, int, int], size: tuple[int, int] = (5, 4)) -> None:
    """An image of one colour; size is (width, height)."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(value, int) else "RGB", size, value).save(folder / name)


@pytest.fixture
def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "site": ["north", "south", "north", "east"],
            "age": [30, 40, 50, 60],
            "dose": [0.5, 1.5, 2.5, 3.5],
            "smoker": [True, False, False, True],
            "outcome": ["ill", "well", "well", "ill"],
            "part": ["train", "train", "test", "train"],
        }
    )


# folders


def test_a_folder_of_clients_and_classes(tmp_path: Path) -> None:
    for name, value in (("b/dog/1.png", 10), ("a/cat/1.png", 20), ("a/dog/1.png", 30)):
        save(tmp_path, name, value)
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    source = load_source("folder", path=str(tmp_path))
    assert (source.x.shape, source.x[:, 0, 0, 0].tolist()) == ((3, 1, 4, 5), [20, 30, 10])
    assert (source.y.tolist(), source.info["classes"]) == ([0, 1, 1], ("cat", "dog"))
    assert source.groups["client"].tolist() == [0, 0, 1]
    assert source.group_names["client"] == ("a", "b")
    assert source.test is None


def test_a_folder_with_parts_keeps_its_split_and_takes_statistics_from_training(tmp_path: Path) -> None:
    for name, value in (("train/photo/cat/1", 0), ("train/photo/cat/2", 255), ("test/sketch/dog/1", 100)):
        save(tmp_path, f"{name}.png", value)
    source = from_folder(tmp_path, group="domain")
    assert source.test is not None
    assert set(source.x[source.test].flatten().tolist()) == {100}
    assert (source.group_names["domain"], source.outputs) == (("photo", "sketch"), 2)
    assert (source.mean, source.std) == (pytest.approx((0.5,)), pytest.approx((0.5,)))


def test_grey_images_join_colour_ones_and_sizes_can_be_made_equal(tmp_path: Path) -> None:
    save(tmp_path, "a/cat/1.png", 7)
    save(tmp_path, "a/dog/1.png", (1, 2, 3), size=(9, 9))
    source = from_folder(tmp_path, size=(6, 8))
    assert source.x.shape == (2, 3, 6, 8)
    assert set(source.x[0].flatten().tolist()) == {7}
    assert source.x[1, :, 0, 0].tolist() == [1, 2, 3]


def test_sixteen_bit_images_are_scaled_and_not_cut_off(tmp_path: Path) -> None:
    save(tmp_path, "a/cat/1.png", 0)
    Image.fromarray(np.full((4, 4), 0x1234, dtype=np.uint16)).save(tmp_path / "a/cat/1.png")
    assert set(from_folder(tmp_path).x.flatten().tolist()) == {0x12}


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "holds no images"),
        ([("cat/1.png", (5, 4))], "client/class/image.*'cat/1.png'"),
        ([("a/cat/1.png", (5, 4)), ("a/cat/2.png", (6, 6))], r"2.png' is 6x6.* 4x5 .*size=\(4, 5\)"),
        ([("a/cat/1.png", (5, 4)), ("a/cat/2.png", None)], "2.png' cannot be read"),
        ([("test/a/cat/1.png", (5, 4))], "'train'"),
    ],
)
def test_mistakes_in_a_folder_are_named(
    tmp_path: Path, images: list[tuple[str, tuple[int, int] | None]], words: str
) -> None:
    for name, size in images:
        save(tmp_path, name, 1, size or (1, 1))
        if size is None:
            (tmp_path / name).write_bytes(b"broken")
    with pytest.raises(DataError, match=words):
        from_folder(tmp_path)
    with pytest.raises(DataError, match="none"):
        from_folder(tmp_path / "none")


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
    assert source.test is not None
    assert source.test.tolist() == [False, False, True, False]


def test_each_file_of_a_folder_is_a_client_of_its_name(tmp_path: Path, frame: pd.DataFrame) -> None:
    plain = frame.drop(columns="site")
    for site, rows in plain.groupby(frame["site"]):
        rows[[*reversed(plain.columns)]].to_csv(tmp_path / f"{site}.csv", index=False)
    plain[frame["site"] == "east"].to_parquet(tmp_path / "east.parquet")
    (tmp_path / "east.csv").unlink()
    (tmp_path / "notes.txt").write_text("no table")
    options = {"label": "outcome", "features": ["age", "dose"], "split": "part"}
    source = load_source("table", path=str(tmp_path), **options)
    expected = from_table(frame.sort_values("site", kind="stable"), client="site", **options)
    assert torch.equal(source.x, expected.x)
    assert torch.equal(source.y, expected.y)
    assert source.group_names["client"] == ("east", "north", "south")
    assert torch.equal(source.groups["client"], expected.groups["client"])
    every_column = from_table(tmp_path, label="outcome", split="part").info["features"]
    assert every_column in (("smoker", "dose", "age"), ("age", "dose", "smoker"))
    by_smoking = from_table(tmp_path, label="outcome", client="smoker", features=["age"], split="part")
    assert by_smoking.group_names["client"] == ("False", "True")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "holds no tables"),
        ({"a.csv": {}, "b.csv": {"dose": "Dose "}}, "'a' .*'dose' .*'b' .*'Dose'"),
        ({"a.csv": {}, "b.csv": {"outcome": "other"}}, "'b' lacks 'outcome'"),
        ({"a.csv": {}, "a.tsv": {}}, "two tables called 'a'"),
        ({"c.csv": {"dose": "file"}}, "'file'"),
    ],
)
def test_folders_of_tables_that_do_not_fit_are_named(
    tmp_path: Path, frame: pd.DataFrame, files: dict[str, dict[str, str]], words: str
) -> None:
    for name, renamed in files.items():
        frame.rename(columns=renamed).to_csv(tmp_path / name, sep="\t" if "tsv" in name else ",", index=False)
    with pytest.raises(DataError, match=words):
        from_table(tmp_path, label="outcome")


def test_a_table_serves_every_task(frame: pd.DataFrame) -> None:
    for task, label, outputs, y in (
        ("binary", "outcome", 1, [0, 1, 1, 0]),
        ("regression", ["dose", "age"], 2, [[0.5, 30], [1.5, 40], [2.5, 50], [3.5, 60]]),
        ("survival", ["smoker", "age"], 1, [[1, 30], [0, 40], [0, 50], [1, 60]]),
        ("multilabel", "smoker", 1, [[1], [0], [0], [1]]),
    ):
        rest = [column for column in ("age", "dose", "smoker") if column not in label]
        source = from_table(frame, label=label, features=rest, task=task)  # type: ignore[arg-type]
        assert (source.outputs, source.y.tolist()) == (outputs, y)


def test_clients_are_ordered_as_numbers_or_where_kinds_are_mixed_as_text() -> None:
    """9 and "9" are one client."""
    frame = pd.DataFrame({"who": [10, 9, 10], "x": [1.0, 2.0, 3.0], "y": [0, 1, 0]})
    source = from_table(frame, label="y", client="who")
    assert (source.group_names["client"], source.groups["client"].tolist()) == (("9", "10"), [1, 0, 1])
    ids = np.array([10, 9, "9", "10", "b"], dtype=object)
    frame = pd.DataFrame({"who": ids, "x": np.arange(5.0), "y": [0, 1, 0, 1, 0]})
    for source in (
        from_table(frame, label="y", client="who"),
        from_tensors(np.eye(5), frame["y"], clients=ids),
    ):
        assert source.group_names["client"] == ("10", "9", "b")
        assert source.groups["client"].tolist() == [0, 1, 1, 0, 2]


@pytest.mark.parametrize("column", ["first", "second"])
def test_every_label_of_several_is_0_or_1(column: str) -> None:
    frame = pd.DataFrame({"first": [0, 1, 1], "second": [1, 0, 1], "x": [1.0, 2.0, 3.0]})
    labels = ["first", "second"]
    assert from_table(frame, label=labels, task="multilabel").y.tolist() == [[0, 1], [1, 0], [1, 1]]
    with pytest.raises(DataError, match=r"multilabel task .* 1 of 3"):
        from_table(frame.assign(**{column: [0, 0.5, 1]}), label=labels, task="multilabel")
    times = frame.assign(second=[120.5, 3.0, 70.0])
    assert from_table(times, label=labels, task="survival").y[:, 1].tolist() == [120.5, 3.0, 70.0]


@pytest.mark.parametrize("column", ["site", "outcome", "dose"])
def test_an_empty_cell_is_named_by_column_and_row(frame: pd.DataFrame, column: str) -> None:
    frame.loc[2, column] = None
    with pytest.raises(DataError, match=rf"'{column}' is empty .* 1 of 4 rows.* row 2"):
        build(source=from_table(frame, label="outcome", client="site", features=["dose"]))


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"label": "outcom"}, "'outcom'.*'outcome'"),
        ({}, {"client": "clinic"}, "'clinic'.*site, age"),
        ({}, {"label": "age", "features": ["age"]}, "'age'"),
        ({"when": pd.Timestamp("2020-01-01")}, {"features": ["when"]}, "'when' is not a number"),
        ({"dose": [0, 0, 0, 1e300]}, {"features": ["dose"]}, "'dose' is infinite.*row 3"),
        ({}, {"client": "site"}, "'part' is not a number in 4 of 4"),
        ({}, {"label": "site", "task": "binary"}, "'site' has 3: east, north, south"),
        ({}, {"label": ["site", "outcome"]}, "2 are given"),
        ({}, {"label": ["age", "dose"], "features": ["smoker"], "task": "survival"}, "survival"),
        ({}, {"label": "smoker", "task": "survival"}, r"y must be .*\[4, 2\]"),
        ({}, {"split": "site"}, "'site' is neither .* 4 of 4"),
        ({"part": "test"}, {"split": "part"}, "no training samples"),
    ],
)
def test_mistakes_in_a_table_are_named(
    frame: pd.DataFrame, change: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    features = {} if "client" in options else {"features": ["age"]}
    with pytest.raises(DataError, match=words):
        build(source=from_table(frame.assign(**change), **{"label": "outcome", **features, **options}))


def test_tables_that_cannot_be_read_are_named(
    tmp_path: Path, frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("empty.csv", "empty.parquet"):
        (tmp_path / name).write_bytes(b"")
    for table, words in (
        (tmp_path / "t.xlsx", "must end in"),
        (tmp_path / "t.csv", "t.csv' does not exist"),
        *((tmp_path / name, f"{name}' cannot be read") for name in ("empty.csv", "empty.parquet")),
        (frame.iloc[:0], "0 rows"),
    ):
        with pytest.raises(DataError, match=words):
            from_table(table, label="outcome", features=["age"])
    monkeypatch.setattr(columns, "MOST_COLUMNS", 6)
    from_table(frame, label="outcome", client="site", split="part")
    with pytest.raises(DataError, match=r"7 columns.*from_tensors"):
        from_table(frame.assign(more=1), label="outcome", client="site", split="part")


# tensors


def test_tensors_and_arrays_of_every_task() -> None:
    x = np.arange(6.0).reshape(3, 2)
    source = from_tensors(x, np.array([0, 2, 1]), clients=["b", "a", "b"], test=[False, True, False])
    assert (source.x.dtype, source.x.tolist(), source.outputs) == (torch.float32, x.tolist(), 3)
    assert source.groups["client"].tolist() == [1, 0, 1]
    assert source.test is not None
    assert source.test.tolist() == [False, True, False]
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


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_with_the_channels_last_are_told_how_to_be_turned(channels: int, dtype: torch.dtype) -> None:
    x = torch.randint(0, 256, (6, 9, 8, channels)).to(dtype)
    with pytest.raises(DataError, match=rf"\[6, 9, 8, {channels}\].*x\.permute\(0, 3, 1, 2\)"):
        from_tensors(x, [0, 1] * 3)
    turned = from_tensors(x.permute(0, 3, 1, 2), [0, 1] * 3)
    assert turned.input_shape == (channels, 9, 8)
    torch.testing.assert_close(turned.x[2, 0], x[2, :, :, 0])
    assert from_tensors(x.flatten(1).float(), [0, 1] * 3).input_shape == (72 * channels,)


@pytest.mark.parametrize("shape", [(6, 1, 8, 4), (6, 3, 4, 4), (6, 3, 32, 32), (6, 16, 8, 8), (6, 3, 3, 3)])
def test_images_with_the_channels_first_pass(shape: tuple[int, ...]) -> None:
    assert from_tensors(torch.rand(shape), [0, 1] * 3).input_shape == shape[1:]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"y": [0, 1]}, "x has 3, y has 2"),
        ({"clients": [0, 0, 0, 1]}, "clients has 4"),
        ({"y": [0, 0.5, 1]}, "whole numbers"),
        ({"clients": ["a", None, "b"]}, "'clients' is empty"),
        ({"y": [0, 2, 1], "task": "multilabel"}, "0 or 1"),
        ({"y": [0, -1, 1]}, "labels must lie in"),
        ({"x": [[0.0, 0], [NAN, 0], [0, 0]], "clients": ["a", "b", "b"]}, "1 of 3 .* sample 1 .*'b'"),
    ],
)
def test_tensor_mistakes_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        from_tensors(**{"x": torch.zeros(3, 2), "y": [0, 1, 1], **arguments})


# Hugging Face datasets


def test_a_missing_datasets_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match="'datasets"):
        from_datasets(object(), label="y", features=["x"])


def test_image_datasets_keep_their_classes_and_parts() -> None:
    datasets = pytest.importorskip("datasets")

    def part(values: list[int], labels: list[int]) -> object:
        images = [Image.new("L", (3, 2), value) for value in values]
        table = {"image": images, "label": labels, "writer": [f"w{value % 2}" for value in values]}
        kinds = {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["zebra", "ant", "unseen"]),
            "writer": datasets.Value("string"),
        }
        return datasets.Dataset.from_dict(table, features=datasets.Features(kinds))

    both = datasets.DatasetDict({"test": part([9], [1]), "train": part([5, 6], [0, 1])})
    source = from_datasets(both, label="label", image="image", client="writer")
    assert (source.x.shape, source.x[:, 0, 0, 0].tolist()) == ((3, 1, 2, 3), [5, 6, 9])
    assert (source.y.tolist(), source.outputs) == ([0, 1, 1], 3)
    assert source.info["classes"] == ("zebra", "ant", "unseen")
    assert source.test is not None
    assert source.test.tolist() == [False, False, True]
    assert source.groups["client"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (lambda sets, part: [1, 2], {"features": ["age"]}, "a list"),
        (
            lambda sets, part: sets.DatasetDict(train=part, validation=part),
            {"features": ["age"]},
            "validation",
        ),
        (lambda sets, part: part, {}, "image= .* features="),
        (lambda sets, part: part, {"features": ["agee"]}, "'agee'.*'age'"),
    ],
)
def test_datasets_mistakes_are_named(
    frame: pd.DataFrame, given: Callable[..., Any], options: dict[str, Any], words: str
) -> None:
    datasets = pytest.importorskip("datasets")
    with pytest.raises(DataError, match=words):
        from_datasets(given(datasets, datasets.Dataset.from_pandas(frame)), label="outcome", **options)
