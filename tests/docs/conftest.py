"""The scripts of docs/ as modules, and a place where their examples may write."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """`script("methods_table")` is docs/methods_table.py, imported."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that an example registers are gone after it."""
    import tailorfl.core.method as registry
    import tailorfl.methods  # noqa: F401  (registers the library's own first)

    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
