"""Every calculator refuses, by name, every number that its formula has no meaning for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from studies import perfed_ckt_formulas
from tailorfl.errors import ConfigError
from tailorfl.theory import fedclup, fedclup_statistics, l2gd, recommend, spread
from tailorfl.theory.privacy import releases

NOT_POSITIVE = (0.0, -1.0, math.inf, math.nan)
NEGATIVE = (-1e-9, math.inf, math.nan)
NO_COUNT = (0, -1)
NO_SHARE = (0.0, 1.0, -0.1, 1.1, math.nan)
CURVED = {"mu": NOT_POSITIVE, "smoothness": (*NOT_POSITIVE, 0.5)}
"""Of mu = 1: a smoothness of half of it is none."""
PROBLEM = {"mu": 1.0, "smoothness": 2.0, "rho": 1.0, "radius": 0.5, "samples": 20, "clients": 5}


def problem() -> fedclup_statistics.Problem:
    return fedclup_statistics.Problem(**PROBLEM)


def resampled(clients: int, draws: int) -> Any:
    return spread.resampled(clients, lambda picked: [float(picked.mean())], draws=draws)


CASES: list[tuple[Callable[..., Any], dict[str, Any], dict[str, tuple[float, ...]]]] = [
    (fedclup.schedule, {"mu": 1.0, "smoothness": 2.0, "lam": 0.5}, {**CURVED, "lam": NOT_POSITIVE}),
    (fedclup.stochastic_eta, {"mu": 1.0, "smoothness": 2.0, "lam": 0.5}, {**CURVED, "lam": NOT_POSITIVE}),
    (fedclup.schedule(1.0, 2.0, 0.5).rounds, {"target": 0.1}, {"target": NO_SHARE}),
    (
        fedclup_statistics.Problem,
        PROBLEM,
        {**CURVED, "rho": NOT_POSITIVE, "radius": NEGATIVE, "samples": NO_COUNT, "clients": NO_COUNT},
    ),
    (fedclup_statistics.slack, {"problem": problem(), "lam": 0.5}, {"lam": NEGATIVE}),
    (l2gd.best_probability, {"smoothness": 2.0, "lam": 0.5}, {"smoothness": NOT_POSITIVE, "lam": NOT_POSITIVE}),
    (
        l2gd.plan,
        {"mu": 1.0, "smoothness": 2.0, "lam": 0.5, "clients": 5, "target": 0.1, "p": 0.4},
        {**CURVED, "lam": NOT_POSITIVE, "clients": NO_COUNT, "target": NO_SHARE, "p": NO_SHARE},
    ),
    (
        fedclup_statistics.minimax_rate,
        {"samples": 20, "clients": 5, "radius": 0.5},
        {"samples": NO_COUNT, "clients": NO_COUNT, "radius": NEGATIVE},
    ),
    (fedclup.moreau_constants, {"mu": 1.0, "smoothness": 2.0, "lam": 0.5}, {**CURVED, "lam": NOT_POSITIVE}),
    (
        perfed_ckt_formulas.transfer_mse,
        {"beta": 1.0, "sigma2": 1.0, "nu": 0.5, "v2": [1.0, 2.0], "client": 0, "lam": 0.5, "alpha": [0.5, 0.5]},
        {"beta": NOT_POSITIVE, "sigma2": NOT_POSITIVE, "nu": NOT_POSITIVE, "lam": NEGATIVE},
    ),
    (
        perfed_ckt_formulas.transmission_cost,
        {"method": "perfed_ckt", "clients": 5, "rounds": 3, "clusters": 2},
        {"clients": NO_COUNT, "rounds": NO_COUNT, "clusters": NO_COUNT},
    ),
    (
        releases,
        {"samples": 5, "batch": 1, "epochs": 1, "rounds": 1, "trainings": 1, "gradients": 1, "noise": 1.0},
        {
            **dict.fromkeys(("samples", "epochs", "rounds", "trainings", "gradients"), NO_COUNT),
            "batch": (-1,), "noise": (-1.0,),
        },
    ),
    (
        recommend.best_pull,
        {"excess": 0.1, "radius2": 0.5, "clients": 10, "most": 3.0},
        {"excess": NEGATIVE, "clients": NO_COUNT, "most": (0.0, -1.0, math.nan)},
    ),
    (
        recommend.expected_errors,
        {"noise": 0.1, "radius2": 0.5, "clients": 10},
        {"noise": NEGATIVE, "clients": NO_COUNT},
    ),
    (resampled, {"clients": 5, "draws": 3}, {"clients": NO_COUNT, "draws": NO_COUNT}),
    (spread.interval, {"value": 1.0, "draws": np.arange(5.0), "level": 0.9}, {"level": NO_SHARE}),
]  # fmt: skip
SINGLE = [
    (f, good, name, bad) for f, good, table in CASES for name, values in table.items() for bad in values
]


@pytest.mark.parametrize(
    ("function", "good", "_"), CASES, ids=[getattr(f, "__qualname__", "") for f, _, _ in CASES]
)
def test_good_numbers_are_taken(function: Callable[..., Any], good: dict[str, Any], _: Any) -> None:
    found = numbers_of(function(**good))
    assert found
    assert all(map(math.isfinite, found))


def numbers_of(value: Any) -> list[float]:
    """All numbers in a result, which may be a number, an array or a dataclass."""
    if dataclasses.is_dataclass(value):
        return [n for field in dataclasses.fields(value) for n in numbers_of(getattr(value, field.name))]
    if isinstance(value, float | int):
        return [float(value)]
    if isinstance(value, tuple):
        return [float(number) for number in value]
    return value.ravel().tolist() if isinstance(value, np.ndarray) else []


@pytest.mark.parametrize(
    ("function", "good", "name", "bad"),
    SINGLE,
    ids=[f"{f.__qualname__}-{name}-{bad}" for f, _, name, bad in SINGLE],
)
def test_a_bad_number_is_refused_by_name(
    function: Callable[..., Any], good: dict[str, Any], name: str, bad: float
) -> None:
    with pytest.raises(ConfigError, match=name):
        function(**{**good, name: bad})
