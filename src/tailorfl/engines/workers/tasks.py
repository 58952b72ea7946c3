"""What a worker is asked to do: client code on a chunk of a cohort, whatever process or machine it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tensordict import TensorDict
from torch import Tensor

from tailorfl.engines.base import Inference, Visit
from tailorfl.engines.in_process import InProcess
from tailorfl.engines.results import Parts, finite_clients
from tailorfl.training.cohort import Cohort
from tailorfl.training.ledger import Uses


class States(Protocol):
    """Where a worker finds the private states of a chunk's clients."""

    def read(self) -> TensorDict:
        """Returns them, [clients, ...]."""

    def write(self, states: TensorDict) -> None:
        """Stages the next ones."""


class Task(Protocol):
    """Something that a worker is asked to do."""

    def run(self) -> Any:
        """Returns what came out."""

    def about(self) -> str:
        """Names it in a message about a worker that was lost."""


@dataclass(frozen=True)
class Train:
    """Training of a chunk; gives (replies, metrics, finite)."""

    engine: InProcess
    visit: Visit
    states: States

    def run(self) -> tuple[TensorDict, TensorDict, Tensor, Mapping[int, Uses]]:
        """Returns (replies, metrics, finite, what it used of private data)."""
        new, replies, metrics = self.engine.map(self.visit, self.states.read())
        self.states.write(new)
        return replies, metrics, finite_clients(new, replies), uses_of(self.visit.cohort)

    def about(self) -> str:
        return f"training {clients_of(self.visit.cohort)}"


@dataclass(frozen=True)
class Map:
    """What a function makes of a chunk's clients, such as the models that they deploy."""

    engine: InProcess
    visit: Visit
    states: States

    def run(self) -> tuple[Parts, Mapping[int, Uses]]:
        """Returns (what it makes of them, what it used of private data)."""
        parts = self.engine.map(self.visit, self.states.read())
        return parts, uses_of(self.visit.cohort)

    def about(self) -> str:
        return f"making the models of {clients_of(self.visit.cohort)}"


@dataclass(frozen=True)
class Predict:
    """The outputs of several models."""

    engine: InProcess
    asked: Inference

    def run(self) -> list[Tensor]:
        """Returns the outputs of each model."""
        return self.engine.predict(self.asked)

    def about(self) -> str:
        return "evaluating"


def clients_of(cohort: Cohort, most: int = 5) -> str:
    """Names the clients of a cohort and the round for a message."""
    ids = ", ".join(map(str, cohort.ids[:most])) + (", ..." if len(cohort.ids) > most else "")
    return f"client{'s' if len(cohort.ids) > 1 else ''} {ids} in round {cohort.round + 1}"


def uses_of(cohort: Cohort) -> Mapping[int, Uses]:
    """Returns what a cohort noted of private training."""
    return {} if cohort.record is None else cohort.record.uses
