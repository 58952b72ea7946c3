"""Helpers shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tailorfl.data.locations import data_file
from tailorfl.errors import DataError


def find_or_skip(file: str) -> Path:
    """The path of a data file; skips the running test, with the reason, where it cannot be found."""
    try:
        return data_file(file)
    except DataError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def need_data() -> Callable[[str], Path]:
    """`need_data("mnist.npz")` is the file's path; skips the test where the data folder lacks it."""
    return find_or_skip
