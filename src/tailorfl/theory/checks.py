"""Checks of the calculators' arguments."""

from __future__ import annotations

import math

from tailorfl.errors import ConfigError


def require_positive(**values: float) -> None:
    """Raise ConfigError naming the first value that is not finite and above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be a positive number, but is {value}")


def require_not_negative(**values: float) -> None:
    """Raise ConfigError naming the first value that is not finite and at least 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be 0 or a positive number, but is {value}")


def require_counts(**values: int) -> None:
    """Raise ConfigError naming the first value that is below 1."""
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, but is {value}")


def require_share(**values: float) -> None:
    """Raise ConfigError naming the first value that is not strictly between 0 and 1."""
    for name, value in values.items():
        if not 0 < value < 1:
            raise ConfigError(f"{name} must be strictly between 0 and 1, but is {value}")


def require_curvature(mu: float, smoothness: float) -> None:
    """Raise ConfigError unless 0 < mu <= smoothness."""
    require_positive(mu=mu, smoothness=smoothness)
    if mu > smoothness:
        raise ConfigError(
            f"mu must not exceed smoothness, but mu={mu} and smoothness={smoothness}: no function curves "
            "more than its smoothness allows"
        )
