"""Messages: aggregation weights, means, and traffic counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient, Replies, Traffic, count_down, count_up, payload_size
from tailorfl.models.functional import Model
from tailorfl.models.split import Split
from tailorfl.settings.experiment import Weights
from tailorfl.training.cohort import TrainConfig


class Net(nn.Sequential):
    """A linear layer and a norm without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4, affine=False)


def context() -> Context:
    net = Model(Net)
    return Context(net, Split.of(net.module, personal="none"), 50, TrainConfig(), net.init(0), 0)


PARAMETERS = frozenset({"fc.weight", "fc.bias"})
BUFFERS = ("norm.running_mean", "norm.num_batches_tracked")


def model(seed: int, *clients: int) -> TensorDict:
    """12 + 3 parameters, 4 + 1 buffers."""
    rng = torch.Generator().manual_seed(seed)
    return TensorDict(
        {
            "fc.weight": torch.randn(*clients, 3, 4, generator=rng),
            "fc.bias": torch.randn(*clients, 3, generator=rng),
            "norm.running_mean": torch.randn(*clients, 4, generator=rng),
            "norm.num_batches_tracked": torch.randint(0, 100, clients, generator=rng),
        },
        batch_size=list(clients),
    )


def replies(weighting: Weights, samples: tuple[int, ...] = (10, 30, 60), seed: int = 0) -> Replies:
    clients = len(samples)
    return Replies(
        model(seed, clients),
        tuple(range(clients)),
        np.array(samples, dtype=np.int64),
        weighting,
        context(),
    )


def test_weights_are_shares_of_samples_or_equal():
    assert replies("samples").weights().tolist() == pytest.approx([0.1, 0.3, 0.6])
    assert replies("uniform").weights().tolist() == pytest.approx([1 / 3] * 3)
    for weighting in ("samples", "uniform"):
        assert float(replies(weighting, tuple(range(1, 1001))).weights().sum()) == pytest.approx(
            1.0, abs=1e-12
        )


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_mean_is_the_weighted_sum_with_the_first_clients_counters(weighting):
    r = replies(weighting)
    mean, a = r.mean(), r.weights()
    for name in ("fc.weight", "fc.bias", "norm.running_mean"):
        expected = sum(float(a[i]) * r.stack[name][i] for i in range(3))
        torch.testing.assert_close(mean[name], expected)
    assert mean["norm.num_batches_tracked"] == r.stack["norm.num_batches_tracked"][0]
    assert mean["norm.num_batches_tracked"].dtype == torch.int64


def test_equal_sample_counts_make_both_weightings_one():
    a, b = replies("samples", (7, 7, 7)).mean(), replies("uniform", (7, 7, 7)).mean()
    torch.testing.assert_close(a["fc.weight"], b["fc.weight"])


@pytest.mark.parametrize("step", [0.0, 0.3, 1.0, 1.7])
def test_towards_moves_parameters_part_of_the_way_and_statistics_all_of_it(step):
    r, w = replies("samples"), model(9)
    mean, moved = r.mean(), r.towards(w, step)
    for name in PARAMETERS:
        torch.testing.assert_close(moved[name], (1 - step) * w[name] + step * mean[name])
    for name in BUFFERS:
        assert torch.equal(moved[name], mean[name])
    assert moved["norm.num_batches_tracked"].dtype == torch.int64


def test_a_whole_step_is_the_mean_to_the_last_bit():
    r = replies("samples")
    assert all(torch.equal(t, r.mean()[n]) for n, t in r.towards(model(9), 1.0).items())


def test_one_reply_is_its_own_mean():
    r = replies("samples", (5,))
    torch.testing.assert_close(r.mean()["fc.weight"], r.stack["fc.weight"][0])


def test_parameters_are_told_from_buffers():
    r = replies("uniform")
    assert set(r.of_parameters(r.stack).keys()) == PARAMETERS
    assert set(r.of_parameters(TensorDict({"fc.bias": torch.zeros(3)}, batch_size=[])).keys()) == {"fc.bias"}


def test_a_payload_is_counted_in_scalars_and_bytes():
    assert payload_size(model(0), BUFFERS) == (15, 5, 15 * 4 + 4 * 4 + 8)
    nested = TensorDict(
        {"w": model(0), "c": model(1).select("fc.weight"), "lr": torch.tensor(0.1)}, batch_size=[]
    )
    assert payload_size(nested, BUFFERS) == (15 + 12 + 1, 5, (15 + 4 + 12 + 1) * 4 + 8)
    assert payload_size(TensorDict({}, batch_size=[]), BUFFERS) == (0, 0, 0)


def test_one_payload_for_all_is_multicast_once_and_received_by_each():
    down = count_down(model(0), 7, BUFFERS)
    assert down == Traffic(
        down_unicast=7 * 15, down_multicast=15, buffers_down=7 * 5, bytes_down=7 * (15 * 4 + 4 * 4 + 8)
    )


def test_payloads_of_their_own_cost_the_same_either_way():
    down = count_down(PerClient(model(0, 7)), 7, BUFFERS)
    assert down == Traffic(
        down_unicast=7 * 15, down_multicast=7 * 15, buffers_down=7 * 5, bytes_down=7 * (15 * 4 + 4 * 4 + 8)
    )


def test_replies_are_counted_for_every_client():
    assert count_up(model(0, 4), BUFFERS) == Traffic(up=60, buffers_up=20, bytes_up=4 * (15 * 4 + 4 * 4 + 8))
    assert count_up(TensorDict({}, batch_size=[4]), BUFFERS) == Traffic()


def test_without_buffers_every_float_is_a_parameter():
    """A whole number, such as a counter or the choice of a cluster, is neither, and only costs bytes."""
    assert count_up(model(0, 2), ()).up == 38
    assert count_up(model(0, 2), ()).buffers_up == 0


def test_counters_add_up():
    total = Traffic()
    for _ in range(3):
        total.add(count_down(model(0), 2, BUFFERS))
        total.add(count_up(model(0, 2), BUFFERS))
    assert total.as_dict() == {
        "up": 90, "down_unicast": 90, "down_multicast": 45, "buffers_up": 30, "buffers_down": 30,
        "bytes_up": 6 * 84, "bytes_down": 6 * 84,
    }  # fmt: skip
    assert Traffic(**total.as_dict()) == total


def test_rows_that_several_clients_get_are_multicast_once():
    table = model(0, 5)
    index = torch.tensor([[0, 1], [1, 4], [1, 0]])
    down = count_down(PerClient(table, index), 3, BUFFERS)
    assert (down.down_unicast, down.down_multicast) == (6 * 15, 3 * 15)
    assert (down.buffers_down, down.bytes_down) == (6 * 5, 6 * (15 * 4 + 4 * 4 + 8))


def test_nobody_receives_nothing():
    assert count_down(model(0), 0, BUFFERS) == Traffic()
