"""What a round of a method does, counted: steps, gradients, what the plain loop lacks, and padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from methods import small
from methods.settings import ROWS
from tailorfl.benchmark.profile import flops_of, moved_by
from tailorfl.benchmark.work import Work, chunks_of, count_work, padding_of, parts_of
from tailorfl.core.method import make_method
from tailorfl.data.federation import Federation
from tailorfl.data.source import Source
from tailorfl.engines.make import make_engine
from tailorfl.engines.sequential import Sequential
from tailorfl.engines.vectorized import Vectorized
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.sample_privacy import SampleDP

SIZES = (10, 5, 1)
IN, OUT = 6, 3


def simulation(method: str = "fedavg", norm: bool = False, **train: object) -> Simulation:
    generator = torch.Generator().manual_seed(0)
    total = sum(SIZES)
    x = torch.randn(total, IN, generator=generator)
    y = torch.randint(0, OUT, (total,), generator=generator)
    rows = tuple(np.split(np.arange(total), np.cumsum(SIZES)[:-1]))
    none = tuple(np.empty(0, dtype=np.int64) for _ in SIZES)
    source = Source("made", x, y, "classification", OUT)
    data = Federation(source, rows, none, none, ("a", "b", "c"), len(SIZES), public=source)
    layers = [nn.Linear(IN, OUT)] if not norm else [nn.BatchNorm1d(IN), nn.Linear(IN, OUT)]
    settings = TrainConfig(**{"epochs": 1, "batch_size": 10, "lr": 0.1, **train})  # type: ignore[arg-type]
    return Simulation(make_method(method), data, Model(lambda: nn.Sequential(*layers)), settings)


def work(sim: Simulation) -> Work:
    (part,) = parts_of(sim, range(len(SIZES)))
    return count_work(sim, part)


def test_fedavg_takes_one_fit_of_its_plan_and_nothing_else() -> None:
    found = work(simulation(epochs=2, batch_size=4))
    assert [[fit.steps for fit in fits] for fits in found.fits] == [[6], [4], [2]]
    assert (found.steps, found.extras) == (12, ())
    assert found.samples() == {("0.weight", "0.bias"): 2 * sum(SIZES)}


def test_counting_trains_nothing() -> None:
    sim = simulation("ditto")
    before = sim.server.clone()
    work(sim)
    assert (sim.server == before).all()
    assert not len(sim.states)


@pytest.mark.parametrize(
    ("method", "models", "gradients", "extra"),
    [
        ("ditto", 2, 1, "a proximal pull"),
        ("fedsam", 1, 2, "a direction of its own (2 gradients a step and model)"),
        ("apfl", 2, 1, "a direction of its own (1 gradient a step and model)"),
    ],
)
def test_methods_that_do_more(method: str, models: int, gradients: int, extra: str) -> None:
    found = work(simulation(method))
    assert found.steps == models * len(SIZES)
    assert sum(found.samples().values()) == models * gradients * sum(SIZES)
    assert extra in found.extras


def test_looks_beside_the_fits_are_named() -> None:
    pulled = simulation("fedoa", norm=True)
    pulled.step()  # personal adapters start in the second round
    assert "a term of the loss" in work(pulled).extras
    assert "clients evaluate losses" in work(simulation("hypcluster")).extras
    looks = {"clients count their classes", "clients sum over their samples"}
    assert set(work(simulation("fedpac")).extras) == looks
    assert set(work(simulation("fedrod")).extras) == {"a term of the loss", "clients count their classes"}
    taught = simulation("perfed_ckt")
    taught.step()  # before, there is nobody to learn from
    assert {"a term on public data", "clients predict the public set"} <= set(work(taught).extras)
    assert (
        "the clipped, noisy gradient of every sample"
        in work(simulation(dp=SampleDP(1.0, 1.0, "shuffle"))).extras
    )


def test_a_part_that_is_trained_alone_is_named_by_its_parameters() -> None:
    sim = simulation("fedrep", norm=True)
    names = {fit.trained for fit in work(sim).fits[0]}
    assert names == {("1.weight", "1.bias"), ("0.weight", "0.bias")}


def test_a_client_without_a_usable_batch_takes_no_step() -> None:
    found = work(simulation(norm=True))  # a batch of one sample has no statistics
    assert [fit.steps for fits in found.fits for fit in fits] == [1, 1, 0]


@pytest.mark.parametrize("chunk", [3, 2, 1])
def test_batches_of_very_different_sizes_are_computed_apart(chunk: int) -> None:
    found = work(simulation())
    chunks = chunks_of(Vectorized(chunk), found.part.cohort)
    assert [len(c.ids) for c in chunks] == [chunk] * (3 // chunk) + [3 % chunk] * (3 % chunk > 0)
    assert padding_of(chunks, found.fits[0]) == 0


@pytest.mark.parametrize(
    ("sizes", "batch", "computed"),
    [
        ((10, 9, 9), 10, 30),  # 2 of 28 samples in vain: together
        ((10, 9, 5), 10, 10 + 10 + 5),  # 6 of 24 were too many: the last one apart
        ((15, 14, 4), 5, 15 + 10 + 10),  # 2 of 33, and a client that has finished is not computed
    ],
)
def test_padding_is_what_chunks_compute_beyond_the_samples(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], batch: int, computed: int
) -> None:
    monkeypatch.setitem(globals(), "SIZES", sizes)
    found = work(simulation(batch_size=batch))
    chunks = chunks_of(Vectorized(3), found.part.cohort)
    assert padding_of(chunks, found.fits[0]) == pytest.approx(computed / sum(sizes) - 1)


def test_nothing_is_padded_alone_or_with_batch_statistics() -> None:
    found = work(simulation())
    assert (
        chunks_of(Sequential(), found.part.cohort) == chunks_of(make_engine("auto"), found.part.cohort) == []
    )
    assert padding_of([], found.fits[0]) == 0
    normed = work(simulation(norm=True))
    assert padding_of(chunks_of(Vectorized(3), normed.part.cohort), normed.fits[0]) == 0


def test_operations_and_traffic_of_a_linear_layer() -> None:
    found = work(simulation())
    # Forward and the weight's gradient: a product of IN x OUT each, of 2 operations an entry; the input needs none.
    assert flops_of([found]) == 4 * IN * OUT * sum(SIZES)
    # Weights read in both passes, gradient written; weights and gradient read, weights written: 6 of 4 bytes a step.
    assert moved_by([found]) == 6 * 4 * (IN * OUT + OUT) * len(SIZES)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_work_of_every_method_is_counted(name: str) -> None:
    """In the first and the second round: what a method hands to fit is there then."""
    sim = small.simulation(name)
    for _ in range(2):
        found = [count_work(sim, part) for part in parts_of(sim, range(sim.participants))]
        assert sum(one.steps for one in found) > 0
        sim.step()
