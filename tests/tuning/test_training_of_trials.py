"""What one trial trains and scores, against rounds that are run and looked at one by one."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.experiments.jobs import Job
from tailorfl.experiments.making import make_federation, make_simulation
from tailorfl.tuning.training import Stretch, Trainer
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
