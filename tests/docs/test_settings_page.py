"""What is made from the registries and the settings is up to date."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType


def test_the_page_of_settings_is_up_to_date(script: Callable[[str], ModuleType]) -> None:
    made = script("settings_table")
    assert made.FILE.read_text(encoding="utf-8") == made.page(), (
        "settings changed: run python docs/settings_table.py --write"
    )
    assert made.ROBUST.read_text(encoding="utf-8") == made.page_of_rules(), (
        "rules changed: run python docs/settings_table.py --write"
    )
