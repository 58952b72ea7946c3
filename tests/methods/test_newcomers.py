"""What `heldout+k` may spend: k batches of a training, however the method cuts it into fits."""

from __future__ import annotations

import pytest
import torch

from methods.small import NEWCOMER, simulation
from tailorfl.core.method import make_method
from tailorfl.training import tree


def adapted(name: str, options: dict[str, object], steps: int) -> dict[str, torch.Tensor]:
    sim = simulation(make_method(name, options), "mlp", rounds=1)
    [(_, models)] = sim.newcomer_models((NEWCOMER,), steps)
    return tree.tensors(models)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_training_of_many_one_step_fits_stops_after_k_batches(steps: int) -> None:
    """pFedMe's R batches are R fits: k of them must be what R = k gives to the personal model."""
    cut = adapted("pfedme", {"local_rounds": 7, "lr": 1e-9, "lam": 1.0}, steps)
    short = adapted("pfedme", {"local_rounds": steps, "lr": 1e-9, "lam": 1.0}, 99)
    for name, tensor in cut.items():
        torch.testing.assert_close(tensor, short[name], atol=2e-3, rtol=1e-2)
    more = adapted("pfedme", {"local_rounds": 7, "lr": 1e-9, "lam": 1.0}, steps + 1)
    assert any(not torch.equal(t, more[n]) for n, t in cut.items())
