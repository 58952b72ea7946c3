"""The scripts in benchmarks/ belong to the library as it is."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_finds_what_it_imports(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    names = runpy.run_path(str(script), run_name="imported")
    for owner, function in names.get("PARTS", {}).values() if script.stem == "whole_round" else ():
        assert callable(getattr(owner, function)), f"{owner.__name__} has no {function} to be timed"
