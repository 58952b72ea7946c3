"""All tests of tests/references run in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """Rounding is then far below every error of mathematics."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
