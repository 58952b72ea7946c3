"""What a round of a method really does: its trainings, counted without training, and the chunks an engine cuts.

The clients' code runs on cohorts that count only (`training/counting.py`), with a client that writes down every fit. So
the plain loop can be given as many steps, and what it lacks can be said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import RUN, Client
from tailorfl.engines.auto import Auto
from tailorfl.engines.base import CohortTask
from tailorfl.engines.in_process import InProcessEngine
from tailorfl.engines.sequential import Sequential
from tailorfl.engines.vectorized import Vectorized
from tailorfl.rounds.groups import Group, by_group, message_for
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.cohort import Cohort
from tailorfl.training.custom_gradient import gradients_asked
from tailorfl.training.plan import BatchPlan, Length, runs
from tailorfl.training.request import is_beside, resolved
from tailorfl.training.terms import Term


class Request(NamedTuple):
    """Which batches a fit asks for, in the order of `Cohort.plan`'s arguments."""

    purpose: str
    batch: int
    epochs: float | None
    steps: int | None
    first: int
    batches: int


@dataclass(frozen=True)
class CountedFit:
    """One fit of one client."""

    request: Request
    steps: int
    """Steps, those on a repeated batch included."""
    models: int
    """How many models it trains together."""
    repeat: int
    gradients: int
    """Gradients that a step takes, of all models and batches together."""
    trained: tuple[str, ...]
    """Names of the trained parameters of each model."""
    extras: tuple[str, ...]
    """What it does beyond steps along the gradient of a batch."""


@dataclass(frozen=True)
class Part:
    """The clients of one architecture in a round, and what they are given."""

    group: Group
    task: CohortTask
    states: TensorDict

    @property
    def cohort(self) -> Cohort:
        """The clients."""
        return self.task.cohort

    def on(self, cohort: Cohort) -> Part:
        """Returns the part with another cohort of as many clients."""
        return replace(self, task=replace(self.task, cohort=cohort))


@dataclass(frozen=True)
class Work:
    """What the clients of one architecture do in a round."""

    part: Part
    fits: tuple[tuple[CountedFit, ...], ...]
    """Of every client, in the order of the cohort."""
    looks: frozenset[str]
    """What clients do beside their fits."""

    @property
    def steps(self) -> int:
        """Steps of all clients, those of models that train together counted for each."""
        return sum(fit.steps * fit.models for fits in self.fits for fit in fits)

    @property
    def extras(self) -> tuple[str, ...]:
        """What the method does beyond plain training, in words, each once."""
        found = dict.fromkeys(extra for fits in self.fits for fit in fits for extra in fit.extras)
        return (*found, *sorted(self.looks))

    def samples(self) -> dict[tuple[str, ...], int]:
        """Gradients of one sample that all clients take, by the names of the trained parameters."""
        found: dict[tuple[str, ...], int] = {}
        everyone = tuple(range(len(self.fits)))
        for number, first in enumerate(self.fits[0] if self.fits else ()):
            count = self.part.cohort.plan(everyone, *first.request).count
            times = first.repeat * first.gradients / first.request.batches
            found[first.trained] = found.get(first.trained, 0) + round(int(count.sum()) * times)
            assert all(fits[number].request == first.request for fits in self.fits)
        return found


def parts_of(sim: Simulation, training: Sequence[int]) -> Iterator[Part]:
    """Yields what the clients `training` are given in a simulation's next round, by architecture."""
    message = sim.method.broadcast(sim.server, tuple(training))
    for group, where in by_group(sim.groups, training):
        ids = tuple(training[k] for k in where)
        task = CohortTask.of(sim.local, sim.cohort(ids), message_for(message, group, where))
        yield Part(group, task, group.states.get(ids))


def count_work(sim: Simulation, part: Part) -> Work:
    """Returns what the clients of a part do in the next round; nothing is trained."""
    clients: list[list[CountedFit]] = []
    looks: set[str] = set()

    def counted(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, ...]:
        clients.append([])
        sim.method.local(_Counting(client, clients[-1], looks), state, received)
        return (tree.empty(),)

    task = replace(part.task, function=counted, cohort=replace(part.cohort, counting=True, plans={}))
    with torch.no_grad():
        Sequential().map(task, part.states)
    return Work(part, tuple(map(tuple, clients)), frozenset(looks))


def chunks_of(engine: Auto | InProcessEngine, cohort: Cohort) -> list[Cohort]:
    """Returns the clients that an engine trains together; none where it trains every client alone."""
    current = engine.current if isinstance(engine, Auto) else engine
    if not isinstance(current, Vectorized):
        return []
    return [cohort.part(positions.tolist()) for positions in current.chunks(cohort)]


def padding_of(chunks: Sequence[Cohort], fits: Sequence[CountedFit]) -> float:
    """Returns the samples that chunks compute in `fits`, over the real ones, minus 1; 0 where nothing is trained."""
    computed = real = 0
    for chunk in chunks:
        for fit in fits:
            plan = chunk.plan(tuple(range(len(chunk.ids))), *fit.request)
            real += int(plan.count.sum()) * fit.repeat
            computed += _computed(plan, chunk.model.has_batch_statistics) * fit.repeat
    return computed / real - 1.0 if real else 0.0


def _computed(plan: BatchPlan, apart: bool) -> int:
    """Samples that a chunk computes: every batch as wide as the widest of its step, of those still active.

    `apart`: batches of unequal sizes are computed apart, as batch statistics need it.
    """
    if apart or not plan.count.size:
        return int(plan.count.sum())
    return sum((b - a) * int(plan.count[a:b, at].max()) for at, cut in enumerate(runs(plan)) for a, b in cut)


class _Counting(Client):
    """A client of a cohort that counts, which writes down its fits."""

    def __init__(self, client: Client, fits: list[CountedFit], looks: set[str]) -> None:
        super().__init__(client._cohort, client._position)
        self._found, self._looks = fits, looks

    def fit(self, start: Any, *args: Any, **options: Any) -> Any:
        """Returns `start` and notes what would be done with it."""
        given = dict(options)
        direction, extra = given.get("direction"), tuple(given.get("given", ()))
        length: Length = given.get("length", RUN)
        batch, epochs, steps = resolved(self.config, length)
        if isinstance(steps, Tensor):
            steps = int(steps)
        batches = length.batches
        taken = int(self.steps(replace(length, steps=steps, epochs=epochs)))
        train = given.get("train")
        wanted = set(self.split.trainable if train is None else train)
        trained = tuple(n for n in self._cohort.model.parameters if n in wanted)
        components = {"": start} if isinstance(start, TensorDict) else dict(start.items())
        beside = {n for n, state in components.items() if is_beside(self._cohort, dict(state.items()))}
        models = len(components) - len(beside)
        if trained:
            asked = models
            if direction is not None:
                moved = {n: s if n in beside else s.select(*trained) for n, s in components.items()}
                of_names = moved[""] if "" in moved else TensorDict(moved, batch_size=[])
                asked = sum(gradients_asked(direction, of_names, extra, batches))
            repeat = length.repeat
            request = Request(given.get("purpose", "train"), batch, epochs, steps, length.first, batches)
            extras = tuple(self._extras(given, direction is not None, asked, models))
            self._found.append(CountedFit(request, taken * repeat, models, repeat, asked, trained, extras))
        return super().fit(start, *args, **options)

    def loss(self, state: TensorDict, part: str = "train") -> Tensor:
        """Returns 0 and notes that a loss was asked for."""
        self._looks.add("clients evaluate losses")
        return super().loss(state, part)

    def summed(self, state: TensorDict, *args: Any, **options: Any) -> Tensor:
        """Returns sums over no samples and notes that they were asked for."""
        self._looks.add("clients sum over their samples")
        return super().summed(state, *args, **options)

    def class_counts(self) -> Tensor:
        """Returns the samples of each class and notes that they were asked for."""
        self._looks.add("clients count their classes")
        return super().class_counts()

    def predict_public(self, state: TensorDict) -> Tensor:
        """Returns outputs on the public set and notes that they were asked for."""
        self._looks.add("clients predict the public set")
        return super().predict_public(state)

    def _extras(self, given: dict[str, Any], directed: bool, asked: int, models: int) -> Iterator[str]:
        if directed:
            each = asked / models
            yield f"a direction of its own ({each:g} gradient{'s' if each != 1 else ''} a step and model)"
        if given.get("prox") is not None:
            yield "a proximal pull"
        terms = given.get("term", ())
        for term in (terms,) if isinstance(terms, Term) else terms:
            yield "a term on public data" if term.public is not None else "a term of the loss"
        if self.config.class_weights != "none":
            yield "class weights"
        if self.config.balanced:
            yield "the balanced softmax"
        if self.config.dp is not None:
            yield "the clipped, noisy gradient of every sample"
