"""What a method declares of itself: conditions on options and runs, and what follows where they hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import Field

from tailorfl.core.method import Method
from tailorfl.core.reduction import comparable, exposure, hold, several, to_fedavg, to_local, untrained
from tailorfl.errors import ConfigError


class Declared(Method):
    """A method for these tests, with a personal and a global model."""

    name = "declared"
    title = "Declared"
    paper = "none"
    special_cases = [
        untrained("without epochs ({self.own_epochs})", "personal", own_length=0),
        to_local("with λ = 0", lam=0),
        to_fedavg("in its only round", rounds=1),
        comparable("with more than one λ", "global", "is something else", lams=several),
    ]
    exposures = [
        exposure("the losses", "sample", lam__not=0),
        exposure("the number of λ", None, lams=several),
    ]
    lam: float = 1.0
    lams: tuple[float, ...] = ()
    own_epochs: int | None = Field(None)
    own_steps: int | None = Field(None)


RUN: Any = SimpleNamespace(rounds=3, train=SimpleNamespace(steps=7))


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        ({"lam": 1.0}, True),
        ({"lam": 0}, False),
        ({"lam__not": 0}, True),
        ({"lam__not": 1}, False),
        ({"rounds": 3, "lam": 1}, True),
        ({"rounds": 3, "lam": 2}, False),
        ({"train__steps": 7}, True),
        ({"train__steps__not": 7}, False),
        ({"lam": lambda lam: lam > 0.5}, True),
        ({"own_length": 0}, False),
        ({"own_length__not": 0}, True),
    ],
)
def test_conditions_are_values_of_options_and_of_the_run(when: dict[str, Any], holds: bool) -> None:
    assert hold(when, Declared(), RUN) == holds


@pytest.mark.parametrize(
    ("options", "nothing"),
    [
        ({"own_epochs": 0}, True),
        ({"own_steps": 0}, True),
        ({"own_steps": 2}, False),
        ({"own_epochs": 1}, False),
    ],
)
def test_a_length_of_nothing_is_no_epoch_or_no_step(options: dict[str, int], nothing: bool) -> None:
    assert hold({"own_length": 0}, Declared(**options)) == nothing


def found(rounds: int = 3, **options: Any) -> list[tuple[str, str, str, str]]:
    run: Any = SimpleNamespace(rounds=rounds)
    return [(r.because, r.model, r.other, r.remark) for r in Declared(**options).reductions(run)]


def test_every_case_that_holds_is_said_once_of_each_model() -> None:
    assert found() == []
    assert found(lam=0) == [("with λ = 0", "personal", "local", "")]
    assert found(rounds=1) == [
        ("in its only round", "global", "fedavg", ""),
        ("in its only round", "personal", "fedavg", ""),
    ]
    assert found(lams=(1, 2)) == [("with more than one λ", "global", "", "is something else")]


def test_of_a_model_that_never_trains_nothing_else_is_said() -> None:
    assert found(lam=0, own_epochs=0) == [("without epochs (0)", "personal", "", "")]


def test_an_exposure_is_of_its_level_of_privacy_or_of_both() -> None:
    assert Declared().unprotected("sample") == "the losses"
    assert Declared().unprotected("client") == ""
    assert Declared(lam=0, lams=(1, 2)).unprotected("client") == "the number of λ"


@pytest.mark.parametrize("declared", [to_local("with λ = 0", lan=0), to_local("without", other_length=0)])
def test_a_condition_on_what_nobody_has_is_refused_when_the_class_is_made(declared: Any) -> None:
    with pytest.raises(ConfigError, match=r"lan|other_length"):
        type(Declared)("Wrong", (Declared,), {"__module__": __name__, "special_cases": [declared]})
