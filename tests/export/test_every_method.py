"""Models of every registered method give the run's outputs in a process that has no tailorfl."""

from __future__ import annotations

from collections.abc import Sequence
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


UNLIKE = ("fedavg", "fedbn", "pfedhn", "fedrod", "apfl")
"""Of methods that deploy in the same way one each; `MORE` has others."""


def leaving(folder: Path, names: Sequence[str]) -> int:
    """How many models of methods give the run's outputs without tailorfl: two clients' and the global one of each."""
    methods = [{"name": name, **row(name).options} for name in names]
    tailorfl.run(SMALL, methods=[*methods, *MORE], out=folder / "run", progress=False)
    places = []
    for label in [*names, *(str(one["label"]) for one in MORE)]:
        run = restore(folder / "run", label)
        heldout = run.heldout[0]
        for model in run.models([0, heldout]):
            place = folder / f"{label}-{model.name}"
            write(run, model, place)
            note(run, place, model.client, steps=model.steps)
            places.append(place)
        if run.sim.method.has_global:
            (model,) = run.global_models()
            places.append(folder / f"{label}-global")
            write(run, model, places[-1])
            note(run, places[-1], None)
    assert_apart(places)
    return len(places)


def test_a_newcomer_leaves_with_the_most_steps_that_were_evaluated(tmp_path: Path) -> None:
    settings = {**SMALL, "eval": {"every": 0, "adapt_steps": [0, 2]}}
    tailorfl.run(settings, methods=["ditto"], out=tmp_path / "run", progress=False)
    run = restore(tmp_path / "run", "ditto")
    (asked,), (most,) = (list(run.models([run.heldout[0]], steps)) for steps in (0, None))
    assert (asked.steps, most.steps) == (0, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_models_of_every_method_leave_the_tool(tmp_path: Path) -> None:
    assert leaving(tmp_path, NAMES) > 2 * (len(NAMES) + len(MORE))


@pytest.mark.slow
def test_models_of_unlike_methods_leave_the_tool(tmp_path: Path) -> None:
    assert leaving(tmp_path, UNLIKE) == 2 * (len(UNLIKE) + len(MORE)) + 5


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
