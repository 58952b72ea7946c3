"""Every method gets the same, counted in samples, with seeds of its own; what trials train, score and come to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailorfl.errors import ConfigError
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.runs.schedule import Limit
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.tuning.plan import Budget, TuningRequest, parse, plan, tuned_on
from tailorfl.tuning.run import _work, foreseen
from tailorfl.tuning.samplers import Sampler, Search
from tailorfl.tuning.search import MethodSearch, Tuned, left
from tailorfl.tuning.space import Choice
from tailorfl.tuning.training import Outcome, Task, Trainer, _shared
from tailorfl.tuning.trials import Ledger, Trial
from tuning.tiny import experiment, tuned


@pytest.mark.parametrize(
    ("text", "seeds", "budget"),
    [
        ("20", 2, Budget(20, 9, (1000,))),
        ("20x3", 2, Budget(20, 3, (1000,))),
        ("5x9x3", 2, Budget(5, 9, (1000, 1001, 1002))),
        ("5×9×2", 2, Budget(5, 9, (1000, 1001))),
        ("5x9x2", [0, 1000, 1002], Budget(5, 9, (1001, 1003))),  # none of the comparison's
    ],
)
def test_a_budget_is_trials_rounds_and_seeds(text: str, seeds: int | list[int], budget: Budget) -> None:
    assert parse(text, experiment(seeds=seeds)) == budget


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not a budget"), ("0", "not a budget"), ("3x", "not a budget"), ("2x10", "10 rounds")],
)
def test_what_is_no_budget_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
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
    assert left(100, 3, [0, 0])  # methods that train nothing have their trials too
    assert not left(100, 3, [0, 0, 0])


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


def test_a_grid_grows_when_half_and_three_quarters_of_the_budget_are_spent(tmp_path: Path) -> None:
    """At the side where the best value so far lies; a trial that failed early counts as a whole one."""
    config, grid = experiment(methods=["fedavg"]), Choice((0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    trials = [
        Trial(0, {"train.lr": 0.6}, "complete", 0.5, 100),
        Trial(1, {"train.lr": 0.3}, "failed", None, 1),
        Trial(2, {"train.lr": 0.1}, "complete", 0.7, 100),
        Trial(3, {"train.lr": 0.2}, "complete", 0.9, 100),
    ]
    request = Search("fedavg", "random", 0, True, 4)
    with Ledger.opened(tmp_path) as ledger:
        search = MethodSearch(
            request, config, config.methods[0], {"train.lr": grid}, 400.0, ledger, widen=True
        )
        spaces = []
        for so_far in (*(trials[:n] for n in range(1, 5)), [trials[0], Trial(1, {}), trials[2]]):
            search.trials = so_far
            spaces.append(search.space()["train.lr"])
    higher = grid.beyond(1)
    wider = higher.beyond(-1)
    assert spaces == [grid, higher, wider, wider, grid], "the last while a trial is under way"


def test_several_workers_go_on_where_a_finished_trial_widens_the_grid(tmp_path: Path) -> None:
    """They have nothing to do while its last values are under way, and then have more."""
    config = experiment(methods=["fedavg", "local"], train={"batch_size": 0, "lr": 0.1})
    searches = {}
    with Ledger.opened(tmp_path) as ledger:
        for line in config.methods:
            request, space = Search(line.label, "grid", 0, True, 4), {"train.lr": Choice((0.01, 0.1))}
            searches[line.label] = MethodSearch(request, config, line, space, 400.0, ledger, widen=True)

        def send(task: Task) -> Future[Outcome]:
            future: Future[Outcome] = Future()
            future.set_result(Outcome("complete", task.values["train.lr"], 100, 1.0))
            return future

        _work(searches, send, workers=3)
        rates = [[trial.values["train.lr"] for trial in search.trials] for search in searches.values()]
    assert rates == [[0.1, 0.01, 1.0, 10.0]] * 2


# -- what a trial is worth --------------------------------------------------------------------------------


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
