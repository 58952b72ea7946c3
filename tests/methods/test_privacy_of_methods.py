"""Differential privacy reaches every gradient of every method, because all training goes through one place."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from methods.settings import NAMES, make, row
from methods.small import TRAIN, assert_close, assert_same, everything, fits, simulation
from tailorfl.core.method import Method
from tailorfl.errors import TailorflError
from tailorfl.training.sample_privacy import SampleDP

PLAIN = replace(TRAIN, momentum=0.0, weight_decay=0.0)
NOISY = replace(PLAIN, dp=SampleDP(0.5, 1.0, "shuffle"))
TOGETHER = {"fedsdr"}
"""Methods whose loss compares the samples of a batch."""
COVERED = [name for name in NAMES if not make(name).unprotected("sample") and name not in TOGETHER]
"""Methods that sample-level privacy covers; the others are refused, see tests/rounds/test_private_runs.py."""


def still(name: str) -> Method:
    """The method without the server's training, whose first steps turn rounding errors into visible differences."""
    return make(name, **{key: value for key, value in row(name).still.items() if key == "distil"})


@pytest.mark.parametrize("name", COVERED)
def test_without_clipping_and_noise_privacy_changes_nothing(name: str) -> None:
    """On a cohort at once; the next test compares it with the loop."""
    private = replace(PLAIN, dp=SampleDP(math.inf, 0.0, "shuffle"))
    a, b = (
        everything(simulation(still(name), "mlp", "vectorized", train=t, rounds=2)) for t in (PLAIN, private)
    )
    assert_close(a, b, atol=5e-5)


@pytest.mark.parametrize("name", COVERED)
def test_private_training_is_the_same_in_every_engine_and_again(name: str) -> None:
    if not fits(name, "logistic"):
        pytest.skip("the method's split does not exist on this model")
    run = [
        everything(simulation(still(name), "logistic", engine, train=NOISY, rounds=2, fraction=0.6))
        for engine in ("sequential", "vectorized", "sequential")
    ]
    assert_close(run[0], run[1])
    assert_same(run[0], run[2])
    assert all(torch.isfinite(t.float()).all() for t in run[0].values())


@pytest.mark.parametrize("name", COVERED)
def test_one_sample_moves_training_by_no_more_than_the_clip(name: str) -> None:
    """Without noise, scaling one client's inputs by a million changes clipped training by a bounded amount.

    The bound is crude (every step of a round could turn around), but a gradient that escapes the clip breaks it by
    orders of magnitude.
    """
    clipped = replace(PLAIN, dp=SampleDP(1e-4, 0.0, "shuffle"), lr=0.01)
    sim = simulation(make(name), "mlp", train=clipped, rounds=1)
    still = simulation(make(name), "mlp", train=replace(clipped, lr=1e-30), rounds=1)
    moved, start = everything(sim), everything(still)
    steps = 60  # more than any method takes here in a round, with rates of its own up to 0.1
    for path, tensor in moved.items():
        if path.startswith("client/") and path.rpartition("/")[2] in sim.model.parameters:
            assert float((tensor - start[path]).abs().max()) <= steps * 0.1 * 1e-4 * 10, path


@pytest.mark.parametrize("name", COVERED)
def test_batch_norm_is_refused_where_its_batches_would_leak(name: str) -> None:
    sim = simulation(name, "batch_norm", train=NOISY)
    with pytest.raises(TailorflError, match=r"[Bb]atch norm"):
        sim.step()


@pytest.mark.parametrize("name", sorted(TOGETHER))
def test_losses_that_see_samples_together_are_refused(name: str) -> None:
    with pytest.raises(TailorflError, match="compares the samples of a batch"):
        simulation(name, "mlp", train=NOISY).step()
