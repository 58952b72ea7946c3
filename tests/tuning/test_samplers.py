"""What is tried next is a function of the trials so far; grids are complete, nothing is tried twice."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tailorfl
from tailorfl.errors import ConfigError, MissingExtraError
from tailorfl.tuning.samplers import SAMPLERS, Sampler, Search, check, propose, pruner, rungs, step
from tailorfl.tuning.space import Choice, Range
from tailorfl.tuning.trials import Ledger, Trial

SPACE = {
    "train.lr": Choice((0.01, 0.1, 1.0)),
    "method.scope": Choice(("head", "all")),
    "method.own": Choice((True, None)),
}
LINE = {"x": Range(-1.0, 1.0)}


def search(sampler: Sampler, seed: int = 0, trials: int = 12, label: str = "ditto") -> Search:
    return Search(label, sampler, seed, True, trials)


def history(sampler: Sampler, space: Any, count: int, seed: int = 0, higher: bool = True) -> list[Trial]:
    found: list[Trial] = []
    wanted = replace(search(sampler, seed), higher_is_better=higher)
    while len(found) < count and (values := propose(wanted, space, found, None)) is not None:
        score = (-1 if higher else 1) * (values.get("x", 0.0) - 0.3) ** 2
        found.append(Trial(len(found), values, "complete", score, 10, 0.1))
    return found


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_finite_space_is_tried_point_by_point_to_its_end(sampler: Sampler) -> None:
    found = [tuple(t.values.values()) for t in history(sampler, SPACE, 99)]
    assert sorted(map(repr, found)) == sorted(
        map(repr, itertools.product(*(d.values for d in SPACE.values())))
    )


@pytest.mark.parametrize("sampler", ["random", "halving"])
def test_what_was_drawn_before_is_drawn_anew(sampler: Sampler) -> None:
    """And not the next in the order of the grid: of u values that are left, that one comes with 1 / u."""
    space = {"x": Choice(tuple(float(k) for k in range(30)))}
    in_order = 0
    for seed in range(4):
        tried = [trial.values["x"] for trial in history(sampler, space, 25, seed)]
        assert len(set(tried)) == 25
        grid = [trial.values["x"] for trial in history("grid", space, 30, seed)]
        in_order += sum(tried[k] == next(x for x in grid if x not in tried[:k]) for k in range(25))
    assert in_order <= 16  # 4 (1/30 + ... + 1/6) = 6.8 expected; redraws that repeat fall back on the order


@pytest.mark.parametrize("sampler", ["random", "tpe", "halving"])
def test_a_proposal_depends_on_trials_seed_and_method_alone(sampler: Sampler) -> None:
    so_far = history(sampler, LINE, 7)
    again = propose(search(sampler), LINE, so_far, None)
    assert again == propose(search(sampler), LINE, list(so_far), None)
    assert again != propose(search(sampler, seed=1), LINE, so_far, None)
    assert again != propose(search(sampler, label="apfl"), LINE, so_far, None)
    assert history(sampler, LINE, 9)[:7] == so_far


@pytest.mark.parametrize("higher", [True, False])
def test_tpe_comes_nearer_to_the_best_than_chance(higher: bool) -> None:
    def last(sampler: Sampler) -> float:
        runs = [history(sampler, LINE, 20, seed, higher)[10:] for seed in range(3)]
        return sum(abs(t.score) for trials in runs for t in trials if t.score is not None) / 30

    assert last("tpe") < last("random") / 2


def test_the_first_trial_is_what_the_experiment_says() -> None:
    own = {"train.lr": 0.1, "method.scope": "all", "method.own": None}
    assert propose(search("random"), SPACE, [], own) == own
    assert propose(search("random"), SPACE, [Trial(0, own, "complete", 0.5)], own) != own


def test_grids_need_lists_of_a_size_that_can_be_tried() -> None:
    large = {name: Choice(tuple(range(1001))) for name in "ab"}
    for space, key in ((LINE, "x"), (large, "1,002,001")):
        with pytest.raises(ConfigError, match=key):
            check("ditto", "grid", space)
        check("ditto", "random", space)
    check("ditto", "grid", {name: Choice(tuple(range(1000))) for name in "ab"})


@pytest.mark.parametrize(("rounds", "count"), [(1, 1), (2, 1), (3, 2), (8, 2), (9, 3), (100, 3)])
def test_trials_are_looked_at_after_whole_rounds_that_grow_threefold(rounds: int, count: int) -> None:
    assert rungs("halving", rounds) == count
    assert rungs("random", rounds) == 1


def test_successive_halving_keeps_the_best_third_of_those_that_came_so_far(tmp_path: Path) -> None:
    scores, survivors = [0.5, 0.4, 0.6, 0.3, 0.7, 0.65, 0.2, 0.69], set()
    with Ledger.opened(tmp_path) as ledger:
        ledger.open("ditto", higher_is_better=True)
        for number, score in enumerate(scores):
            ledger.begin("ditto", Trial(number, {}), {})
            stops = ledger.stops("ditto", number, step(0), score, pruner("halving", 3))
            survivors |= set() if stops else {score}
            ledger.tell("ditto", Trial(number, {}, "pruned" if stops else "complete", score))
    assert survivors == {0.5, 0.6, 0.7, 0.65, 0.69}  # 0.65 is second of six, 0.69 second of eight


def test_without_optuna_the_extra_is_named_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match="extra 'tune'"):
        propose(search("random"), LINE, [], None)
    with pytest.raises(MissingExtraError, match="extra 'tune'"):
        tailorfl.tune("demo", budget="1x1", out=tmp_path / "tuning")
    assert not (tmp_path / "tuning").exists()
