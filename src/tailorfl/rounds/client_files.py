"""Files that say something of clients of a simulated system: CSV with a column `client`, by name or by number."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from tailorfl.errors import DataError


def rows_of(path: Path, columns: Sequence[str], names: Sequence[str]) -> Iterator[tuple[int, list[float]]]:
    """Yields (client, numbers in `columns`) of each line of a file; `names` are those of the clients.

    Raises:
        DataError: it cannot be read, lacks a column, or a line names no client or holds no number; says which.
    """
    numbers = {name: number for number, name in enumerate(names)}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            lacking = [c for c in ("client", *columns) if c not in (reader.fieldnames or ())]
            if lacking:
                raise DataError(
                    f"'{path}' has no column {lacking[0]}; its first line is: client,{','.join(columns)}"
                )
            for line, row in enumerate(reader, start=2):
                yield (
                    _client(path, line, row["client"], numbers),
                    [_number(path, line, row[c], c) for c in columns],
                )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read '{path}': {error}; give a CSV file") from error


def _client(path: Path, line: int, said: str | None, numbers: dict[str, int]) -> int:
    said = (said or "").strip()
    if said in numbers:
        return numbers[said]
    if said.isdecimal() and int(said) < len(numbers):
        return int(said)
    raise DataError(
        f"line {line} of '{path}' is of client '{said}', but clients are 0 to {len(numbers) - 1} or have names such as "
        f"'{next(iter(numbers))}'"
    )


def _number(path: Path, line: int, said: str | None, column: str) -> float:
    try:
        found = float(said or "")
    except ValueError:
        found = math.nan
    if math.isnan(found):
        raise DataError(f"line {line} of '{path}' has {column} = '{said}', which is no number")
    return found
