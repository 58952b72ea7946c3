"""Tables as hospitals have them: however a file writes them the numbers are the same, and what is odd is named."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tailorfl.cli.main import app
from tailorfl.data.build import build
from tailorfl.data.own import from_folder, from_table, from_tensors
from tailorfl.data.registry import load_source
from tailorfl.data.table_files import read_table
from tailorfl.data.text import from_texts
from tailorfl.errors import ConfigError, DataError, TailorflError

SITES = ("ash", "elm", "oak")
OPTIONS: dict[str, Any] = {"label": "outcome", "client": "site"}


def patients(rows: int = 30) -> pd.DataFrame:
    """Patients of three sites, with numbers of every number of digits, and letters beyond ASCII."""
    rng = np.random.default_rng(4)
    count = rows * len(SITES)
    return pd.DataFrame(
        {
            "site": np.repeat(SITES, rows),
            "age": rng.integers(20, 90, count),
            "dose": rng.normal(5, 2, count),
            "level": rng.normal(0, 1, count).round(2),
            "sex": rng.choice(["männlich", "weiblich"], count),
            "outcome": rng.choice(["gut", "schlecht"], count),
        }
    )


def as_text(frame: pd.DataFrame, sep: str, decimal: str, quoted: bool) -> str:
    """The table as a spreadsheet of some country writes it."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            value = "" if np.isnan(value) else repr(value).replace(".", decimal)
        text = str(value)
        return f'"{text}"' if quoted or sep in text else text

    lines = [sep.join(map(str, frame.columns))]
    lines += [sep.join(map(cell, row)) for row in frame.itertuples(index=False)]
    return "\r\n".join(lines) + "\r\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "utf-16"])
def test_the_same_table_has_the_same_bits_however_it_is_written(tmp_path: Path, encoding: str) -> None:
    frame = patients()
    expected = from_table(frame, **OPTIONS)
    prepared = build(source=expected, normalise="client", seed=1).source
    for sep, decimal, quoted in itertools.product(",;\t|", ".,", (False, True)):
        file = tmp_path / ("t.tsv" if quoted else "t.csv")
        file.write_bytes(as_text(frame, sep, decimal, quoted).encode(encoding))
        forced = {"sep": "tab" if sep == "\t" else sep, "decimal": decimal}
        for source in (from_table(file, **OPTIONS), from_table(file, **OPTIONS, **forced)):
            assert torch.equal(source.x.nan_to_num(), expected.x.nan_to_num()), (sep, decimal, quoted)
            assert torch.equal(source.y, expected.y)
            assert source.info["features"] == expected.info["features"]
    again = build("table", path=str(file), options=OPTIONS, normalise="client", seed=1).source
    assert torch.equal(again.x, prepared.x)
    assert again.info["features"] == prepared.info["features"]
    assert "sex=männlich" in again.info["features"]


def test_a_file_of_another_encoding_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.csv").write_bytes(as_text(patients(), ";", ",", False).encode("latin-1"))
    from_table(tmp_path / "t.csv", **OPTIONS)
    assert "t.csv' is not UTF-8 and is read as Windows-1252" in caplog.text
    (tmp_path / "t.csv").write_bytes(b"a,y\n\x81,1\n\xff,0\n")
    with pytest.raises(DataError, match="neither UTF-8 nor Windows-1252"):
        from_table(tmp_path / "t.csv", label="y")


def write(folder: Path, text: str, name: str = "t.csv") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_marks_of_thousands_are_no_decimals(tmp_path: Path) -> None:
    english = write(tmp_path, 'cost,rate,y\n"1,234.5",0.5,1\n"12,000",1.5,0\n"1,234,567",2.5,1\n')
    german = write(tmp_path, "cost;rate;y\n1.234,5;0,5;1\n12.000;1,5;0\n1.234.567;2,5;1\n", "d.csv")
    for file in (english, german):
        assert from_table(file, label="y").x.tolist() == [[1234.5, 0.5], [12000, 1.5], [1234567, 2.5]], file
    points = write(tmp_path, "a;b;y\n2.5;0,5;1\n3.25;1,5;0\n", "p.csv")  # each column in its own way
    assert from_table(points, label="y").x.tolist() == [[2.5, 0.5], [3.25, 1.5]]
    codes = write(tmp_path, "a;y\n1,2;1\n3;0\n", "c.csv")
    assert from_table(codes, label="y", decimal=".").x.isnan().all()  # several answers in a cell are words


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("a;b;y\n1,234;7;1\n2,345;8;0\n", "a"),  # 1.234 or 1234?
        ("a;b;y\n1,234;;1\n2,345;8;0\n", "a"),  # a gap makes no decimal point
        ("a;b;y\n0,5;7;1\n1.5;8;0\n", "a"),
        ("a;b;y\n0,5;1.234;1\n1,5;2.345;0\n", "b"),
        ("a;b;y\n0,5;1,234.5;1\n1,5;2,345.5;0\n", "b"),
    ],
)
def test_numbers_that_can_be_read_in_two_ways_are_refused_by_column(
    tmp_path: Path, text: str, column: str
) -> None:
    with pytest.raises(DataError, match=rf"column '{column}' .*data\.options\.decimal"):
        from_table(write(tmp_path, text), label="y")


def test_the_decimal_mark_decides_what_is_open(tmp_path: Path) -> None:
    file = write(tmp_path, "a;y\n1,234;1\n2,345;0\n")
    assert from_table(file, label="y", decimal=",").x.flatten().tolist() == pytest.approx([1.234, 2.345])
    assert from_table(file, label="y", decimal=".").x.flatten().tolist() == [1234, 2345]
    points = write(tmp_path, "a;b;y\n0,5;1.234;1\n1,5;2.345;0\n")
    assert from_table(points, label="y", decimal=",").x.tolist() == [[0.5, 1234], [1.5, 2345]]
    frame = pd.DataFrame({"a": ["0,5", "1,5"], "y": [0, 1]})  # of a file that was read before
    assert from_table(frame, label="y").x.flatten().tolist() == [0.5, 1.5]


@pytest.mark.parametrize("option", [{"sep": ""}, {"sep": ";;"}, {"sep": '"'}, {"sep": 3}, {"decimal": ";"}])
def test_marks_that_are_none_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    ((key, value),) = option.items()
    with pytest.raises(ConfigError, match=key) as refused:
        from_table(write(tmp_path, "a,y\n1,0\n"), label="y", **option)
    assert repr(value) in str(refused.value)


def test_headers_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    for text, words in (
        ("a,y\nr1,1,0\nr2,2,1\n", "3 cells.* 2 columns"),  # as R writes names of rows
        ("a,a ,y\n1,2,0\n3,4,1\n", "'a' twice"),
        (",a,y\n0,2,0\n1,4,1\n", "'Unnamed: 0'.*exclude"),  # as pandas writes its index
        ("a, ,y\n0,2,0\n1,4,1\n", "'Unnamed: 1'"),
    ):
        with pytest.raises(DataError, match=words):
            from_table(write(tmp_path, text), label="y")
    file = write(tmp_path, "a , y,\n 2, x ,\n4,z,\n")  # separators at the end, blanks around names and words
    source = from_table(file, label="y")
    assert (source.info["features"], source.info["classes"]) == (("a",), ("x", "z"))
    index = from_table(write(tmp_path, ",a,y\n0,2,0\n1,4,1\n"), label="y", exclude=["Unnamed: 0"])
    assert index.x.tolist() == [[2], [4]]


@pytest.mark.parametrize(
    ("text", "name", "header"),
    [
        ("a\tb,c\n1\t2,x\n3\t4,z\n", "t.csv", ["a\tb", "c"]),  # where two separators fit, the ending decides
        ("a\tb,c\n1\t2,x\n3\t4,z\n", "t.tsv", ["a", "b,c"]),
        ("age;dose, in mg, oral;y\n60;1;0\n70;2;1\n", "t.csv", ["age", "dose, in mg, oral", "y"]),
    ],
)
def test_the_rows_decide_between_separators(tmp_path: Path, text: str, name: str, header: list[str]) -> None:
    assert list(read_table(write(tmp_path, text, name))[1].columns) == header


def test_excluded_cells_stay_as_they_are_written_behind_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes("patient,age\n007,60\n008,70\n".encode("utf-8-sig"))
    assert read_table(file, exclude=["patient"])[1]["patient"].tolist() == ["007", "008"]


def lacking(folder: Path) -> Path:
    """Three files, of which the middle one has no dose and another order, separator and decimal mark."""
    for site, rows in patients().groupby("site"):
        plain, odd = rows.drop(columns="site"), site == "elm"
        plain = plain[["sex", "outcome", "age", "level"]] if odd else plain
        write(folder, as_text(plain, ";" if odd else ",", "," if odd else ".", False), f"{site}.csv")
    return folder


def test_a_column_that_one_site_lacks_is_empty_there_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = lacking(tmp_path / "sites")
    found = build("table", path=str(folder), options={"label": "outcome"}, normalise="federated")
    assert [r.getMessage() for r in caplog.records if "'dose' (elm)" in r.getMessage()] != []
    assert caplog.text.count("'dose'") == 1
    frame = patients()
    frame.loc[frame["site"] == "elm", "dose"] = np.nan
    wanted = build(source=from_table(frame, **OPTIONS), normalise="federated")
    assert torch.equal(found.source.x, wanted.source.x)
    dose = found.source.info["features"].index("dose")
    assert not found.source.x[30:60, dose].any()  # the mean of all
    with pytest.raises(DataError, match=r"column 'dose' is empty.*data\.normalise"):
        build("table", path=str(folder), options={"label": "outcome", "features": ["dose"]})


def test_a_column_with_two_spellings_is_refused(tmp_path: Path) -> None:
    folder = lacking(tmp_path / "sites")
    write(folder, "AGE,sex,outcome\n3,weiblich,gut\n", "yew.csv")
    with pytest.raises(DataError, match=r"'ash' has a column 'age' and 'yew' a column 'AGE'"):
        from_table(folder, label="outcome")


# what columns mean


def test_words_and_excluded_columns_that_are_not_there_are_refused_with_the_nearest() -> None:
    frame = pd.DataFrame({"ward": [1, 2, 3], "age": [4.0, 5.0, 6.0], "y": [0, 1, 0]})
    for options, words in (
        ({"words": ["wards"]}, "'wards'.*'ward'"),
        ({"exclude": ["agee"]}, "'agee'.*'age'"),
        ({"exclude": "y"}, "'y'"),
    ):
        with pytest.raises(DataError, match=words):
            from_table(frame, label="y", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("blank", ["", "  ", None, "?"])
@pytest.mark.parametrize("task", ["classification", "binary"])
def test_a_label_that_is_missing_is_no_class(blank: str | None, task: Any) -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "y": ["u", blank, "u" if task == "classification" else "v"]})
    with pytest.raises(DataError, match=r"column 'y' is empty \(NaN\) in 1 of 3 rows, the first is row 1"):
        from_table(frame, label="y", task=task, na_values=["?"])


def features(column: list[Any]) -> pd.DataFrame:
    return pd.DataFrame({"odd": column, "age": np.arange(40.0), "y": [0, 1] * 20})


DATES = [f"{1 + k % 28}.{1 + k % 12}.20{10 + k % 9}" for k in range(40)]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (DATES, "dates"),
        ([f"2024-0{1 + k % 3}-01 10:3{k % 9}" for k in range(40)], "dates"),
        (list(pd.date_range("2024-01-01", periods=40)), "dates"),
        ([f"P{k:04}" for k in range(40)], "names, numbers of patients or texts"),
        ([*range(39), "unknown"], "different numbers and words .1: unknown."),
        ([f"w{k % 101}" for k in range(404)], "101 different words"),
    ],
)
def test_columns_that_are_no_categories_are_refused_by_name(column: list[Any], said: str) -> None:
    frame = pd.DataFrame({"odd": column, "age": np.arange(float(len(column)))}).assign(y=0)
    frame.loc[::2, "y"] = 1
    settings: dict[str, Any] = {"clients": 1, "normalise": "federated", "partition": "iid"}
    with pytest.raises(DataError, match=rf"column 'odd' .*{said}"):
        build(source=from_table(frame, label="y"), split={"test": 0.0}, **settings)
    source = from_table(frame, label="y", exclude="odd")
    assert source.info["features"] == ("age",)


def test_a_named_code_may_look_like_a_date_or_differ_in_nearly_every_row() -> None:
    for column in (DATES, [f"P{k:04}" for k in range(40)], [*range(39), "unknown"]):
        source = from_table(features(column), label="y", words=["odd"])
        names = build(source=source, clients=2, normalise="federated").source.info["features"]
        assert any(name.startswith("odd=") for name in names)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (range(1000, 1040), "number of the row or patient"),
        ([20240101 + k % 28 for k in range(40)], "dates"),
    ],
)
def test_numbers_that_measure_nothing_are_named(
    column: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    from_table(features(list(column)), label="y")
    assert f"column 'odd' looks like {'a ' if 'number' in said else ''}{said}" in caplog.text
    assert "data.options.exclude=[odd]" in caplog.text
    caplog.clear()
    from_table(features([k % 7 for k in range(40)]), label="y")
    assert "looks like" not in caplog.text


@pytest.mark.parametrize("column", ["odd", "y"])
def test_cells_that_hold_lists_are_refused_by_column_and_type(tmp_path: Path, column: str) -> None:
    frame = pd.DataFrame({"odd": [1.0, 2.0], "y": ["u", "v"]})
    frame[column] = pd.Series([[1.0, 2.0], [3.0, 4.0]])
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=rf"column '{column}' holds a value of type ndarray in 2 of 2 rows"):
        from_table(tmp_path / "t.parquet", label="y")
    if column == "odd":
        with pytest.raises(DataError, match="0 feature columns"):
            from_table(tmp_path / "t.parquet", label="y", exclude=["odd"])


def test_pictures_are_turned_as_they_were_held(tmp_path: Path) -> None:
    (tmp_path / "a" / "c").mkdir(parents=True)
    pixels = np.arange(24, dtype=np.uint8).reshape(4, 6)
    for orientation in (1, 2, 3, 4):
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(pixels).save(tmp_path / "a" / "c" / f"{orientation}.png", exif=exif)
    x = from_folder(tmp_path).x[:, 0].numpy()
    for row, turned in enumerate((pixels, pixels[:, ::-1], pixels[::-1, ::-1], pixels[::-1])):
        assert (x[row] == turned).all(), row
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn: a portrait that is stored as a landscape
    Image.fromarray(pixels).save(tmp_path / "a" / "c" / "5.png", exif=exif)
    with pytest.raises(DataError, match="6x4, but the first one is 4x6"):
        from_folder(tmp_path)


# what is said


def test_copies_and_classes_of_one_sample_are_named_by_data_show(tmp_path: Path) -> None:
    frame = patients()
    frame.loc[5, "outcome"] = "unklar"
    frame = pd.concat([frame, frame.iloc[[0, 0, 40]].assign(site="oak")])  # three copies, two at another site
    frame.to_csv(tmp_path / "t.csv", index=False)
    options = "data.options={label: outcome, client: site}"
    words = f"data show data=table data.path={tmp_path / 't.csv'} data.normalise=client".split()
    shown = " ".join(CliRunner().invoke(app, [*words, options]).stderr.split())
    assert "3 of 93 rows are exact copies of other rows" in shown
    assert "1 of 3 classes (unklar) have a single sample" in shown


def test_copies_differ_where_an_excluded_column_does(caplog: pytest.LogCaptureFixture) -> None:
    frame = pd.DataFrame({"id": list("abab"), "age": [1.0, 1.0, 1.0, 1.0], "y": [0, 0, 0, 1]})
    from_table(frame, label="y", exclude="id")
    assert "1 of 4 rows" not in caplog.text or "2 of 4 rows" not in caplog.text
    assert "1 of 4 rows are exact copies" in caplog.text


SECRET = "Anna Secret"
NUMBER = "4711.25"


def secrets() -> list[Any]:
    """What goes wrong with tables whose every cell is a secret: functions that should raise an error of the library."""
    rows = [f"{SECRET} {k}" for k in range(40)]
    frame = pd.DataFrame({"who": rows, "age": np.full(40, float(NUMBER)), "y": [0, 1] * 20})
    several = frame.assign(y=[SECRET, f"{SECRET} 1", f"{SECRET} 2", *rows[3:]])
    numbers = torch.full((4, 2), float(NUMBER))
    labels = torch.tensor([0, 1, 0, 1])
    return [
        lambda: build(source=from_table(frame, label="y"), clients=2, normalise="federated"),
        lambda: build(source=from_table(frame, label="y"), clients=2),
        lambda: from_table(several, label="y", task="binary"),
        lambda: from_table(frame.assign(who=[[r] for r in rows]), label="y"),
        lambda: from_table(frame, label="age", features=["y"]),
        lambda: from_table(frame, label="who", features=["age"], task="regression"),
        lambda: from_table(frame, label="y", split="who"),
        lambda: from_table(frame, label=frame["who"]),  # type: ignore[arg-type]
        lambda: from_table(frame, label="y", client=frame["who"]),  # type: ignore[arg-type]
        lambda: from_table(frame, label="y", exclude=frame["who"]),  # type: ignore[arg-type]
        lambda: from_table(frame, label="y", sep=frame["who"]),  # type: ignore[arg-type]
        lambda: from_table(frame.assign(age=[1e300, *[float(NUMBER)] * 39]), label="y", features=["age"]),
        lambda: load_source("table", path=frame, label="y", task=frame),
        lambda: from_texts(frame.assign(who=["", *rows[1:]]), label="y", text="who"),
        lambda: from_tensors(np.array(rows), labels),
        lambda: from_tensors(numbers, labels, clients=frame[:4]),
        lambda: from_tensors(numbers, labels, clients=[[SECRET], [SECRET, SECRET]] * 2),
        lambda: from_tensors(numbers, numbers[:, :1], task="counts"),
        lambda: from_tensors(numbers, numbers[:, 0], task="classification"),
        lambda: from_tensors(numbers, [[SECRET], [SECRET, SECRET]] * 2),
        lambda: build(source=from_tensors(numbers, labels, [0, 0, 1, 1]), shifts={"new": rows}),
        lambda: read_table(frame, decimal=frame),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("number", range(len(secrets())))
def test_no_message_shows_a_cell(number: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(TailorflError) as refused:
        secrets()[number]()
    said = str(refused.value) + caplog.text
    assert SECRET not in said, said
    assert NUMBER not in said, said
