"""The page of the field against numbers worked out by hand."""

from __future__ import annotations

import math
from types import ModuleType

import pytest

from scripts import loaded

ALONE = {0: 80.0, 1: 82.0, 2: 84.0}


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return loaded("studies/field_tables.py")


def test_gains_are_paired_by_seed_and_corrected_for_their_number(study: ModuleType) -> None:
    """Differences 3, 4, 5: mean 4, deviation 1, t(2) = 4.3027 at 95 %; t = 4√3 has p = 0.0202, times two methods."""
    found = {"LocalTrain": ALONE, "A": {2: 89.0, 0: 83.0, 1: 86.0}, "B": {0: 80.0, 1: 82.5, 2: 83.5, 3: 0.0}}
    gains = study.against(found, "LocalTrain")
    assert gains["A"].mean == pytest.approx(4)
    assert gains["A"].half_width == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert gains["A"].p_value == pytest.approx(2 * 0.02020, rel=1e-3)
    assert (gains["B"].mean, gains["B"].seeds, gains["B"].p_value) == (pytest.approx(0), 3, pytest.approx(1))


def test_what_the_best_does_not_beat_beyond_noise_is_unbeaten(study: ModuleType) -> None:
    """The best is ahead of LocalTrain by 3, 4, 5 (4 ± 2.48) and of C by 0, 1, 5 (2 ± 6.6)."""
    best = {0: 83.0, 1: 86.0, 2: 89.0}
    found = {"LocalTrain": ALONE, "A": best, "C": {0: 83.0, 1: 85.0, 2: 84.0}}
    assert study.unbeaten(found) == ["A", "C"]


def test_the_page_says_what_is_beyond_doubt_and_what_is_missing(study: ModuleType) -> None:
    sure = {seed: value + 4 for seed, value in ALONE.items()}
    sent = {"LocalTrain": dict.fromkeys(ALONE, 0.0), "A": dict.fromkeys(ALONE, 1234.0)}
    alone, silent = {"LocalTrain": ALONE}, {"LocalTrain": sent["LocalTrain"]}
    one = study.Federation("accuracy", {**alone, "A": sure}, {**alone, "A": ALONE}, sent)
    other = study.Federation("balanced_accuracy", alone, alone, silent)
    text = study.page({"one": one, "other": other})
    assert "| Method | one, accuracy | other, balanced accuracy |" in text
    assert "| LocalTrain | 82.0 ± 5.0 | 82.0 ± 5.0° |" in text
    assert "| A | **+4.0 ± 0.0**° | – |" in text
    assert "| A | +0.0 ± 0.0 | – |" in text.split("## Worst")[1]
    assert "| A | 1,234 | – |" in text
