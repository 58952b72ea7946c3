"""Every mistake in a user's own table or arrays is named, by column and row or by sample."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tailorfl.data import columns
from tailorfl.data.build import build
from tailorfl.data.own import from_table, from_tensors
from tailorfl.errors import DataError

NAN = float("nan")
FRAME = pd.DataFrame(
    {
        "site": ["north", "south", "north", "east"],
        "age": [30, 40, 50, 60],
        "dose": [0.5, 1.5, 2.5, 3.5],
        "smoker": [True, False, False, True],
        "outcome": ["ill", "well", "well", "ill"],
        "part": ["train", "train", "test", "train"],
    }
)
ALL: dict[str, Any] = {"features": None, "client": "site", "exclude": ["part"]}
"""Roles in which every column has one."""
NA = {"na_values": ["?"]}
AGE = {"label": "age", "features": ["dose"], "na_values": 50}


def blank(column: str) -> dict[str, list[Any]]:
    """A gap in row 2 of a column."""
    return {column: [*FRAME[column][:2], None, FRAME[column][3]]}


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"label": "outcom"}, "'outcom'.*'outcome'"),
        ({}, {"client": "clinic"}, "'clinic'.*site, age"),
        ({}, {"label": "age", "features": ["age"]}, "'age'"),
        ({}, {"label": 1}, "'1'"),
        ({}, {"client": 3}, "client"),
        ({}, {"features": [1]}, "'1'"),
        ({}, {"split": 1.5}, "split"),
        ({}, {"words": ["ages"]}, "'ages'.*'age'"),
        ({}, {**ALL, "exclude": ["agee"]}, "'agee'.*'age'"),
        ({}, {"exclude": "outcome"}, "'outcome'"),
        *((blank(c), ALL, rf"'{c}' is empty .* 1 of 4 rows.* row 2") for c in ("site", "outcome", "dose")),
        *(({"outcome": ["u", b, "u", "u"]}, NA, "'outcome' .* row 1") for b in ("", "  ", None, "?")),
        ({"outcome": ["u", "?", "v", "u"]}, {**NA, "task": "binary"}, "'outcome' .* row 1"),
        *(({}, {**AGE, "task": task}, "'age' is empty .* row 2") for task in ("regression", "counts")),
        ({}, {"na_values": [True]}, "na_values"),
        ({"when": pd.Timestamp("2020-01-01")}, {"features": ["when"]}, "'when' is not a number"),
        ({"dose": [0, 0, 0, 1e300]}, {"features": ["dose"]}, "'dose' is infinite.*row 3"),
        ({"dose": np.arange(4) * 1j}, {"features": ["dose"]}, "column 'dose' holds complex numbers"),
        ({}, {"features": None, "client": "site"}, "'part' is not a number in 4 of 4"),
        ({}, {"label": "site", "task": "binary"}, "'site' has 3: east, north, south"),
        ({}, {"label": ["site", "outcome"]}, "2 are given"),
        ({}, {"label": ["age", "dose"], "features": ["smoker"], "task": "survival"}, "survival"),
        ({}, {"label": "smoker", "task": "survival"}, r"y must be .*\[4, 2\]"),
        *(({c: [0, 0.5, 1, 1]}, {"label": ["a", "b"], "task": "multilabel"}, "multi.* 1 of 4") for c in "ab"),
        ({}, {"split": "site"}, "'site' is neither .* 4 of 4"),
        ({"part": "test"}, {"split": "part"}, "no training samples"),
    ],
)
def test_mistakes_in_a_table_are_named(change: dict[str, Any], options: dict[str, Any], words: str) -> None:
    frame = FRAME.assign(a=1, b=0).assign(**change)
    with pytest.raises(DataError, match=words):
        build(source=from_table(frame, **{"label": "outcome", "features": ["age"], **options}))


DATES = [f"{1 + k % 28}.{1 + k % 12}.20{10 + k % 9}" for k in range(40)]
CODES = [f"P{k:04}" for k in range(40)]
MIXED = [*range(39), "unknown"]


def of_odd(column: list[Any]) -> pd.DataFrame:
    count = len(column)
    return pd.DataFrame({"odd": column, "age": np.arange(float(count)), "y": np.arange(count) % 2})


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (DATES, "dates"),
        ([f"2024-0{1 + k % 3}-01 10:3{k % 9}" for k in range(40)], "dates"),
        (list(pd.date_range("2024-01-01", periods=40)), "dates"),
        (CODES, "at most 100 are encoded"),
        (MIXED, "different numbers .*unknown"),
        ([f"w{k % 101}" for k in range(404)], "101 different words"),
    ],
)
def test_columns_that_are_no_categories_are_refused_by_name(column: list[Any], said: str) -> None:
    frame = of_odd(column)
    settings: dict[str, Any] = {"clients": 1, "normalise": "federated", "split": {"test": 0.0}}
    with pytest.raises(DataError, match=rf"column 'odd' .*{said}"):
        build(source=from_table(frame, label="y"), **settings)
    assert from_table(frame, label="y", exclude="odd").info["features"] == ("age",)
    if column in (DATES, CODES, MIXED):  # unless it is named as a code
        source = build(source=from_table(frame, label="y", words=["odd"]), **settings).source
        assert any(name.startswith("odd=") for name in source.info["features"])


@pytest.mark.parametrize(
    "words", [[*range(20), *map("ward {}".format, range(20))], [f"w{k}" for k in range(100)]]
)
def test_as_many_words_as_numbers_and_a_hundred_words_are_categories(words: list[Any]) -> None:
    settings: dict[str, Any] = {"clients": 1, "normalise": "federated", "split": {"train": 1.0}}
    source = build(source=from_table(of_odd(words * 2), label="y"), **settings).source
    assert sum(name.startswith("odd=") for name in source.info["features"]) == len(words)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (range(1000, 1040), "looks like a row or patient number.*data.options.exclude=\\[odd\\]"),
        ([20240101 + k % 28 for k in range(40)], "looks like dates.*data.options.exclude=\\[odd\\]"),
        ([np.nan, *range(1000, 1039)], "looks like a row or patient number"),
        ([np.nan, *(20240101 + k % 28 for k in range(39))], "looks like dates"),
        ([np.nan, *(k + 0.5 for k in range(39))], "^((?!looks like).)*$"),
        ([k % 7 for k in range(40)], "^((?!looks like).)*$"),
    ],
)
def test_numbers_that_measure_nothing_are_named(column: Any, said: str, caplog: Any) -> None:
    from_table(of_odd(list(column)), label="y")
    assert re.search(said, caplog.text.replace("\n", " "))


@pytest.mark.parametrize("column", ["odd", "y"])
def test_cells_that_hold_lists_are_refused_by_column_and_type(tmp_path: Path, column: str) -> None:
    frame = pd.DataFrame({"odd": [1.0, 2.0], "y": ["u", "v"]})
    frame[column] = pd.Series([[1.0, 2.0], [3.0, 4.0]])
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=rf"column '{column}' holds a value of type ndarray in 2 of 2 rows"):
        from_table(tmp_path / "t.parquet", label="y")


def test_tables_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty.csv", "empty.parquet"):
        (tmp_path / name).write_bytes(b"")
    twice = pd.DataFrame(np.arange(40.0).reshape(20, 2) % 3)
    monkeypatch.setattr(columns, "MOST_COLUMNS", 6)
    from_table(FRAME, label="outcome", exclude=["site", "part"])
    for table, words in (
        (tmp_path / "t.xlsx", "must end in"),
        (tmp_path / "t.csv", "t.csv' does not exist"),
        *((tmp_path / name, f"{name}' cannot be read") for name in ("empty.csv", "empty.parquet")),
        (FRAME.iloc[:0], "0 rows"),
        (pd.concat([twice, twice], axis=1), "has the column '0' twice"),
        (FRAME.assign(more=1), r"7 columns.*from_tensors"),
    ):
        with pytest.raises(DataError, match=words):
            from_table(table, label="outcome")
    assert from_table(twice, "1").info["features"] == ("0",)  # names of columns may be numbers


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "holds no tables"),
        ({"a.csv": {}, "b.csv": {"dose": "Dose "}}, "'a' .*'dose' .*'b' .*'Dose'"),
        ({"a.csv": {}, "b.csv": {"age": "AGE"}}, "'a' has a column 'age' and 'b' a column 'AGE'"),
        ({"a.csv": {}, "b.csv": {"outcome": "other"}}, "'b' lacks 'outcome'"),
        ({"a.csv": {}, "a.tsv": {}}, "two tables named 'a'"),
        ({"c.csv": {"dose": "file"}}, "'file'"),
    ],
)
def test_tables_that_do_not_fit_are_named(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    for name, renamed in files.items():
        FRAME.rename(columns=renamed).to_csv(tmp_path / name, sep="\t" if "tsv" in name else ",", index=False)
    with pytest.raises(DataError, match=words):
        from_table(tmp_path, label="outcome")


X, Y = torch.arange(60.0).reshape(20, 3), torch.arange(20) % 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"y": [0, 1]}, "x has 20, y has 2"),
        ({"clients": [0] * 21}, "clients has 21"),
        ({"clients": ["a", None] * 10}, "'clients' is empty"),
        ({"clients": [("a", 1)] * 20}, "clients should be names or numbers"),
        ({"clients": "a" * 20}, "clients should be names or numbers"),
        ({"clients": 5}, "clients should be names or numbers"),
        ({"x": torch.where(X == 4, NAN, X), "clients": ["a", "b"] * 10}, "1 of 20 .* sample 1 .*'b'"),
        ({"x": X + 1j}, "x holds complex numbers"),
        ({"x": X.to_sparse()}, r"x is a sparse tensor; give its to_dense\(\)"),
        ({"x": np.full((20, 3), "a")}, "x must be an array of numbers"),
        ({"x": [[1], [1, 2]]}, "x must be an array of numbers"),
        ({"x": [[10**30] * 3] * 20}, "x must be an array of numbers"),
        ({"x": X.to("meta")}, "x should be a plain array"),
        ({"x": torch.tensor(1.0)}, "x should be a plain array"),
        ({"y": X + 1j, "task": "regression"}, "y holds complex numbers"),
        ({"y": [0, 0.5] * 10}, "whole numbers.*task='regression'"),
        ({"y": Y * 2, "task": "multilabel"}, "0 or 1"),
        ({"y": -Y}, "labels must lie in"),
        ({"y": Y * 10**12}, "has class 1,000,000,000,000, .*outputs"),
        ({"y": Y + 1}, r"classes 1 to 2; classes are counted from 0.*y - 1"),  # class 0 would be empty
        ({"x": torch.zeros(60, 3), "y": torch.arange(60)}, "60 values in 60 rows"),
        ({"y": np.array(["a", None] * 10, dtype=object)}, "missing in 10 samples, first in sample 1"),
        ({"test": [0.5] * 20}, "test should be True or False"),
        ({"test": ["a"] * 20}, "test must be an array of numbers"),
        ({"test": [2] * 20}, "test should be True or False"),
    ],
)
def test_mistakes_in_arrays_are_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        from_tensors(**{"x": X, "y": Y, **arguments})


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_with_the_channels_last_are_told_how_to_be_turned(channels: int, dtype: torch.dtype) -> None:
    x = torch.randint(0, 256, (6, 9, 8, channels)).to(dtype)
    with pytest.raises(DataError, match=rf"\[6, 9, 8, {channels}\].*x\.permute\(0, 3, 1, 2\)"):
        from_tensors(x, [0, 1] * 3)
    turned = from_tensors(x.permute(0, 3, 1, 2), [0, 1] * 3)
    assert turned.input_shape == (channels, 9, 8)
    torch.testing.assert_close(turned.x[2, 0], x[2, :, :, 0])


# labels that were never meant as the classes they would silently become


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.arange(60) + 0.5, r"'y' has 60 values in 60 rows, 60 of them with fractions.*task='regression'"),
        (np.arange(60), "60 values in 60 rows"),
    ],
)
def test_numbers_are_no_classes(labels: np.ndarray, said: str) -> None:
    frame = pd.DataFrame({"a": np.arange(60.0), "y": labels})
    with pytest.raises(DataError, match=said):
        from_table(frame, "y")
    assert from_table(frame, "y", task="regression").outputs == 1


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.arange(60) // 2, "has 30 classes in 60 rows, 2.0 rows per class"),
        ([f"patient {row // 2}" for row in range(60)], "is it the right column?"),
        (np.arange(60) % 5, None),
        (np.where(np.arange(60) < 30, 0.0, 1.0), None),
    ],
)
def test_many_classes_with_few_rows_are_pointed_out(labels: Any, said: str | None, caplog: Any) -> None:
    from_table(pd.DataFrame({"a": np.arange(60.0), "y": labels}), "y")
    assert said in caplog.text if said else caplog.text == ""


@pytest.mark.parametrize("kind", [list, np.array, lambda v: np.array(v, dtype=object), pd.Series])
def test_names_of_classes_are_numbered_in_sorted_order(kind: Callable[[list[str]], Any]) -> None:
    source = from_tensors(np.zeros((60, 2)), kind(["dog", "cat", "ant"] * 20))
    assert (source.y[:3].tolist(), source.outputs) == ([2, 1, 0], 3)
    assert source.info["classes"] == ("ant", "cat", "dog")
    binary = from_tensors(np.zeros((60, 2)), kind(["yes", "no"] * 30), task="binary")
    assert (binary.y[:2].tolist(), binary.outputs) == ([1, 0], 1)
