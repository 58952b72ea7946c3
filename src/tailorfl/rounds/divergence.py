"""Numbers that are not finite: the clients they come from, the term of the method that made them, and the fix.

To find the term, the first client that diverged trains once more with its terms watched. Rounds without divergence have
no overhead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.method import Method
from tailorfl.engines.base import CohortTask, Parts, Stored
from tailorfl.errors import DivergenceError, ModelError, TailorflError, first_few
from tailorfl.models.mapping import physical
from tailorfl.rounds.federated_run import FederatedRun
from tailorfl.rounds.groups import message_for
from tailorfl.rounds.one_round import Trained
from tailorfl.training import tree
from tailorfl.training.objective import Seen, Term

log = logging.getLogger(__name__)


def rejected_clients(run: FederatedRun, done: Sequence[Trained]) -> tuple[int, ...]:
    """Return the clients whose update is not finite, in rising order.

    Raises:
        DivergenceError: no update is finite.
    """
    answered = sum(len(t.ids) for t in done)
    rejected = tuple(
        sorted(c for t in done for c, ok in zip(t.ids, t.finite.tolist(), strict=True) if not ok)
    )
    diverged = tuple(i for i in rejected if i not in run.malicious.clients)
    if diverged and len(rejected) < answered:
        log.warning(
            "round %d: update of client %s is not finite and was rejected (%s)",
            run.round + 1,
            listed(diverged),
            (not run.is_blamed and _blamed_term(run, done)) or "learning rate too high?",
        )
        run.is_blamed = True
    # With client-level privacy, stopping would reveal a single client's update.
    if diverged and len(rejected) == answered and run.client_dp is None:
        raise DivergenceError(
            f"round {run.round + 1}: all {answered} clients diverged (updates are NaN or infinite); "
            + (_blamed_term(run, done) or why_all_diverged(run.server, run.method.server_settings))
        )
    return rejected


def _blamed_term(run: FederatedRun, done: Sequence[Trained]) -> str:
    """Return the first term that was not finite, of the first client that diverged; "" if there is none.

    Only batches whose loss is finite are checked: the terms' values and gradients. Under privacy, which must not reveal
    single batches or clients, the result is "".
    """
    if run.level is not None:
        return ""
    bad = ((t, k) for t in done for k, ok in enumerate(t.finite.tolist()) if not ok)
    part, k = next((t, k) for t, k in bad if t.ids[k] not in run.malicious.clients)
    message = message_for(part.message, part.group, (k,))
    watched = CohortTask.of(_Watched(run.method), run.cohort((part.ids[k],)), message)
    try:
        with torch.no_grad():
            run.engine.map(watched, Stored(part.group.states))
    except _NotFiniteError as blamed:
        return f"{run.local.about} of client {part.ids[k]}, round {run.round + 1}: {blamed}"
    return ""


def check_server(old: TensorDict, new: TensorDict, round: int, options: Sequence[str]) -> None:
    """Check that the server's state holds no NaN or infinity that it did not hold before.

    `options` are the settings of the method that the server's step depends on.

    Raises:
        DivergenceError: it does, though every update that it was made from is finite.
    """
    before = dict(tree.leaves(old))
    for path, tensor in tree.leaves(new):
        bad = ~torch.isfinite(tensor) if tensor.is_floating_point() else torch.zeros(())
        earlier = before.get(path)
        if earlier is not None and earlier.shape == tensor.shape and earlier.is_floating_point():
            bad = bad & torch.isfinite(earlier)
        if bad.any():
            raise DivergenceError(
                f"round {round}: the server's '{path}' is NaN or infinite after aggregation, though every update was "
                f"finite: {_too_long(options)}"
            )


HUGE = 1e6
"""Size of numbers in the server's state from which its own step, if it has one, is blamed for diverging clients."""


def why_all_diverged(server: TensorDict, options: Sequence[str]) -> str:
    """Return advice if no client's update was finite; the state they received decides whether to blame the server."""
    floats = [t for _, t in tree.leaves(server) if t.is_floating_point() and t.numel()]
    largest = max((float(t.abs().max()) for t in floats), default=0.0)
    if largest > HUGE and options:
        return f"the server had sent values up to {largest:.2g}: {_too_long(options)}"
    grown = (
        f"clients' models had reached values up to {largest:.2g} in earlier rounds: "
        if largest > HUGE
        else ""
    )
    return f"{grown}lower train.lr, set train.clip, or check the scale of the data"


def _too_long(options: Sequence[str]) -> str:
    named = f" ({', '.join(options)})" if options else ""
    return f"the server's step is too large, not train.lr; lower the method's server settings{named}"


def listed(clients: Sequence[int], most: int = 20) -> str:
    """Return at most `most` ids for a message."""
    return first_few([str(client) for client in clients], most)


class _NotFiniteError(TailorflError):
    """A term is not finite; ends the training that is watched."""


@dataclass(frozen=True)
class _Watched:
    """The client function of a round with its terms watched; it returns an empty state."""

    method: Method

    def __call__(self, client: Client, state: TensorDict, received: TensorDict) -> Parts:
        self.method.local(_Watching(client._cohort, client._position), state, received)
        return (tree.empty(),)


class _Watching(Client):
    """A client whose fits stop at the first term that is not finite."""

    def fit(self, start: Any, **options: Any) -> Any:
        """Return `start` trained."""
        terms_given, purpose = options.get("term", ()), options.get("purpose", "train")
        terms = (terms_given,) if isinstance(terms_given, Term) else tuple(terms_given)
        watched = [replace(t, function=_Watch(t, k, purpose)) for k, t in enumerate(terms, start=1)]
        return super().fit(start, **{**options, "term": watched})


class _Watch:
    """The function of a term, which counts its batches and checks its values."""

    def __init__(self, term: Term, number: int, purpose: str) -> None:
        self.term, self.batch = term, 0
        self.name = f"term {number} ({_name(term.function)}) of its fit '{purpose}'"

    def __call__(self, seen: Seen, *inputs: Any) -> Any:
        value, state = self.term.value(seen, inputs)
        self._look(seen, value)
        return (value, state) if self.term.keeps else value

    def _look(self, seen: Seen, value: Tensor) -> None:
        """Raise _NotFiniteError if this term is not finite though the model is."""
        self.batch += 1
        public = self.term.public is not None
        term_value, model_value = physical(value)[0], physical(seen.outputs if public else seen.loss)[0]
        if not _finite(model_value):
            return  # the model itself has already diverged
        if not _finite(term_value):
            bad = f"is {term_value.sum().item()}"
        elif not all(map(_finite, _slopes(term_value, seen))):
            bad = f"is {term_value.sum().item():.4g} with a gradient that is not finite"
        else:
            return
        comparison = (
            "the model's outputs are finite"
            if public
            else f"the run's loss is {model_value.sum().item():.4g}"
        )
        raise _NotFiniteError(
            f"{self.name} {bad} at batch {self.batch}, where {comparison}; keep the arguments of roots and logarithms, "
            "and denominators, away from 0: x.clamp(min=1e-12).sqrt(), torch.where(x > 0, x, 1.0).log()"
        )


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _slopes(value: Tensor, seen: Seen) -> list[Tensor]:
    """Gradients of a term with respect to those of the model's outputs, parameters and features that it depends on."""
    sources = [seen.outputs, *seen.own.values()]
    with contextlib.suppress(ModelError):  # the model has no feature layer, so no term uses features
        sources.append(seen.features)
    inputs = [t for t in (physical(source)[0] for source in sources) if t.requires_grad]
    if not value.requires_grad or not inputs:
        return []
    slopes = torch.autograd.grad(value.sum(), inputs, retain_graph=True, allow_unused=True)
    return [slope for slope in slopes if slope is not None]


def _name(function: Callable[..., Tensor]) -> str:
    inside = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inside, "__name__", type(inside).__name__))
