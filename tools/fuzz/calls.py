"""Random calls from Python with one or two arguments of a wrong kind: an error of the library that shows no data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import TensorDataset

import tailorfl
from tailorfl import Model, Simulation, TrainConfig, build_federation
from tailorfl.core.method import make_method
from tailorfl.data.own import from_table, from_tensors
from tailorfl.errors import TailorflError
from tailorfl.models.registry import build

SENTINEL = "Zyxwv Qrstu"
"""The name of a patient, in every row of the data: no error may show it."""
SMALL = {"methods": ["fedavg"], "rounds": 1, "seeds": 1, "train": {"epochs": 1}, "progress": False}


def frame() -> pd.DataFrame:
    """Return a table of nine patients of three hospitals."""
    return pd.DataFrame(
        {
            "hospital": ["north", "south", "west"] * 3,
            "age": np.linspace(-1, 1, 9),
            "patient": [SENTINEL] * 9,
            "outcome": ["ill", "well", "well"] * 3,
        }
    )


def wrong_values() -> list[Any]:
    """Return values of kinds that few arguments take, some of them data.

    None is a bare list of texts: what is given as a name may be shown, since it may be a misspelt one.
    """
    rows = frame()
    return [
        *(None, True, -1, 0, 1.5, float("nan"), 10**30, 1j, "", "no such thing", b"bytes", [], {}, (), set()),
        *([None], [[1]], {"a": 1}, {1: 2}, object(), len, int, print, Path("nowhere"), range(3), "a,b"),
        *(
            rows,
            rows["patient"],
            rows.to_dict("records"),
            rows.to_dict(),
            rows.values,
        ),
        *(rows.values.tolist(), rows.to_csv(), {"path": rows}, {"options": {"path": rows}}, {"north": rows}),
        *(TensorDataset(torch.zeros(3, 2)), torch.zeros(3), np.zeros((2, 2)), lambda: rows, iter([1])),
    ]


def entry_points(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return name -> (a function, arguments with which it works)."""
    numbers = frame().drop(columns="patient")
    federation = build_federation("synthetic_linear", clients=3, samples=30)
    model = Model(lambda: build("linear", federation.source.input_shape, federation.source.outputs))
    own = {**SMALL, "data": numbers, "label": "outcome", "client": "hospital", "features": ["age"]}
    pairs = TensorDataset(torch.zeros(6, 2), torch.tensor([0, 1] * 3))
    return {
        "run": (
            tailorfl.run,
            {**SMALL, "config": None, "data": {"clients": 2, "samples": 60}, "out": folder},
        ),
        "run frame": (tailorfl.run, {**own, "out": folder}),
        "run pairs": (tailorfl.run, {**SMALL, "data": pairs, "clients": [0, 0, 0, 1, 1, 1], "out": folder}),
        "build_federation": (
            build_federation,
            {"name": "digits", "clients": 3, "samples": 60, "seed": 0, "split": None, "partition": "iid"}
            | dict.fromkeys(("source", "partition_options", "public", "corruptions", "options", "path"))
            | {"heldout_clients": 0, "shifts": {}, "normalise": "none", "augment": "none"},
        ),
        "make_method": (make_method, {"name": "ditto", "options": {"lam": 1.0}}),
        "Simulation": (
            Simulation,
            {
                "method": make_method("fedavg"),
                "federation": federation,
                "model": model,
                "train": TrainConfig(),
            }
            | {"seed": 0, "fraction": 1.0, "sampling": "uniform", "weights": "samples", "assignment": ()},
        ),
        "from_table": (
            from_table,
            {"path": numbers, "label": "outcome", "client": "hospital", "features": None},
        ),
        "from_tensors": (from_tensors, {"x": torch.zeros(4, 2), "y": [0, 1, 0, 1], "clients": [0, 0, 1, 1]}),
    }


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that a traceback shows above it."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@contextmanager
def silent(chosen: list[str]) -> Iterator[None]:
    """Raise AssertionError where an error of the library in the block shows a row of the data."""
    try:
        yield
    except TailorflError as error:
        if any(SENTINEL in str(one) for one in chain(error)):
            raise AssertionError(f"shows data: {chosen}") from error
        raise


def case(random_: random.Random, folder: Path) -> None:
    """Call an entry point with wrong arguments.

    Raises:
        AssertionError: an error shows a row of the data.
        Exception: what the call raised.
    """
    function, arguments = random_.choice(list(entry_points(folder / "out").values()))
    chosen = random_.sample(sorted(arguments), random_.choice((1, 1, 2)))
    changed: Mapping[str, Any] = {**arguments, **{key: random_.choice(wrong_values()) for key in chosen}}
    with silent(chosen):
        function(**changed)
