"""Methods by name, what a wrong name or option says, and what a method declares of itself."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import Field, ValidationError

from tailorfl.core import method as registry
from tailorfl.core.method import Method, make_method, methods, register
from tailorfl.core.reduction import comparable, exposure, hold, several, to_fedavg, to_local, untrained
from tailorfl.errors import ClientError, ConfigError


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    methods()  # the library's own are imported once, into the registry that stays
    monkeypatch.setattr(registry, "_REGISTRY", {})
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    registry._load_entry_points.cache_clear()
    yield
    registry._load_entry_points.cache_clear()


class Sample(Method):
    """A method for these tests."""

    name = "sample"
    title = "Sample"
    paper = "none"
    lam: float = Field(1.0, ge=0)


def test_a_registered_method_is_made_with_its_options():
    register(Sample)
    assert methods() == {"sample": Sample}
    made = make_method("sample", {"lam": 2, "weights": "samples"})
    assert isinstance(made, Sample)
    assert made.lam == 2.0
    assert made.weights == "samples"
    assert make_method("sample") == Sample()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sampel", {}, r"unknown method 'sampel'. Did you mean 'sample'"),
        ("sample", {"lamb": 1}, r"unknown option of sample 'lamb'. Did you mean 'lam'"),
        ("sample", {"lam": -1}, "method 'sample': lam = -1"),
        ("sample", {"lam": "high"}, "method 'sample': lam = 'high'"),
        ("sample", {"weights": "square"}, "method 'sample': weights = 'square'"),
    ],
)
def test_a_wrong_name_or_value_is_named(name: str, options: dict[str, Any], message: str):
    register(Sample)
    with pytest.raises(ConfigError, match=message):
        make_method(name, options)


def test_two_methods_of_one_name_are_refused_and_one_may_register_twice():
    register(Sample)
    register(Sample)

    class Other(Sample):
        """Another class with the same name."""

    with pytest.raises(ConfigError, match="two methods have the name 'sample'"):
        register(Other)


def test_installed_packages_add_methods_and_a_broken_one_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken() -> None:
        raise ImportError("no module named 'gone'")

    loaders = {"broken": broken, "number": lambda: 3, "sample": lambda: Sample}
    entries = [SimpleNamespace(value=name, load=load) for name, load in loaders.items()]
    monkeypatch.setattr(
        registry, "entry_points", lambda group: entries if group == "tailorfl.methods" else []
    )
    assert methods() == {"sample": Sample}
    assert "the methods of 'broken' cannot be loaded: ImportError: no module named 'gone'" in caplog.text
    assert "'number' is neither a method nor a module with methods" in caplog.text


def test_hyper_parameters_cannot_be_changed_or_invented():
    with pytest.raises(ClientError, match=r"self\.lam.*Sample\(lam=\.\.\.\)"):
        Sample().lam = 3.0  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Sample(mu=1.0)  # type: ignore[call-arg]


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
    ("when", "options", "holds"),
    [
        ({"lam": 1.0}, {}, True),
        ({"lam": 0}, {}, False),
        ({"lam__not": 0}, {}, True),
        ({"lam__not": 1}, {}, False),
        ({"rounds": 3, "lam": 1}, {}, True),
        ({"rounds": 3, "lam": 2}, {}, False),
        ({"train__steps": 7}, {}, True),
        ({"train__steps__not": 7}, {}, False),
        ({"lam": lambda lam: lam > 0.5}, {}, True),
        # A length of nothing is no epoch or no step.
        ({"own_length": 0}, {}, False),
        ({"own_length__not": 0}, {}, True),
        ({"own_length": 0}, {"own_epochs": 0}, True),
        ({"own_length": 0}, {"own_steps": 0}, True),
        ({"own_length": 0}, {"own_steps": 2}, False),
        ({"own_length": 0}, {"own_epochs": 1}, False),
    ],
)
def test_conditions_are_values_of_options_and_of_the_run(
    when: dict[str, Any], options: dict[str, int], holds: bool
) -> None:
    assert hold(when, Declared(**options), RUN) == holds


@pytest.mark.parametrize(
    ("rounds", "options", "said"),
    [
        (3, {}, []),
        (3, {"lam": 0}, [("with λ = 0", "personal", "local", "")]),
        (1, {}, [("in its only round", kind, "fedavg", "") for kind in ("global", "personal")]),
        (3, {"lams": (1, 2)}, [("with more than one λ", "global", "", "is something else")]),
        # Of a model that never trains nothing else is said.
        (3, {"lam": 0, "own_epochs": 0}, [("without epochs (0)", "personal", "", "")]),
    ],
)
def test_every_case_that_holds_is_said_once_of_each_model(
    rounds: int, options: dict[str, Any], said: list[tuple[str, str, str, str]]
) -> None:
    run: Any = SimpleNamespace(rounds=rounds)
    reductions = Declared(**options).reductions(run)
    assert [(r.because, r.model, r.other, r.remark) for r in reductions] == said


def test_an_exposure_is_of_its_level_of_privacy_or_of_both() -> None:
    assert Declared().unprotected("sample") == "the losses"
    assert Declared().unprotected("client") == ""
    assert Declared(lam=0, lams=(1, 2)).unprotected("client") == "the number of λ"


@pytest.mark.parametrize("declared", [to_local("with λ = 0", lan=0), to_local("without", other_length=0)])
def test_a_condition_on_what_nobody_has_is_refused_when_the_class_is_made(declared: Any) -> None:
    with pytest.raises(ConfigError, match=r"lan|other_length"):
        type(Declared)("Wrong", (Declared,), {"__module__": __name__, "special_cases": [declared]})
