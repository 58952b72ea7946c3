"""Messages: aggregation weights, means, and traffic counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tailorfl.core.context import Context
from tailorfl.core.messages import PRESENT, PerClient, Replies, Traffic, count_down, count_up, payload_size
from tailorfl.models.functional import Model
from tailorfl.models.split import Split
from tailorfl.settings.experiment import Weights
from tailorfl.training.cohort import TrainConfig


class Net(nn.Sequential):
    """A linear layer and a norm without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4, affine=False)


PARAMETERS = frozenset({"fc.weight", "fc.bias"})
BUFFERS = ("norm.running_mean", "norm.num_batches_tracked")


def model(seed: int, *clients: int) -> TensorDict:
    """12 + 3 parameters, 4 + 1 buffers."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {"fc.weight": (3, 4), "fc.bias": (3,), "norm.running_mean": (4,)}
    tensors = {n: torch.randn(*clients, *shape, generator=rng) for n, shape in shapes.items()}
    counter = torch.randint(0, 100, clients, generator=rng)
    return TensorDict({**tensors, "norm.num_batches_tracked": counter}, batch_size=list(clients))


def replies(weighting: Weights, samples: tuple[int, ...] = (10, 30, 60)) -> Replies:
    net = Model(Net)
    context = Context(net, Split.of(net.module, personal="none"), 50, TrainConfig(), net.init(0), 0)
    ids, counts = tuple(range(len(samples))), np.array(samples, dtype=np.int64)
    return Replies(model(0, len(samples)), ids, counts, weighting, context)


def test_weights_are_shares_of_samples_or_equal():
    assert replies("samples").weights().tolist() == pytest.approx([0.1, 0.3, 0.6])
    assert replies("uniform").weights().tolist() == pytest.approx([1 / 3] * 3)
    for weighting in ("samples", "uniform"):
        weights = replies(weighting, tuple(range(1, 1001))).weights()
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_mean_is_the_weighted_sum_with_the_first_clients_counters(weighting):
    r = replies(weighting)
    mean, a = r.mean(), r.weights()
    for name in ("fc.weight", "fc.bias", "norm.running_mean"):
        expected = sum(float(a[i]) * r.stack[name][i] for i in range(3))
        torch.testing.assert_close(mean[name], expected)
    assert mean["norm.num_batches_tracked"] == r.stack["norm.num_batches_tracked"][0]
    assert mean["norm.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("step", [0.0, 0.3, 1.0, 1.7])
def test_towards_moves_parameters_part_of_the_way_and_statistics_all_of_it(step):
    """A whole step is the mean to the last bit."""
    r, w = replies("samples"), model(9)
    mean, moved = r.mean(), r.towards(w, step)
    for name in PARAMETERS:
        torch.testing.assert_close(moved[name], (1 - step) * w[name] + step * mean[name])
        assert step != 1.0 or torch.equal(moved[name], mean[name])
    for name in BUFFERS:
        assert torch.equal(moved[name], mean[name])
    assert moved["norm.num_batches_tracked"].dtype == torch.int64


def test_parameters_are_told_from_buffers():
    r = replies("uniform")
    assert set(r.of_parameters(r.stack).keys()) == PARAMETERS
    assert set(r.of_parameters(TensorDict({"fc.bias": torch.zeros(3)}, batch_size=[])).keys()) == {"fc.bias"}


BYTES = 15 * 4 + 4 * 4 + 8
"""Of a model: 15 parameters and 4 statistics of 4 bytes, and a counter of 8."""
EMPTY = TensorDict({}, batch_size=[])


@pytest.mark.parametrize(
    ("payload", "buffers", "size"),
    [
        (model(0), BUFFERS, (15, 5, BYTES)),
        (
            TensorDict({"w": model(0), "c": model(1).select("fc.weight"), "lr": torch.tensor(0.1)}),
            BUFFERS,
            (15 + 12 + 1, 5, BYTES + (12 + 1) * 4),
        ),
        (EMPTY, BUFFERS, (0, 0, 0)),
        # A whole number, such as a counter or the choice of a cluster, is neither, and only costs bytes.
        (model(0), (), (19, 0, BYTES)),
    ],
)
def test_a_payload_is_counted_in_scalars_and_bytes(payload, buffers, size):
    assert payload_size(payload, buffers) == size


SHARED = torch.tensor([[0, 1], [1, 4], [1, 0]])
"""Rows of a table of 5 that each of 3 clients gets: 6 in all, 3 different ones."""


@pytest.mark.parametrize(
    ("sent", "clients", "unicast", "multicast"),
    [
        (model(0), 7, 7, 1),
        (PerClient(model(0, 7)), 7, 7, 7),
        (PerClient(model(0, 5), SHARED), 3, 6, 3),
        (model(0), 0, 0, 0),
    ],
)
def test_a_payload_for_several_is_multicast_once_and_received_by_each(sent, clients, unicast, multicast):
    expected = Traffic(
        down_unicast=unicast * 15, down_multicast=multicast * 15, buffers_down=unicast * 5,
        bytes_down=unicast * BYTES,
    )  # fmt: skip
    assert count_down(sent, clients, BUFFERS) == expected


def test_of_a_table_the_rows_that_are_there_travel():
    """Two tables of four rows of three numbers, the second of which two clients get; a row's flag is one byte."""
    there = torch.tensor([[True, False, False, False], [True, True, False, True]])
    tables = TensorDict(
        {"t": TensorDict({"rows": torch.zeros(2, 4, 3), PRESENT: there}, batch_size=[2])}, batch_size=[2]
    )
    assert payload_size(tables[1], BUFFERS) == (9, 0, 9 * 4 + 4)
    assert payload_size(TensorDict({"w": model(0), **tables[0]}), BUFFERS) == (15 + 3, 5, BYTES + 3 * 4 + 4)
    sent = count_down(PerClient(tables, torch.tensor([0, 1, 1])), 3, BUFFERS)
    assert sent == Traffic(down_unicast=3 + 2 * 9, down_multicast=3 + 9, bytes_down=21 * 4 + 3 * 4)


def test_replies_are_counted_for_every_client_and_counters_add_up():
    assert count_up(model(0, 4), BUFFERS) == Traffic(up=60, buffers_up=20, bytes_up=4 * BYTES)
    assert count_up(TensorDict({}, batch_size=[4]), BUFFERS) == Traffic()
    total = Traffic()
    for _ in range(3):
        total.add(count_down(model(0), 2, BUFFERS))
        total.add(count_up(model(0, 2), BUFFERS))
    counts = {"up": 90, "down_unicast": 90, "down_multicast": 45, "buffers_up": 30, "buffers_down": 30}
    assert total.as_dict() == {**counts, "bytes_up": 6 * 84, "bytes_down": 6 * 84}
    assert Traffic(**total.as_dict()) == total
