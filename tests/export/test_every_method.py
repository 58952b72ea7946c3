"""Models of every registered method give the run's outputs in a process that has no tailorfl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tailorfl
from export.exporting import assert_apart, note
from methods.settings import NAMES, row
from tailorfl.export.folder import write
from tailorfl.runs.trained_models import restore

SMALL: dict[str, Any] = {
    "seeds": [0],
    "data": {"samples": 150, "clients": 3, "heldout_clients": 1, "public": "digits", "public_samples": 6},
    "model": {"name": "mlp", "hidden": [8], "norm": "batch"},
    "rounds": 2,
    "train": {"batch_size": 8},
    "engine": "sequential",
    "eval": {"every": 0, "final": ["local"], "adapt_steps": [2]},
}
MORE: list[dict[str, Any]] = [
    {"name": "fedproto", "label": "nearest prototype", "predict": "prototype"},
    {"name": "knn_per", "label": "votes and logits", "mix": "logits"},
    {"name": "moon", "label": "moon with a projection", "projection": 6},
]
"""Methods whose options make another deployable model."""


def test_a_newcomer_leaves_with_the_most_steps_that_were_evaluated(tmp_path: Path) -> None:
    settings = {**SMALL, "eval": {"every": 0, "adapt_steps": [0, 2]}}
    tailorfl.run(settings, methods=["ditto"], out=tmp_path / "run", progress=False)
    run = restore(tmp_path / "run", "ditto")
    (asked,), (most,) = (list(run.models([run.heldout[0]], steps)) for steps in (0, None))
    assert (asked.steps, most.steps) == (0, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_models_of_every_method_leave_the_tool(tmp_path: Path) -> None:
    """Two clients' models and the global one of each method give the run's outputs without tailorfl."""
    methods = [{"name": name, **row(name).options} for name in NAMES]
    tailorfl.run(SMALL, methods=[*methods, *MORE], out=tmp_path / "run", progress=False)
    places = []
    for label in [*NAMES, *(str(one["label"]) for one in MORE)]:
        run = restore(tmp_path / "run", label)
        shared = run.global_models() if run.sim.method.has_global else ()
        for model in (*run.models([0, run.heldout[0]]), *shared):
            places.append(tmp_path / f"{label}-{model.name}")
            write(run, model, places[-1])
            note(run, places[-1], model.client, steps=model.steps)
    assert_apart(places)
    assert len(places) > 2 * (len(NAMES) + len(MORE))


@pytest.mark.slow
def test_what_is_noted_tells_models_apart(tmp_path: Path) -> None:
    """The test above would see another client's weights in an export."""
    tailorfl.run(SMALL, methods=["local"], out=tmp_path / "run", progress=False)
    run = restore(tmp_path / "run")
    first, second = run.models([0, 1])
    write(run, second, tmp_path / "wrong")
    note(run, tmp_path / "wrong", 0)
    with pytest.raises(AssertionError, match="wrong: "):
        assert_apart([tmp_path / "wrong"])
    assert not torch.equal(first.module.head.weight, second.module.head.weight)  # type: ignore[union-attr]
