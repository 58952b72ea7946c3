"""What a subclass overrides is checked by name and by signature when the class is made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from tensordict import TensorDict

from tailorfl import Client, Observer
from tailorfl.core.method import Method, methods
from tailorfl.errors import ConfigError
from tailorfl.interface import check_hooks
from tailorfl.methods.fedavg import FedAvg

CALLED = [name for name, value in vars(Method).items() if inspect.isfunction(value) and name[0] != "_"]


def make(base: type, **attributes: Any) -> type:
    return type("Mine", (base,), {"__module__": __name__, "__qualname__": "Mine", **attributes})


def misspellings(name: str) -> Iterator[str]:
    """Every name with one letter left out, doubled, or exchanged with the next."""
    for k in range(len(name)):
        yield name[:k] + name[k + 1 :]
        yield name[:k] + name[k] + name[k:]
        yield name[:k] + name[k : k + 2][::-1] + name[k + 2 :]


def like(hook: Any) -> Any:
    """A function that is called as the hook is."""
    return functools.wraps(hook)(lambda self, *given: None)


@pytest.mark.parametrize("hook", CALLED)
def test_one_wrong_letter_in_the_name_of_a_hook_is_refused(hook: str) -> None:
    wrong = {word for word in misspellings(hook) if word not in CALLED and word[0] != "_"} - {hook}
    assert len(wrong) > len(hook)
    for word in sorted(wrong):
        with pytest.raises(ConfigError) as caught:
            check_hooks(make(object, **{word: like(vars(Method)[hook])}), Method)
        assert f"'{word}'" in str(caught.value)
        assert f"Did you mean '{hook}'" in str(caught.value)


@pytest.mark.parametrize(
    ("base", "attributes", "message"),
    [
        # FedAvg aggregates, so that nothing would be missing at run time.
        (FedAvg, {"agregate": lambda self, server, replies: server}, "'agregate'.*'aggregate'"),
        (Method, {"serverstate": like(Method.server_state)}, "'serverstate'.*'server_state'"),
        (Method, {"client_sate": like(Method.client_state)}, "'client_sate'.*'client_state'"),
        (Method, {"lokal": like(Method.local)}, "'lokal'.*'local'"),
        (FedAvg, {"__annotations__": {"has_persnal": ClassVar[bool]}, "has_persnal": True}, "'has_personal'"),
        (FedAvg, {"averages_replies": lambda self: True}, "@property"),
        (FedAvg, {"broadcast": property(lambda self: TensorDict({}))}, "is a property"),
        (FedAvg, {"__annotations__": {"broadcast": ClassVar[bool]}, "broadcast": True}, "is a bool"),
        (Observer, {"round_dne": lambda self, job, done: None}, "'round_dne'.*'round_done'"),
        (Observer, {"round_done": lambda self, done: None}, r"round_done\(self, job, done\)"),
        (Client, {"los": lambda self, state: None}, "'los'.*'loss'"),
    ],
)
def test_a_hook_or_constant_of_another_name_or_form_is_refused_as_the_class_is_made(
    base: type, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(base, **attributes)


@pytest.mark.parametrize("constant", ["title", "has_global"])
def test_a_constant_written_as_a_hyper_parameter_is_refused(constant: str) -> None:
    with (
        pytest.warns(UserWarning, match="shadows"),
        pytest.raises(ConfigError, match=rf"write {constant} = "),
    ):
        make(FedAvg, __annotations__={constant: str}, **{constant: "x"})


@pytest.mark.parametrize(
    "names",
    [
        *(["aggregate_heads"], ["local_loss"], ["server_step"], ["shares"], ["_agregate"], ["penalty"]),
        *(["weights_of"], ["rate"], ["share", "shared"]),  # share alone would be a wrong `shared`
    ],
)
def test_names_of_the_authors_own_are_left_alone(names: list[str]) -> None:
    helpers = {name: lambda self, client, more, others: None for name in names}
    if "shared" in helpers:
        helpers["shared"] = lambda self, server: server
    assert hasattr(make(FedAvg, **helpers), names[0])


@pytest.mark.parametrize("hook", CALLED)
def test_a_hook_that_lacks_a_parameter_is_refused(hook: str) -> None:
    names = list(inspect.signature(vars(Method)[hook]).parameters)
    if len(names) < 2:
        assert make(Method, **{hook: lambda self: {}})  # nothing can be lacking
        return
    right = eval(f"lambda {', '.join(names)}: None")
    assert make(Method, **{hook: right})
    for wrong in (names[:-1], [*names, "more"], [*names, "*", "keyword"]):
        with pytest.raises(ConfigError) as caught:
            make(Method, **{hook: eval(f"lambda {', '.join(wrong)}: None")})
        assert f"Mine.{hook} takes" in str(caught.value)
        assert f"def {hook}({', '.join(names)})" in str(caught.value)


def test_other_forms_that_can_be_called_are_taken() -> None:
    def local(client: Any, state: Any, received: Any, extra: int = 0) -> None: ...

    make(FedAvg, local=staticmethod(local))
    make(FedAvg, local=functools.partialmethod(lambda self, one, c, s, r: None, 1))
    make(FedAvg, local=lambda self, *given: None)
    make(FedAvg, aggregate=classmethod(lambda cls, server, replies: server))
    make(Observer, round_done=lambda self, job, done: None)


def test_all_methods_of_the_library_pass() -> None:
    assert len(methods()) >= 66
    for method in methods().values():
        for cls in method.__mro__[: method.__mro__.index(Method)]:
            check_hooks(cls, Method, Method.__class_vars__)
