"""The names and options that are known without torch are those of the registries."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType


def test_catalogue_is_up_to_date(script: Callable[[str], ModuleType]) -> None:
    made = script("catalogue")
    assert made.FILE.read_text(encoding="utf-8") == made.catalogue(), (
        "names or options changed: run python docs/catalogue.py --write"
    )
