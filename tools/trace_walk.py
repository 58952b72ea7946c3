"""Prints which files of tailorfl one client's round enters, and how often its calls move from one file to another.

The client runs Ditto in the sequential engine: two fits of one step each. A first round fills caches; then a round,
the engine's part of one and the client's part of one are traced. A move is a call into another file than before.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tailorfl.methods
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.sequential import Sequential
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

ROOT = str(Path(tailorfl.methods.__file__).parents[1]) + "/"


def main() -> None:
    """Trace three rounds and print the counts."""
    rows, source = np.arange(9), Source("x", torch.randn(9, 8), torch.arange(9) % 3, "classification", 3)
    clients = Federation(source, (rows,), (rows[:0],), (rows[:0],), ("0",), 1)
    model = Model(lambda: nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 3)))
    method, engine = make_method("ditto"), Sequential()
    run = Simulation(method, clients, model, TrainConfig(epochs=None, steps=1, batch_size=5), engine=engine)
    run.step()
    for owner, name in ((run, "step"), (engine, "train"), (type(method), "local")):
        calls, function = list[str](), getattr(owner, name)

        def traced(*arguments: Any, function: Any = function, calls: list[str] = calls) -> Any:
            sys.setprofile(
                lambda frame, event, _: calls.append(frame.f_code.co_filename) if event == "call" else None
            )
            result = function(*arguments)
            sys.setprofile(None)
            return result

        setattr(owner, name, traced)
        run.step()
        setattr(owner, name, function)
        calls = [file.removeprefix(ROOT) for file in calls if file.startswith(ROOT)]
        moves = sum(before != after for before, after in pairwise(calls))
        print(f"{name}: {len(set(calls))} files, {moves} moves, {len(calls)} calls")
        print(*(f"  {count:4} {file}" for file, count in Counter(calls).most_common()), sep="\n")


if __name__ == "__main__":
    main()
