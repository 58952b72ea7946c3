"""The advisor's answer: what it measured, settings of the methods, and doubts."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from tailorfl.theory.fedclup_statistics import LambdaRange
from tailorfl.theory.measures import Curvature
from tailorfl.theory.pilot import Mode
from tailorfl.theory.recommend import Recommendation
from tailorfl.theory.shrinkage import Errors
from tailorfl.theory.spread import SpreadInterval


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
    radius: SpreadInterval
    """R, root mean square distance of the clients' optima from their mean."""
    radius2: float
    """R^2 as estimated, free of bias; may be below 0 where clients are alike."""
    noise: SpreadInterval
    """V, squared error of a client that trains alone."""
    excess: float
    """E, twice the loss by which such a client misses its optimum."""
    rho: SpreadInterval
    """Standard deviation of one sample's gradient at the client's own optimum."""
    curvature: Curvature
    gain: SpreadInterval
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
    errors: Errors
    lam: SpreadInterval
    corollary: LambdaRange | None
    """Corollary 1's range of lam in the problem's own units; None without mu."""
    transfer: Transfer
    recommendations: tuple[Recommendation, ...]
    notes: tuple[str, ...] = ()
    """What a reader should know before trusting the numbers."""

    def to_config(self) -> dict[str, Any]:
        """`{"methods": [...]}`, to be pasted into an experiment."""
        return {"methods": [method.to_config() for method in self.recommendations]}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON can hold; what is not a finite number becomes None."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
