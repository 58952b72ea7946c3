"""Rows that come a thousand at a time, as one array: in memory, or in a file that is mapped and never read whole.

What was converted once is kept (`tailorfl.data.cache`) and used again.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tailorfl.data.cache import cached, mapped
from tailorfl.data.columns import numeric
from tailorfl.data.folder import stack_images
from tailorfl.data.source import Task
from tailorfl.errors import DataError

if TYPE_CHECKING:
    import pandas as pd  # at run time only where tables are read: it takes 60 MB

ROWS = 1_000
"""Rows that are looked at together."""
_FACTS, _SAMPLES, _OTHERS, _TEST = "facts.json", "samples.bin", "columns.parquet", "test.npy"


@dataclass(frozen=True)
class ColumnSelection:
    """Which columns are what.

    Attributes:
        label: target columns.
        image: the image column, or None where
        features: are the numeric input columns.
        client: whose a row is, or None.
        task: what the label means.
        size: (height, width) to which images are resized, or None.
    """

    label: tuple[str, ...]
    image: str | None
    features: tuple[str, ...]
    client: str | None
    task: Task
    size: tuple[int, int] | None = None

    @property
    def beside(self) -> list[str]:
        """Target and client columns."""
        return [*self.label, *([] if self.client is None else [self.client])]

    @property
    def all(self) -> list[str]:
        """Every column that is read."""
        return [*self.beside, *self.features, *([] if self.image is None else [self.image])]


@dataclass(frozen=True, eq=False)
class Gathered:
    """What was read: inputs `[rows, ...]`, the other columns as a frame, and True for test rows or None."""

    x: Tensor
    frame: pd.DataFrame
    test: Tensor | None


def gather(
    name: str, parts: Mapping[str, Any], columns: ColumnSelection, file: Path | None = None
) -> Gathered:
    """Read data sets of the `datasets` package, held or streamed, "train" before "test".

    Args:
        name: for messages.
        parts: by name; each has `select_columns` and `iter`.
        columns: what to read.
        file: where inputs are written, of which no more than `ROWS` are held at a time; None: memory.

    Raises:
        DataError: no rows, cells that do not fit, images of different sizes.
    """
    try:
        return _read(name, parts, columns, file, colour=False)
    except _ColouredError:  # an image with colours came after grey ones were written
        return _read(name, parts, columns, file, colour=True)


def gathered_once(folder: Path, key: str, make: Callable[[Path], Gathered]) -> Gathered:
    """Return what is kept under a key in a folder, its inputs mapped; `make` is given the file for the inputs."""

    def written(working: Path) -> None:
        gathered = make(working / _SAMPLES)
        gathered.frame.to_parquet(working / _OTHERS)
        if gathered.test is not None:
            np.save(working / _TEST, gathered.test.numpy())
        facts = {
            "shape": list(gathered.x.shape),
            "bytes": gathered.x.dtype == torch.uint8,
            "test": gathered.test is not None,
        }
        (working / _FACTS).write_text(json.dumps(facts))

    return cached(folder, key, written, _open)


class _ColouredError(Exception):
    """Grey images were read as such, and now one has colours."""


class _Coded:
    """A column of few different values: a number for each row."""

    def __init__(self) -> None:
        self.codes, self.values = array("q"), dict[Any, int]()

    def add(self, column: pd.Series[Any]) -> None:
        import pandas as pd

        codes, unique_values = pd.factorize(column)
        code_of = [self.values.setdefault(value, len(self.values)) for value in unique_values]
        self.codes.extend(np.append(np.asarray(code_of, dtype=np.int64), -1)[codes].tolist())

    def series(self) -> pd.Series[Any]:
        import pandas as pd

        values = np.empty(len(self.values) + 1, dtype=object)
        values[:-1], values[-1] = list(self.values), None
        return pd.Series(values[np.asarray(self.codes)]).infer_objects()


class _Numbers:
    """A column of numbers that may all differ."""

    def __init__(self) -> None:
        self.pieces: list[pd.Series[Any]] = []

    def add(self, column: pd.Series[Any]) -> None:
        self.pieces.append(column)

    def series(self) -> pd.Series[Any]:
        import pandas as pd

        return pd.concat(self.pieces, ignore_index=True)


class _Inputs:
    """Blocks of inputs one after another, in memory or in a file."""

    def __init__(self, file: Path | None, colour: bool) -> None:
        self.file = None if file is None else file.open("wb")
        self.path, self.colour, self.rows = file, colour, 0
        self.blocks: list[Tensor] = []
        self.shape: tuple[int, ...] | None = None
        self.type = torch.float32

    def add(self, block: Tensor, name: str) -> None:
        if block.dtype == torch.uint8:
            if block.shape[1] == 1 and self.colour:
                block = block.expand(-1, 3, -1, -1)
            elif block.shape[1] == 3 and not self.colour:
                if self.rows:
                    raise _ColouredError
                self.colour = True
        shape = tuple(block.shape[1:])
        if self.shape is not None and self.shape != shape:
            raise DataError(
                f"'{name}': an image from row {self.rows} on is {shape[1]}x{shape[2]}, but the first one is "
                f"{self.shape[1]}x{self.shape[2]} (height x width); resize them to one size with size=(height, width)"
            )
        self.shape, self.type, self.rows = shape, block.dtype, self.rows + len(block)
        if self.file is None:
            self.blocks.append(block)
        else:
            self.file.write(block.contiguous().numpy().tobytes())

    def done(self) -> Tensor:
        if self.shape is None:
            raise DataError("the data set has no rows")
        if self.file is None or self.path is None:
            return torch.cat(self.blocks)
        self.file.flush()
        os.fsync(self.file.fileno())
        return mapped(self.path, (self.rows, *self.shape), self.type)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _read(
    name: str, parts: Mapping[str, Any], columns: ColumnSelection, file: Path | None, colour: bool
) -> Gathered:
    import pandas as pd

    classed = columns.task in ("classification", "binary")
    other_columns: dict[str, _Coded | _Numbers] = {
        column: _Coded() if classed or column == columns.client else _Numbers() for column in columns.beside
    }
    inputs, rows = _Inputs(file, colour), []
    try:
        for part in parts.values():
            before = inputs.rows
            for batch in _batches(part, columns):
                frame = pd.DataFrame(
                    {column: batch[column] for column in (*columns.beside, *columns.features)}
                )
                for column, collector in other_columns.items():
                    collector.add(frame[column])
                inputs.add(_block(name, batch, frame, columns, inputs.rows), name)
            rows.append(inputs.rows - before)
        x = inputs.done()
    finally:
        inputs.close()
    test = None
    if "test" in parts:
        test = torch.repeat_interleave(torch.tensor([part == "test" for part in parts]), torch.tensor(rows))
    return Gathered(
        x, pd.DataFrame({column: collector.series() for column, collector in other_columns.items()}), test
    )


def _batches(part: Any, columns: ColumnSelection) -> Iterator[Mapping[str, Sequence[Any]]]:
    """Yield the wanted columns of a data set, some rows at a time."""
    yield from part.select_columns(columns.all).with_format(None).iter(batch_size=ROWS)


def _block(
    name: str, batch: Mapping[str, Sequence[Any]], frame: pd.DataFrame, columns: ColumnSelection, start: int
) -> Tensor:
    if columns.image is None:
        return numeric(f"{name}, rows from {start} on" if start else name, frame, list(columns.features))
    pictures = list(batch[columns.image])
    for number, picture in enumerate(pictures):
        if not isinstance(picture, Image.Image):
            raise DataError(
                f"'{name}': column '{columns.image}' holds no image in row {start + number} but a "
                f"{type(picture).__name__}; cast it with datasets.Image() first"
            )
    if columns.size is not None:
        height, width = columns.size
        pictures = [picture.resize((width, height), Image.Resampling.BILINEAR) for picture in pictures]
    return stack_images(pictures, [f"row {start + number}" for number in range(len(pictures))])


def _open(entry: Path) -> Gathered | None:
    """Return what lies in a folder, or None where something is missing."""
    import pandas as pd

    try:
        facts = json.loads((entry / _FACTS).read_text())
        shape, kind = facts["shape"], torch.uint8 if facts["bytes"] else torch.float32
        if (entry / _SAMPLES).stat().st_size != math.prod(shape) * kind.itemsize:
            return None
        frame = pd.read_parquet(entry / _OTHERS)
        test = torch.from_numpy(np.load(entry / _TEST)) if facts["test"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if len(frame) != shape[0]:
        return None
    return Gathered(mapped(entry / _SAMPLES, shape, kind), frame, test)
