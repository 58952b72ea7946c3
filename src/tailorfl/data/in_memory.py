"""Data that Python code holds, as a source: a frame, one frame a client, or a torch Dataset of (x, y) pairs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset

from tailorfl.data.intake import check_roles
from tailorfl.data.own import from_table, from_tensors
from tailorfl.data.source import Source
from tailorfl.data.table_files import joined, plain_frame
from tailorfl.errors import DataError
from tailorfl.settings.base import listed
from tailorfl.settings.data import DataConfig

Data = Source | pd.DataFrame | Mapping[str, pd.DataFrame] | Dataset[Any]
CLIENT = "client"
"""The column that says of which frame a row is, where each client has a frame of its own."""
ROLES = frozenset(inspect.signature(from_table).parameters) - {"path"}
"""What can be said of frames, see `from_table`."""
OF_DATASETS = frozenset({"clients", "task", "test", "scaling"})
"""What can be said of a torch Dataset, see `from_tensors`."""


def is_data(value: Any) -> bool:
    """Return whether a value is data and not the settings of some."""
    if isinstance(value, Mapping):
        settings = not value.keys().isdisjoint(DataConfig.model_fields)
        return not settings and any(isinstance(one, pd.DataFrame) for one in value.values())
    return isinstance(value, pd.DataFrame | Dataset | Source)


def as_source(data: Any, options: Mapping[str, Any]) -> Source:
    """Return a source of data in memory.

    Args:
        data: a frame, or a frame of each client by its name, with the options of `from_table`; a torch Dataset whose
            items are (x, y), with `clients`, `task`, `test` and `scaling` of `from_tensors`; or a Source, without any.
        options: what is said of the data.

    Raises:
        DataError: they are none of these, or an option is lacking or not one of theirs.
    """
    if isinstance(data, Source):
        _check_options(options, frozenset(), "a Source, which is complete")
        return data
    if isinstance(data, Dataset):
        _check_options(options, OF_DATASETS, "a torch Dataset")
        x, y = _stacked(data)
        return from_tensors(x, y, **{"name": "dataset", **options})
    if not is_data(data):
        raise DataError(
            f"source is a {type(data).__name__}, but should be a pandas DataFrame, a DataFrame of each client by name, "
            "a torch Dataset, or a Source such as from_tensors(x, y, clients) of tailorfl.data.own returns"
        )
    several = isinstance(data, Mapping)
    _check_options(options, ROLES - ({CLIENT} if several else frozenset()), "a DataFrame")
    if "label" not in options:
        raise DataError("data is a DataFrame; name the column to be predicted, label=...")
    if several:
        frames = _plain(data)
        check_roles(options["label"], None, None, None, exclude=options.get("exclude", ()))
        whole = joined(frames, CLIENT, listed(options.get("exclude", ())), listed(options["label"]))
        return from_table(whole, **{**options, CLIENT: CLIENT})
    return from_table(data, **options)


def _check_options(options: Mapping[str, Any], valid: frozenset[str], what: str) -> None:
    for option in options:
        if option not in valid:
            takes = f"; beside it stand {', '.join(sorted(valid))}" if valid else ""
            raise DataError(f"the data are {what}, so that {option}=... says nothing of them{takes}")


def _plain(frames: Mapping[Any, Any]) -> dict[str, pd.DataFrame]:
    """Return each client's frame by its name."""
    plain: dict[str, pd.DataFrame] = {}
    for name, frame in frames.items():
        if not isinstance(frame, pd.DataFrame):
            raise DataError(f"data has a DataFrame of each client, but '{name}' is a {type(frame).__name__}")
        plain[str(name)] = plain_frame(frame)
        if CLIENT in frame.columns:
            raise DataError(
                f"the frame of '{name}' has a column '{CLIENT}', but each frame is a client already; rename or drop "
                f"it, or give one frame of all rows and {CLIENT}='{CLIENT}'"
            )
    return plain


def _stacked(dataset: Dataset[Any]) -> tuple[torch.Tensor, Any]:
    """Return the samples of a Dataset [samples, ...] and their targets; a PIL image becomes bytes, channels first."""
    try:
        items = [dataset[k] for k in range(len(dataset))]  # type: ignore[arg-type]
    except (TypeError, NotImplementedError) as error:
        raise DataError(
            f"{type(dataset).__name__} has no length or no items by number, so that samples cannot be dealt to "
            "clients; give a Dataset with __len__ and __getitem__"
        ) from error
    if not items or not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise DataError(
            f"{type(dataset).__name__} should have items (x, y), at least one and all of them pairs"
        )
    try:
        x = torch.stack([_sample(item[0]) for item in items])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{type(dataset).__name__} has samples that are no numbers, or not all of one shape; let it return tensors "
            "of the same shape"
        ) from error
    targets = [np.asarray(item[1]) for item in items]
    if len({target.shape for target in targets}) > 1:
        raise DataError(f"{type(dataset).__name__} has targets that are not all of one shape")
    return x, np.stack(targets)


def _sample(x: Any) -> torch.Tensor:
    image = hasattr(x, "getbands")  # PIL's
    sample = torch.as_tensor(np.array(x) if image else x)
    if not image:
        return sample
    return sample.permute(2, 0, 1) if sample.dim() == 3 else sample[None]
