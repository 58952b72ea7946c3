"""Methods by name: what is registered, and what a wrong name or hyper-parameter says."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from pydantic import Field, ValidationError

from tailorfl.core import method as registry
from tailorfl.core.method import Method, make_method, methods, register
from tailorfl.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", {})
    monkeypatch.setattr(registry, "entry_points", lambda group: [])


class Sample(Method):
    """A method for these tests."""

    name: ClassVar[str] = "sample"
    title: ClassVar[str] = "Sample"
    paper: ClassVar[str] = "none"
    lam: float = Field(1.0, ge=0)


def test_a_registered_method_is_made_with_its_options():
    register(Sample)
    assert methods() == {"sample": Sample}
    made = make_method("sample", {"lam": 2, "weights": "samples"})
    assert isinstance(made, Sample)
    assert made.lam == 2.0
    assert made.weights == "samples"
    assert make_method("sample") == Sample()


def test_a_wrong_name_suggests_the_nearest():
    register(Sample)
    with pytest.raises(ConfigError, match=r"unknown method 'sampel'. Did you mean 'sample'"):
        make_method("sampel")
    with pytest.raises(ConfigError, match=r"unknown option of sample 'lamb'. Did you mean 'lam'"):
        make_method("sample", {"lamb": 1})


@pytest.mark.parametrize("bad", [{"lam": -1}, {"lam": "high"}, {"weights": "square"}])
def test_a_wrong_value_names_the_option_and_the_value(bad: dict[str, Any]):
    register(Sample)
    ((option, value),) = bad.items()
    with pytest.raises(ConfigError, match=f"method 'sample': {option} = {value!r}"):
        make_method("sample", bad)


def test_two_methods_of_one_name_are_refused_and_one_may_register_twice():
    register(Sample)
    register(Sample)

    class Other(Sample):
        """Another class with the same name."""

    with pytest.raises(ConfigError, match="two methods are called 'sample'"):
        register(Other)


def test_installed_packages_add_methods_by_entry_point(monkeypatch: pytest.MonkeyPatch):
    class Entry:
        @staticmethod
        def load() -> type[Method]:
            return Sample

    def points(group: str) -> list[type[Entry]]:
        return [Entry] if group == "tailorfl.methods" else []

    monkeypatch.setattr(registry, "entry_points", points)
    assert methods() == {"sample": Sample}


def test_hyper_parameters_cannot_be_changed_or_invented():
    with pytest.raises(ValidationError):
        Sample().lam = 3.0  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Sample(mu=1.0)  # type: ignore[call-arg]
