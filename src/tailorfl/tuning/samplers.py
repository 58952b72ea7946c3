"""Proposals of values to try: pure functions of the trials so far, a seed, and the trial's number; and pruners.

Optuna's samplers are created anew for every trial, with the trials so far and a seed from (seed, method, number), so a
killed search continues as if it had not been interrupted.
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
"""Successive halving keeps one of this many trials, and multiplies its rounds by the same factor."""
RUNGS = 3
"""Largest number of stages of a trial, which may be stopped after 1/9 and 1/3 of its rounds (if at least one)."""
REDRAWS = 20
LARGEST_GRID = 1_000_000


@dataclass(frozen=True)
class Search:
    """The settings of one method's search."""

    label: str
    sampler: Sampler
    seed: int
    higher_is_better: bool
    trials: int
    """Number of trials for which the budget was planned."""


def rungs(sampler: Sampler, rounds: int) -> int:
    """Return the number of stages of a trial: 1 if none is stopped early."""
    if sampler not in ("halving", "hyperband"):
        return 1
    return sum(step(rung) <= rounds for rung in range(RUNGS))


def step(rung: int) -> int:
    """Return the pruner's step of a rung (counted from 0)."""
    return int(ETA**rung)


def propose(
    search: Search, space: Space, so_far: Sequence[Trial], first: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return untried values for the next trial, or None if the space has no more.

    `first` has the values of the first trial, whatever the sampler.

    Raises:
        ConfigError: a grid over ranges, or with too many points.
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


def check(label: str, sampler: Sampler, space: Space) -> None:
    """Raise ConfigError if a sampler cannot search the space of a line."""
    if sampler != "grid":
        return
    ranges = [key for key, dimension in space.items() if not isinstance(dimension, Choice)]
    if ranges:
        raise ConfigError(
            f"search: {label} has a range for {', '.join(ranges)}, which has no grid; give lists of values, or use "
            "another sampler"
        )
    if size(space) > LARGEST_GRID:
        raise ConfigError(
            f"search: the grid of {label} has {size(space):,} points, more than {LARGEST_GRID:,}; give fewer values, "
            "or use another sampler"
        )


def size(space: Space) -> float:
    """Return the number of points in a space."""
    return math.prod(len(d.values) if isinstance(d, Choice) else math.inf for d in space.values())


def pruner(sampler: Sampler, rung_count: int) -> Any:
    """Return Optuna's pruner of trials with `rung_count` stages."""
    pruners = load_optuna().pruners
    if sampler == "hyperband":
        most = step(rung_count - 1)
        return pruners.HyperbandPruner(min_resource=1, max_resource=most, reduction_factor=ETA)
    return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=ETA)


def _draw(search: Search, space: Space, so_far: Sequence[Trial], seed: int) -> dict[str, Any]:
    """Return the proposal of Optuna's sampler from an in-memory study of earlier trials, as grids may have grown."""
    optuna = load_optuna()
    if search.sampler == "tpe":
        startup = max(1, min(10, search.trials // 3))
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)
    else:
        sampler, so_far = optuna.samplers.RandomSampler(seed=seed), ()
    study = optuna.create_study(
        direction="maximize" if search.higher_is_better else "minimize", sampler=sampler
    )
    kinds = {key: distribution(dimension) for key, dimension in space.items()}
    states = optuna.trial.TrialState
    for trial in so_far:
        state = {"running": states.RUNNING, "complete": states.COMPLETE}.get(trial.state, states.FAIL)
        score = trial.score if trial.state == "complete" else None
        study.add_trial(
            optuna.trial.create_trial(
                state=state, value=score, params=dict(trial.values), distributions=kinds
            )
        )
    return dict(study.ask(kinds).params)


def _points(search: Search, space: Space) -> Iterator[dict[str, Any]]:
    """Yield all points of a space, in an order drawn from the seed; none of one with more than `LARGEST_GRID`."""
    if size(space) > LARGEST_GRID:
        return
    lists = [dimension.values for dimension in space.values() if isinstance(dimension, Choice)]
    order = generator(search.seed, "tuning", search.label, "grid").permutation(int(size(space)))
    shape = [len(values) for values in lists]
    for point in order:
        indices = np.unravel_index(int(point), shape) if shape else ()
        yield {key: values[int(i)] for key, values, i in zip(space, lists, indices, strict=True)}


def _key(values: Mapping[str, Any]) -> str:
    return repr(sorted(values.items()))
