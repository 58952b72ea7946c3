"""Confidence in an advice, and the doubts that it names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailorfl.theory.advice import Advice
from tailorfl.theory.advisor import _notes
from tailorfl.theory.spread import SpreadInterval
from tailorfl.training.cohort import TrainConfig

NONE: Any = None


def advice(lam: tuple[float, float] = (1.0, 4.0), used: int = 8, mode: str = "optimum") -> Advice:
    facts: Any = SimpleNamespace(mode=mode, used=used)
    return Advice(facts, NONE, SpreadInterval(sum(lam) / 2, *lam), None, NONE, ())


@pytest.mark.parametrize(
    ("given", "confidence"),
    [
        ({}, "high"),
        ({"used": 7}, "moderate"),
        ({"lam": (1.0, 4.1)}, "moderate"),
        ({"lam": (0.0, 0.0)}, "moderate"),
        ({"mode": "training"}, "low"),
    ],
)
def test_confidence_is_high_only_of_optima_of_many_clients_with_a_lam_within_a_factor_of_four(
    given: dict[str, Any], confidence: str
) -> None:
    assert advice(**given).confidence == confidence


@pytest.mark.parametrize(("low", "alike"), [(0.0, True), (1.0, False), (1e-9, False)])
def test_it_is_said_where_the_radius_cannot_be_told_from_zero(low: float, alike: bool) -> None:
    found = advice()
    found.facts.radius, found.facts.curvature = (
        SpreadInterval(2.0, low, 3.0),
        SimpleNamespace(client_mu=1.0, flat=0),
    )
    federation: Any = SimpleNamespace(train=[range(2)] * 8, num_clients=8)
    notes = _notes(found, federation, TrainConfig())
    assert any("clients may be alike" in note for note in notes) == alike
    assert len(notes) == alike


@pytest.mark.parametrize(("used", "rough"), [(7, True), (8, False)])
def test_few_clients_make_rough_intervals_and_tiny_ones_are_counted(used: int, rough: bool) -> None:
    found = advice(used=used)
    found.facts.radius, found.facts.curvature = (
        SpreadInterval(2.0, 1.0, 3.0),
        SimpleNamespace(client_mu=1.0, flat=0),
    )
    federation: Any = SimpleNamespace(train=[range(2), range(1), range(0), range(0)], num_clients=3)
    notes = _notes(found, federation, TrainConfig())
    assert notes[0].startswith("2 clients with fewer than 2 training samples")
    assert any("resampling only 7 clients" in note for note in notes) == rough


@pytest.mark.parametrize(("mu", "flat", "said"), [(0.0, 0, 1), (-1e-9, 2, 2), (0.5, 0, 0), (0.5, 2, 1)])
def test_losses_without_strong_convexity_and_flat_directions_are_named(
    mu: float, flat: int, said: int
) -> None:
    found = advice()
    found.facts.radius, found.facts.curvature = (
        SpreadInterval(2.0, 1.0, 3.0),
        SimpleNamespace(client_mu=mu, flat=flat),
    )
    federation: Any = SimpleNamespace(train=[range(2)] * 8, num_clients=8)
    notes = _notes(found, federation, TrainConfig())
    assert len(notes) == said
    assert any("no strong convexity" in note for note in notes) == (mu <= 0)
    assert any(note.startswith("2 directions") for note in notes) == (flat == 2)
