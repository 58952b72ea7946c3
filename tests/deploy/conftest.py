"""A federation of three clients for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.federation import Federation


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """A server and three clients in this process."""
    with Federation(tmp_path) as three:
        yield three
