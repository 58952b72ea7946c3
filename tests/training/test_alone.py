"""One client by itself: the order of its images in memory, and batches that are gathered for several steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from methods.settings import CLASSES, make
from methods.small import assert_close, everything, federation, simulation
from tailorfl.core.client import Client
from tailorfl.engines.devices import HOST
from tailorfl.engines.make import make_engine
from tailorfl.models.functional import Model
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import batches, tree
from tailorfl.training.cohort import TrainConfig

TWO_PASSES = TrainConfig(epochs=2, batch_size=4, lr=0.05, momentum=0.5)


class Viewing(nn.Module):
    """A network that relies on the usual order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(3 * 36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        out: Tensor = self.head(y.relu().view(len(x), -1))
        return out


def chain(*between: nn.Module) -> nn.Module:
    """A network of torch's layers."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), *between, nn.Flatten(), nn.Linear(4 * 36, CLASSES))


def test_channels_are_last_where_every_layer_is_known_and_nothing_normalises() -> None:
    assert Model(chain).channels_last(HOST)
    assert not Model(chain).channels_last(torch.device("cuda"))
    assert not Model(lambda: chain(nn.GroupNorm(2, 4))).channels_last(HOST)
    assert not Model(Viewing).channels_last(HOST)
    assert not Model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))).channels_last(HOST)


def test_client_code_sees_the_usual_order_of_memory() -> None:
    sim = simulation("fedavg", "cnn2", "sequential")
    start = sim.server["w"]
    found = tree.tensors(Client(sim.cohort((0, 1)), torch.tensor(0)).fit(start))
    assert all(t.is_contiguous() and not torch.equal(t, start[name]) for name, t in found.items())


@pytest.mark.parametrize("network", [chain, Viewing])
def test_models_equal_those_of_a_cohort(
    network: Callable[[], nn.Module],
) -> None:
    found = {}
    for name in ("sequential", "vectorized"):
        engine = make_engine(name, None)
        sim = Simulation(make("ditto"), federation(), Model(network), TWO_PASSES, engine=engine)
        sim.step()
        sim.step()
        found[name] = everything(sim)
    assert_close(found["sequential"], found["vectorized"], atol=1e-5, rtol=1e-4)


def test_what_is_gathered_at_once_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tree.tensors(simulation("fedavg", "cnn2", "sequential", train=TWO_PASSES, rounds=1).server["w"])
    monkeypatch.setattr(batches, "GATHERED_BYTES", 2 * 4 * 64 * 4)  # two batches of four
    parts = tree.tensors(simulation("fedavg", "cnn2", "sequential", train=TWO_PASSES, rounds=1).server["w"])
    assert all(torch.equal(parts[name], t) for name, t in whole.items())
