"""How sure an answer of the advisor calls itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailorfl.theory.advice import SURE, Advice
from tailorfl.theory.advisor import _notes
from tailorfl.theory.minimax import Regime
from tailorfl.theory.spread import Interval
from tailorfl.training.cohort import TrainConfig

NONE: Any = None


def advice(
    regime: Regime = "pooled",
    share: float = 1.0,
    lam: tuple[float, float] = (1.0, 4.0),
    used: int = 8,
    mode: str = "optimum",
    gain: tuple[float, float] = (0.0, 0.0),
) -> Advice:
    facts: Any = SimpleNamespace(mode=mode, used=used, gain=Interval(sum(gain) / 2, *gain))
    shares: dict[Regime, float] = {"pooled": 0.0, "between": 0.0, "alone": 0.0, regime: share}
    return Advice(facts, regime, shares, NONE, Interval(sum(lam) / 2, *lam), None, NONE, ())


@pytest.mark.parametrize(("share", "sure"), [(1.0, True), (SURE, True), (SURE - 1e-9, False)])
def test_it_is_sure_where_nearly_all_resamples_agree(share: float, sure: bool) -> None:
    assert advice(share=share).sure == sure
    assert advice("alone", share).sure == sure


@pytest.mark.parametrize(
    ("given", "confidence"),
    [
        ({}, "high"),
        ({"used": 7}, "moderate"),
        ({"share": 0.9}, "moderate"),
        ({"lam": (1.0, 4.1)}, "moderate"),
        ({"lam": (0.0, 0.0)}, "moderate"),
        ({"mode": "training"}, "low"),
    ],
)
def test_confidence_is_high_only_of_optima_of_many_clients_with_a_lam_within_a_factor_of_four(
    given: dict[str, Any], confidence: str
) -> None:
    assert advice(**given).confidence == confidence


@pytest.mark.parametrize(
    ("regime", "gain", "contradicted"),
    [
        ("pooled", (0.1, 0.2), True),
        ("pooled", (-0.1, 0.2), True),
        ("pooled", (-0.1, 0.0), True),
        ("pooled", (-0.2, -0.1), False),
        ("alone", (-0.2, -0.1), True),
        ("alone", (-0.2, 0.1), True),
        ("alone", (0.0, 0.1), True),
        ("alone", (0.1, 0.2), False),
        ("between", (0.1, 0.2), False),
        ("between", (-0.2, -0.1), False),
    ],
)
def test_trained_models_contradict_the_regime_unless_losses_surely_speak_for_it(
    regime: Regime, gain: tuple[float, float], contradicted: bool
) -> None:
    """Own models that surely beat their mean speak for training alone; ones that surely lose, for collaboration."""
    assert advice(regime, mode="training", gain=gain).contradicted == contradicted
    assert advice(regime, mode="training", gain=gain).sure == (not contradicted)
    assert not advice(regime, mode="optimum", gain=gain).contradicted


@pytest.mark.parametrize(("low", "alike"), [(0.0, True), (1.0, False), (1e-9, False)])
def test_it_is_said_where_the_radius_cannot_be_told_from_zero(low: float, alike: bool) -> None:
    found = advice()
    found.facts.radius, found.facts.curvature = (
        Interval(2.0, low, 3.0),
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
        Interval(2.0, 1.0, 3.0),
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
        Interval(2.0, 1.0, 3.0),
        SimpleNamespace(client_mu=mu, flat=flat),
    )
    federation: Any = SimpleNamespace(train=[range(2)] * 8, num_clients=8)
    notes = _notes(found, federation, TrainConfig())
    assert len(notes) == said
    assert any("no strong convexity" in note for note in notes) == (mu <= 0)
    assert any(note.startswith("2 directions") for note in notes) == (flat == 2)
