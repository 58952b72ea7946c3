"""Prints the files of tailorfl that one client's round enters, or those that pass a setting on.

    python tools/trace_walk.py round      files, moves between files and calls of a round
    python tools/trace_walk.py setting    files that get `train.lr`, from the command line to the optimizer

The client runs Ditto in the sequential engine: two fits of one step each. A first round fills caches; then a round,
the engine's part of one and the client's part of one are traced. A move is a call into another file than before.

The setting is followed through `tailorfl run` with FedAvg: a file gets it where an argument of one of its functions is
the value, a text with it, or an object of a class that carries it. `Optimizer`, by which a method replaces the run's
rate, is among the classes, and carries none in FedAvg.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

import tailorfl.methods
from tailorfl.cli.main import run as command_line
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.in_process import Sequential
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

ROOT = str(Path(tailorfl.methods.__file__).parents[1]) + "/"
RATE = 0.1234567
CARRIERS = ("TrainSettings", "TrainConfig", "UpdateRule", "Optimizer")


def main() -> None:
    """Trace what the command line asks for."""
    walks = {"round": trace_round, "setting": trace_setting}
    if sys.argv[1:] not in ([name] for name in walks):
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(walks)}")
    walks[sys.argv[1]]()


def trace_setting() -> None:
    """Run one round of FedAvg from the command line and print the files that get `train.lr`, in order of first use."""
    forms: defaultdict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            forms[code.co_filename].update(filter(None, (_form(frame.f_locals.get(name)) for name in names)))

    with tempfile.TemporaryDirectory() as folder:
        words = [
            "run",
            "methods=fedavg",
            f"train.lr={RATE}",
            "rounds=1",
            "seeds=[0]",
            "--out",
            folder + "/results",
        ]
        sys.argv = ["tailorfl", *words]
        sys.setprofile(note)
        try:
            command_line()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
    files = {file.removeprefix(ROOT): sorted(kinds) for file, kinds in forms.items() if kinds}
    print(f"{len(files)} files")
    print(*(f"  {file}: {', '.join(kinds)}" for file, kinds in files.items()), sep="\n")


def _form(value: Any) -> str | None:
    """Return how a value holds the learning rate, or None."""
    if type(value).__name__ in CARRIERS:
        return type(value).__name__ if value.lr == RATE else None
    if isinstance(value, float):
        return "number" if value == RATE else None
    if isinstance(value, str):
        return "text" if str(RATE) in value else None
    if isinstance(value, dict):
        return "mapping" if any(map(_form, value.values())) else None
    return (
        "words"
        if isinstance(value, (list, tuple)) and any(isinstance(v, str) and _form(v) for v in value)
        else None
    )


def trace_round() -> None:
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
