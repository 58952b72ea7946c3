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
from tailorfl.hooks import check_hooks
from tailorfl.methods.fedavg import FedAvg

CALLED = [name for name, value in vars(Method).items() if inspect.isfunction(value) and name[0] != "_"]
CONSTANTS = [name for name in sorted(Method.__class_vars__) if name != "model_config"]


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


def test_a_misspelt_hook_beside_an_inherited_one_is_refused_as_the_class_is_made() -> None:
    """FedAvg aggregates, so that nothing would be missing at run time."""
    with pytest.raises(ConfigError, match=r"'agregate'.*'aggregate'"):

        class Mine(FedAvg):
            def agregate(self, server, replies):
                return server


@pytest.mark.parametrize(
    ("word", "meant"), [("serverstate", "server_state"), ("client_sate", "client_state"), ("lokal", "local")]
)
def test_other_misspellings(word: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"'{word}'.*'{meant}'"):
        make(Method, **{word: like(vars(Method)[meant])})


def test_a_misspelt_constant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'has_persnal'.*'has_personal'"):

        class Mine(FedAvg):
            has_persnal: ClassVar[bool] = True


@pytest.mark.parametrize("constant", ["title", "has_global"])
def test_a_constant_written_as_a_hyper_parameter_is_refused(constant: str) -> None:
    with (
        pytest.warns(UserWarning, match="shadows"),
        pytest.raises(ConfigError, match=rf"is written {constant} = "),
    ):
        make(FedAvg, __annotations__={constant: str}, **{constant: "x"})


@pytest.mark.parametrize(
    "name",
    ["aggregate_heads", "local_loss", "server_step", "shares", "_agregate", "penalty", "weights_of", "rate"],
)
def test_names_of_the_authors_own_are_left_alone(name: str) -> None:
    cls = make(FedAvg, **{name: lambda self, client, more, others: None})
    assert hasattr(cls, name)


def test_a_helper_like_a_hook_is_left_alone_beside_that_hook() -> None:
    cls = make(FedAvg, share=lambda self, server: server, shared=lambda self, server: server)
    assert hasattr(cls, "share")


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


def test_a_hook_that_is_read_is_a_property() -> None:
    with pytest.raises(ConfigError, match="@property"):
        make(FedAvg, averages_replies=lambda self: True)
    with pytest.raises(ConfigError, match="is a property"):
        make(FedAvg, broadcast=property(lambda self: TensorDict({})))
    with pytest.raises(ConfigError, match="is a bool"):
        make(FedAvg, __annotations__={"broadcast": ClassVar[bool]}, broadcast=True)


def test_observers_and_clients_are_checked_alike() -> None:
    with pytest.raises(ConfigError, match=r"'round_dne'.*'round_done'"):
        make(Observer, round_dne=lambda self, job, done: None)
    with pytest.raises(ConfigError, match=r"round_done\(self, job, done\)"):
        make(Observer, round_done=lambda self, done: None)
    with pytest.raises(ConfigError, match=r"'los'.*'loss'"):
        make(Client, los=lambda self, state: None)
    assert make(Observer, round_done=lambda self, job, done: None)


def test_all_methods_of_the_library_pass() -> None:
    assert len(methods()) >= 66
    for method in methods().values():
        for cls in method.__mro__[: method.__mro__.index(Method)]:
            check_hooks(cls, Method, Method.__class_vars__)
