"""What all tests of commands share: an empty working folder, and recipes that are parsed once."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest

from tailorfl.settings import loading

PARSED = cache(loading.parsed)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _yaml_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists show all recipes, whose parsing takes half a second each time."""
    monkeypatch.setattr(loading, "parsed", lambda text, source: deepcopy(PARSED(text, source)))
