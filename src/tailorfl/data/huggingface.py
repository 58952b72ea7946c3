"""Data sets of the Hugging Face package `datasets`: from memory, from disk, or streamed into mapped files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from tailorfl.data.cache import cache_folder, key_of
from tailorfl.data.columns import filled, make_source, need_columns, target_columns
from tailorfl.data.registry import data_source
from tailorfl.data.scaling import Channels
from tailorfl.data.source import Source, Task
from tailorfl.data.streamed import ColumnSelection, Gathered, gather, gathered_once
from tailorfl.errors import DataError, MissingExtraError, unknown
from tailorfl.hub import unreachable

if TYPE_CHECKING:
    import pandas as pd  # at run time only where tables are read: it takes 60 MB

FORMAT = "1"
"""Of what is kept; another one is converted anew."""


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

    Streamed ones go a thousand rows at a time into a file that is mapped and not held in memory; so do the others where
    `cache` names a folder. What was converted is used again for the same fingerprint, and done again where it was
    interrupted. Labels and clients, 8 bytes a row each, are held.

    Args:
        dataset: as above.
        label: the target column, for several targets their list; a `ClassLabel` keeps its numbers and names.
        image: the image column, or
        features: the numeric input columns; give exactly one of the two.
        client: the column that says whose a sample is.
        task: what the label means.
        scaling: of images, as in `from_tensors`.
        size: (height, width) to resize every image to.
        cache: folder of converted data, None: nothing is kept.
        fingerprint: what tells this data set from others; by default that of a data set that has one.

    Raises:
        MissingExtraError: if `datasets` is not installed.
        DataError: for another type of data set, other parts than "train" and "test", or a column as in
            `from_table`.
    """
    import pandas as pd

    try:
        import datasets
    except ImportError as missing:
        raise MissingExtraError("datasets", "data") from missing
    parts = _parts(dataset)
    if (image is None) == (features is None):
        raise DataError(
            "give either image= (one column) or features= (numeric columns), not both and not neither"
        )
    if task not in get_args(Task):
        raise unknown("task", str(task), get_args(Task))
    labels = (label,) if isinstance(label, str) else tuple(label)
    columns = ColumnSelection(
        labels, image, tuple(features or ()), client, task, None if size is None else (size[0], size[1])
    )
    name = "datasets"
    first = parts["train"]
    need_columns(name, pd.DataFrame(columns=_column_names(first)), columns.all)
    gathered = _gathered(name, parts, columns, cache, fingerprint)
    kind = (first.features or {}).get(labels[0])
    if task == "classification" and isinstance(kind, datasets.ClassLabel):
        y, outputs, classes = _numbers_of_classes(gathered.frame, labels[0], tuple(kind.names))
    else:
        y, outputs, classes = target_columns(name, gathered.frame, labels, task)
    owners = None if client is None else filled(name, gathered.frame, client)
    info = {**classes, "label": labels} | ({} if image is not None else {"features": columns.features})
    return make_source(name, gathered.x, y, task, outputs, owners, gathered.test, info, scaling)


@data_source("Hugging Face data set, of the hub or here, streamed (options path, label, client, ...)")
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
    """Return a data set of the Hugging Face hub, or one that lies here, read into mapped files.

    Args:
        path: a name on the hub, a folder of files or one that `save_to_disk` wrote; or csv, json, parquet, ... with
            `data_files`.
        label, image, features, client, task, size, scaling: as for `from_datasets`.
        data_files: files of a format, a pattern, or a list.
        config, revision: of a data set on the hub.
        train: name of the split that clients are dealt.
        test: name of the split that is the test part; by default "test" where there is one.
        streaming: read rows as they come. False downloads and prepares all first, as the package does: an interrupted
            download goes on where it was.
        cache: folder of converted data; by default TAILORFL_CACHE or tailorfl in the user's cache folder.

    Raises:
        MissingExtraError: if `datasets` is not installed.
        DataError: for data that are not there or do not fit.
    """
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as missing:
        raise MissingExtraError("datasets", "data") from missing
    local = Path(path).expanduser()
    offline_reason = "" if local.exists() or data_files else unreachable()
    if offline_reason:  # asking would take half a minute of attempts
        raise DataError(
            f"there is no file or folder '{path}', and {offline_reason}; where the hub can be reached, save_to_disk "
            "keeps a data set in a folder, which serves here"
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
    """Return the parts that train and test, under these names."""
    import datasets

    if isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        return dataset
    for part in (train, *([] if test is None else [test])):
        if part not in dataset:
            raise unknown(f"split of data set '{path}'", part, dataset)
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
        return gathered_once(Path(cache).expanduser(), key, lambda file: gather(name, parts, columns, file))
    if cache is None and None not in fingerprints:
        return gather(name, parts, columns)
    # streamed, and nothing says which data these are: a file without a name, which is gone with the tensor
    with tempfile.TemporaryDirectory(prefix="tailorfl-") as folder:
        return gather(name, parts, columns, Path(folder) / "samples.bin")


def _numbers_of_classes(
    frame: pd.DataFrame, label: str, names: tuple[str, ...]
) -> tuple[torch.Tensor, int, dict[str, Any]]:
    numbers = filled("datasets", frame, label).to_numpy(dtype=np.int64, copy=True)
    return torch.from_numpy(numbers), len(names), {"classes": names}


def _files_in(folder: Path) -> str:
    """Return what tells the files of a folder from others: names, sizes, times of change."""
    file_facts = []
    for directory, _, names in os.walk(folder):
        for name in names:
            file = Path(directory) / name
            facts = file.stat()
            file_facts.append((str(file.relative_to(folder)), facts.st_size, facts.st_mtime_ns))
    return repr((str(folder.resolve()), sorted(file_facts)))
