"""z-scores of published cells against numbers worked out by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

STUDY = Path(__file__).resolve().parents[2] / "studies" / "published_cells.py"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_cells", STUDY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_z_is_of_the_spread_over_seeds(study: ModuleType) -> None:
    numbers = {("a", "x"): [0.1, 0.2, 0.3], ("a", "y"): [0.5, 0.7, 0.9], ("b", "x"): [0.0, 0.0, 0.6]}
    kept = pd.DataFrame(
        [(v, label, i, n) for (v, label), many in numbers.items() for i, n in enumerate(many)],
        columns=["variant", "label", "seed", "mean"],
    )
    found = study.cells(kept, {("a", "x"): 0.5, ("a", "y"): 0.3, ("b", "x"): 0.2, ("c", "x"): 1.0}, "mean")
    assert list(found["z"].round(6)) == [3.0, -2.0, 0.0]  # standard deviations .1, .2 and .346
    far = study.distances(found)
    assert list(far.index) == ["b", "a"]
    assert far["a"] == pytest.approx((13 / 2) ** 0.5)
    made = study.text(found, "recipe", "mean")
    assert "| a | 50.0 / 20.0 ± 10.0 (+3.0) | 30.0 / 70.0 ± 20.0 (-2.0) | 3 | 2.55 |" in made
    assert "| b | 20.0 / 20.0 ± 34.6 (+0.0) |  | 3 | 0.00 |" in made


def test_published_numbers_are_those_of_the_recipe(study: ModuleType) -> None:
    found = study.published("fedclup_logit", "shared.official")
    assert len(found) == 18 * 5
    assert found["s 10, [0, 1], drawn", "Global"] == 0.8391
    assert study.published("fedclup_logit", "mean") == {}
