"""Every method gets the same, counted in samples; tuning has seeds of its own."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailorfl.errors import ConfigError
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.tuning.budget import Budget, left, parse, tuned_on
from tailorfl.tuning.plan import TuningRequest, plan
from tailorfl.tuning.run import foreseen
from tuning.tiny import experiment, tuned


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("20", Budget(20, 9, (1000,))),
        ("20x3", Budget(20, 3, (1000,))),
        ("5x9x3", Budget(5, 9, (1000, 1001, 1002))),
        ("5×9×2", Budget(5, 9, (1000, 1001))),
    ],
)
def test_a_budget_is_trials_rounds_and_seeds(text: str, budget: Budget) -> None:
    assert parse(text, experiment()) == budget


def test_seeds_of_tuning_are_none_of_the_comparison() -> None:
    assert parse("5x9x2", experiment(seeds=[0, 1000, 1002])).seeds == (1001, 1003)


@pytest.mark.parametrize(
    ("text", "told"), [("", "no budget"), ("0", "no budget"), ("3x", "no budget"), ("2x10", "10 rounds")]
)
def test_what_is_no_budget_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        parse(text, experiment())


def test_trials_have_the_rounds_and_seeds_of_the_budget_and_lines_are_cut_alike() -> None:
    config = experiment(methods=[{"name": "ditto", "rounds": 6}, "fedavg"])
    made = tuned_on(config, parse("5x3x2", config))
    assert (made.rounds, made.seeds) == (3, (1000, 1001))
    assert [line.rounds for line in made.methods] == [2, None]


@given(each=st.floats(0.05, 30), trials=st.integers(1, 30))
def test_trials_end_nearest_to_the_allowance(each: float, trials: int) -> None:
    """As `experiments.budget` has it for rounds: no further above what is allowed than one trial fewer was below."""
    allowance, used = float(trials), list[float]()
    while left(allowance, trials, used):
        used.append(each)
    assert len(used) >= 1 or each > 2 * allowance or trials == 1
    assert abs(sum(used) - allowance) <= each / 2 + 1e-9 or (len(used) == 1 and each > allowance)


def test_trials_that_are_under_way_count_as_the_mean_of_the_others() -> None:
    assert left(100, 10, [10] * 8, begun=1)
    assert not left(100, 10, [10] * 8, begun=2)
    assert left(100, 10, [], begun=9)
    assert not left(100, 10, [], begun=10)


@pytest.mark.slow
@pytest.mark.usefixtures("a_quick_estimate")
@pytest.mark.parametrize("budget", ["rounds", "gradients"])
def test_a_dry_run_foresees_as_many_trials_as_there_then_are(budget: str, tmp_path: Path) -> None:
    """Two gradients a step are half the trials, unless rounds are fewer; a small space ends before its budget."""
    search = {"train.lr": [0.1, 0.3, 0.5, 0.7], "methods": {"local": {"train.lr": [0.1, 0.5]}}}
    settings = {
        "methods": ["fedavg", "ditto", "local"],
        "budget": budget,
        "search": search,
        "train": {"steps": 2, "batch_size": 4},
    }
    request = TuningRequest("4x3")
    expected = {label: one.trials for label, one in foreseen(plan(experiment(**settings), request)).items()}
    found = tuned(tmp_path / "t", request, **settings)
    assert expected == {one.label: len(one.trials) for one in found.methods}
    assert expected == {"fedavg": 4, "ditto": 2 if budget == "rounds" else 3, "local": 2}


def test_what_a_dry_run_foresees_is_validated_at_the_end_of_a_trial_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it takes the rounds of all seeds and one evaluation each; where models are selected, those on the way too."""
    asked = []

    def estimated(config: ExperimentConfig, watch: object) -> SimpleNamespace:
        asked.append(config)
        return SimpleNamespace(methods={"fedavg": {"gradients_per_round": 0, "rounds": 3, "seconds": 7.0}})

    monkeypatch.setattr("tailorfl.tuning.run.estimate", estimated)
    for select, every in (("last", 0), ("val", 2)):
        config = experiment(methods=["fedavg"], eval={"select": select, "every": 2})
        (one,) = foreseen(plan(config, TuningRequest("5x3x2"))).values()
        assert (one.trials, one.seconds) == (5, 35.0)
        found = asked[-1]
        assert (found.eval.sets, found.eval.every, found.rounds, len(found.seeds)) == (("val",), every, 3, 2)


def test_methods_that_train_nothing_have_their_trials_too() -> None:
    assert left(100, 3, [0, 0])
    assert not left(100, 3, [0, 0, 0])
