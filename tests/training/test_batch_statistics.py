"""Batch norm: running statistics are a client's own, equal a plain loop's, and never mix within a cohort."""

from __future__ import annotations

import pytest
import torch

from methods import plain
from methods.settings import make
from methods.small import SIZES, assert_close, federation, personal, replaced, shared, simulation

ENGINES = ("sequential", "vectorized")


@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_are_those_of_the_clients_own_batches(engine: str) -> None:
    sim = simulation("local", "batch_norm", engine)
    expected = [plain.train(sim, dict(sim.init.items()), plain.batches(sim, i)) for i in range(len(SIZES))]
    sim.step()
    models = personal(sim)
    for i, state in enumerate(expected):
        assert_close({n: t[i] for n, t in models.items()}, state)
    # 15 samples in batches of 4 are four batches; 9 are two, for the last one would have a single sample;
    # 1 is none.
    assert models["1.num_batches_tracked"].tolist() == [4, 0, 2, 2, 1]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chunk", [None, 2])
def test_one_client_with_strange_data_does_not_leak(engine: str, chunk: int | None) -> None:
    changed = replaced(federation(), 3, lambda x: 1000.0 * x + 500.0)
    a, b = (
        simulation("local", "batch_norm", engine, chunk=chunk, data=d, rounds=2)
        for d in (federation(), changed)
    )
    left, right = personal(a), personal(b)
    rest = [0, 1, 2, 4]
    for n, t in left.items():
        assert torch.equal(t[rest], right[n][rest]), n
    assert not torch.allclose(left["1.running_var"][3], right["1.running_var"][3])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_the_server_averages_statistics_with_the_clients_weights(engine: str, weights: str) -> None:
    """FedAvg shares running statistics like parameters; counters are the first client's."""
    sim = simulation(make("fedavg", weights=weights), "batch_norm", engine)
    local = [plain.train(sim, dict(sim.init.items()), plain.batches(sim, i)) for i in range(len(SIZES))]
    sim.step()
    assert_close(shared(sim), plain.average(local, SIZES if weights == "samples" else [1] * 5))
    assert int(shared(sim)["1.num_batches_tracked"]) == 4


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_without_a_usable_batch_keep_their_model(engine: str) -> None:
    sim = simulation("local", "batch_norm", engine, rounds=2)
    for n, t in personal(sim, (1,)).items():
        assert torch.equal(t[0], sim.init[n]), n
