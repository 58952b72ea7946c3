"""Tables in files and folders: separator, decimal mark and encoding are detected; no column changes its meaning."""

from __future__ import annotations

import codecs
import csv
import functools
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailorfl.errors import ConfigError, DataError, first_few
from tailorfl.printable import shown

if TYPE_CHECKING:
    import pandas as pd  # at run time only when tables are read: it takes 60 MB

log = logging.getLogger(__name__)

TABLES = (".csv", ".tsv", ".parquet")
FILE = "file"
"""The column with the file of each row of a folder."""
READING = "table_reading"
"""Key of `Source.info`: arguments of `read_table`, other than defaults, with which new files of the data are read."""
SEPARATORS = (",", ";", "\t", "|")
TRIED = 100
"""Rows by which a separator is chosen."""
NAMED = 8
"""Columns or files that a message names."""
SHOWN = 30
"""Columns of a table that a message lists."""
CHUNK = 2**20
NOTHING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A",
    "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
"""Texts that pandas reads as empty cells."""
UNREADABLE = (
    OSError, ValueError, OverflowError, RecursionError, MemoryError, NotImplementedError, csv.Error,
)  # fmt: skip
"""Errors that readers of tables raise for damaged files."""
_UNNAMED = re.compile(r"Unnamed: \d+")
_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_COMMA = re.compile(r"[+-]?(\d+|[1-9]\d{0,2}(\.\d{3})+),\d+([eE][+-]?\d+)?")  # 1,5 and 1.234,5
_COMMA_GROUPS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")  # 1,234 and 1,234.5
_POINT_GROUPS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+")  # 1.234


def read_table(
    table: str | Path | pd.DataFrame,
    sep: str | None = None,
    decimal: str | None = None,
    exclude: Sequence[str] = (),
    needed: Sequence[str] = (),
) -> tuple[str, pd.DataFrame]:
    """Return (name, frame) of a table in a file, in the files of a folder, or in memory.

    For a folder, the column `FILE` holds the file name of each row without its ending. A column that some of its files
    lack is empty there.

    Args:
        table: the file, folder or frame.
        sep: separator of text files, one character or "tab"; None: the one that fits the first rows.
        decimal: "." or ","; None: a comma if numbers have one, file by file.
        exclude: columns that are not inputs, whose cells stay as they are written.
        needed: columns that every file of a folder must have.

    Raises:
        ConfigError: for another `sep` or `decimal`.
        DataError: it cannot be read, two columns have one name, or the notation of its numbers is ambiguous.
    """
    import pandas as pd

    if sep is not None and (not isinstance(sep, str) or (sep != "tab" and (len(sep) != 1 or sep in '"\r\n'))):
        raise ConfigError(f"sep should be one character such as ';', or tab, but is {shown(sep)}")
    if decimal is not None and (not isinstance(decimal, str) or decimal not in (".", ",")):
        raise ConfigError(f"decimal should be '.' or ',', but is {shown(decimal)}")
    if isinstance(table, pd.DataFrame):
        return "table", _with_numbers("table", plain_frame(table), decimal, exclude)
    path = Path(table).expanduser()
    if path.is_dir():
        return path.name, _read_folder(path, sep, decimal, exclude, needed)
    if path.suffix.lower() not in TABLES:
        raise DataError(f"table '{path}' must end in .csv, .tsv or .parquet, or be a folder of such files")
    if not path.is_file():
        raise DataError(f"table '{path}' does not exist")
    try:
        if path.suffix.lower() == ".parquet":
            frame, decimal_mark = plain_frame(pd.read_parquet(path)), None
        else:
            frame, decimal_mark = _read_text(path, "\t" if sep == "tab" else sep, decimal, exclude)
    except UNREADABLE as error:
        raise DataError(f"table '{path}' cannot be read: {error}") from error
    return path.name, _with_numbers(path.name, frame, decimal, exclude, decimal_mark)


def reading_info(
    sep: str | None = None, decimal: str | None = None, exclude: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return the entry of `Source.info` on how its table was read; empty if everything was detected."""
    chosen = {"sep": sep, "decimal": decimal, "exclude": list(exclude)}
    reading = {key: value for key, value in chosen.items() if value}
    return {READING: reading} if reading else {}


def plain_frame(table: pd.DataFrame) -> pd.DataFrame:
    """Return a frame with rows counted from 0 and columns named by texts. Raise DataError if two have one name."""
    named = table.reset_index(drop=True).set_axis([str(column) for column in table.columns], axis=1)
    _check_distinct("the table", list(named.columns))
    return named


def is_unnamed(column: str) -> bool:
    """Return whether a file gave a column no name, as pandas does with its index."""
    return not column.strip() or _UNNAMED.fullmatch(column) is not None


def _check_distinct(location: str, columns: Sequence[str]) -> None:
    twice = [column for column, count in Counter(columns).items() if count > 1]
    if twice:
        raise DataError(f"{location} has the column '{twice[0]}' twice; rename one of them")


def _read_folder(
    folder: Path, sep: str | None, decimal: str | None, exclude: Sequence[str], needed: Sequence[str]
) -> pd.DataFrame:
    tables = [f for f in folder.iterdir() if f.suffix.lower() in TABLES and not f.name.startswith(".")]
    files = sorted(tables, key=lambda f: (f.stem, f.name))  # the order of the clients, so that rows follow it
    if not files:
        raise DataError(f"folder '{folder}' holds no tables ({', '.join(TABLES)})")
    frames: dict[str, pd.DataFrame] = {}
    for file in files:
        frame = read_table(file, sep, decimal, exclude)[1]
        if file.stem in frames:
            raise DataError(
                f"folder '{folder}' has two tables named '{file.stem}', which would become one client; rename one of "
                "them"
            )
        if FILE in frame.columns:
            raise DataError(
                f"table '{file}' has a column '{FILE}', a name reserved for the file of each row; rename the column"
            )
        frames[file.stem] = frame
    return joined(frames, FILE, exclude, needed)


def joined(
    frames: Mapping[str, pd.DataFrame], owner: str, exclude: Sequence[str] = (), needed: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the rows of several tables, in order; a column that some lack is empty there, and named in a warning.

    Args:
        frames: each table by its name.
        owner: name of a new column with the table of each row.
        exclude: columns that the warning leaves out.
        needed: columns that every table must have.

    Raises:
        DataError: a table lacks a column that is needed, or two tables spell one column differently.
    """
    import pandas as pd

    for name, frame in frames.items():
        if lacking := [column for column in needed if column != owner and column not in frame.columns]:
            listed = first_few([shown(column) for column in lacking], SHOWN)
            raise DataError(f"table '{name}' lacks {listed}; it has: {first_few(list(frame.columns), SHOWN)}")
    named = {name: list(frame.columns) for name, frame in frames.items()}
    columns = shared_columns(named)
    name_lacking(named, exclude)
    owned = [frame.assign(**{owner: name}) for name, frame in frames.items()]
    return pd.concat(owned, ignore_index=True)[[*columns, owner]]


def shared_columns(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Return all columns of several tables, each given by its name, in the order of the first.

    Raises:
        DataError: two tables spell one column differently, such as Age and age.
    """
    union = list(dict.fromkeys(column for table_columns in columns.values() for column in table_columns))
    having = {name: set(table_columns) for name, table_columns in columns.items()}
    alike: dict[str, str] = {}
    for column in union:
        first_spelling = alike.setdefault(re.sub(r"[\W_]+", "", column).casefold() or column, column)
        if first_spelling != column and not any(
            {first_spelling, column} <= table_columns for table_columns in having.values()
        ):
            first_table, second_table = (
                next(name for name, table_columns in having.items() if c in table_columns)
                for c in (first_spelling, column)
            )
            raise DataError(
                f"'{first_table}' has a column '{first_spelling}' and '{second_table}' a column '{column}'; give it "
                "one name in all tables"
            )
    return union


def name_lacking(columns: Mapping[str, Sequence[str]], exclude: Sequence[str] = ()) -> None:
    """Warn of the columns that some of several tables lack, except those in `exclude`."""
    having = {name: set(table_columns) for name, table_columns in columns.items()}
    union = dict.fromkeys(column for table_columns in columns.values() for column in table_columns)
    lacking = {
        column: [name for name, table_columns in having.items() if column not in table_columns]
        for column in union
        if column not in exclude
    }
    descriptions = [f"'{column}' ({first_few(names, NAMED)})" for column, names in lacking.items() if names]
    if descriptions:
        text = f"these columns are missing in some tables and count as empty there: {first_few(descriptions, NAMED)}"
        log.warning("%s", text, extra={"once": text})


def _read_text(
    path: Path, sep: str | None, decimal: str | None, exclude: Sequence[str]
) -> tuple[pd.DataFrame, str | None]:
    """Return the table of a text file, and its decimal mark if it was detected as a comma."""
    import pandas as pd

    encoding = _encoding_of(path)
    sep = sep or _separator_of(path, encoding)
    header = _records(path, encoding, sep, 1)
    names = [name.strip() for name in header[0]] if header else []
    _check_distinct(f"table '{path}'", [name for name in names if name])
    columns = header[0] if header else []
    written = {raw: str for raw in columns if raw.strip() in exclude}
    # By name and by number, as pandas names a column without a name. The texts of the others are kept: None is a word.
    empty_cells: dict[Any, tuple[str, ...]] = {
        key: NOTHING for i, raw in enumerate(columns) if raw not in written for key in (i, raw)
    }

    def parsed(mark: str) -> pd.DataFrame:
        frame = pd.read_csv(
            path,
            sep=sep,
            decimal=mark,
            encoding=encoding,
            dtype=written,
            keep_default_na=False,
            na_values=empty_cells,
            # In one piece: otherwise each piece decides for itself whether its 007 is a number or a word. Separators
            # beyond ASCII need pandas' slower reader, which knows no pieces.
            low_memory=not sep.isascii(),
        )
        if not isinstance(frame.index, pd.RangeIndex):
            raise DataError(
                f"table '{path}': rows have {len(frame.columns) + frame.index.nlevels} cells, but the header names "
                f"{len(frame.columns)} columns; give every column a name (also a first column of row names), or set "
                "the separator with data.options.sep"
            )
        frame.columns = pd.Index(
            [column.strip() or f"Unnamed: {number}" for number, column in enumerate(map(str, frame.columns))]
        )
        empty = [column for column in frame.columns if is_unnamed(column) and frame[column].isna().all()]
        return frame.drop(columns=empty)  # a separator at the end of lines makes such columns

    frame = parsed(decimal or ".")
    if decimal is None and _commas(frame, exclude):
        return parsed(","), ","
    return frame, None


def _encoding_of(path: Path) -> str:
    """Return UTF-16 if there is its byte order mark, else UTF-8, else Windows-1252 (which has all Latin-1 letters).

    Raises:
        DataError: the bytes fit none of these.
    """
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for encoding in ("utf-8-sig", "cp1252"):
        decoder = codecs.getincrementaldecoder(encoding)()
        try:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    decoder.decode(chunk)
                decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            continue
        if encoding != "utf-8-sig":
            text = f"table '{path}' is not UTF-8 and is read as Windows-1252 (Western European letters)"
            log.warning("%s", text, extra={"once": text})
        return encoding
    raise DataError(
        f"table '{path}' is neither UTF-8 nor Windows-1252 text; save it as UTF-8 (in Excel: CSV UTF-8)"
    )


def _separator_of(path: Path, encoding: str) -> str:
    """Return the separator that splits the most rows into as many cells as the header, preferring more cells."""
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    best, chosen = (0, 1), usual
    for sep in (usual, *(separator for separator in SEPARATORS if separator != usual)):
        try:
            header, *rows = _records(path, encoding, sep, TRIED + 1) or [[]]
        except csv.Error:
            continue
        score = sum(len(row) == len(header) for row in rows), len(header)
        if len(header) > 1 and score > best:
            best, chosen = score, sep
    return chosen


def _records(path: Path, encoding: str, sep: str, count: int) -> list[list[str]]:
    """Return the first records of a text file that are not empty."""
    with path.open(encoding=encoding, newline="") as file:
        return list(islice((record for record in csv.reader(file, delimiter=sep) if record), count))


def _texts_of(values: pd.Series[Any]) -> list[str]:
    """Return the distinct texts of a column, stripped of blanks."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(values) or pd.api.types.is_datetime64_any_dtype(values):
        return []
    texts = {value.strip() for value in values if isinstance(value, str)}
    return sorted(texts - {""})


def _numbers_among(texts: Sequence[str]) -> list[str]:
    """Return the texts that are numbers in any form; none unless more than half of the texts are."""
    forms = (_PLAIN, _COMMA, _COMMA_GROUPS, _POINT_GROUPS)
    numbers = [text for text in texts if any(form.fullmatch(text) for form in forms)]
    return numbers if 2 * len(numbers) > len(texts) else []


def _commas(frame: pd.DataFrame, exclude: Sequence[str]) -> list[str]:
    """Return the columns whose numbers have a comma that can only be a decimal mark."""
    return [
        column
        for column in frame.columns
        if column not in exclude
        and any(
            _COMMA.fullmatch(number) and not _COMMA_GROUPS.fullmatch(number)
            for number in _numbers_among(_texts_of(frame[column]))
        )
    ]


def _with_numbers(
    name: str,
    frame: pd.DataFrame,
    decimal: str | None,
    exclude: Sequence[str],
    decimal_mark: str | None = None,
) -> pd.DataFrame:
    """Return a frame with numbers in place of their texts, such as 1,5 and 1.234,5 and 1,234.

    Args:
        name: of the table, for messages.
        frame: the table.
        decimal: the decimal mark, None if it was not given.
        exclude: columns that stay as they are.
        decimal_mark: the decimal mark of numbers that were read before.

    Raises:
        DataError: the decimal mark is ambiguous; names a column.
    """
    import pandas as pd

    texts = {column: _texts_of(frame[column]) for column in frame.columns if column not in exclude}
    numbers = {
        column: among for column, column_numbers in texts.items() if (among := _numbers_among(column_numbers))
    }
    commas = _commas(frame[list(numbers)], ())
    points = [column for column in numbers if _points_in(numbers[column])]
    mark = decimal or decimal_mark or ("," if commas else None)
    if mark is None and (points or any(_has_fractions(frame[column]) for column in frame.columns)):
        mark = "."
    changed: dict[str, Any] = {}
    for column, column_numbers in numbers.items():
        with_comma = [number for number in column_numbers if "," in number]
        with_point = [number for number in column_numbers if "." in number and "," not in number]
        mixed = column in commas and any(not _POINT_GROUPS.fullmatch(number) for number in with_point)
        if decimal is None and (mixed or (mark == "," and _points_in(with_comma))):
            raise _open(name, column, "has numbers with decimal commas and others with decimal points")
        if with_comma and mark is None:
            raise _open(name, column, "has numbers with a comma that may mark decimals or thousands")
        grouped = [number for number in with_point if _POINT_GROUPS.fullmatch(number)]
        only_groups = bool(grouped) and len(grouped) == len(with_point)
        if mark == "," and only_groups and decimal is None and column not in commas:
            raise _open(name, column, "has numbers with a point that may mark decimals or thousands")
        pointed = {number: _pointed(number, mark, only_groups) for number in column_numbers}
        if any(number != as_read for as_read, number in pointed.items()):
            cells = frame[column].astype(object).map(functools.partial(_replaced, pointed))
            plain_cells = all(isinstance(cell, str | float | int) for cell in cells[cells.notna()])
            changed[column] = (
                pd.to_numeric(cells) if plain_cells and len(column_numbers) == len(texts[column]) else cells
            )
    return frame.assign(**changed) if changed else frame


def _has_fractions(values: pd.Series[Any]) -> bool:
    """Return whether a column was written with decimal points; exactly three decimals may have been thousands."""
    import pandas as pd

    if not pd.api.types.is_float_dtype(values):
        return False
    numbers = values[values % 1 != 0].dropna()
    return bool(((numbers * 1000) % 1 != 0).any() or ((numbers * 100) % 1 == 0).any())


def _points_in(numbers: Sequence[str]) -> bool:
    """Return whether numbers have commas that can only mark thousands, as in 1,234.5 and 1,234,567."""
    return any(_COMMA_GROUPS.fullmatch(number) and not _COMMA.fullmatch(number) for number in numbers)


def _pointed(number: str, mark: str | None, groups: bool) -> str:
    """Return a number in Python's notation; `groups`: points without a comma mark thousands."""
    if mark == ",":
        if _COMMA.fullmatch(number):
            return number.replace(".", "").replace(",", ".")
        return number.replace(".", "") if groups and _POINT_GROUPS.fullmatch(number) else number
    return number.replace(",", "") if _COMMA_GROUPS.fullmatch(number) else number


def _replaced(pointed: Mapping[str, str], cell: Any) -> Any:
    return pointed.get(cell.strip(), cell) if isinstance(cell, str) else cell


def _open(name: str, column: str, problem: str) -> DataError:
    return DataError(
        f"table '{name}': column '{column}' {problem}; write all numbers in the same way, or set the decimal mark with "
        "data.options.decimal ('.' or ',')"
    )
