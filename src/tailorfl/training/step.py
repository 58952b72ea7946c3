"""How the clients of a fit take a step: along a gradient, a proximal pull and terms on public samples.

g = ∇F(p; batch)                 or the method's own direction (SAM, APFL, ...), or a private gradient
g = g + ∇T(p; public batch)      terms on public samples
g = g + λ(p − centre)            proximal pull, penalty (λ/2)‖p − centre‖²
p moves along g by the rule of an optimizer, see `tailorfl.training.update`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailorfl.models.cohort_layers import WeightStep
from tailorfl.training.active import ActiveClients, Which
from tailorfl.training.batches import Step
from tailorfl.training.custom_gradient import CustomGradient
from tailorfl.training.gradients import LocalObjective, client_gradient, cohort_gradient, single_users
from tailorfl.training.plan import BatchPlan
from tailorfl.training.public_term import PublicTerm
from tailorfl.training.request import FitRequest
from tailorfl.training.update import along, clip_norm


class GradientStep:
    """Takes the steps of one fit.

    Args:
        request: what is asked of it.
        plan: the batches of its clients.
        public: its terms on public samples.
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
        """Of every client on new batches, int64 [clients]."""
        self.gradients = (plan.count > 0) * (0 if self.custom else request.length.repeat)
        """How many were taken of each batch, int64 [clients, batches]."""
        pulled = bool(public) or request.centre is not None
        self.bare = not (stacked or self.custom or pulled or request.clip is not None or rule.own != 1)
        """Whether it is of one client along its gradient alone."""
        self.places: dict[str, range] = {}
        """Where the trained tensors of each component are among those of all."""
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
        # A public term is taken at the parameters before the step, so they must all wait for it.
        shares = {} if self.public else self._shares(clients, step)
        leaves = _leaves(clients.params)
        value, left = cohort_gradient(self.objective, component, leaves, batch, shares)
        self._move(clients, step, tuple(self.places), left)
        return value

    def mean(self, losses: Sequence[tuple[Which, Tensor]]) -> Tensor:
        """Return the mean over steps of each client's losses, [clients] (0-d of one client)."""
        device = self.request.cohort.device
        if not self.stacked and not self.custom:
            values = [loss for _, loss in losses]
            return torch.stack(values).mean().float() if values else torch.zeros((), device=device)
        total = torch.zeros(len(self.steps), device=device)
        for who, loss in losses:
            total[who] += loss
        steps = torch.from_numpy(self.steps).to(device).clamp(min=1)
        mean = total / steps / self.request.length.repeat
        return mean if self.stacked else mean[0]

    def _pace(self, clients: ActiveClients, step: Step) -> float | Tensor:
        """Return η of a step: a number where all its clients have the same, else [clients]."""
        rule = self.request.rule
        rate = rule.lr if clients.rate is None else clients.rate
        if rule.schedule == "constant":
            return rate
        last = self.steps * self.request.length.repeat
        if not self.stacked:
            return rate * (1.0 - step.number / int(last[0]))
        return rate * (1.0 - step.number / torch.from_numpy(last)[step.who].to(clients.keys.device))

    def _move(
        self, clients: ActiveClients, step: Step, turn: Sequence[str], gradient: Sequence[Tensor | None]
    ) -> None:
        """Move the components of `turn` along their gradient, which is None where a tensor has moved already."""
        rule, params, memory = self.request.rule, clients.params, clients.memory
        pace = self._pace(clients, step)
        if self.bare:
            rule.apply(step.number, pace, params, memory, list(gradient))  # type: ignore[arg-type]
            return
        where = [k for name in turn for k in self.places[name]]
        slopes = {k: g for k, g in zip(where, gradient, strict=True) if g is not None}
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
        for places, share in ((of_model, 1.0), (of_own, rule.own)):
            if places:
                copies = range(0, len(memory), len(params))
                remembered = [memory[first + k] for first in copies for k in places]
                moved, along_them = [params[k] for k in places], [slopes[k] for k in places]
                rule.apply(step.number, pace * share, moved, remembered, along_them)

    def _by_owner(self, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """Places of tensors of the model, and of those that only terms use: clipped and paced apart."""
        names = [n for names in self.request.trained.values() for n in names]
        known = self.objective.model.sizes
        return [k for k in places if names[k] in known], [k for k in places if names[k] not in known]

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
        """Return what happens to each parameter that may step inside the backward pass, by its place in memory.

        That is for cohorts and plain gradient descent, where nothing has to see the gradient first.
        """
        rule, model = self.request.rule, self.objective.model
        if self.request.clip is not None or rule.memories or rule.own != 1:
            return {}
        component, centre = clients.components[0], clients.centre
        # A term may use a weight once more, so what is known of one fit says nothing of another.
        known = self._single_users if self.objective.terms else model.single_users
        if component.names not in known:
            leaves = _leaves(clients.params)
            known[component.names] = single_users(self.objective, component, leaves, step.batches[0])
        pace = self._pace(clients, step)
        pull: float | Tensor = 0.0
        if centre is not None:
            strength = self.request.strength if clients.strength is None else clients.strength
            pull = pace * (0.0 if strength is None else strength)
        keep = 1.0 - pace * rule.weight_decay - pull
        return {
            p.data_ptr(): WeightStep(pace, keep, pull, None if centre is None else centre[k])
            for k, (p, single) in enumerate(zip(clients.params, known[component.names], strict=True))
            if single
        }


def _leaves(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that gradients are taken of.

    A slice of a leaf calls itself a leaf too, but autograd does not see it
    used.
    """
    return [p if p.requires_grad and p._base is None else p.detach().requires_grad_() for p in params]
