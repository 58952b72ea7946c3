"""Which term of a method is to blame for an update that is not finite: its client trains once more, watched.

Rounds that go well pay nothing for it, and of one that does not a single client is looked at.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.method import Method
from tailorfl.engines.base import Engine, Stored, Visit
from tailorfl.engines.results import Parts
from tailorfl.errors import ModelError, TailorflError
from tailorfl.models.mapping import physical
from tailorfl.training import tree
from tailorfl.training.terms import Seen, Term


class _NotFinite(TailorflError):
    """A term is to blame; ends the training that is watched."""


def term_to_blame(method: Method, visit: Visit, states: Stored, engine: Engine) -> str:
    """Returns which term of the one client of `visit` was the first that was not finite; "" if none was.

    Looked at are the terms of batches whose loss is finite, their values and their gradients. Under sample-level
    privacy, which must not show what single batches are, the answer is "".
    """
    if visit.cohort.config.dp is not None:
        return ""
    try:
        engine.map(replace(visit, function=_Watched(method)), states)
    except _NotFinite as found:
        return f"{visit.about} of client {visit.cohort.ids[0]}, round {visit.cohort.round + 1}: {found}"
    return ""


@dataclass(frozen=True)
class _Watched:
    """The client function of a round, with terms that are watched; it returns nothing."""

    method: Method

    def __call__(self, client: Client, state: TensorDict, received: TensorDict) -> Parts:
        self.method.local(_Watching(client._cohort, client._position), state, received)
        return (tree.empty(),)


class _Watching(Client):
    """A client whose fits end at the first term that is not finite."""

    def fit(self, start: Any, **options: Any) -> Any:
        """Returns `start` trained."""
        given, purpose = options.get("term", ()), options.get("purpose", "train")
        terms = (given,) if isinstance(given, Term) else tuple(given)
        watched = [replace(t, function=_Watch(t, k, purpose)) for k, t in enumerate(terms, start=1)]
        return super().fit(start, **{**options, "term": watched})


class _Watch:
    """The function of a term, which counts the batches it is asked about and looks at what it says of them."""

    def __init__(self, term: Term, number: int, purpose: str) -> None:
        self.term, self.batch = term, 0
        self.name = f"term {number} ({_name(term.function)}) of its fit '{purpose}'"

    def __call__(self, seen: Seen, *given: Any) -> Any:
        value, kept = self.term.value(seen, given)
        self._look(seen, value)
        return (value, kept) if self.term.keeps else value

    def _look(self, seen: Seen, value: Tensor) -> None:
        """Raises _NotFinite where this term is the first that is not finite."""
        self.batch += 1
        public = self.term.public is not None
        said, known = physical(value)[0], physical(seen.outputs if public else seen.loss)[0]
        if not _finite(known):
            return  # the model itself is past mending
        if not _finite(said):
            bad = f"is {said.sum().item()}"
        elif not all(map(_finite, _slopes(said, seen))):
            bad = f"is {said.sum().item():.4g} with a gradient that is not finite"
        else:
            return
        beside = "the model's outputs are finite" if public else f"the run's loss is {known.sum().item():.4g}"
        raise _NotFinite(
            f"{self.name} {bad} at batch {self.batch}, where {beside}; keep roots, logarithms and quotients away from "
            "0 before they are taken: x.clamp(min=1e-12).sqrt(), torch.where(x > 0, x, 1.0).log()"
        )


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _slopes(value: Tensor, seen: Seen) -> list[Tensor]:
    """Gradients of a term by what it sees of the model, where it depends on it."""
    found = [seen.outputs, *seen.own.values()]
    with contextlib.suppress(ModelError):  # a model without a layer that has features: no term uses them
        found.append(seen.features)
    inputs = [t for t in (physical(one)[0] for one in found) if t.requires_grad]
    if not value.requires_grad or not inputs:
        return []
    slopes = torch.autograd.grad(value.sum(), inputs, retain_graph=True, allow_unused=True)
    return [slope for slope in slopes if slope is not None]


def _name(function: Callable[..., Tensor]) -> str:
    inside = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inside, "__name__", type(inside).__name__))
