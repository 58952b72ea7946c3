"""Checkpoints take their share of the time, also in the first seconds of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tailorfl.runs import job_loop as module
from tailorfl.runs.job_loop import BYTES_A_SECOND, SHARE, WAIT, Saver

SCALARS = 1_000_000


class Clock:
    """A simulation and a store in one, with a time of its own; saving takes `cost` seconds."""

    def __init__(self, cost: float) -> None:
        self.now, self.cost, self.round = 0.0, cost, 0
        self.saved: list[tuple[int, float]] = []

    def dump(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return {"w": torch.zeros(SCALARS)}, {}

    def save_checkpoint(self, round: int, tensors: Any, facts: Any) -> None:
        self.saved.append((round, self.now))
        self.now += self.cost


def ran(cost: float, rounds: int, seconds: float, interval: int | None, patch: pytest.MonkeyPatch) -> Clock:
    """A run of rounds that take `seconds` each."""
    clock = Clock(cost)
    patch.setattr(module.time, "perf_counter", lambda: clock.now)
    saver = Saver(clock, clock, interval)  # type: ignore[arg-type]
    for _ in range(rounds):
        clock.round += 1
        clock.now += seconds
        if saver.due():
            saver.save(clock.now)
    return clock


@pytest.mark.parametrize("cost", [0.001, 0.03, 0.2])
def test_checkpoints_take_their_share_of_the_time(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ran(cost, 2000, 0.02, None, monkeypatch)
    assert 0 < len(clock.saved) * cost <= SHARE * clock.now + 2 * cost


def test_the_first_one_waits_until_it_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (WAIT + 4 * SCALARS / BYTES_A_SECOND) / SHARE
    short = ran(0.03, int(0.9 * expected / 0.02), 0.02, None, monkeypatch)
    assert not short.saved
    assert ran(0.03, 2, expected, None, monkeypatch).saved[0][0] == 1  # after a long round at once


def test_a_given_interval_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [round for round, _ in ran(9.0, 10, 0.02, 3, monkeypatch).saved] == [3, 6, 9]
