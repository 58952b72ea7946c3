"""The code of an export's model.py that prepares rows of a raw table: words, numbers and empty cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailorfl.data.summaries import OTHER

_NUMBERS = '''

MEAN = torch.tensor({mean!r}, dtype=torch.float64)
DEVIATION = torch.tensor({deviation!r}, dtype=torch.float64)
FILL = torch.tensor({fill!r}, dtype=torch.float64)


def prepare(x):
    """Raw numbers [samples, {width}], NaN where one is missing -> what the network takes.

    Columns: {names}
    """
    x = x.double()
    return ((torch.where(x.isnan(), FILL, x) - MEAN) / DEVIATION).float()
'''
_CELLS = '''

COLUMNS = {columns}
ABSENT = {absent!r}
NA_VALUES = {na_values!r}


def prepare(rows):
    """Raw rows, each a mapping from column to cell as csv.DictReader gives it -> what the network takes.

    None, NaN, blanks and NA_VALUES are missing cells; rows may lack the columns in ABSENT.
    """
    rows = [{{**dict.fromkeys(ABSENT), **row}} for row in rows]
    made = [[x for name, column in COLUMNS.items() for x in _inputs(row[name], column)] for row in rows]
    return torch.tensor(made, dtype=torch.float64).float()


def _inputs(cell, column):
    word = "" if cell is None or cell != cell else _word(cell)
    missing = word == "" or word in NA_VALUES
    flag = [float(missing)] if column["indicator"] else []
    if column["kind"] == "word":
        levels = column["levels"]
        word = word if missing or word in levels else {other!r}
        return [float(word == level and not missing) for level in levels] + flag
    number = column["fill"] if missing else float(cell)
    return [(number - column["mean"]) / column["deviation"], *flag]


def _word(cell):
    """A cell as a word: 1, 1.0 and "1.0" are one."""
    text = str(cell).strip()
    if isinstance(cell, bool) or not (isinstance(cell, float) or re.fullmatch(r"[+-]?\\d+(\\.\\d+)?", text)):
        return text
    number = float(text)
    if number.is_integer():
        return str(int(number)) if abs(number) < 2**53 else text
    return str(number)
'''


def numbers_alone(preparation: Mapping[str, Any]) -> bool:
    """Whether a table has a number a feature and nothing else, so that a tensor can hold its raw rows."""
    columns = preparation["columns"].values()
    return all(column["kind"] == "number" and not column["indicator"] for column in columns)


def prepare_table(preparation: Mapping[str, Any]) -> str:
    """Return the code of `prepare` by the constants of a table (`Constants.to_dict()`)."""
    columns = preparation["columns"]
    if numbers_alone(preparation):
        constants = {
            key: [column[key] for column in columns.values()] for key in ("mean", "deviation", "fill")
        }
        names = ", ".join(columns).replace("\\", "").replace('"""', "")
        return _NUMBERS.format(**constants, width=len(columns), names=names)
    listed = "".join(f"    {name!r}: {column!r},\n" for name, column in columns.items())
    absent, na_values = tuple(preparation["absent"]), tuple(preparation["roles"]["na_values"])
    return _CELLS.format(columns=f"{{\n{listed}}}", absent=absent, na_values=na_values, other=OTHER)
