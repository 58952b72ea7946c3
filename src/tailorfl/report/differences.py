"""Every pair of methods of an experiment, compared seed by seed and corrected for being many comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from tailorfl.evaluation.ranks import LEVEL, holm
from tailorfl.evaluation.seeds import paired

if TYPE_CHECKING:
    from tailorfl.report.result import ExperimentResult


@dataclass(frozen=True)
class Difference:
    """The mean over clients of one method minus that of another, over the seeds that both have."""

    first: str
    second: str
    mean: float
    half_width: float  # of the 95 % interval, of this pair alone; NaN with one seed
    p_value: float  # of this pair alone
    adjusted: float  # corrected by Holm for all pairs of the experiment
    seeds: int

    @property
    def is_beyond_noise(self) -> bool:
        """Whether it would be so large by chance in fewer than 1 of 20 such tables."""
        return self.adjusted < LEVEL


def differences(result: ExperimentResult) -> list[Difference]:
    """Return all pairs of methods that share a seed, in the order of the table; `p_value` is of a paired t-test."""
    found = []
    for (a, first), (b, second) in combinations(result.means_by_job().items(), 2):
        common = sorted(first.keys() & second.keys())
        if common:
            found.append((a, b, paired([first[s] for s in common], [second[s] for s in common])))
    adjusted = holm([pair.p_value for _, _, pair in found])
    return [
        Difference(a, b, pair.mean, pair.half_width, pair.p_value, p, pair.seeds)
        for (a, b, pair), p in zip(found, adjusted, strict=True)
    ]
