"""Features that were computed once: what a frozen backbone says of images, or their principal components."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tailorfl.archives import load_arrays
from tailorfl.data.source import Source
from tailorfl.errors import DataError


def features(path: str) -> Source:
    """A classification source of the feature vectors of a .npz file, such as `studies/features.py` writes.

    Arrays: `x` `[samples, features]` float, `y` `[samples]` int classes from 0, `classes` their names; where there is
    an official test part `test` `[samples]` bool; where there are domains `domain` `[samples]` int and `domains`, their
    names.

    Raises:
        DataError: the file is missing, damaged, or lacks an array.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(
            f"features: there is no file '{file}'; write it with python studies/features.py cifar10 {file} (or pacs)"
        )
    try:
        arrays = load_arrays(file)
        groups, names = {}, {}
        if "domain" in arrays:
            groups["domain"] = torch.from_numpy(arrays["domain"].astype(np.int64))
            names["domain"] = tuple(map(str, arrays["domains"]))
        classes = tuple(map(str, arrays["classes"]))
        return Source(
            name="features",
            x=torch.from_numpy(arrays["x"].astype(np.float32)),
            y=torch.from_numpy(arrays["y"].astype(np.int64)),
            task="classification",
            outputs=len(classes),
            test=torch.from_numpy(arrays["test"].astype(bool)) if "test" in arrays else None,
            groups=groups,
            group_names=names,
            info={"classes": classes},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"features: '{file}' cannot be used: {error}") from error
