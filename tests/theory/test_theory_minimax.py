"""Three regimes, and a rate that is continuous between them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailorfl.errors import ConfigError
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


def test_the_order_between_the_thresholds_is_the_maximum_of_both_terms() -> None:
    """The printed minimum of R^2 and 1/(m n) would promise the pooled rate to every heterogeneity there."""
    found = minimax_rate(samples=100, clients=25, radius=0.09)
    assert found.regime == "between"
    assert found.rate > 10 * min(0.09**2, 1 / 2500)


def test_one_client_has_no_middle() -> None:
    found = minimax_rate(samples=100, clients=1, radius=0.1)
    assert found.pooled_below == found.alone_above == 0.1


def test_impossible_values() -> None:
    with pytest.raises(ConfigError, match="clients must be at least 1"):
        minimax_rate(10, 0, 0.1)
    with pytest.raises(ConfigError, match="radius must be 0 or a positive number"):
        minimax_rate(10, 1, -0.1)
