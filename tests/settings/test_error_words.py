"""The words of messages."""

from __future__ import annotations

import pytest

from tailorfl.errors import first_few


@pytest.mark.parametrize(
    ("names", "between", "said"),
    [
        ([], ", ", ""),
        (["a", "b"], ", ", "a, b"),
        (["a", "b", "c"], ", ", "a, b and 1 more"),
        (["a", "b", "c", "d"], "; ", "a; b; and 2 more"),
    ],
)
def test_many_names_are_told_by_the_first_few_and_their_number(
    names: list[str], between: str, said: str
) -> None:
    assert first_few(names, 2, between) == said
