"""Exam scores of London's schools, the natural federation of multi-task learning."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from tailorfl.archives import load_arrays
from tailorfl.data.locations import data_file
from tailorfl.data.registry import data_source
from tailorfl.data.scaling import SCALING, Scaling
from tailorfl.data.source import Source
from tailorfl.errors import DataError, check_known

FILE = "school/school.npz"
LOWEST, WIDTH = 1.0, 69.0
"""Scores are from 1 to 70, and become (score − 1)/69."""
PERCENT = (3, 4)
"""Columns in percent, of a school's pupils; all others are 0 or 1."""


@data_source(
    "exam scores of 15,362 pupils, 139 London schools, 28 features, regression", files="school/school.npz"
)
def school(scaling: Literal["none", "public"] = "none") -> Source:
    """Exam scores of 15,362 pupils of 139 schools (ILEA), in [0, 1], from 28 features; group `client` is the school.

    Two features are percentages of a school, the others 0 or 1 and the last always 1. The protocol of Motley (Wu et
    al., 2022) and of Liu et al. (NeurIPS 2022) standardises them by each school's training pupils
    (`data.normalise: client`), and its linear model has a bias. With `scaling` "public" they are mapped from their
    range to [-1, 1] in place of that, pupil by pupil, as differential privacy of a pupil needs it. There is no official
    split. Task `regression`; the metric of both is the squared error, which Motley prints halved.

    Args:
        scaling: "none" leaves features as they are, "public" maps their ranges to [-1, 1].

    Raises:
        ConfigError: another `scaling`.
        DataError: school.npz is missing, damaged, or not `x` `[pupils, 28]`, `y` `[pupils]`, `sizes` `[schools]`.
    """
    check_known("scaling", scaling, ("none", "public"))
    file = data_file(FILE)
    try:
        arrays = load_arrays(file)
        x, y, sizes = (arrays[name] for name in ("x", "y", "sizes"))
        client = np.repeat(np.arange(len(sizes)), sizes)
        info: dict[str, Any] = {}
        if scaling == "public":
            middle = np.full((1, x.shape[1]), 0.5)
            middle[0, PERCENT] = 50.0
            info[SCALING] = Scaling(torch.from_numpy(middle), torch.from_numpy(middle.copy()))
            x = (x - middle) / middle
        return Source(
            name="school",
            x=torch.from_numpy(x.astype(np.float32)),
            y=torch.from_numpy(((y - LOWEST) / WIDTH).astype(np.float32)).unsqueeze(1),
            task="regression",
            outputs=1,
            groups={"client": torch.from_numpy(client)},
            group_names={"client": tuple(f"school {number}" for number in range(1, len(sizes) + 1))},
            info=info,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"school: '{file}' cannot be used: {error}") from error
