"""The records of a run as its files hold them: one JSON object a line, with an integer "round"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailorfl.errors import RunError
from tailorfl.runs.files import decode, decode_lines, read_lines

if TYPE_CHECKING:
    import pandas as pd


def parsed(path: Path, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Returns the records that lines of the file `path` hold. Raises RunError for one that is damaged; says which."""
    try:
        found = decode_lines(lines)
        if all(map(_is_record, found)):
            return found
    except ValueError:
        pass  # which line it is shows one by one
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decode(line))
            if not _is_record(records[-1]):
                raise ValueError("it is no record of a round")
        except ValueError as error:
            raise RunError(
                f"line {number} of '{path}' is damaged ({error}); delete it to go on without"
            ) from error
    return records


def numbers(path: Path) -> list[int]:
    """Returns the rounds that the records of a file are of, in its order. Raises RunError where one is damaged."""
    return [int(record["round"]) for record in parsed(path, read_lines(path))]


def table(path: Path) -> pd.DataFrame:
    """Returns the records of a file, one row each; a column of nulls alone, which stand for NaN, is of floats."""
    import pandas as pd

    frame = pd.DataFrame(parsed(path, read_lines(path)))
    if "round" not in frame:
        return pd.DataFrame({"round": pd.Series(dtype="int64")})
    for column in frame.columns[frame.isna().all()]:
        frame[column] = frame[column].astype("float64")
    return frame


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("round")) is int
