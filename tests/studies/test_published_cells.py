"""z-scores of published cells against numbers worked out by hand."""

from __future__ import annotations

from types import ModuleType

import pandas as pd
import pytest

from scripts import loaded


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return loaded("studies/published_cells.py")


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
