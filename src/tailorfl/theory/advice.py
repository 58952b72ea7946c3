"""What the advisor answers: the facts it measured, the regime, settings of the methods, doubts."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from tailorfl.theory.fedclup_statistics import LambdaRange
from tailorfl.theory.measures import Curvature
from tailorfl.theory.minimax import Regime
from tailorfl.theory.pilot import Mode
from tailorfl.theory.recommend import Recommendation
from tailorfl.theory.shrinkage import Errors
from tailorfl.theory.spread import Interval

Confidence = Literal["high", "moderate", "low"]
WORDS: dict[Regime, str] = {"pooled": "collaborate", "between": "in between", "alone": "personalize"}
SURE = 0.95
"""Share of the resamples that must agree on the regime."""


@dataclass(frozen=True)
class Facts:
    """What was measured; squared distances are those of weights."""

    mode: Mode
    clients: int
    """N, clients of the federation that train."""
    used: int
    """Clients in the pilot."""
    samples: float
    """n, harmonic mean over the pilot's clients: estimates of single clients err as 1/n_i."""
    median_samples: float
    total_samples: int
    dim: int
    rank: int
    radius: Interval
    """R, root mean square distance of the clients' optima from their mean."""
    radius2: float
    """R^2 as estimated, free of bias; may be below 0 where clients are alike."""
    noise: Interval
    """V, squared error of a client that trains alone."""
    excess: float
    """E, twice the loss by which such a client misses its optimum."""
    rho: Interval
    """Standard deviation of one sample's gradient at the client's own optimum."""
    curvature: Curvature
    gain: Interval
    """Loss by which own models beat their mean on samples that neither has been trained on."""
    travelled: float
    """Squared distance from the initial model to the clients' mean."""
    seconds: float


@dataclass(frozen=True)
class Transfer:
    """PerFed-CKT's optimum (Theorem 4.2) for every client of the pilot; all lists in the order of `clients`."""

    clients: tuple[str, ...]
    v2: tuple[float, ...]
    """v_k^2, variance of one weight of the client's optimum around the common one."""
    pull: tuple[float, ...]
    """lambda_k as a pull on weights beside the client's mean loss; infinite where no spread is seen."""
    lam: tuple[float, ...]
    """lambda_k as the method has it, on predictions of public samples (of training samples where none)."""
    alpha: tuple[float, ...]
    """Weight of the client's model in everybody's teacher; they sum to 1."""
    own_weight: tuple[float, ...]
    """What a client keeps of its own model beside the teacher."""


@dataclass(frozen=True)
class Advice:
    """The advisor's answer."""

    facts: Facts
    regime: Regime
    shares: dict[Regime, float]
    """Share of the resamples of the clients that fall into each regime."""
    errors: Errors
    lam: Interval
    corollary: LambdaRange | None
    """Corollary 1's range of lam in the problem's own units; None without mu."""
    transfer: Transfer
    recommendations: tuple[Recommendation, ...]
    notes: tuple[str, ...] = ()
    """What a reader should know before trusting the numbers."""

    @property
    def confidence(self) -> Confidence:
        """low without optima; high if the regime is sure, lam known within a factor of 4 and clients are 8 or more."""
        if self.facts.mode == "training":
            return "low"
        firm = self.lam.low > 0 and self.lam.high <= 4 * self.lam.low
        return "high" if self.sure and firm and self.facts.used >= 8 else "moderate"

    @property
    def sure(self) -> bool:
        """Whether nearly all resamples of the clients agree on the regime, and losses do not contradict it."""
        return self.shares[self.regime] >= SURE and not self.contradicted

    @property
    def contradicted(self) -> bool:
        """Whether losses on samples not trained on speak against the regime.

        Not asked where optima are reached: the halves' models are noisier than those of all samples, so
        that they lose on unseen samples says little there.
        """
        if self.facts.mode == "optimum":
            return False
        own = self.facts.gain
        return (self.regime == "alone" and own.low <= 0) or (self.regime == "pooled" and own.high >= 0)

    @property
    def words(self) -> str:
        """The regime in a word or two: collaborate, in between or personalize."""
        return WORDS[self.regime]

    def to_config(self) -> dict[str, Any]:
        """`{"methods": [...]}`, to be pasted into an experiment."""
        return {"methods": [found.to_config() for found in self.recommendations]}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON can hold; what is not a finite number becomes None."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return {"regime_in_words": self.words, "sure": self.sure, "confidence": self.confidence, **plain}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
