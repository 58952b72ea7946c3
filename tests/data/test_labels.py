"""Labels that were never meant as the classes they would silently become."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tailorfl.data.own import from_table, from_tensors
from tailorfl.errors import DataError

X = np.zeros((60, 2), dtype=np.float32)


def table(label: object) -> pd.DataFrame:
    return pd.DataFrame({"a": np.arange(60.0), "y": label})


def test_numbers_with_fractions_are_no_classes() -> None:
    with pytest.raises(
        DataError, match=r"column 'y' has 60 values in 60 rows, 60 of them with fractions.*task='regression'"
    ):
        from_table(table(np.arange(60) + 0.5), "y")
    with pytest.raises(DataError, match=r"whole numbers.*task='regression'"):
        from_tensors(X, np.linspace(0, 1, 60))
    assert from_table(table(np.arange(60) + 0.5), "y", task="regression").outputs == 1


def test_numbers_that_all_differ_are_no_classes() -> None:
    with pytest.raises(DataError, match="too few of each to be classes"):
        from_table(table(np.arange(60)), "y")
    with pytest.raises(DataError, match="too few of each to be classes"):
        from_tensors(X, np.arange(60))


def test_many_classes_with_few_rows_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    source = from_table(table(np.arange(60) // 2), "y")
    assert source.outputs == 30
    assert "has 30 classes in 60 rows, 2.0 rows a class; if it is a number to be predicted" in caplog.text
    caplog.clear()
    from_table(table([f"patient {row // 2}" for row in range(60)]), "y")
    assert "is it the right column?" in caplog.text
    caplog.clear()
    from_table(table(np.arange(60) % 5), "y")
    from_tensors(X, np.arange(60) % 5)
    from_table(table(np.where(np.arange(60) < 30, 0.0, 1.0)), "y")
    assert caplog.text == ""


def test_classes_counted_from_1_are_refused() -> None:
    """They would leave class 0 empty: an output more than there are classes, and accuracy per class over it."""
    with pytest.raises(DataError, match=r"classes 1 to 3; classes are counted from 0.*y - 1"):
        from_tensors(X, np.arange(60) % 3 + 1)
    assert from_tensors(X, np.arange(60) % 3).outputs == 3


@pytest.mark.parametrize("kind", [list, np.array, lambda v: np.array(v, dtype=object), pd.Series])
def test_names_of_classes_are_numbered_in_sorted_order(kind) -> None:  # type: ignore[no-untyped-def]
    source = from_tensors(X, kind(["dog", "cat", "ant"] * 20))
    assert source.y[:3].tolist() == [2, 1, 0]
    assert source.outputs == 3
    assert source.info["classes"] == ("ant", "cat", "dog")
    binary = from_tensors(X, kind(["yes", "no"] * 30), task="binary")
    assert (binary.y[:2].tolist(), binary.outputs) == ([1, 0], 1)
    with pytest.raises(DataError, match="missing in 1 samples, first in sample 1"):
        from_tensors(X[:2], np.array(["a", None], dtype=object))
