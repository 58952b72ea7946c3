"""A fit: the one loop in which all local training happens, for one client or a whole cohort at once.

    plan       which samples each client takes at each step, fixed by keys before the first        `plan.py`
    batch      those samples                                                                       `batches.py`
    gradient   of the loss there, or the method's own direction (SAM, APFL, ...), or a private one `gradients.py`
    step       by the rule of an optimizer, with proximal pull and terms on public samples         `step.py`
    result     the mean loss, the gradients that were computed, and the trained models

A cohort's tensors are physical (no vmap wrapper) and have a leading axis of clients, which are ordered by falling
number of steps: those still active at a step are the first ones, and an idle client is never touched. Tensors of one
client have no such axis. Updates are in place on tensors that this loop owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tailorfl.training.active import Which, active_clients, ordered_plan, public_terms
from tailorfl.training.batches import steps_of
from tailorfl.training.counting import account, counted
from tailorfl.training.operations import apply, where
from tailorfl.training.request import FitRequest, FitResult
from tailorfl.training.step import GradientStep


def fit(position: Tensor, request: FitRequest) -> FitResult | None:
    """Train the client at `position` of the cohort, alone or under `torch.func.vmap`; None where it takes no step.

    Raises:
        ClientError: training failed; names client, round and stage.
    """
    if not request.takes_a_step:
        return None
    result: FitResult = apply(Fit(request), position, request.inputs())
    return result


@dataclass(frozen=True, eq=False)
class Fit:
    """A training of a cohort as an operation."""

    request: FitRequest

    def run(self, positions: tuple[int, ...], inputs: dict[str, Any], stacked: bool) -> FitResult:
        """Train the clients at `positions` from the tensors of a request, `Mapped` where `stacked`."""
        request = self.request
        if request.cohort.counting:
            return counted(request, positions, inputs, stacked)
        plan, positions, layout = ordered_plan(request, positions, inputs, stacked)
        clients = active_clients(request, inputs, layout, plan, positions)
        public = public_terms(request, inputs, layout, plan, positions)
        gradient_step = GradientStep(request, plan, public, stacked)
        losses: list[tuple[Which, Tensor]] = []
        for step in steps_of(request, clients, plan, stacked):
            active = clients.of(step.who) if stacked else clients
            losses.append((step.who, gradient_step.take(active, step)))
            if stacked:
                clients.put(step.who, active)
        work = account(request, positions, gradient_step.gradients, plan.count)
        numbers = layout.results({"loss": gradient_step.mean(losses), "work": work if stacked else work[0]})
        models = {
            name: layout.results({**component.trained, **component.moving})
            for name, component in zip(request.start, clients.components, strict=True)
        }
        return FitResult(numbers["loss"], numbers["work"], models)

    def where(self, positions: Sequence[int]) -> str:
        """Name clients, round and stage for error messages."""
        return where(self.request.cohort, positions, self.request.purpose)
