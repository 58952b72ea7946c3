"""Random settings, data, names and damaged folders: an error of the library, a correct result, or nothing.

TAILORFL_FUZZ_CASES=10000 runs more of them; `running.py` does that without pytest, and repeats one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuzz import folders
from fuzz.running import kind_of, run_case

CASES = int(os.environ.get("TAILORFL_FUZZ_CASES", "100"))
PARTS = 10
QUICK = (0, 1, 3)
"""Parts that are not slow; each has cases of every kind."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that cases of damage begin with."""
    place = tmp_path_factory.mktemp("whole")
    folders.make(place)
    return place


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[] if part in QUICK else pytest.mark.slow) for part in range(PARTS)]
)
def test_nothing_but_an_error_of_the_library_or_a_correct_result(part: int, root: Path) -> None:
    for number in range(part, CASES, PARTS):
        try:
            run_case(kind_of(number), number, root)
        except BaseException as error:
            error.add_note(f"repeat it: python tools/fuzz/running.py --only {kind_of(number)} {number}")
            raise
