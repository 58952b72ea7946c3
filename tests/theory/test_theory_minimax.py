"""Three regimes, and a rate that is continuous between them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.theory.minimax import minimax_rate


@pytest.mark.parametrize(
    ("radius", "regime", "order"),
    [(0.0, "pooled", 1 / 2500), (0.02, "pooled", 1 / 2500), (0.05, "between", 0.0025), (0.2, "alone", 0.01)],
)
def test_regimes(radius: float, regime: str, order: float) -> None:
    found = minimax_rate(samples=100, clients=25, radius=radius)
    assert (found.pooled_below, found.alone_above) == (0.02, 0.1)
    assert found.regime == regime
    assert found.order == pytest.approx(order)
    assert found.rate == pytest.approx(1 / 2500 + min(radius**2, 0.01))


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**4), st.floats(0, 10))
def test_rate_is_of_its_order_and_never_better_than_pooled(samples: int, clients: int, radius: float) -> None:
    found = minimax_rate(samples, clients, radius)
    assert found.order <= found.rate <= 2 * found.order
    assert found.rate >= 1 / (samples * clients)
    assert found.rate <= minimax_rate(samples, clients, radius * 1.1).rate
