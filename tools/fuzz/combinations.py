"""Settings that are each right, put together at random: what one feature takes for granted, another may break."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tailorfl.printable import harmful
from tailorfl.report.experiment import run_experiment
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.build import check
from tailorfl.settings.loading import load
from tailorfl.settings.names import known

CHOICES: dict[str, list[Any]] = {
    "model": [
        "logistic",
        {"name": "mlp", "hidden": [4]},
        {"name": "mlp", "hidden": [4], "norm": "batch"},
        "cnn2",
    ],
    "data.partition": ["iid", "dirichlet", "shards", "quantity"],
    "data.heldout_clients": [0, 1],
    "data.public": [None],
    "data.split": [{"train": 0.5, "val": 0.25}, {"train": 0.8}],
    "fraction": [1.0, 0.5],
    "sampling": ["uniform", "bernoulli", "proportional", "cyclic"],
    "weights": ["samples", "uniform"],
    "budget": ["rounds", "gradients", "bytes"],
    "rounds": [1, 2, 3],
    "train": [{"steps": 1}, {"steps": 2, "batch_size": 8}, {"epochs": 1}, {"steps": 1, "batch_size": 0}],
    "train.optimizer": ["sgd", "adamw"],
    "train.momentum": [0.0, 0.9],
    "train.weight_decay": [0.0, 0.01],
    "train.clip": [None, 0.5],
    "train.objective": ["task", "balanced_softmax"],
    "train.schedule": ["constant", "linear"],
    "train.round_schedule": [{"kind": "step"}, {"kind": "cosine"}, {"kind": "inverse"}],
    "train.dp": [None, {"clip": 1.0, "noise": 1.0}, {"clip": 1.0, "epsilon": 8.0, "delta": 1e-3}],
    "engine.name": ["sequential", "vectorized", "auto"],
    "engine.chunk": [None, 1, 2],
    "engine.states": ["memory", "disk"],
    "eval": [{"every": 1}, {"every": 1, "select": "val"}, {"every": 2}],
    "eval.sets": [["local"], ["local", "global"], ["participants"]],
    "eval.final": [["local"], ["local", "global", "heldout"]],
    "eval.adapt_steps": [[], [0, 1]],
    "eval.target": [None, 0.3],
    "checkpoint_every": [1, 2],
}
"""Values that the documentation offers, small enough to be run at once."""
BASE: dict[str, Any] = {
    "seeds": 1,
    "rounds": 2,
    "data": {"name": "digits", "clients": 3, "samples": 90, "public": "digits"},
    "model": "logistic",
    "engine": {"name": "auto"},
    "train": {"steps": 1},
    "eval": {"every": 0, "sets": ["local"], "final": ["local"]},
}


def case(random_: random.Random, folder: Path) -> None:
    """Run one or two methods under a handful of settings.

    Raises:
        TailorflError: these do not go together, which the message says.
        AssertionError: a method is missing from the table, or it claims an accuracy that is none.
    """
    methods = random_.sample(sorted(known("methods")), random_.choice([1, 1, 2]))
    given: dict[str, Any] = {**BASE, "methods": methods}
    for key in sorted(random_.sample(sorted(CHOICES), random_.randrange(2, 9))):  # train before train.lr
        place, _, name = key.partition(".")
        value = random_.choice(CHOICES[key])
        given[place] = {**given[place], name: value} if name else value
    config = load(given)
    check(config)
    with patch.object(
        ExperimentResult, "plot", lambda result: []
    ):  # most of the time, and not of the question
        result = run_experiment(config, folder / "out")
    assert list(result.table.index) == [method.label for method in config.methods]
    for mean in result.table["mean"]:
        assert math.isnan(mean) or 0 <= mean <= 1, f"an accuracy of {mean}"
    assert harmful(result.markdown, but="\n") is None
