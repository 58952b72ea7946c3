"""A user's own data comes back as it was given, and every mistake in it is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from tailorfl.data.build import build
from tailorfl.data.columns import MOST_COLUMNS, need_columns
from tailorfl.data.folder import from_client_folder
from tailorfl.data.own import from_datasets, from_folder, from_table, from_tensors
from tailorfl.data.registry import load_source
from tailorfl.errors import DataError, MissingExtraError


def save(folder: Path, place: str, value: int | tuple[int, int, int], size: tuple[int, int] = (5, 4)) -> None:
    """An image of one colour; size is (width, height)."""
    file = folder / place
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(value, int) else "RGB", size, value).save(file)


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
    save(tmp_path, "b/dog/1.png", 10)
    save(tmp_path, "a/cat/1.png", 20)
    save(tmp_path, "a/dog/1.png", 30)
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    source = load_source("folder", path=str(tmp_path))
    assert source.x.shape == (3, 1, 4, 5)
    assert source.x[:, 0, 0, 0].tolist() == [20, 30, 10]
    assert source.y.tolist() == [0, 1, 1]
    assert source.groups["client"].tolist() == [0, 0, 1]
    assert source.group_names["client"] == ("a", "b")
    assert source.info["classes"] == ("cat", "dog")
    assert source.test is None


def test_a_folder_with_parts_keeps_its_split_and_takes_statistics_from_training(tmp_path: Path) -> None:
    save(tmp_path, "train/photo/cat/1.png", 0)
    save(tmp_path, "train/photo/cat/2.png", 255)
    save(tmp_path, "test/sketch/dog/1.png", 100)
    source = from_folder(tmp_path, group="domain")
    assert source.test is not None
    assert set(source.x[source.test].flatten().tolist()) == {100}
    assert source.group_names["domain"] == ("photo", "sketch")
    assert source.outputs == 2
    assert source.mean == pytest.approx((0.5,))
    assert source.std == pytest.approx((0.5,))


def test_grey_images_join_colour_ones_and_sizes_can_be_made_equal(tmp_path: Path) -> None:
    save(tmp_path, "a/cat/1.png", 7)
    save(tmp_path, "a/dog/1.png", (1, 2, 3), size=(9, 9))
    source = from_folder(tmp_path, size=(6, 8))
    assert source.x.shape == (2, 3, 6, 8)
    assert set(source.x[0].flatten().tolist()) == {7}
    assert source.x[1, :, 0, 0].tolist() == [1, 2, 3]


def test_sixteen_bit_images_are_scaled_and_not_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "a" / "cat" / "1.png"
    file.parent.mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 0x1234, dtype=np.uint16)).save(file)
    assert set(from_folder(tmp_path).x.flatten().tolist()) == {0x12}


def test_folder_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist"):
        from_folder(tmp_path / "none")
    with pytest.raises(DataError, match=r"holds no images"):
        from_folder(tmp_path)
    save(tmp_path, "cat/1.png", 1)
    with pytest.raises(DataError, match=r"expected client/class/image.*found 'cat/1.png'"):
        from_folder(tmp_path)


def test_images_of_two_sizes_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "a/cat/1.png", 1)
    save(tmp_path, "a/cat/2.png", 1, size=(6, 6))
    with pytest.raises(DataError, match=r"2.png' is 6x6, but the first one is 4x5 .*size=\(4, 5\)"):
        from_folder(tmp_path)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    save(tmp_path, "a/cat/1.png", 1)
    (tmp_path / "a" / "cat" / "2.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"2.png' cannot be read"):
        from_folder(tmp_path)


def test_a_folder_without_training_images_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "test/a/cat/1.png", 1)
    with pytest.raises(DataError, match=r"no images in 'train'"):
        from_folder(tmp_path)


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
    assert source.y.tolist() == [0, 1, 1, 0]
    assert source.info["classes"] == ("ill", "well")
    assert source.group_names["client"] == ("east", "north", "south")
    assert source.groups["client"].tolist() == [1, 2, 1, 0]
    assert source.test is not None
    assert source.test.tolist() == [False, False, True, False]


def test_each_file_of_a_folder_is_a_client_of_its_name(tmp_path: Path, frame: pd.DataFrame) -> None:
    folder = tmp_path / "sites"
    folder.mkdir()
    plain = frame.drop(columns="site")
    for site, mine in plain.groupby(frame["site"]):
        mine[[*reversed(plain.columns)]].to_csv(folder / f"{site}.csv", index=False)
    plain[frame["site"] == "east"].to_parquet(folder / "east.parquet")
    (folder / "east.csv").unlink()
    (folder / "notes.txt").write_text("no table")
    options = {"label": "outcome", "features": ["age", "dose"], "split": "part"}
    source = load_source("table", path=str(folder), **options)
    ordered = frame.sort_values("site", kind="stable")
    wanted = from_table(ordered, client="site", **options)
    assert torch.equal(source.x, wanted.x)
    assert torch.equal(source.y, wanted.y)
    assert source.group_names["client"] == ("east", "north", "south")
    assert torch.equal(source.groups["client"], wanted.groups["client"])
    rest = from_table(folder, label="outcome", split="part")
    assert rest.info["features"] == ("smoker", "dose", "age") or rest.info["features"] == (
        "age",
        "dose",
        "smoker",
    )
    by_smoking = from_table(folder, label="outcome", client="smoker", features=["age"], split="part")
    assert by_smoking.group_names["client"] == ("False", "True")


def test_folders_of_tables_that_do_not_fit_are_named(tmp_path: Path, frame: pd.DataFrame) -> None:
    with pytest.raises(DataError, match="holds no tables"):
        from_table(tmp_path, label="outcome")
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.rename(columns={"dose": "Dose "}).to_csv(tmp_path / "b.csv", index=False)
    with pytest.raises(DataError, match=r"'a' has a column 'dose' and 'b' a column 'Dose'"):
        from_table(tmp_path, label="outcome")
    frame.drop(columns="outcome").to_csv(tmp_path / "b.csv", index=False)
    with pytest.raises(DataError, match=r"'b' lacks 'outcome'"):
        from_table(tmp_path, label="outcome")
    frame.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.csv").unlink()
    with pytest.raises(DataError, match="two tables called 'a'"):
        from_table(tmp_path, label="outcome")
    (tmp_path / "a.parquet").unlink()
    frame.assign(file="x").to_csv(tmp_path / "c.csv", index=False)
    with pytest.raises(DataError, match="has a column 'file'"):
        from_table(tmp_path, label="outcome")


def test_a_table_serves_every_task(frame: pd.DataFrame) -> None:
    binary = from_table(frame, label="outcome", features=["age"], task="binary")
    assert (binary.outputs, binary.y.tolist()) == (1, [0, 1, 1, 0])
    regression = from_table(frame, label=["dose", "age"], features=["smoker"], task="regression")
    assert regression.y.tolist() == [[0.5, 30], [1.5, 40], [2.5, 50], [3.5, 60]]
    survival = from_table(frame, label=["smoker", "age"], features=["dose"], task="survival")
    assert survival.y.tolist() == [[1, 30], [0, 40], [0, 50], [1, 60]]
    multilabel = from_table(frame, label="smoker", features=["dose"], task="multilabel")
    assert (multilabel.outputs, multilabel.y.tolist()) == (1, [[1], [0], [0], [1]])


def test_client_numbers_are_ordered_as_numbers() -> None:
    frame = pd.DataFrame({"who": [10, 9, 10], "x": [1.0, 2.0, 3.0], "y": [0, 1, 0]})
    source = from_table(frame, label="y", client="who")
    assert source.group_names["client"] == ("9", "10")
    assert source.groups["client"].tolist() == [1, 0, 1]


def test_ids_of_mixed_kinds_are_taken_as_text() -> None:
    """9 and "9" are one client, and the order is that of texts."""
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
    source = from_table(frame, label=labels, task="multilabel")
    assert source.y.tolist() == [[0, 1], [1, 0], [1, 1]]
    with pytest.raises(DataError, match=r"multilabel task .* 1 of 3"):
        from_table(frame.assign(**{column: [0, 0.5, 1]}), label=labels, task="multilabel")
    times = frame.assign(second=[120.5, 3.0, 70.0])
    assert from_table(times, label=labels, task="survival").y[:, 1].tolist() == [120.5, 3.0, 70.0]


def test_missing_columns_are_named_with_the_nearest(frame: pd.DataFrame) -> None:
    with pytest.raises(DataError, match=r"no column 'outcom'. Did you mean 'outcome'"):
        from_table(frame, label="outcom")
    with pytest.raises(DataError, match=r"no column 'clinic'.*Columns: site, age"):
        from_table(frame, label="outcome", client="clinic")
    with pytest.raises(DataError, match=r"'age' is used for two things"):
        from_table(frame, label="age", features=["age"])


@pytest.mark.parametrize("column", ["site", "outcome", "dose"])
def test_an_empty_cell_is_named_by_column_and_row(frame: pd.DataFrame, column: str) -> None:
    frame.loc[2, column] = None
    with pytest.raises(
        DataError, match=rf"column '{column}' is empty \(NaN\) in 1 of 4 rows, the first is row 2"
    ):
        build(source=from_table(frame, label="outcome", client="site", features=["dose"]))


def test_text_dates_and_infinity_are_no_features(frame: pd.DataFrame) -> None:
    with pytest.raises(DataError, match=r"column 'part' is not a number in 4 of 4 rows"):
        build(source=from_table(frame, label="outcome", client="site"))
    dates = frame.assign(when=pd.to_datetime("2020-01-01"))
    with pytest.raises(DataError, match=r"column 'when' is not a number"):
        build(source=from_table(dates, label="outcome", features=["when"]))
    frame.loc[3, "dose"] = 1e300
    with pytest.raises(DataError, match=r"column 'dose' is infinite.*first is row 3"):
        from_table(frame, label="outcome", features=["dose"])


def test_targets_that_do_not_fit_the_task_are_refused(frame: pd.DataFrame) -> None:
    with pytest.raises(
        DataError, match=r"a binary label has two values, but 'site' has 3: east, north, south"
    ):
        from_table(frame, label="site", features=["age"], task="binary")
    with pytest.raises(DataError, match=r"has one label column, but 2 are given"):
        from_table(frame, label=["site", "outcome"], features=["age"])
    with pytest.raises(DataError, match=r"survival task .*event 0 or 1"):
        from_table(frame, label=["age", "dose"], features=["smoker"], task="survival")
    with pytest.raises(DataError, match=r"y must be torch.float32 of shape \[4, 2\]"):
        from_table(frame, label="smoker", features=["age"], task="survival")
    with pytest.raises(DataError, match=r"column 'site' is neither 'train' nor 'test' in 4 of 4 rows"):
        from_table(frame, label="outcome", features=["age"], split="site")
    with pytest.raises(DataError, match=r"no training samples"):
        from_table(frame.assign(part="test"), label="outcome", features=["age"], split="part")


def test_tables_that_cannot_be_read_are_named(tmp_path: Path, frame: pd.DataFrame) -> None:
    with pytest.raises(DataError, match=r"must end in .csv, .tsv or .parquet"):
        from_table(tmp_path / "t.xlsx", label="y")
    with pytest.raises(DataError, match=r"t.csv' does not exist"):
        from_table(tmp_path / "t.csv", label="y")
    for suffix in (".csv", ".parquet"):
        (tmp_path / f"t{suffix}").write_bytes(b"")
        with pytest.raises(DataError, match=r"cannot be read"):
            from_table(tmp_path / f"t{suffix}", label="y")
    with pytest.raises(DataError, match=r"0 rows"):
        from_table(frame.iloc[:0], label="outcome", features=["age"])


# tensors


def test_tensors_and_arrays_of_every_task() -> None:
    x = np.arange(6.0).reshape(3, 2)
    source = from_tensors(x, np.array([0, 2, 1]), clients=["b", "a", "b"], test=[False, True, False])
    assert source.x.dtype == torch.float32
    assert source.x.tolist() == x.tolist()
    assert source.outputs == 3
    assert source.groups["client"].tolist() == [1, 0, 1]
    assert source.test is not None
    assert source.test.tolist() == [False, True, False]
    assert from_tensors(x, [1.5, 2.5, 3.5], task="regression").y.tolist() == [[1.5], [2.5], [3.5]]
    assert from_tensors(x, [1.0, 0.0, 1.0], task="binary").y.tolist() == [1, 0, 1]
    assert from_tensors(x, torch.zeros(3, 5), task="multilabel").outputs == 5


def test_image_tensors_stay_bytes() -> None:
    x = torch.randint(0, 256, (3, 2, 4, 4), dtype=torch.uint8)
    source = from_tensors(x, [0, 1, 0])
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
    with pytest.raises(DataError, match=r"x\.permute\(0, 3, 1, 2\)") as error:
        from_tensors(x, [0, 1] * 3)
    assert f"[6, 9, 8, {channels}] looks like images [samples, height, width, channels]" in str(error.value)
    turned = from_tensors(x.permute(0, 3, 1, 2), [0, 1] * 3)
    assert turned.input_shape == (channels, 9, 8)
    torch.testing.assert_close(turned.x[2, 0], x[2, :, :, 0])
    assert from_tensors(x.flatten(1).float(), [0, 1] * 3).input_shape == (72 * channels,)


@pytest.mark.parametrize("shape", [(6, 1, 8, 4), (6, 3, 4, 4), (6, 3, 32, 32), (6, 16, 8, 8), (6, 3, 3, 3)])
def test_images_with_the_channels_first_pass(shape: tuple[int, ...]) -> None:
    assert from_tensors(torch.rand(shape), [0, 1] * 3).input_shape == shape[1:]


def test_tensor_mistakes_are_named() -> None:
    x = torch.zeros(3, 2)
    with pytest.raises(DataError, match=r"x has 3, y has 2"):
        from_tensors(x, [0, 1])
    with pytest.raises(DataError, match=r"clients has 4"):
        from_tensors(x, [0, 1, 1], clients=[0, 0, 0, 1])
    with pytest.raises(DataError, match=r"whole numbers"):
        from_tensors(x, [0, 0.5, 1])
    with pytest.raises(DataError, match=r"'clients' is empty"):
        from_tensors(x, [0, 1, 1], clients=["a", None, "b"])
    with pytest.raises(DataError, match=r"task are .*0 or 1"):
        from_tensors(x, [0, 2, 1], task="multilabel")
    with pytest.raises(DataError, match=r"labels must lie in"):
        from_tensors(x, [0, -1, 1])
    x[1, 0] = float("nan")
    with pytest.raises(
        DataError, match=r"NaN or infinity in 1 of 3 samples, the first is sample 1 \(client 'b'\)"
    ):
        from_tensors(x, [0, 1, 1], clients=["a", "b", "b"])


# Hugging Face datasets


def test_a_missing_datasets_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match="pip install 'datasets"):
        from_datasets(object(), label="y", features=["x"])


def test_numeric_datasets_come_back(frame: pd.DataFrame) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_pandas(frame)
    source = from_datasets(dataset, label="outcome", features=["age", "dose"], client="site")
    expected = from_table(frame, label="outcome", features=["age", "dose"], client="site")
    assert torch.equal(source.x, expected.x)
    assert torch.equal(source.y, expected.y)
    assert torch.equal(source.groups["client"], expected.groups["client"])
    assert source.info["classes"] == ("ill", "well")


def test_image_datasets_keep_their_classes_and_parts() -> None:
    datasets = pytest.importorskip("datasets")

    def part(values: list[int], labels: list[int]) -> object:
        columns = {"image": [Image.new("L", (3, 2), value) for value in values], "label": labels}
        columns["writer"] = [f"w{value % 2}" for value in values]
        kinds = {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["zebra", "ant", "unseen"]),
            "writer": datasets.Value("string"),
        }
        return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))

    both = datasets.DatasetDict({"test": part([9], [1]), "train": part([5, 6], [0, 1])})
    source = from_datasets(both, label="label", image="image", client="writer")
    assert source.x.shape == (3, 1, 2, 3)
    assert source.x[:, 0, 0, 0].tolist() == [5, 6, 9]
    assert source.y.tolist() == [0, 1, 1]
    assert (source.outputs, source.info["classes"]) == (3, ("zebra", "ant", "unseen"))
    assert source.test is not None
    assert source.test.tolist() == [False, False, True]
    assert source.groups["client"].tolist() == [1, 0, 1]


def test_datasets_mistakes_are_named(frame: pd.DataFrame) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_pandas(frame)
    with pytest.raises(DataError, match=r"got a list"):
        from_datasets([1, 2], label="y", features=["x"])
    with pytest.raises(DataError, match=r"with parts train, validation"):
        from_datasets(
            datasets.DatasetDict({"train": dataset, "validation": dataset}), label="outcome", features=["age"]
        )
    with pytest.raises(DataError, match=r"either image= .* or features="):
        from_datasets(dataset, label="outcome")
    with pytest.raises(DataError, match=r"no column 'agee'. Did you mean 'age'"):
        from_datasets(dataset, label="outcome", features=["agee"])


@pytest.mark.parametrize(
    ("size", "word"),
    [
        ((100_000, 100_000), "10,000,000,000 pixels"),
        ((0, 5), "two whole numbers"),
        ((5,), "two whole numbers"),
        ((5.5, 5), "two whole numbers"),
        (5, "two whole numbers"),
    ],
)
def test_a_size_that_no_image_can_have_is_refused_before_any_is_made(
    tmp_path: Path, size: Any, word: str
) -> None:
    save(tmp_path, "north/ill/a.png", 3)
    for load in (from_folder, from_client_folder):
        with pytest.raises(DataError, match=word):
            load(tmp_path, size=size)


def test_a_table_of_too_many_columns_is_refused() -> None:
    wide = pd.DataFrame(np.zeros((2, MOST_COLUMNS + 1), dtype=np.int8)).add_prefix("c")
    with pytest.raises(DataError, match=r"50,001 columns.*from_tensors"):
        from_table(wide, label="c0", client="c1")
    need_columns("wide", wide.iloc[:, 1:], list(wide.columns[1:]))
