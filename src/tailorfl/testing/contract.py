"""The contract of a method, the registry of checks, and the functions that run them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tailorfl.core.method import Method
from tailorfl.testing.small import Parts

Count = Callable[[Parts], int]
"""A number of scalars, from those of a model (`d`) and of its parts (`head`, `norm`)."""


def nothing(parts: Parts) -> int:
    """Return 0."""
    return 0


def whole(parts: Parts) -> int:
    """Return the scalars of a whole model."""
    return parts.d


def twice(parts: Parts) -> int:
    """Return the scalars of two models."""
    return 2 * parts.d


@dataclass(frozen=True)
class Contract:
    """A method and its promises. A promise that is left out is not checked, or is what most methods do.

    Attributes:
        method: the method with options that make it quick, and that do not turn it into another one.
        down: scalars that a sampled client receives in a round.
        up: scalars that it sends.
        by_round: instead of both, (down, up) of a round, counted from 0, if rounds differ; two clients are sampled.
        at_most: whether `down` and `up` are upper bounds: messages leave out entries that do not exist yet.
        trained: scalars of the models that a client trains.
        beside: scalars that its training produces in addition to models, such as corrections.
        personal: whether clients deploy personal models; None: as the class declares.
        shared: whether there is a global model; None: as the class declares.
        chooses: whether clients start with different models, their own or ones chosen by their data.
        still: options under which nothing but local training moves a model, and all clients start alike.
        alike: options under which clients with equal data are equal.
        by_id: whether results depend on the ids of clients, as with embeddings, noise or turns by id.
        in_turn: whether one client per round takes part, in an order by ids, however the run samples.
        own_rate: whether it takes steps at its own learning rate, whatever the run's.
        mixes_samples: whether its loss compares the samples of a batch, which sample-level privacy refuses.
        unweighted: whether no average weights clients by their samples.
        over_all: whether the server's sums are over all clients, sampled or not.
        not_on: the tiny models on which the method has nothing to split.
    """

    method: Method
    down: Count | None = None
    up: Count | None = None
    by_round: Callable[[int, Parts], tuple[int, int]] | None = None
    at_most: bool = False
    trained: Count | None = None
    beside: Count = nothing
    personal: bool | None = None
    shared: bool | None = None
    chooses: bool = False
    still: Mapping[str, Any] = field(default_factory=dict)
    alike: Mapping[str, Any] = field(default_factory=dict)
    by_id: bool = False
    in_turn: bool = False
    own_rate: bool = False
    mixes_samples: bool = False
    unweighted: bool = False
    over_all: bool = False
    not_on: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The method's name, or that of its class."""
        return getattr(type(self.method), "name", type(self.method).__name__)

    def having(self, **options: Any) -> Method:
        """Return the method with some options changed."""
        return type(self.method)(**{**self.method.all_options(), **options})


@dataclass(frozen=True)
class Check:
    """One check of one method: a call raises AssertionError if the method breaks its contract."""

    name: str
    contract: Contract
    function: Callable[..., None]
    arguments: tuple[Any, ...]

    def __call__(self) -> None:
        """Run the check."""
        self.function(self.contract, *self.arguments)

    def __str__(self) -> str:
        arguments = f" ({', '.join(map(str, self.arguments))})" if self.arguments else ""
        return f"{self.contract.name}: {self.name}{arguments}"


Function = TypeVar("Function", bound=Callable[..., None])
Applies = Callable[[Contract], bool]
CHECKS: list[tuple[Callable[..., None], tuple[tuple[Any, ...], ...], Applies]] = []


def check(
    *variants: tuple[Any, ...], where: Applies = lambda contract: True
) -> Callable[[Function], Function]:
    """Register a check that runs with each of the arguments `variants`, on the methods for which `where` is true."""

    def add(function: Function) -> Function:
        CHECKS.append((function, variants or ((),), where))
        return function

    return add


def checks_of(method: Contract | Method | type[Method]) -> list[Check]:
    """Return every check that applies to a method, which may be given as its class if all options have defaults."""
    if isinstance(method, type):
        method = method()
    contract = method if isinstance(method, Contract) else Contract(method)
    return [
        Check(function.__name__, contract, function, variant)
        for function, variants, applies in CHECKS
        for variant in variants
        if applies(contract) and not set(variant) & set(contract.not_on)
    ]


def check_method(method: Contract | Method | type[Method]) -> None:
    """Check that a method keeps its contract.

    Args:
        method: the method, its class if all options have defaults, or a `Contract`, which promises more.

    Raises:
        AssertionError: a check failed; names it. Other errors are those of the method.
    """
    for check in checks_of(method):
        try:
            check()
        except AssertionError as error:
            raise AssertionError(f"{check}: {error}\n{inspect.getdoc(check.function)}") from error


def parametrize_with_checks(*methods: Contract | Method | type[Method]) -> Any:
    """Return a decorator for pytest: the test, which takes `check`, runs once for each check of each method."""
    import pytest

    checks = [check for method in methods for check in checks_of(method)]
    return pytest.mark.parametrize("check", checks, ids=str)


def is_federated(contract: Contract) -> bool:
    """Whether clients train separately, not on pooled data."""
    return not contract.method.pooled


def is_covered(contract: Contract) -> bool:
    """Whether sample-level privacy covers the method."""
    return not contract.method.unprotected("sample") and not contract.mixes_samples
