"""What trials train, score and come to, against rounds looked at one by one and expectations written out."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.runs.budget import Limit
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.tuning.outcome import Tuned
from tailorfl.tuning.run import TuningRequest, begin, discard, plan, tune
from tailorfl.tuning.training import Stretch, Trainer, _shared
from tailorfl.tuning.trials import Trial
from tuning.tiny import experiment


@pytest.mark.parametrize("every", [1, 3])
def test_models_selected_by_validation_are_scored_at_their_best_round(every: int, tmp_path: Path) -> None:
    """Each client counts with the best of the rounds that are looked at, which a rate this high makes an early one."""
    config = experiment(
        methods=["local"],
        rounds=7,
        seeds=[1000],
        eval={"select": "val", "every": every},
        train={"batch_size": 8, "lr": 3.0},
    )
    (line,) = config.methods
    outcome = Trainer(config, tmp_path).train(Stretch(line.label, 0, {}, 1.0))
    sim = make_simulation(Job(config, line, 1000), make_federation(config, 1000))
    looks = []
    for number in range(1, 8):
        sim.step()
        if number % every == 0 or number == 7:
            looks.append(pd.DataFrame(evaluate(sim, Protocol(("val",)))).set_index("client")["accuracy"])
    scores = pd.concat(looks, axis=1)
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


@pytest.mark.parametrize("finished", [False, True])
def test_a_tuning_that_is_discarded_leaves_what_is_not_its_own(finished: bool, tmp_path: Path) -> None:
    made = plan(experiment(methods=["fedavg"], search={"train.lr": [0.5]}), TuningRequest("1x1"))
    begin(tmp_path / "t", made)
    if finished:
        tune(tmp_path / "t", made)
    (tmp_path / "t" / "notes.txt").write_text("mine")
    discard(tmp_path / "t")
    assert {path.name for path in (tmp_path / "t").iterdir()} - {".lock"} == {"notes.txt"}
    discard(tmp_path / "t")  # there is none any more
