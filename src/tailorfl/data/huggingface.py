"""Data sets of the Hugging Face package `datasets`: from memory, from disk, or streamed into mapped files.

Rows come a thousand at a time and become one array: in memory, or in a file that is mapped and never read whole.
Converted data are cached (`tailorfl.data.storage`) and reused.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tailorfl.data.columns import filled, make_source, need_columns, numeric, target_columns, tidy
from tailorfl.data.folder import check_size, resized, stack_images
from tailorfl.data.registry import data_source
from tailorfl.data.scaling import Channels
from tailorfl.data.source import Source, Task
from tailorfl.data.storage import cache_folder, cached, key_of, mapped
from tailorfl.errors import DataError, check_known, needs_extra
from tailorfl.hub import unreachable
from tailorfl.settings.base import listed

if TYPE_CHECKING:
    import pandas as pd  # at run time only when tables are read: it takes 60 MB

FORMAT = "1"
"""Version of cached data; data of another version are converted again."""
ROWS = 1_000
"""Rows that are read at a time."""
_FACTS, _SAMPLES, _OTHERS, _TEST = "facts.json", "samples.bin", "columns.parquet", "test.npy"


def from_datasets(
    dataset: Any,
    label: str | Sequence[str],
    image: str | None = None,
    features: Sequence[str] | None = None,
    client: str | None = None,
    task: Task = "classification",
    scaling: Channels = "train",
    size: tuple[int, int] | None = None,
    cache: str | Path | None = None,
    fingerprint: str | None = None,
) -> Source:
    """Return a source from a Hugging Face `Dataset` or `IterableDataset`, or a dictionary of two.

    The dictionary has the keys "train" and "test".

    Streamed ones go a thousand rows at a time into a file that is mapped and not held in memory; so do the others if
    `cache` names a folder. Converted data are reused for the same fingerprint; an interrupted conversion is repeated.
    Labels and clients, 8 bytes a row each, are held in memory.

    Args:
        dataset: as above.
        label: the target column, or a list of several; a `ClassLabel` keeps its numbers and names.
        image: the image column; give this or `features`.
        features: the numeric input columns; give these or `image`.
        client: the column with the client of each sample.
        task: the meaning of the label.
        scaling: as for `tailorfl.data.own.from_tensors`.
        size: (height, width) to resize every image to.
        cache: folder of converted data; None: no cache.
        fingerprint: identifies the data set in the cache; by default the data set's own, if it has one.

    Raises:
        MissingExtraError: if `datasets` is not installed.
        DataError: for another type of data set, other parts than "train" and "test", or a column as in
            `from_table`.
    """
    import pandas as pd

    with needs_extra("datasets", "data"):
        import datasets
    parts = _parts(dataset)
    if (image is None) == (features is None):
        raise DataError("give exactly one of image= (one column) and features= (numeric columns)")
    check_known("task", task, get_args(Task))
    check_size(size)
    labels = (label,) if isinstance(label, str) else tuple(label)
    columns = ColumnSelection(
        labels,
        image,
        tuple(listed(features or ())),
        client,
        task,
        None if size is None else (size[0], size[1]),
    )
    name = "datasets"
    for part in parts.values():
        need_columns(name, pd.DataFrame(columns=_column_names(part)), columns.all)
    kinds = [(part.features or {}).get(labels[0]) for part in parts.values()]
    named = [tuple(kind.names) if isinstance(kind, datasets.ClassLabel) else () for kind in kinds]
    if len(set(named)) > 1:
        raise DataError(
            f"'{name}': the parts 'train' and 'test' number the classes of column '{labels[0]}' differently; give both "
            "the same datasets.ClassLabel"
        )
    gathered = _gathered(name, parts, columns, cache, fingerprint)
    if named[0] and (task == "classification" or (task == "binary" and len(named[0]) == 2)):
        numbers = filled(name, gathered.frame, labels[0]).to_numpy(dtype=np.int64, copy=True)
        outputs = 1 if task == "binary" else len(named[0])
        y, classes = torch.from_numpy(numbers), {"classes": named[0]}
    else:
        y, outputs, classes = target_columns(name, gathered.frame, labels, task)
    owners = None if client is None else filled(name, gathered.frame, client)
    info = {**classes, "label": labels} | ({} if image is not None else {"features": columns.features})
    return make_source(name, gathered.x, y, task, outputs, owners, gathered.test, info, scaling)


@data_source(
    "Hugging Face data set, from the hub or a local folder, streamed (options path, label, client, ...)"
)
def huggingface(
    path: str,
    label: str | Sequence[str],
    image: str | None = None,
    features: Sequence[str] | None = None,
    client: str | None = None,
    task: Task = "classification",
    data_files: Any = None,
    config: str | None = None,
    revision: str | None = None,
    train: str = "train",
    test: str | None = None,
    streaming: bool = True,
    size: tuple[int, int] | None = None,
    scaling: Channels = "train",
    cache: str | None = None,
) -> Source:
    """Return a data set of the Hugging Face hub, or a local one, read into mapped files.

    Args:
        path: a name on the hub, a folder of files or one that `save_to_disk` wrote; or csv, json, parquet, ... with
            `data_files`.
        label, image, features, client, task, size, scaling: as for `from_datasets`.
        data_files: files of a format, a pattern, or a list.
        config: configuration of a data set on the hub.
        revision: branch, tag or commit of a data set on the hub.
        train: name of the split that is dealt to clients.
        test: name of the split that is the test part; by default "test" if there is one.
        streaming: read rows as they come. False downloads and prepares all first, as the package does, which resumes
            an interrupted download.
        cache: folder of converted data; by default TAILORFL_CACHE or tailorfl in the user's cache folder.

    Raises:
        MissingExtraError: if `datasets` is not installed.
        DataError: for data that are missing or do not fit.
    """
    with needs_extra("datasets", "data"):
        import datasets
        from datasets.exceptions import DatasetsError
    local = Path(path).expanduser()
    offline_reason = "" if local.exists() or data_files else unreachable()
    if offline_reason:  # attempts to reach it would take half a minute
        raise DataError(
            f"there is no file or folder '{path}', and {offline_reason}; on a machine that can reach the hub, save the "
            "data set with save_to_disk, and give that folder as path"
        )
    saved = any((local / file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            dataset, key = datasets.load_from_disk(str(local)), _files_in(local)
        else:
            load_options = {"data_files": data_files, "revision": revision}
            builder = datasets.load_dataset_builder(path, config, **load_options)
            key = repr((builder.dataset_name, builder.config_id, builder.hash, str(builder.info.version)))
            dataset = datasets.load_dataset(path, config, **load_options, streaming=streaming)
        chosen = _chosen(path, dataset, train, test)
        return from_datasets(
            chosen, label, image, features, client, task, scaling, size,
            cache=cache or cache_folder() / "datasets",
            fingerprint=f"{key} {train} {test}",
        )  # fmt: skip
    except (DatasetsError, OSError, ConnectionError) as error:
        raise DataError(
            f"data set '{path}' cannot be read: {error}. Give a folder, a format such as csv with data_files, "
            "or a name on the hub"
        ) from error


def _parts(dataset: Any) -> dict[str, Any]:
    import datasets

    if isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        return {"train": dataset}
    is_dict = isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict)
    if is_dict and "train" in dataset and set(dataset) <= {"train", "test"}:
        return {part: dataset[part] for part in ("train", "test") if part in dataset}
    parts_text = f"with parts {', '.join(dataset)}" if isinstance(dataset, Mapping) else ""
    raise DataError(
        f"expected a datasets.Dataset or a DatasetDict with the parts 'train' and 'test', "
        f"but got a {type(dataset).__name__} {parts_text}".rstrip()
    )


def _chosen(path: str, dataset: Any, train: str, test: str | None) -> Any:
    """Return the chosen splits under the names "train" and "test"."""
    import datasets

    if isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        return dataset
    for part in (train, *([] if test is None else [test])):
        check_known(f"split of data set '{path}'", part, dataset)
    if test is None and "test" in dataset and train != "test":
        test = "test"
    return type(dataset)({"train": dataset[train], **({} if test is None else {"test": dataset[test]})})


def _column_names(part: Any) -> list[str]:
    if part.column_names is not None:
        return [str(column) for column in part.column_names]
    return [str(column) for column in next(iter(part), {})]


def _gathered(
    name: str,
    parts: Mapping[str, Any],
    columns: ColumnSelection,
    cache: str | Path | None,
    fingerprint: str | None,
) -> Gathered:
    fingerprints = [getattr(part, "_fingerprint", None) for part in parts.values()]
    if fingerprint is None and None not in fingerprints:
        fingerprint = " ".join(map(str, fingerprints))
    if cache is not None and fingerprint is not None:
        key = key_of(FORMAT, fingerprint, list(parts), columns)
        return _once(Path(cache).expanduser(), key, lambda file: _gather(name, parts, columns, file))
    if cache is None and None not in fingerprints:
        return _gather(name, parts, columns)
    # streamed without a fingerprint or cache: an unnamed file, which is gone with the tensor
    with tempfile.TemporaryDirectory(prefix="tailorfl-") as folder:
        return _gather(name, parts, columns, Path(folder) / "samples.bin")


@dataclass(frozen=True)
class ColumnSelection:
    """The roles of columns.

    Attributes:
        label: target columns.
        image: the image column, or None.
        features: the numeric input columns if there is no image column.
        client: the column with the client of each row, or None.
        task: the meaning of the label.
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
    """The content of a data set: inputs `[rows, ...]`, the other columns as a frame, and a test mask or None."""

    x: Tensor
    frame: pd.DataFrame
    test: Tensor | None


def _once(folder: Path, key: str, make: Callable[[Path], Gathered]) -> Gathered:
    """Return the data cached under a key, inputs mapped; if there are none, `make` writes inputs to a given file."""

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
    """A colour image follows images that were read as grey."""


class _Inputs:
    """Blocks of inputs, concatenated in memory or in a file."""

    def __init__(self, file: Path | None, colour: bool) -> None:
        self.path, self.colour, self.rows = file, colour, 0
        self.blocks: list[Tensor] = []
        self.shape: tuple[int, ...] | None = None
        self.type = torch.float32

    def add(self, block: Tensor, name: str) -> None:
        if block.dtype == torch.uint8 and self.colour and block.shape[1] == 1:
            block = block.expand(-1, 3, -1, -1)
        elif block.dtype == torch.uint8 and not self.colour and block.shape[1] == 3:
            if self.rows:
                raise _ColouredError
            self.colour = True
        shape = tuple(block.shape[1:])
        if self.shape is not None and self.shape != shape:
            raise DataError(
                f"'{name}': an image from row {self.rows} on is {shape[1]}x{shape[2]}, but the first one is "
                f"{self.shape[1]}x{self.shape[2]} (height x width); resize them to one size with size=(height, width)"
            )
        if self.path is None:
            self.blocks.append(block)
        else:
            with self.path.open("ab" if self.rows else "wb") as file:
                file.write(block.contiguous().numpy().tobytes())
        self.shape, self.type, self.rows = shape, block.dtype, self.rows + len(block)

    def done(self) -> Tensor:
        if self.shape is None:
            raise DataError("the data set has no rows")
        if self.path is None:
            return torch.cat(self.blocks)
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        return mapped(self.path, (self.rows, *self.shape), self.type)


def _gather(
    name: str,
    parts: Mapping[str, Any],
    columns: ColumnSelection,
    file: Path | None = None,
    colour: bool = False,
) -> Gathered:
    """Read data sets of the `datasets` package, in memory or streamed, "train" before "test".

    Args:
        name: for messages.
        parts: by name; each has `select_columns` and `iter`.
        columns: to read.
        file: for the inputs, of which at most `ROWS` are held in memory at a time; None: all are.
        colour: whether grey images get three channels.

    Raises:
        DataError: no rows, cells that do not fit, images of different sizes.
    """
    import pandas as pd

    inputs, rows = _Inputs(file, colour), []
    pieces: dict[str, list[pd.Series[Any]]] = defaultdict(list)
    classed, distinct = columns.task in ("classification", "binary"), dict[Any, Any]()
    try:
        for part in parts.values():
            before = inputs.rows
            for batch in part.select_columns(columns.all).with_format(None).iter(batch_size=ROWS):
                frame = pd.DataFrame(
                    {column: batch[column] for column in (*columns.beside, *columns.features)}
                )
                for column in columns.beside:
                    values = frame[column]
                    if classed or column == columns.client:  # few distinct values: hold each once
                        tidy(values, ())  # refuses lists
                        values = values.astype(object).map(lambda v: distinct.setdefault((type(v), v), v))
                    pieces[column].append(values)
                inputs.add(_block(name, batch, frame, columns, inputs.rows), name)
            rows.append(inputs.rows - before)
    except _ColouredError:  # an image with colours came after grey ones were written
        return _gather(name, parts, columns, file, colour=True)
    x, test = inputs.done(), None
    if "test" in parts:
        test = torch.repeat_interleave(torch.tensor([part == "test" for part in parts]), torch.tensor(rows))
    beside = {
        column: pd.concat(values, ignore_index=True).infer_objects() for column, values in pieces.items()
    }
    return Gathered(x, pd.DataFrame(beside), test)


def _block(
    name: str, batch: Mapping[str, Sequence[Any]], frame: pd.DataFrame, columns: ColumnSelection, start: int
) -> Tensor:
    if columns.image is None:
        return numeric(f"{name}, rows from {start} on" if start else name, frame, list(columns.features))
    pictures = list(batch[columns.image])
    for number, picture in enumerate(pictures):
        if not isinstance(picture, Image.Image):
            raise DataError(
                f"'{name}': column '{columns.image}' holds a {type(picture).__name__} instead of an image in row "
                f"{start + number}; cast it with datasets.Image() first"
            )
    pictures = [resized(picture, columns.size) for picture in pictures]
    return stack_images(pictures, [f"row {start + number}" for number in range(len(pictures))])


def _open(entry: Path) -> Gathered | None:
    """Return the data in a folder, or None if something is missing or damaged."""
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


def _files_in(folder: Path) -> str:
    """Return a fingerprint of the files of a folder: its path, their names, sizes and modification times."""
    file_facts = []
    for directory, _, names in os.walk(folder):
        for name in names:
            file = Path(directory) / name
            facts = file.stat()
            file_facts.append((str(file.relative_to(folder)), facts.st_size, facts.st_mtime_ns))
    return repr((str(folder.resolve()), sorted(file_facts)))
