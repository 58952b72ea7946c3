"""What trials train, score and come to, against rounds looked at one by one and expectations written out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
import torch

from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.runs.budget import Limit
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.tuning.outcome import Tuned
from tailorfl.tuning.samplers import Sampler
from tailorfl.tuning.training import Task, Trainer, _shared
from tailorfl.tuning.trials import Ledger, Trial
from tuning.tiny import experiment


@pytest.mark.parametrize(
    ("every", "sampler", "looks"),
    [(1, "random", range(1, 8)), (3, "random", (3, 6, 7)), (3, "halving", (2, 3, 6, 7))],
)
def test_models_selected_by_validation_are_scored_at_their_best_round(
    every: int, sampler: Sampler, looks: Sequence[int], tmp_path: Path
) -> None:
    """Each client counts with the best of the rounds that are looked at, which a rate this high makes an early one."""
    config = experiment(
        methods=["local"],
        rounds=7,
        seeds=[1000],
        eval={"select": "val", "every": every},
        train={"batch_size": 8, "lr": 3.0},
    )
    (line,) = config.methods
    with Ledger.opened(tmp_path) as ledger:
        ledger.open(line.label, higher_is_better=True)
        ledger.begin(line.label, Trial(0, {}), {})
        outcome = Trainer(config, tmp_path, sampler).train(Task(line.label, 0, {}))
    sim = make_simulation(Job(config, line, 1000), make_federation(config, 1000))
    columns = []
    for number in range(1, 8):
        sim.step()
        if number in looks:
            columns.append(pd.DataFrame(evaluate(sim, Protocol(("val",)))).set_index("client")["accuracy"])
    scores = pd.concat(columns, axis=1)
    assert outcome.score == pytest.approx(scores.max(axis=1).mean())
    assert scores.max(axis=1).mean() > scores.iloc[:, -1].mean()


def test_trials_have_the_threads_of_the_experiment(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        Trainer(experiment(threads=before + 1), tmp_path)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("rounds", "share", "cut"), [(9, 1 / 9, 1), (9, 1 / 3, 3), (2, 1 / 9, 1), (9, 1, 9)])
def test_a_share_of_the_rounds_is_at_least_one(rounds: int, share: float, cut: int) -> None:
    assert _shared(Limit(rounds, "gradients", 90.0), share) == Limit(cut, "gradients", 90.0 * share)


@pytest.mark.parametrize("higher", [True, False])
def test_the_expected_best_of_a_budget_is_that_of_as_many_trials_as_it_pays_for(higher: bool) -> None:
    """Of four trials of 100 samples on average: scores 1, 2 and 4 (stopped early), and a failed one as the worst, 1."""
    sign = 1 if higher else -1
    trials = [
        Trial(0, {}, "complete", sign * 2.0, 150),
        Trial(1, {}, "pruned", sign * 4.0, 50),
        Trial(2, {}, "failed", None, 100),
        Trial(3, {}, "complete", sign * 1.0, 100),
        Trial(4, {}),  # not done
    ]
    found = Tuned("ditto", {}, trials, higher).expected_of([30.0, 100.0, 200.0, 349.0])
    two = (4 * 1 + 5 * 2 + 7 * 4) / 16  # the best of two is 1, 2, 4 in 4, 5 and 7 of 16 cases
    three = (8 * 1 + 19 * 2 + 37 * 4) / 64
    assert found[0] is None
    assert found[1:] == pytest.approx([sign * (1 + 1 + 2 + 4) / 4, sign * two, sign * three])
