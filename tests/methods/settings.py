"""What every registered method declares for the tests that run over all of them: `CONTRACTS` of its own test file.

A method's row has small hyper-parameters, what it sends and trains, its optimum on quadratics, and the settings under
which it is another method. `row` fails with the name of a method that has none.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
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


def body(parts: Parts) -> int:
    """A model without its head."""
    return parts.d - parts.head


def head(parts: Parts) -> int:
    """A head."""
    return parts.head


def prototypes(parts: Parts) -> int:
    """C · d_z, from the head's C (d_z + 1) scalars."""
    return parts.head - CLASSES


def with_statistics(parts: Parts) -> int:
    """A model, and beside it means and counts of classes and a variance; likewise."""
    return parts.d + 2 * prototypes(parts) + CLASSES + 1


def width(parts: Parts) -> int:
    """d_z, likewise."""
    return parts.head // CLASSES - 1


def with_guide(parts: Parts) -> int:
    """A body, an embedding of every class, and two layers of width d_z with their norms; likewise."""
    return body(parts) + prototypes(parts) + 2 * (width(parts) ** 2 + 3 * width(parts))


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


class Row:
    """What the tests that run over all methods need to know about one.

    Args:
        card: scalars that travel and train, and the models that are evaluated.
        options: make it quick; never a value that turns the method into another one.
        limit: its optimum on quadratics.
        same: settings under which it is another method: `test_method_reductions.py` runs both sides.
        remarks: settings under which it is something simple that has no name here: (options, words, where it is
            proved).
        proved: which tests prove it, where neither a row nor an optimum does, or beside them.
        never: why it never names another method.
        promises: further fields of its `Contract`, such as `chooses`.
    """

    def __init__(
        self,
        card: Card,
        options: Mapping[str, Any] | None = None,
        limit: Limit | None = None,
        *,
        same: tuple[Same, ...] = (),
        remarks: tuple[tuple[Mapping[str, Any], str, str], ...] = (),
        proved: str = "",
        never: str = "",
        **promises: Any,
    ) -> None:
        self.options, self.limit, self.same = options or {}, limit, same
        self.remarks, self.proved, self.never = remarks, proved, never
        self.promises = {**vars(card), **promises}

    def contract(self, name: str) -> Contract:
        """What `tailorfl.testing` checks of the method."""
        return Contract(make_method(name, dict(self.options)), **self.promises)


PROX_STEPS = 10
"""Steps that solve a proximal problem of the quadratics to float32 accuracy (contraction 1/4 a step)."""


def declared(file: Path) -> dict[str, Row]:
    """The rows in `CONTRACTS` of a test file, which is read and not imported: tests import each other through here."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONTRACTS":
            code = compile(ast.Expression(node.value), str(file), "eval")
            return dict(eval(code, {**vars(reductions), **vars(contract), **globals()}))
    return {}


DECLARATIONS = {file: declared(file) for file in sorted(Path(__file__).parent.glob("test_*.py"))}
ROWS = {name: row for rows in DECLARATIONS.values() for name, row in rows.items()}
"""Method -> what it declares."""
DECLARED_IN = {name: file for file, rows in DECLARATIONS.items() for name in rows}
"""Method -> its test file."""
REDUCTIONS = {name: row.same for name, row in ROWS.items() if row.same}
REMARKS = {name: row.remarks for name, row in ROWS.items() if row.remarks}
ELSEWHERE = {name: row.proved for name, row in ROWS.items() if row.proved}
NEVER_SAID = {name: row.never for name, row in ROWS.items() if row.never}
NAMES = tuple(methods())
"""Every registered method, in order of names."""


def in_turn(*ways: tuple[str, ...], names: Sequence[str] = NAMES, share: int = 1) -> list[Any]:
    """(name, *way) of every method: one way each, in turn, in the quick suite, and the others among the slow tests.

    One of `share` methods has a way in the quick suite.
    """
    return [
        pytest.param(name, *way, marks=[] if k % (len(ways) * share) == j * share else [pytest.mark.slow])
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
