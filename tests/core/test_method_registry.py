"""Methods by name: what is registered, and what a wrong name or hyper-parameter says."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import Field, ValidationError

from tailorfl.core import method as registry
from tailorfl.core.method import Method, make_method, methods, register
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


def offered(monkeypatch: pytest.MonkeyPatch, **loaders: Any) -> None:
    """Install entry points: name -> what loading it returns or raises."""
    entries = [SimpleNamespace(value=name, load=load) for name, load in loaders.items()]
    monkeypatch.setattr(
        registry, "entry_points", lambda group: entries if group == "tailorfl.methods" else []
    )


def test_installed_packages_add_methods_by_entry_point(monkeypatch: pytest.MonkeyPatch):
    offered(monkeypatch, sample=lambda: Sample)
    assert methods() == {"sample": Sample}


def test_a_broken_package_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken() -> None:
        raise ImportError("no module named 'gone'")

    offered(monkeypatch, broken=broken, number=lambda: 3, sample=lambda: Sample)
    assert methods() == {"sample": Sample}
    assert "the methods of 'broken' are left out: ImportError: no module named 'gone'" in caplog.text
    assert "'number' is neither a method nor a module with methods" in caplog.text


def test_hyper_parameters_cannot_be_changed_or_invented():
    with pytest.raises(ClientError, match=r"self\.lam.*Sample\(lam=\.\.\.\)"):
        Sample().lam = 3.0  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Sample(mu=1.0)  # type: ignore[call-arg]
