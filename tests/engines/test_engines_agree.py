"""Every method on every kind of model.

All engines, chunk sizes and orders of clients give the same numbers.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from methods.settings import NAMES
from methods.small import (
    EXACT,
    FACTORIES,
    NEWCOMER,
    SIZES,
    assert_close,
    everything,
    fits,
    personal,
    simulation,
)
from tailorfl.engines.base import Inference
from tailorfl.engines.make import make_engine
from tailorfl.rounds.simulation import Simulation

CHUNKED = [
    (name, fitting[k % len(fitting)], chunk)
    for k, name in enumerate(NAMES)
    for fitting in [[model_name for model_name in FACTORIES if fits(name, model_name)]]
    for chunk, k in ((1, k), (3, k + 1))
]
"""One model a method, and all models in turn: cohorts are cut up around a method, whatever it and its model compute."""
ALL = (*range(len(SIZES)), NEWCOMER)


def outcome(sim: Simulation) -> dict[str, Tensor]:
    """States, deployable models (of the newcomer too) and the newcomer's model after two steps."""
    ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 2)
    return {
        **everything(sim),
        **{f"personal/{n}": t for n, t in personal(sim, ALL).items()},
        **{f"adapted/{n}": t for n, t in adapted.items()},
    }


@cache
def reference(name: str, model_name: str) -> dict[str, Tensor]:
    """Two rounds of the sequential engine, clients of 15, 1, 7, 9 and 3 samples."""
    return outcome(simulation(name, model_name + EXACT, rounds=2))


TURNS = [(case, k % 8 in (0, 5)) for k, case in enumerate(CHUNKED)]


@pytest.mark.parametrize(
    ("name", "model_name", "chunk"),
    [pytest.param(*case, marks=[] if quick else [pytest.mark.slow]) for case, quick in TURNS],
)
def test_vectorized_equals_sequential_whatever_the_chunk(
    name: str, model_name: str, chunk: int | None
) -> None:
    """In float64: what single precision rounds away depends on the processor, and the first steps of Adam make a whole
    step of the sign of a gradient near zero.
    """
    sim = simulation(name, model_name + EXACT, "vectorized", chunk=chunk, rounds=2)
    assert_close(outcome(sim), reference(name, model_name), atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_predictions_are_those_of_the_module(engine: str) -> None:
    """Also for clients without rows, and the same inputs for all."""
    sim = simulation("local", "batch_norm", engine, rounds=2)
    ids = (0, 1, 3)
    ((_, models),) = sim.personal_models(ids)
    rows = [torch.arange(5), torch.arange(0), torch.arange(20, 22)]
    source = sim.federation.source
    own = make_engine(engine).predict(Inference(sim.model, models, source, rows))
    common = make_engine(engine).predict(Inference(sim.model, models, source, torch.arange(7)))
    for k in range(3):
        module = sim.model.module.eval()
        expected_state = {n: t[k] for n, t in models.items()}
        expected = torch.func.functional_call(module, expected_state, (source.x[rows[k]],))
        torch.testing.assert_close(own[k], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            common[k],
            torch.func.functional_call(module, expected_state, (source.x[:7],)),
            atol=1e-5,
            rtol=1e-4,
        )


def test_chunks_hold_clients_of_similar_size() -> None:
    """Sorted by size, so that little is padded; results come back in the cohort's order all the same."""
    sizes: list[list[int]] = []
    sim = simulation("local", engine="vectorized", chunk=2)

    def look(client: object, state: TensorDict, received: TensorDict) -> tuple[TensorDict, ...]:
        sizes.append([len(m) for m in client._cohort.members])  # type: ignore[attr-defined]
        return (TensorDict({"samples": client.samples}, batch_size=[]),)  # type: ignore[attr-defined]

    (found,) = sim.run(range(5), sim.states.get(range(5)), TensorDict({}, batch_size=[]), look)
    assert found["samples"].tolist() == list(SIZES)
    assert sizes == [[15, 9], [7, 3], [1]]
    assert np.all(np.diff([s for part in sizes for s in part]) <= 0)
