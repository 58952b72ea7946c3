"""A tuning that is killed, in the middle of a trial too, goes on to the bits of one that was not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tailorfl.rounds.simulation import Simulation
from tailorfl.tuning.outcome import TUNED
from tailorfl.tuning.run import TuningRequest, begin, plan, plan_in, tune
from tailorfl.tuning.samplers import Sampler
from tailorfl.tuning.trials import Ledger
from tuning.tiny import TINY, experiment, tuned, untimed

SEARCH = {"train.lr": {"low": 0.05, "high": 2.0, "log": True}, "method.mu": [0.1, 1.0]}


def killed(folder: Path, point: tuple[type, str], count: int) -> None:
    """Go on with a tuning in a process of its own, which is killed at the `count`-th call of something."""
    process = os.fork()
    if process == 0:
        where, name = point
        real, calls = getattr(where, name), []

        def call(*arguments: object, **named: object) -> object:
            calls.append(1)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(where, name, call)
        try:
            tune(folder, plan_in(folder))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL, "it was not reached"


@pytest.mark.parametrize(
    ("sampler", "budget"), [("tpe", "4x3x2"), pytest.param("halving", "3x9x1", marks=pytest.mark.slow)]
)
def test_killed_thrice_and_resumed_is_as_never_killed(sampler: Sampler, budget: str, tmp_path: Path) -> None:
    settings = {**TINY, "methods": ["fedprox"], "search": SEARCH}
    request = TuningRequest(budget, sampler, widen=True)
    tuned(tmp_path / "whole", request, **settings)
    begin(tmp_path / "killed", plan(experiment(**settings), request))
    killed(tmp_path / "killed", (Simulation, "step"), 11)  # in the middle of a trial
    killed(tmp_path / "killed", (Simulation, "step"), 5)
    killed(tmp_path / "killed", (Ledger, "tell"), 1)  # trained, and not yet told
    tune(tmp_path / "killed", plan_in(tmp_path / "killed"))
    tables = (untimed(tmp_path / name / "tuning.json") for name in ("whole", "killed"))
    assert next(tables) == next(tables)
    assert (tmp_path / "killed" / TUNED).read_bytes() == (tmp_path / "whole" / TUNED).read_bytes()


def test_a_tuning_that_is_done_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(tmp_path / "t", TuningRequest("2x1"), methods=["fedprox"], search=SEARCH)
    before = (tmp_path / "t" / "tuning.json").read_bytes()
    monkeypatch.setattr(Simulation, "step", None)
    tune(tmp_path / "t", plan_in(tmp_path / "t"))
    assert (tmp_path / "t" / "tuning.json").read_bytes() == before
