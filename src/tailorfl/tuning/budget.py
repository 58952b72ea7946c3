"""What every method may use up: trials × rounds × seeds, counted in samples seen.

A trial trains as the comparison will: the experiment's `budget` holds inside of it. What all methods get equally is the
number of gradients of single samples that so many trials of FedAvg take (`experiments.budget`): a method whose rounds
look at more samples gets fewer trials, one that is stopped early gets more.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tailorfl.errors import ConfigError
from tailorfl.settings.experiment import ExperimentConfig

FIRST_SEED = 1000
"""Seeds of tuning are counted from here, so that more seeds can be added to a comparison without meeting them."""
_TEXT = re.compile(r"([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?(?:x([1-9]\d{0,3}))?")


@dataclass(frozen=True)
class Budget:
    """Trials, the rounds of each, and the seeds that each is repeated with."""

    trials: int
    rounds: int
    seeds: tuple[int, ...]


def parse(text: str, config: ExperimentConfig) -> Budget:
    """Return the budget of a text: TRIALS, TRIALSxROUNDS or TRIALSxROUNDSxSEEDS.

    Rounds are those of the experiment if not told, seeds one. The seeds are none of the experiment's.

    Raises:
        ConfigError: the text is no budget, or asks for more rounds than the experiment has.
    """
    match = _TEXT.fullmatch(text.strip().replace("×", "x"))
    if match is None:
        raise ConfigError(
            f"'{text}' is no budget; write the trials of each method, such as 20, or trials x rounds x seeds, such as "
            "20x10x2"
        )
    trials, rounds, seeds = (None if part is None else int(part) for part in match.groups())
    if rounds is not None and rounds > config.rounds:
        raise ConfigError(
            f"the budget '{text}' has {rounds} rounds a trial, more than the {config.rounds} of the experiment whose "
            "settings are tuned; give at most so many"
        )
    free = (seed for seed in itertools.count(FIRST_SEED) if seed not in config.seeds)
    return Budget(trials or 1, rounds or config.rounds, tuple(itertools.islice(free, seeds or 1)))


def tuned_on(config: ExperimentConfig, budget: Budget) -> ExperimentConfig:
    """Return the experiment that trials run: with the budget's rounds and seeds, and lines' own rounds cut alike."""
    share = budget.rounds / config.rounds
    lines = tuple(
        m if m.rounds is None else m.model_copy(update={"rounds": max(1, round(m.rounds * share))})
        for m in config.methods
    )
    return config.model_copy(update={"rounds": budget.rounds, "seeds": budget.seeds, "methods": lines})


def left(allowance: float, trials: int, used: Iterable[float], begun: int = 0) -> bool:
    """Return whether another trial is paid for, as long as it ends no further above the allowance than below it.

    Args:
        allowance: samples that a method may see.
        trials: how many trials that was meant for.
        used: what each finished trial is counted as.
        begun: trials that are not finished yet, each counted as the mean of the others.
    """
    spent = list(used)
    mean = sum(spent) / len(spent) if sum(spent) > 0 else allowance / trials
    if sum(spent) <= 0 and len(spent) + begun >= trials:  # of methods that train nothing
        return False
    return sum(spent) + begun * mean + mean / 2 <= allowance
