"""A fit: the loop of all local training, for one client or a whole cohort at once.

    plan       the samples of each client at each step, fixed by keys before the first step        `plan.py`
    batch      those samples                                                                       `batches.py`
    gradient   of the loss on them, or the method's direction (SAM, APFL, ...), or a private one   `gradients.py`
    step       by the rule of an optimizer, with proximal pull and terms on public samples         `GradientStep`
    result     the mean loss, the number of gradients, and the trained models

    g = ∇F(p; batch)                 or the method's direction, or a private gradient
    g = g + ∇T(p; public batch)      terms on public samples
    g = g + λ(p − centre)            proximal pull, penalty (λ/2)‖p − centre‖²
    p moves along g by the rule of an optimizer, see `tailorfl.training.update`

A cohort's tensors are physical (no vmap wrapper) and have a leading axis of clients, ordered by falling number of
steps: the clients still active at a step come first, and idle ones are never touched. Tensors of a single client have
no such axis. Updates are in place on tensors that this loop owns.

A private fit writes its uses of data to the ledger. The noise for a target ε must be known before the first round, so a
cohort may only count: its fits record what they would use and return their start. The number of gradients that a
direction requests is found by running it on zero gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from tailorfl.models.cohort_layers import WeightStep
from tailorfl.training.batches import (
    ActiveClients,
    Step,
    Which,
    active_clients,
    ordered_plan,
    public_terms,
    steps_of,
    steps_of_clients,
)
from tailorfl.training.custom_gradient import CustomGradient, gradients_asked
from tailorfl.training.gradients import (
    LocalObjective,
    PublicTerm,
    client_gradient,
    cohort_gradient,
    single_users,
)
from tailorfl.training.operations import CohortLayout, Layout, Operation, Packed, apply
from tailorfl.training.plan import BatchPlan, batch_sizes, batches_of, batches_per_pass
from tailorfl.training.request import FitRequest, FitResult
from tailorfl.training.update import along, clip_norm


def account(
    request: FitRequest,
    positions: Sequence[int],
    gradients: NDArray[np.int64],
    samples: NDArray[np.int64],
) -> Tensor:
    """Return the number of single-sample gradients of a fit, float [clients], and record its private releases.

    `gradients` and `samples` [clients, batches] are the numbers of gradients and of samples of each batch. Gradients of
    public samples count too.
    """
    _note(request, positions, gradients)
    cohort, length = request.cohort, request.length
    total: NDArray[np.int64] = (gradients * samples).sum(1)
    if request.public and cohort.public is not None:
        steps = length.repeat * ((samples > 0).sum(1) // length.batches)
        for term in request.public:
            total = total + min(term.public or 0, len(cohort.public)) * steps
    return torch.from_numpy(total.astype(np.float32)).to(cohort.device)


def _note(request: FitRequest, positions: Sequence[int], gradients: NDArray[np.int64]) -> None:
    """Record the releases of a private fit, from the number of gradients of each batch [clients, batches].

    With shuffled batches a sample is in one batch per pass, so each pass counts with the largest number of gradients of
    one of its batches.
    """
    cohort, dp, batch = request.cohort, request.dp, request.batch
    if dp is None or cohort.record is None:
        return
    for position, of_batches in zip(positions, gradients, strict=True):
        samples, client = max(len(cohort.members[position]), 1), cohort.ids[position]
        rate = 1.0 if batch <= 0 or dp.sampling == "shuffle" else min(1.0, batch / samples)
        used = _of_passes(request, samples, of_batches) if dp.sampling == "shuffle" else of_batches
        cohort.record.add(client, rate, dp.noise_of(client), used)


def _of_passes(request: FitRequest, samples: int, gradients: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each pass the largest number of gradients of a batch, from the numbers of all batches."""
    (length,) = batches_per_pass(np.array([samples]), request.batch, request.cohort.min_batch)
    which = (request.length.first + np.arange(len(gradients))) // max(length, 1)
    return np.array([gradients[which == n].max() for n in np.unique(which)], dtype=np.int64)


def counted(
    request: FitRequest,
    positions: Sequence[int],
    inputs: dict[str, Any],
    stacked: bool,
) -> FitResult:
    """Record what a fit would use and return its start as the result, with a loss of 0.

    A direction has no conditions on values, so the first client shows how many gradients every client requests.
    """
    cohort, length, dp = request.cohort, request.length, request.dp
    batch, epochs = request.batch, request.epochs
    steps, layout = steps_of_clients(request, inputs, len(positions)), Layout()
    if stacked:
        layout = CohortLayout(len(positions))
    start = {
        name: dict(zip(state, layout.views(list(state.values())), strict=True))
        for name, state in inputs["start"].items()
    }

    def of_one(tensor: Tensor) -> Tensor:
        return tensor[0] if stacked else tensor

    states = {
        name: TensorDict({n: of_one(start[name][n]) for n in names}, batch_size=[])
        for name, names in request.trained.items()
    }
    direction_inputs = Packed(list(map(of_one, layout.views(inputs["given"]))), request.given.form).unpack()
    state = states[""] if tuple(states) == ("",) else TensorDict(dict(states), batch_size=[])
    per_step = (
        np.array(gradients_asked(request.direction, state, direction_inputs, length.batches)) * length.repeat
    )
    sizes, first = cohort.sizes[list(positions)], length.first
    taken = batches_of(sizes, batch, epochs, steps, cohort.min_batch, cohort.left(first), length.batches)
    per_batch = np.tile(per_step, int(taken.max(initial=0)) // length.batches)
    gradients = per_batch * (np.arange(len(per_batch)) < taken[:, None])
    if dp is not None and dp.sampling == "poisson":
        expected = np.minimum(sizes, batch) if batch > 0 else sizes
        samples = np.broadcast_to(expected[:, None], gradients.shape)
    else:
        samples = batch_sizes(sizes, batch, taken, first, cohort.min_batch)
    work = account(request, positions, gradients, samples)
    loss = torch.zeros(len(positions)) if stacked else torch.zeros(())
    return FitResult(loss, work if stacked else work[0], start)


class GradientStep:
    """Takes the steps of one fit.

    Args:
        request: the call of `Client.fit`.
        plan: the clients' batches.
        public: the terms on public samples.
        stacked: whether tensors have an axis of clients.
    """

    def __init__(
        self, request: FitRequest, plan: BatchPlan, public: Sequence[PublicTerm], stacked: bool
    ) -> None:
        cohort, rule = request.cohort, request.rule
        self.request, self.public, self.stacked = request, public, stacked
        self.objective = LocalObjective(cohort.model, cohort.loss, request.private)
        self.custom = request.direction is not None or request.dp is not None
        self.steps = plan.steps // request.length.batches
        """Steps of every client on new batches, int64 [clients]."""
        self.gradients = (plan.count > 0) * (0 if self.custom else request.length.repeat)
        """Number of gradients computed on each batch, int64 [clients, batches]."""
        pulled = bool(public) or request.centre is not None
        self.bare = not (stacked or self.custom or pulled or request.clip is not None or rule.own != 1)
        """Whether a step is one client's, along its gradient only."""
        self.places: dict[str, range] = {}
        """Positions of each component's trained tensors among those of all components."""
        for name, names in request.trained.items():
            first = sum(map(len, self.places.values()))
            self.places[name] = range(first, first + len(names))
        self._single_users: dict[frozenset[str], tuple[bool, ...]] = {}

    def take(self, clients: ActiveClients, step: Step) -> Tensor:
        """Take a step in place and return the loss of each client before it."""
        if self.custom:
            gradient = CustomGradient(self.request, self.objective, clients, step.batches, self.stacked)
            for turn, slopes in gradient.turns():
                self._move(clients, step, turn, slopes)
            first = step.at * len(step.batches)
            self.gradients[step.who, first : first + len(step.batches)] += gradient.taken
            return gradient.close()
        (batch,), component = step.batches, clients.components[0]
        if not self.stacked:
            value, slopes = client_gradient(self.objective, component, clients.params, batch)
            self._move(clients, step, tuple(self.places), slopes)
            return value
        # A public term is evaluated at the parameters before the step, so none may move before it.
        shares = {} if self.public else self._shares(clients, step)
        leaves = _leaves(clients.params)
        value, remaining = cohort_gradient(self.objective, component, leaves, batch, shares)
        self._move(clients, step, tuple(self.places), remaining)
        return value

    def mean(self, losses: Sequence[tuple[Which, Tensor]]) -> Tensor:
        """Return the mean over steps of each client's losses, [clients] (0-d for one client)."""
        device = self.request.cohort.device
        if not self.stacked and not self.custom:
            values = [loss for _, loss in losses]
            return torch.stack(values).mean().float() if values else torch.zeros((), device=device)
        total = torch.zeros(len(self.steps), device=device)
        for which, loss in losses:
            total[which] += loss
        steps = torch.from_numpy(self.steps).to(device).clamp(min=1)
        mean = total / steps / self.request.length.repeat
        return mean if self.stacked else mean[0]

    def _pace(self, clients: ActiveClients, step: Step) -> float | Tensor:
        """Return η of a step: a number if all its clients have the same, else [clients]."""
        rule = self.request.rule
        rate = rule.lr if clients.rate is None else clients.rate
        if rule.schedule == "constant":
            return rate
        last = self.steps * self.request.length.repeat
        if not self.stacked:
            return rate * (1.0 - step.number / int(last[0]))
        steps = torch.from_numpy(last)[step.who].to(clients.keys.device, self.request.cohort.dtype)
        return rate * (1.0 - step.number / steps)

    def _move(
        self, clients: ActiveClients, step: Step, turn: Sequence[str], gradient: Sequence[Tensor | None]
    ) -> None:
        """Move the components of `turn` along their gradient, which is None for tensors that have moved already."""
        rule, params, memory = self.request.rule, clients.params, clients.memory
        pace = self._pace(clients, step)
        if self.bare:
            rule.apply(step.number, pace, params, memory, list(gradient))  # type: ignore[arg-type]
            return
        positions = [k for name in turn for k in self.places[name]]
        slopes = {k: g for k, g in zip(positions, gradient, strict=True) if g is not None}
        for term in self.public:
            pushed = term.gradient(clients.components[0], params, step.at, step.who)
            torch._foreach_add_(list(slopes.values()), pushed)
        if not slopes:
            return
        if clients.centre is not None:
            self._pull(clients, slopes, clients.centre)
        if self.request.clip is not None:
            for owned in (part for name in turn for part in self._by_owner(self.places[name]) if part):
                clip_norm([slopes[k] for k in owned], self.request.clip, self.stacked)
        of_model, of_own = (list(slopes), []) if rule.own == 1 else self._by_owner(list(slopes))
        for chosen, share in ((of_model, 1.0), (of_own, rule.own)):
            if chosen:
                copies = range(0, len(memory), len(params))
                remembered = [memory[first + k] for first in copies for k in chosen]
                moved, along_them = [params[k] for k in chosen], [slopes[k] for k in chosen]
                rule.apply(step.number, pace * share, moved, remembered, along_them)

    def _by_owner(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return positions of the model's tensors, and of those that only terms use; clip and rate are separate."""
        names = [n for names in self.request.trained.values() for n in names]
        model_names = self.objective.model.sizes
        return [k for k in positions if names[k] in model_names], [
            k for k in positions if names[k] not in model_names
        ]

    def _pull(self, clients: ActiveClients, slopes: dict[int, Tensor], centre: list[Tensor]) -> None:
        """Add the gradient of the proximal penalty."""
        pull = torch._foreach_sub([clients.params[k] for k in slopes], [centre[k] for k in slopes])
        gradient, strength = list(slopes.values()), self.request.strength
        if clients.strength is None:
            assert isinstance(strength, float | int)
            torch._foreach_add_(gradient, pull, alpha=strength)
        else:
            torch._foreach_add_(gradient, [along(clients.strength, d) * d for d in pull])

    def _shares(self, clients: ActiveClients, step: Step) -> dict[int, WeightStep]:
        """Return the step of each parameter that may step inside the backward pass, by its memory address.

        Only for cohorts with plain gradient descent, where nothing else needs the gradient first.
        """
        rule, model = self.request.rule, self.objective.model
        if self.request.clip is not None or rule.memories or rule.own != 1:
            return {}
        component, centre = clients.components[0], clients.centre
        # Terms may use a weight again, so results of one fit do not hold for another.
        single_use = self._single_users if self.objective.terms else model.single_users
        if component.names not in single_use:
            leaves = _leaves(clients.params)
            single_use[component.names] = single_users(self.objective, component, leaves, step.batches[0])
        pace = self._pace(clients, step)
        pull: float | Tensor = 0.0
        if centre is not None:
            strength = self.request.strength if clients.strength is None else clients.strength
            pull = pace * (0.0 if strength is None else strength)
        keep = 1.0 - pace * rule.weight_decay - pull
        return {
            p.data_ptr(): WeightStep(pace, keep, pull, None if centre is None else centre[k])
            for k, (p, single) in enumerate(zip(clients.params, single_use[component.names], strict=True))
            if single
        }


def _leaves(params: Sequence[Tensor]) -> list[Tensor]:
    """Return leaf tensors for computing gradients.

    A slice of a leaf also reports `is_leaf`, but autograd does not see its use.
    """
    return [p if p.requires_grad and p._base is None else p.detach().requires_grad_() for p in params]


def fit(position: Tensor, request: FitRequest) -> FitResult | None:
    """Train the client at `position` of the cohort, alone or under `torch.func.vmap`; None if it takes no step.

    Raises:
        ClientError: training failed; names client, round and stage.
    """
    if not request.takes_a_step:
        return None
    return apply(Fit(request), position, request.inputs())


class Fit(Operation[FitResult]):
    """A fit of a cohort as an operation."""

    def __init__(self, request: FitRequest) -> None:
        self.request, self.cohort, self.stage = request, request.cohort, request.purpose

    def run(self, positions: tuple[int, ...], inputs: dict[str, Any], stacked: bool) -> FitResult:
        """Train the clients at `positions` from the tensors of a request, which are `Mapped` if `stacked`."""
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
