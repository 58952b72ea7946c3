"""Helpers shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tailorfl import modules
from tailorfl.data.locations import data_file
from tailorfl.errors import DataError

torch.set_num_threads(1)  # tests train tiny models: a second thread only waits, for minutes on a busy machine


@pytest.fixture(autouse=True)
def modules_named_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that a test names with --import or imports= stays named in its process; here until the test ends."""
    monkeypatch.setattr(modules, "_NAMED", dict(modules._NAMED))


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
