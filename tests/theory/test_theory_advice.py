"""The doubts that an advice names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailorfl.theory.advisor import Advice, _notes
from tailorfl.theory.spread import SpreadInterval
from tailorfl.training.cohort import TrainConfig

NONE: Any = None


@pytest.mark.parametrize(
    ("low", "used", "mu", "flat", "sizes", "expected"),
    [
        (1e-9, 8, 0.5, 0, [2], []),
        (0.0, 8, 0.5, 0, [2], ["alike"]),
        (1.0, 7, 0.5, 0, [2], ["only 7 clients"]),
        (1.0, 8, 0.0, 0, [2], ["not strongly convex"]),
        (1.0, 8, -1e-9, 2, [2], ["not strongly convex", "2 directions"]),
        (1.0, 8, 0.5, 2, [2], ["2 directions"]),
        (1.0, 8, 0.5, 0, [2, 1, 0], ["2 clients with fewer than 2 training samples"]),
    ],
)
def test_notes_name_each_doubt_and_no_other(
    low: float, used: int, mu: float, flat: int, sizes: list[int], expected: list[str]
) -> None:
    """The last client, without samples, is one that does not train."""
    curvature = SimpleNamespace(client_mu=mu, flat=flat)
    radius = SpreadInterval(2.0, low, 3.0)
    facts: Any = SimpleNamespace(mode="optimum", used=used, radius=radius, curvature=curvature)
    advice = Advice(facts, NONE, SpreadInterval(2.5, 1.0, 4.0), None, NONE, ())
    federation: Any = SimpleNamespace(train=[range(n) for n in (*sizes, 0)], members=range(len(sizes)))
    notes = _notes(advice, federation, TrainConfig())
    assert len(notes) == len(expected)
    assert all(words in note for words, note in zip(expected, notes, strict=True))
    facts.mode = "training"
    private: Any = SimpleNamespace(dp=SimpleNamespace(clip=1.0))
    trained = " ".join(_notes(advice, federation, private))
    assert "is a heuristic" in trained
    assert "compare with fedavg" in trained
    assert "trains without privacy" in trained
