"""Where an experiment takes place: its clients are simulated in this process, or elsewhere and asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailorfl.data.federation import Federation
from tailorfl.evaluation.predictions import Kept
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.evaluation.selection import Selection
from tailorfl.evaluation.summary import Record
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.build import make_federation, make_simulation
from tailorfl.runs.job import Job
from tailorfl.settings.experiment import ExperimentConfig


@dataclass(frozen=True)
class Backend:
    """What differs between a simulation and a deployment.

    Attributes:
        federation: (settings, seed, a source in place of the configured one, warnings already said) -> who takes part.
        simulation: (job, federation, its folder) -> the run before its first round.
        evaluate: (run, what to evaluate, the last round's clients, what selects models, what notes outputs) -> records.
        done: called with the run after its last round.
    """

    federation: Callable[[ExperimentConfig, int, Any, set[str] | None], Federation]
    simulation: Callable[[Job, Federation, Path | None], Simulation]
    evaluate: Callable[[Simulation, Protocol, Sequence[int], Selection | None, Kept | None], list[Record]]
    done: Callable[[Simulation], None] = lambda sim: None


SIMULATED = Backend(make_federation, make_simulation, evaluate)
