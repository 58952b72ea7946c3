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

from tailorfl.data.build import build
from tailorfl.data.own import as_source, from_folder, from_table, from_tensors
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


ENCODINGS = ("utf-8", "utf-8-sig", "latin-1", "utf-16")
FORMS = [*itertools.product(ENCODINGS, ",;\t|", ".,", (False, True))]
IN_PAIRS = [
    (encoding, sep, ".,"[(i + j) % 2], (i + j // 2) % 2 == 1)
    for (i, encoding), (j, sep) in itertools.product(enumerate(ENCODINGS), enumerate(",;\t|"))
]
"""Every pair of an encoding, a separator, a decimal mark, and quotes or none."""


@pytest.mark.parametrize(
    "forms", [IN_PAIRS, pytest.param(FORMS, marks=pytest.mark.slow)], ids=["pairs", "all"]
)
def test_the_same_table_has_the_same_bits_however_it_is_written(tmp_path: Path, forms: Any) -> None:
    frame = patients(10)
    expected = from_table(frame, **OPTIONS)
    for encoding, sep, decimal, quoted in forms:
        file = tmp_path / ("t.tsv" if quoted else "t.csv")
        file.write_bytes(as_text(frame, sep, decimal, quoted).encode(encoding))
        forced = {"sep": "tab" if sep == "\t" else sep, "decimal": decimal}
        for source in (from_table(file, **OPTIONS), from_table(file, **OPTIONS, **forced)):
            assert torch.equal(source.x.nan_to_num(), expected.x.nan_to_num()), (
                encoding,
                sep,
                decimal,
                quoted,
            )
            assert torch.equal(source.y, expected.y)
            assert source.info["features"] == expected.info["features"]
    prepared, again = (
        build(**data, normalise="client", seed=1).source
        for data in ({"source": expected}, {"name": "table", "path": str(file), "options": OPTIONS})
    )
    assert torch.equal(again.x, prepared.x)
    assert "sex=männlich" in again.info["features"] == prepared.info["features"]


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


GERMAN = "cost;rate;y\n1.234,5;0,5;1\n12.000;1,5;0\n1.234.567;2,5;1\n"
ENGLISH = 'cost,rate,y\n"1,234.5",0.5,1\n"12,000",1.5,0\n"1,234,567",2.5,1\n'


@pytest.mark.parametrize(
    ("text", "decimal", "x"),
    [
        (ENGLISH, None, [[1234.5, 0.5], [12000, 1.5], [1234567, 2.5]]),
        (GERMAN, None, [[1234.5, 0.5], [12000, 1.5], [1234567, 2.5]]),
        ("a;b;y\n2.5;0,5;1\n3.25;1,5;0\n", None, [[2.5, 0.5], [3.25, 1.5]]),  # each column in its own way
        ("a;y\n1,234;1\n2,345;0\n", ",", [[1.234], [2.345]]),
        ("a;y\n1,234;1\n2,345;0\n", ".", [[1234], [2345]]),
        ("a;b;y\n0,5;1.234;1\n1,5;2.345;0\n", ",", [[0.5, 1234], [1.5, 2345]]),
        ("a;y\n1,2;1\n3;0\n", ".", [[0], [0]]),  # several answers in a cell are words
    ],
)
def test_marks_of_thousands_are_no_decimals(tmp_path: Path, text: str, decimal: Any, x: Any) -> None:
    forced = {"decimal": decimal} if decimal else {}
    source = from_table(write(tmp_path, text), label="y", **forced)
    torch.testing.assert_close(source.x.nan_to_num(), torch.tensor(x, dtype=torch.float32))


def test_decimal_marks_of_a_frame_that_was_read_before() -> None:
    frame = pd.DataFrame({"a": ["0,5", "1,5"], "y": [0, 1]})
    assert from_table(frame, label="y").x.flatten().tolist() == [0.5, 1.5]


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
def test_numbers_with_two_readings_are_refused_by_column(tmp_path: Path, text: str, column: str) -> None:
    with pytest.raises(DataError, match=rf"column '{column}' .*data\.options\.decimal"):
        from_table(write(tmp_path, text), label="y")


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
    for (
        text,
        options,
        read,
    ) in (  # separators at the end, blanks around names and words; an index that is excluded
        ("a , y,\n 2, x ,\n4,z,\n", {}, (("a",), ("x", "z"), [[2], [4]])),
        (",a,y\n0,2,u\n1,4,v\n", {"exclude": ["Unnamed: 0"]}, (("a",), ("u", "v"), [[2], [4]])),
    ):
        source = from_table(write(tmp_path, text), label="y", **options)
        assert (source.info["features"], source.info["classes"], source.x.tolist()) == read


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


def test_words_that_pandas_takes_for_empty_cells_stay_in_excluded_columns(tmp_path: Path) -> None:
    file = write(tmp_path, "note,age,,sex\nNone,60,,null\nNA,NA,,f\nnull,,,\n,90,,m\n")
    frame = read_table(file, exclude=["note"])[1]
    assert frame.pop("note").tolist() == ["None", "NA", "null", ""]
    assert frame.isna().to_numpy().tolist() == [[False, True], [True, False], [True, True], [False, False]]
    assert list(frame.columns) == ["age", "sex"]


def test_a_long_table_has_one_form_of_its_ids(tmp_path: Path) -> None:
    """pandas reads it in pieces, of which only the last one has an id with a letter."""
    rows, columns = 5_000, 200
    ids = ["007"] * (rows - 1) + ["A07"]
    text = "\n".join([",".join(["site", *map(str, range(columns))]), *(f"{i}{',1' * columns}" for i in ids)])
    assert set(read_table(write(tmp_path, text))[1]["site"]) == {"007", "A07"}


def test_true_is_the_same_word_beside_other_words(tmp_path: Path) -> None:
    write(tmp_path, "age,ill\n" + "40,TRUE\n50,FALSE\n" * 5, "ash.csv")
    write(tmp_path, "age,ill\n" + "40,true\n50,FALSE\n60,unknown\n" * 5, "elm.csv")
    source = from_table(tmp_path, "ill")
    assert source.info["classes"] == ("False", "True", "unknown")
    assert source.y.tolist() == [1, 0] * 5 + [1, 0, 2] * 5
    frame = read_table(tmp_path)[1].assign(outcome=[0, 1] * 12 + [1])
    smokers = build(
        source=from_table(frame, "outcome", "file", features="ill", words="ill"), normalise="federated"
    )
    assert smokers.source.info["features"] == ("ill=False", "ill=True", "ill=unknown")


def test_a_column_that_one_site_lacks_is_empty_there_and_named_once(tmp_path: Path, caplog: Any) -> None:
    frame, options = patients(), {"label": "outcome"}
    for site, rows in frame.groupby("site"):
        plain, odd = (rows.drop(columns="site"), site == "elm")  # another order, separator and decimal
        plain = plain[["sex", "outcome", "age", "level"]] if odd else plain
        write(tmp_path, as_text(plain, ";" if odd else ",", "," if odd else ".", False), f"{site}.csv")
    found = build("table", path=str(tmp_path), options=options, normalise="federated").source
    assert "'dose' (elm)" in caplog.text
    assert caplog.text.count("'dose'") == 1
    frame.loc[frame["site"] == "elm", "dose"] = np.nan
    frames = {str(site): rows.drop(columns=["site"]) for site, rows in frame.groupby("site")}
    frames["elm"] = frames["elm"].drop(columns="dose")
    for data in (from_table(frame, **OPTIONS), as_source(frames, options)):
        assert torch.equal(found.x, build(source=data, normalise="federated").source.x)
    assert not found.x[30:60, found.info["features"].index("dose")].any()  # the mean of all
    with pytest.raises(DataError, match=r"column 'dose' is empty.*data\.normalise"):
        build("table", path=str(tmp_path), options={**options, "features": ["dose"]})


def test_pictures_are_turned_as_they_were_held(tmp_path: Path) -> None:
    (tmp_path / "a" / "c").mkdir(parents=True)
    pixels, exif = np.arange(24, dtype=np.uint8).reshape(4, 6), Image.Exif()
    for orientation in (1, 2, 3, 4, 6):
        exif[0x0112] = orientation
        Image.fromarray(pixels).save(tmp_path / "a" / "c" / f"{orientation}.png", exif=exif)
    with pytest.raises(DataError, match="6x4, but the first one is 4x6"):  # a portrait, stored as a landscape
        from_folder(tmp_path)
    (tmp_path / "a" / "c" / "6.png").unlink()
    for row, turned in enumerate((pixels, pixels[:, ::-1], pixels[::-1, ::-1], pixels[::-1])):
        assert (from_folder(tmp_path).x[row, 0].numpy() == turned).all(), row


@pytest.mark.parametrize("size", [None, (2, 3), (4, 6)])
def test_bytes_of_grey_pictures_have_any_order(tmp_path: Path, size: tuple[int, int] | None) -> None:
    pixels = np.array([[0, 300, 40_000], [65_535, 256, 1_000]])
    for name, kind in (("I;16", "<u2"), ("I;16B", ">u2")):
        (tmp_path / name / "c").mkdir(parents=True)
        Image.frombytes(name, (3, 2), pixels.astype(kind).tobytes()).save(tmp_path / name / "c" / "1.tif")
    x = from_folder(tmp_path, size=size).x
    assert torch.equal(x[0], x[1])
    if size != (4, 6):
        assert x[0, 0].tolist() == (pixels // 256).tolist()


# what is said


def test_copies_and_classes_of_one_sample_are_named(caplog: pytest.LogCaptureFixture) -> None:
    frame = patients()
    frame.loc[5, "outcome"] = "unklar"
    frame = pd.concat([frame, frame.iloc[[0, 0, 40]].assign(site="oak")])  # three copies, two at another site
    from_table(frame, **OPTIONS)
    assert "3 of 93 rows are exact copies of other rows" in caplog.text
    assert "1 of 3 classes (unklar) have a single sample" in caplog.text
    caplog.clear()  # an excluded column tells rows apart
    ids = pd.DataFrame({"id": list("abab"), "age": [1.0, 1.0, 1.0, 1.0], "y": [0, 0, 0, 1]})
    from_table(ids, label="y", exclude="id")
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
        lambda: from_table(several, label="y", task="binary"),
        lambda: from_table(frame.assign(who=[[r] for r in rows]), label="y"),
        lambda: from_table(frame, label="age", features=["y"]),
        lambda: from_table(frame, label="who", features=["age"], task="regression"),
        lambda: from_table(frame, label="y", split="who"),
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
        lambda: read_table(frame, decimal=frame),
    ]


@pytest.mark.parametrize("number", range(len(secrets())))
def test_no_message_shows_a_cell(number: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(TailorflError) as refused:
        secrets()[number]()
    said = str(refused.value) + caplog.text
    assert SECRET not in said, said
    assert NUMBER not in said, said
