"""All engines give the same numbers; the automatic one chooses once, on training, and falls back where `vmap` fails."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from engines.networks import Broken, Undecided, outcome
from methods.settings import NAMES, one_of
from methods.small import (
    EXACT,
    FACTORIES,
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    federation,
    fits,
    personal,
    simulation,
)
from tailorfl.core.method import make_method
from tailorfl.engines import choice
from tailorfl.engines.choice import Auto
from tailorfl.engines.in_process import Sequential
from tailorfl.errors import ClientError
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation

CHUNKED = [
    (name, fitting[k % len(fitting)], chunk)
    for k, name in enumerate(NAMES)
    for fitting in [[model_name for model_name in FACTORIES if fits(name, model_name)]]
    for chunk, k in ((1, k), (3, k + 1))
]
"""One model a method, and all models in turn: cohorts are cut up around a method, whatever it and its model compute."""


@cache
def reference(name: str, model_name: str) -> dict[str, Tensor]:
    """Two rounds of the sequential engine, clients of 15, 1, 7, 9 and 3 samples."""
    return outcome(simulation(name, model_name + EXACT, rounds=2))


TURNS = [(case, k % 11 == 9) for k, case in enumerate(CHUNKED)]
"""Eleven has no divisor in common with the numbers of models and of chunks, so the quick cases have all of them."""


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


@pytest.fixture
def a_quick_choice() -> None:
    """Here the choice is the subject: no limit of the measurement is changed."""


def own(module: type[nn.Module], engine: Auto | Sequential, name: str = "local") -> Simulation:
    return Simulation(make_method(name), federation(), Model(module), TRAIN, engine=engine)


@pytest.mark.parametrize("name", one_of(12, NAMES))
def test_chooses_an_engine_and_equals_it_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "PROBE_STEPS", 1)  # how long it looks is no matter of the method
    monkeypatch.setattr(choice, "PROBE_SECONDS", 0.0)
    sim = simulation(name, "dropout", "auto", rounds=2, fraction=0.6)
    assert sim.engine.name in {"sequential", "vectorized"}
    same = simulation(name, "dropout", sim.engine.name, rounds=2, fraction=0.6)
    assert_same(everything(sim), everything(same))
    assert_same(personal(sim), personal(same))


@pytest.mark.parametrize("choice", ["sequential", "vectorized"])
def test_a_fixed_choice_is_kept(choice: str) -> None:
    sim = simulation("ditto", engine=Auto(choice=choice), rounds=2)
    assert sim.engine.name == choice
    assert_same(everything(sim), everything(simulation("ditto", engine=choice, rounds=2)))


def test_falls_back_with_one_warning_where_vmap_cannot_follow(caplog: pytest.LogCaptureFixture) -> None:
    sim, reference = own(Undecided, Auto()), own(Undecided, Sequential())
    with caplog.at_level(logging.WARNING, logger="tailorfl"):
        sim.step()
        sim.step()
    assert sim.engine.name == "sequential"
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "vmap" in caplog.text
    assert "sequential" in caplog.text
    reference.step()
    reference.step()
    assert_same(everything(sim), everything(reference))


@pytest.mark.parametrize("name", ["local", "fedavg_ft", "ditto"])
def test_looking_at_models_before_training_does_not_decide(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The initial models of LocalTrain need no forward pass, so they say nothing of what training needs."""

    def vectorized_looks_faster(engine: Any, *part: Any) -> float:
        engine.map(*part)
        return 1.0 if engine.name == "sequential" else 0.0

    monkeypatch.setattr(choice, "_seconds", vectorized_looks_faster)
    sim = own(Undecided, Auto(), name)
    personal(sim)
    for _ in range(2):
        sim.step()
    personal(sim)
    assert sim.engine.name == "sequential"


@pytest.mark.parametrize(("looped", "batched"), [(3.0, 1.0), (1.0, 3.0), (0.3, 0.1), (0.1, 0.3)])
def test_the_faster_engine_is_kept(looped: float, batched: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured once where that takes long; else the least of several, so one slow moment does not count."""
    times: dict[str, list[float]] = {"sequential": [], "vectorized": []}

    def seconds(engine: Any, *part: Any) -> float:
        engine.map(*part)
        true = looped if engine.name == "sequential" else batched
        disturbed = len(times[engine.name]) == 1 and true == min(looped, batched)
        times[engine.name].append(true + 5.0 if disturbed else true)
        return times[engine.name][-1]

    monkeypatch.setattr(choice, "_seconds", seconds)
    sim = simulation("fedavg", engine="auto", rounds=1)
    assert sim.engine.name == ("vectorized" if batched < looped else "sequential")
    runs = 1 if looped + batched >= choice.PROBE_SECONDS else 1 + min(7, 1 + int(2.0 / (looped + batched)))
    assert [len(found) for found in times.values()] == [runs, runs]


def test_an_error_in_the_model_is_not_taken_for_a_missing_rule(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ClientError, match=r"client.*round 1.*train"):
        own(Broken, Auto()).step()
    assert not caplog.records


def test_one_client_needs_no_measurement() -> None:
    sim = simulation("fedavg", engine="auto", data=federation((5,)), rounds=1)
    assert sim.engine.name == "sequential"


def test_measuring_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe trains for a few steps and throws the result away."""
    monkeypatch.setattr(choice, "PROBE_SECONDS", 0.0)
    sim = simulation("ditto", "batch_norm", "auto")
    state = torch.get_rng_state()
    sim.step()
    assert torch.equal(state, torch.get_rng_state())
    assert_same(everything(sim), everything(simulation("ditto", "batch_norm", sim.engine.name, rounds=1)))
