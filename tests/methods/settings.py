"""What every registered method declares for the tests that run over all of them: `CONTRACTS` of its own test file.

A method's row has small hyper-parameters, what it sends and trains, its optimum on quadratics, and the settings under
which it is another method. `row` fails with the name of a method that has none.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from methods import reductions
from methods.reductions import Same
from tailorfl.core.method import Method, make_method, methods
from tailorfl.testing import contract
from tailorfl.testing.contract import Contract, Count
from tailorfl.testing.contract import nothing as none
from tailorfl.testing.small import CLASSES, Parts

LAM = 2.0
"""λ (or μ) of every method on the quadratics."""


def and_one(parts: Parts) -> int:
    """A model and a number beside it."""
    return parts.d + 1


def prototypes(parts: Parts) -> int:
    """C · d_z, from the head's C (d_z + 1) scalars."""
    return parts.head - CLASSES


def width(parts: Parts) -> int:
    """d_z, likewise."""
    return parts.head // CLASSES - 1


def with_guide(parts: Parts) -> int:
    """A body, an embedding of every class, and two layers of width d_z with their norms; likewise."""
    return parts.d - parts.head + prototypes(parts) + 2 * (width(parts) ** 2 + 3 * width(parts))


def with_gate(parts: Parts) -> int:
    """A model and a gate of width d_z; likewise."""
    return parts.d + 2 * width(parts) * (width(parts) + 1) + 4 * width(parts)


@dataclass(frozen=True)
class Card:
    """A line of the table of method cards.

    Scalars per sampled client and round, models that are evaluated.
    """

    down: Count
    up: Count
    trained: Count
    personal: bool
    shared: bool
    beside: Count = none
    """Scalars that training makes beside models: corrections, changes that are sent in place of a model."""


Kind = Literal["local", "pooled", "pooled_and_local", "local_and_mean", "coupled", "coupled_global", "ditto"]
"""Names of the optima in `quadratics.optimum`."""


@dataclass(frozen=True)
class Limit:
    """Where a method goes on quadratics with full batches, and with which settings."""

    kind: Kind
    steps: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """What the generated tests need to know about a method."""

    card: Card
    options: Mapping[str, Any] = field(default_factory=dict)
    """Makes it quick; never a value that turns the method into another one."""
    limit: Limit | None = None
    chooses: bool = False
    """Whether clients start with different models: their own, or picked among several by their data."""
    still: Mapping[str, Any] = field(default_factory=dict)
    """Options under which the server trains nothing itself, no step has a rate of its own, and all start alike."""
    by_round: Callable[[int, Parts], tuple[int, int]] | None = None
    """Parameter scalars (down, up) of a client in a round, counted from 0, where rounds differ; m = 2 are sampled."""
    alike: Mapping[str, Any] = field(default_factory=dict)
    """Options under which clients with equal data are equal: only private batches are drawn by a client's id."""
    sparse: bool = False
    """Whether messages leave out rows that are not there yet, or that a client has not: the card says the most."""
    indexed: bool = False
    """Whether the server keeps something of its own for every client id (an embedding)."""
    draws: bool = False
    """Whether a layer of its own draws noise by the client's id."""
    in_turn: bool = False
    """Whether one client a round takes part, in an order by ids, however the run samples."""
    own_rate: bool = False
    """Whether it takes steps at a rate of its own, whatever the run's."""
    mixes_samples: bool = False
    """Whether its loss compares the samples of a batch."""
    unweighted: bool = False
    """Whether no average counts clients by their samples."""
    over_all: bool = False
    """Whether the server's sums are over all clients, sampled or not."""
    not_on: tuple[str, ...] = ()
    """Models on which the method has nothing to split."""

    same: tuple[Same, ...] = ()
    """Settings under which it is another method: `test_method_reductions.py` runs both sides."""
    remarks: tuple[tuple[Mapping[str, Any], str, str], ...] = ()
    """Settings under which it is something simple that has no name here: (options, words, where it is proved)."""
    proved: str = ""
    """Which tests prove it, where neither a row nor an optimum does, or beside them."""
    never: str = ""
    """Why it never names another method."""

    def contract(self, name: str) -> Contract:
        """What `tailorfl.testing` checks of the method."""
        return Contract(
            make_method(name, dict(self.options)),
            down=self.card.down,
            up=self.card.up,
            by_round=self.by_round,
            at_most=self.sparse,
            trained=self.card.trained,
            beside=self.card.beside,
            personal=self.card.personal,
            shared=self.card.shared,
            chooses=self.chooses,
            still=self.still,
            alike=self.alike,
            by_id=self.indexed or self.in_turn or self.draws,
            in_turn=self.in_turn,
            own_rate=self.own_rate,
            mixes_samples=self.mixes_samples,
            unweighted=self.unweighted,
            over_all=self.over_all,
            not_on=self.not_on,
        )


PROX_STEPS = 10
"""Steps that solve a proximal problem of the quadratics to float32 accuracy (contraction 1/4 a step)."""


def declared(file: Path) -> dict[str, Row]:
    """The rows in `CONTRACTS` of a test file, which is read and not imported: tests import each other through here."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONTRACTS":
            code = compile(ast.Expression(node.value), str(file), "eval")
            found: dict[str, Row] = eval(code, {**vars(reductions), **vars(contract), **globals()})
            return found
    return {}


ROWS = {
    name: row
    for file in sorted(Path(__file__).parent.glob("test_*.py"))
    for name, row in declared(file).items()
}
"""Method -> what it declares."""
REDUCTIONS = {name: row.same for name, row in ROWS.items() if row.same}
REMARKS = {name: row.remarks for name, row in ROWS.items() if row.remarks}
ELSEWHERE = {name: row.proved for name, row in ROWS.items() if row.proved}
NEVER_SAID = {name: row.never for name, row in ROWS.items() if row.never}
NAMES = tuple(methods())
"""Every registered method, in order of names."""


def in_turn(*ways: tuple[str, ...], names: Sequence[str] = NAMES) -> list[Any]:
    """(name, *way) of every method: one way each, in turn, in the quick suite, and the others among the slow tests."""
    return [
        pytest.param(name, *way, marks=[] if k % len(ways) == j else [pytest.mark.slow])
        for k, name in enumerate(names)
        for j, way in enumerate(ways)
    ]


def one_of(share: int, names: Sequence[str], turn: int = 0) -> list[Any]:
    """The names; one of `share` of them is in the quick suite, the others are among the slow tests.

    For what holds of all methods by one piece of code: a mistake in it shows in the few that stay. `turn` says which.
    """
    return [
        pytest.param(name, marks=[] if k % share == turn % share else [pytest.mark.slow])
        for k, name in enumerate(names)
    ]


def row(name: str) -> Row:
    """The row of a method; fails the running test, saying what to do, where there is none."""
    if name not in ROWS:
        pytest.fail(
            f"the method '{name}' is registered but has no row; add it to CONTRACTS of its test file in tests/methods"
        )
    return ROWS[name]


def make(name: str, **options: Any) -> Method:
    """The method with its quick options; `options` win."""
    return make_method(name, {**row(name).options, **options})


def with_limit() -> tuple[str, ...]:
    """The methods whose optimum on quadratics is known."""
    return tuple(name for name in NAMES if name in ROWS and ROWS[name].limit is not None)
