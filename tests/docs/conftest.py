"""The scripts of docs/ as modules, and a place where their examples may write."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from scripts import loaded


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """`script("methods_table")` is docs/methods_table.py, imported."""

    return lambda name: loaded(f"docs/{name}.py")


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch, plotting: None) -> None:
    """Methods that an example registers are gone after it."""
    import tailorfl.core.method as registry

    monkeypatch.setattr(registry, "_REGISTRY", registry.all_methods())
