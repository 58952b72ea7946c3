"""What is tried next, and what is stopped early: pure functions of the trials so far, a seed, and the trial's number.

Optuna's samplers and pruners are asked afresh for every trial, of a study in memory that has the trials so far and with
a seed derived from (seed, method, number). So a search that was killed goes on as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from tailorfl.errors import ConfigError
from tailorfl.training.keys import generator
from tailorfl.tuning.space import Choice, Space
from tailorfl.tuning.trials import Trial, distribution, load_optuna

Sampler = Literal["random", "tpe", "grid", "halving", "hyperband"]
SAMPLERS = get_args(Sampler)
ETA = 3
"""Successive halving keeps one of so many, and gives it so many times the rounds."""
RUNGS = 3
"""Shares of the rounds of a trial after which it may be stopped: 1/9 and 1/3, as far as that are whole rounds."""
REDRAWS = 20
LARGEST_GRID = 1_000_000


@dataclass(frozen=True)
class Search:
    """What is searched for one method, and how."""

    label: str
    sampler: Sampler
    seed: int
    higher_is_better: bool
    trials: int
    """How many the budget was meant for."""


def rungs(sampler: Sampler, rounds: int) -> int:
    """Return after how many stretches the rounds of a trial are over: 1 where none is stopped early."""
    if sampler not in ("halving", "hyperband"):
        return 1
    return max(1, min(RUNGS, 1 + int(math.log(rounds, ETA) + 1e-9)))


def step(rung: int) -> int:
    """Return the number by which the pruner knows a rung, from 0."""
    return int(ETA**rung)


def propose(
    search: Search, space: Space, so_far: Sequence[Trial], first: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the values of the next trial, which nobody has tried; None where the space has no others.

    `first` is what the first trial has, whatever the sampler says.

    Raises:
        ConfigError: a grid of ranges, or with too many points.
        MissingExtraError: Optuna is not installed.
    """
    number, tried = len(so_far), {_key(trial.values) for trial in so_far}
    if not number and first is not None:
        return dict(first)
    if search.sampler != "grid":
        for attempt in range(REDRAWS):
            seed = int(generator(search.seed, "tuning", search.label, number, attempt).integers(2**31))
            drawn = _draw(search, space, so_far, seed)
            if _key(drawn) not in tried:
                return drawn
    points = _points(search, space)
    return next((values for values in points if _key(values) not in tried), None)


def check(search: Search, space: Space) -> None:
    """Raise ConfigError where a sampler cannot search a space."""
    if search.sampler != "grid":
        return
    ranges = [key for key, dimension in space.items() if not isinstance(dimension, Choice)]
    if ranges:
        raise ConfigError(
            f"search: {search.label} has a range for {', '.join(ranges)}, which has no grid; give a list of values, or "
            "take another sampler"
        )
    if size(space) > LARGEST_GRID:
        raise ConfigError(
            f"search: the grid of {search.label} has {size(space):,} points, more than {LARGEST_GRID:,}; give fewer "
            "values, or take another sampler"
        )


def size(space: Space) -> float:
    """Return how many points a space has."""
    return math.prod(len(d.values) if isinstance(d, Choice) else math.inf for d in space.values())


def stops(
    search: Search, so_far: Sequence[Trial], trial: Trial, rung_count: int
) -> tuple[bool, dict[str, float]]:
    """Return whether a trial is stopped at its last score, and what the pruner notes of it.

    `so_far` are all trials in the order of their numbers, this one among them.
    """
    pruners = load_optuna().pruners
    if search.sampler == "hyperband":
        most = step(rung_count - 1)
        pruner = pruners.HyperbandPruner(min_resource=1, max_resource=most, reduction_factor=ETA)
    else:
        pruner = pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=ETA)
    study = _replica(search, [trial if t.number == trial.number else t for t in so_far], None, pruner)
    mine = study.get_trials(deepcopy=False)[trial.number]
    stop = bool(load_optuna().trial.Trial(study, mine._trial_id).should_prune())
    noted = study.get_trials(deepcopy=False)[trial.number].system_attrs
    return stop, {key: float(value) for key, value in noted.items() if key.startswith("completed_rung_")}


def _draw(search: Search, space: Space, so_far: Sequence[Trial], seed: int) -> dict[str, Any]:
    samplers = load_optuna().samplers
    if search.sampler == "tpe":
        sampler = samplers.TPESampler(seed=seed, n_startup_trials=max(1, min(10, search.trials // 3)))
    else:
        sampler = samplers.RandomSampler(seed=seed)
    study = _replica(search, so_far, space, None, sampler)
    return dict(study.ask({key: distribution(dimension) for key, dimension in space.items()}).params)


def _replica(
    search: Search, trials: Sequence[Trial], space: Space | None, pruner: Any, sampler: Any = None
) -> Any:
    """Return a study in memory with the trials so far; without their values where `space` is None."""
    optuna = load_optuna()
    study = optuna.create_study(
        study_name=search.label,
        direction="maximize" if search.higher_is_better else "minimize",
        pruner=pruner,
        sampler=sampler,
    )
    states = optuna.trial.TrialState
    kinds = {
        "running": states.RUNNING,
        "complete": states.COMPLETE,
        "pruned": states.PRUNED,
        "failed": states.FAIL,
    }
    for trial in trials:
        study.add_trial(
            optuna.trial.create_trial(
                state=kinds[trial.state],
                value=trial.score if trial.state in ("complete", "pruned") else None,
                params=dict(trial.values) if space is not None else {},
                distributions={k: distribution(d) for k, d in space.items()} if space is not None else {},
                intermediate_values=dict(trial.scores),
                system_attrs=dict(trial.rungs),
            )
        )
    return study


def _points(search: Search, space: Space) -> Iterator[dict[str, Any]]:
    """All points of a finite space in an order drawn from the seed, nothing of another one."""
    if size(space) > LARGEST_GRID:
        return
    lists = [dimension.values for dimension in space.values() if isinstance(dimension, Choice)]
    order = generator(search.seed, "tuning", search.label, "grid").permutation(int(size(space)))
    shape = [len(values) for values in lists]
    for point in order:
        places = np.unravel_index(int(point), shape) if shape else ()
        yield {key: values[int(i)] for key, values, i in zip(space, lists, places, strict=True)}


def _key(values: Mapping[str, Any]) -> str:
    return repr(sorted(values.items()))
