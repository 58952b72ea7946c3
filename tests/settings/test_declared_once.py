"""Each setting is declared once: no layer repeats a default or the names that a setting may take."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import tailorfl
from tailorfl.data.build import build
from tailorfl.engines.choice import make_engine
from tailorfl.evaluation.protocols import Protocol
from tailorfl.rounds.simulation import Simulation
from tailorfl.settings.experiment import DEFAULT
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.update import RoundSchedule

PACKAGE = Path(tailorfl.__file__).parent
SETTINGS = PACKAGE / "settings"
LAYERS = ("core", "training", "privacy", "data", "engines", "rounds", "evaluation")
READERS = {layer: sorted((PACKAGE / layer).rglob("*.py")) or [PACKAGE / f"{layer}.py"] for layer in LAYERS}
GROUPS = (DEFAULT, DEFAULT.train, DEFAULT.train.round_schedule, DEFAULT.eval, DEFAULT.engine)
NAMES = {name for group in GROUPS for name in type(group).model_fields} - {
    "name", "description", "seeds", "data", "model", "methods", "kind",
}  # fmt: skip


@cache
def tree(path: Path) -> ast.Module:
    """A file's syntax."""
    return ast.parse(path.read_text())


def literals(path: Path) -> Iterator[frozenset[Any]]:
    """The sets of values of every `Literal[...]` of texts in a file."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            yield frozenset(ast.literal_eval(part) for part in parts)


def defaults(path: Path) -> Iterator[tuple[str, ast.expr]]:
    """(name, default) of every parameter and every field of a class in a file."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef):
            given = node.args.posonlyargs + node.args.args
            some = given[len(given) - len(node.args.defaults) :]
            yield from zip((a.arg for a in some), node.args.defaults, strict=True)
            for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
                if default is not None:
                    yield argument.arg, default
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value:
                    yield line.target.id, line.value


def test_no_reader_repeats_what_a_setting_may_be():
    declared = {values for file in SETTINGS.glob("*.py") for values in literals(file) if len(values) > 1}
    paths = [path for layer in READERS.values() for path in layer]
    again = [(path, set(values)) for path in paths for values in declared & set(literals(path))]
    assert len(declared) > 10
    assert all(READERS.values())
    assert not again


def test_no_reader_has_a_default_of_its_own():
    own = [
        f"{path.relative_to(PACKAGE)}: {name} = {ast.unparse(default)}"
        for layer in READERS
        if layer != "data"  # sources have options of their own, of equal names
        for path in READERS[layer]
        for name, default in defaults(path)
        if name in NAMES and isinstance(default, ast.Constant) and default.value is not None
    ]
    assert not own


def test_python_leaves_out_what_yaml_leaves_out():
    train = TrainConfig()
    for field in dataclasses.fields(TrainConfig):
        if field.name not in ("dp", "decay", "round_schedule"):
            assert getattr(train, field.name) == getattr(DEFAULT.train, field.name), field.name
    schedule = dataclasses.asdict(RoundSchedule())
    assert schedule.pop("rounds") is None
    assert schedule == DEFAULT.train.round_schedule.model_dump()
    for name, value in vars(Protocol()).items():
        assert value == getattr(DEFAULT.eval, name), name
    for function, group, of_settings in (
        (Simulation, DEFAULT, {"fraction", "sampling", "weights"}),
        (make_engine, DEFAULT.engine, {"name", "chunk", "workers", "cluster", "gpus", "device"}),
        (build, DEFAULT.data, {"name", "heldout_clients", "official_set", "normalise", "augment"}),
    ):
        parameters = inspect.signature(function).parameters
        for name in of_settings:
            assert parameters[name].default == getattr(group, name), (function, name)
