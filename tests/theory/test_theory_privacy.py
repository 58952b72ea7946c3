"""The releases of a training by the numbers that describe it."""

from __future__ import annotations

import math

import pytest

from tailorfl.errors import ConfigError
from tailorfl.theory.privacy import releases


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"samples": 500, "batch": 10, "epochs": 1, "rounds": 10}, (0.02, 1.0, 500)),
        ({"samples": 505, "batch": 10, "epochs": 1, "rounds": 10}, (10 / 505, 1.0, 510)),
        ({"samples": 500, "batch": 10, "epochs": 2, "rounds": 10, "trainings": 2}, (0.02, 1.0, 2000)),
        ({"samples": 500, "batch": 0, "epochs": 3, "rounds": 4}, (1.0, 1.0, 12)),
        ({"samples": 5, "batch": 10, "epochs": 3, "rounds": 4}, (1.0, 1.0, 12)),
        (
            {"samples": 500, "batch": 10, "epochs": 1, "rounds": 1, "gradients": 4, "noise": 3.0},
            (0.02, 1.5, 50),
        ),
    ],
)
def test_rate_noise_and_steps(given: dict[str, int], expected: tuple[float, float, int]) -> None:
    q, sigma, steps = releases(**given)
    assert (q, steps) == (pytest.approx(expected[0]), expected[2])
    assert math.isclose(sigma, expected[1])


@pytest.mark.parametrize("name", ["samples", "epochs", "rounds", "trainings", "gradients"])
def test_counts_start_at_one(name: str) -> None:
    given = {"samples": 5, "batch": 1, "epochs": 1, "rounds": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        releases(**given)


@pytest.mark.parametrize("changed", [{"batch": -1}, {"noise": -1.0}])
def test_batch_and_noise_are_not_negative(changed: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        releases(**{"samples": 5, "batch": 1, "epochs": 1, "rounds": 1, **changed})  # type: ignore[arg-type]
