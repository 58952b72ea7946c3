"""Where no temperature between its ends is best, the nearer end is taken."""

from __future__ import annotations

import numpy as np
import pytest

from tailorfl.evaluation.predictions import Predictions
from tailorfl.evaluation.temperature import FEWEST, HIGHEST, fitted


@pytest.mark.parametrize("size", [0.2, 4.0])
@pytest.mark.parametrize(("right", "end"), [(True, 1 / HIGHEST), (False, HIGHEST)])
@pytest.mark.parametrize("task", ["classification", "binary"])
def test_outputs_that_are_always_right_or_wrong_get_an_end(
    task: str, right: bool, end: float, size: float
) -> None:
    """The likelihood then only rises, or only falls, with the size of the logits."""
    y = np.arange(FEWEST) % 2
    sign = np.where((y == 1) == right, 1.0, -1.0)[:, None] * size
    outputs = sign if task == "binary" else np.concatenate([-sign, sign], axis=1)
    rows = np.arange(len(y))
    assert fitted(Predictions(task, rows * 0, rows, y, outputs.astype(np.float32))) == end
