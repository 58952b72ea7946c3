"""The client handle: what the client half of a method may use, and the one entrance to local training.

A method's `local` and `personal` are written for ONE client. Under an engine that maps them over a cohort
with `torch.func.vmap`, the handle's operations (`fit`, `loss`) carry their own batching rule
(`torch.autograd.Function.vmap`): they see the whole cohort's physical tensors, train it in one loop and hand
back per-client results. So client code is pure mathematics, and the loop underneath still works in place and
without padding idle clients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core import tree
from tailorfl.core.ascent import Ascent
from tailorfl.core.gradients import Carry, Direction, Gradient, Objective
from tailorfl.core.keys import derive
from tailorfl.core.local_sgd import FitOptions, LocalSGD
from tailorfl.core.objective import Loss
from tailorfl.core.plan import BatchPlan, Rows, make_plan, steps_of
from tailorfl.core.privacy import SampleDP, check_separable
from tailorfl.data.source import Source
from tailorfl.errors import ClientError, TailorflError
from tailorfl.models.functional import Model
from tailorfl.models.split import Split

PLAN_BLOCK = 64
"""Clients whose batches are planned together when they run one by one."""


@dataclass(frozen=True)
class TrainConfig:
    """Defaults of local training; a method may override any of them for one fit."""

    epochs: int | None = 1
    steps: int | None = None
    batch_size: int = 10
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    dp: SampleDP | None = None


@dataclass(frozen=True)
class Cohort:
    """The clients that run together, and all they may see: their own rows, the model, the round's key."""

    ids: tuple[int, ...]
    members: tuple[Rows, ...]
    """Training rows of each client, in the order of `ids`."""
    val: tuple[Rows, ...]
    source: Source
    model: Model
    split: Split
    loss: Loss
    config: TrainConfig
    seed: int
    round: int
    limit: int | None = None
    """At most this many steps a fit: 0 turns training off (evaluating newcomers without adaptation)."""
    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def part(self, positions: Sequence[int]) -> Cohort:
        """Returns the cohort of the clients at `positions`."""
        take = [int(p) for p in positions]
        return replace(
            self,
            ids=tuple(self.ids[p] for p in take),
            members=tuple(self.members[p] for p in take),
            val=tuple(self.val[p] for p in take),
            plans={},
        )

    @property
    def sizes(self) -> Rows:
        """[clients] int64: training samples of each client."""
        return np.array([len(m) for m in self.members], dtype=np.int64)

    @property
    def min_batch(self) -> int:
        """Smallest batch a step may use: batch norm cannot train on a single sample."""
        return 2 if self.model.has_batch_statistics else 1

    def keys(self, positions: Sequence[int], purpose: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Returns one key a client for this round and purpose, uint64 [positions]."""
        ids = np.array([self.ids[p] for p in positions], dtype=np.uint64)
        return derive(self.seed, "client", self.round, purpose, ids)

    def plan(
        self,
        positions: tuple[int, ...],
        purpose: str,
        batch: int,
        epochs: int | None,
        steps: int | None,
        first: int,
    ) -> BatchPlan:
        """Returns the batch plan of the clients at `positions`.

        Equal arguments give equal plans in every cohort.
        """
        if len(positions) == 1:
            # One client of a loop: plan its whole block at once, which costs little more than planning one.
            block = positions[0] // PLAN_BLOCK * PLAN_BLOCK
            together = tuple(range(block, min(block + PLAN_BLOCK, len(self.ids))))
        else:
            together = positions
        request = (purpose, batch, epochs, steps, first)
        if self.plans.get("positions") != together:
            self.plans.clear()
            self.plans["positions"] = together
        if request not in self.plans:
            self.plans[request] = make_plan(
                [self.members[p] for p in together],
                self.keys(together, purpose),
                batch,
                epochs=epochs,
                steps=steps,
                first=first,
                min_batch=self.min_batch,
                limit=self.limit,
            )
        plan: BatchPlan = self.plans[request]
        return plan if together == positions else plan.of(positions[0] - together[0])


class Client:
    """One client inside `local` or `personal`; made by an engine, never by a method."""

    def __init__(self, cohort: Cohort, position: Tensor) -> None:
        self._cohort, self._position = cohort, position
        self.config = cohort.config
        self.split = cohort.split
        self.metrics: dict[str, Tensor] = {}
        """Mean training loss of each stage, 0-d tensors."""
        self._trainable = frozenset(cohort.split.trainable)
        self._fits = 0

    @property
    def samples(self) -> Tensor:
        """Number of training samples n_i, 0-d float tensor."""
        return torch.from_numpy(self._cohort.sizes).float()[self._position]

    def steps(
        self, epochs: int | None = None, steps: int | None = None, batch_size: int | None = None
    ) -> Tensor:
        """Number of SGD steps K a fit with these settings takes, 0-d float tensor."""
        c = self._cohort
        epochs, steps = self._length(epochs, steps)
        taken = steps_of(c.sizes, self._batch(batch_size), epochs, steps, c.min_batch)
        taken = taken if c.limit is None else np.minimum(taken, c.limit)
        return torch.from_numpy(taken).float()[self._position]

    def fit(
        self,
        start: TensorDict | Mapping[str, TensorDict],
        *,
        train: Collection[str] | None = None,
        prox: tuple[float | Tensor, TensorDict] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
        ascent: Ascent | None = None,
        direction: Direction | None = None,
        given: Sequence[Tensor | TensorDict] = (),
        repeat: int = 1,
        first: int = 0,
        purpose: str = "train",
    ) -> Any:
        """Returns `start` after mini-batch SGD on this client's training data; `start` itself is not changed.

        Args:
            start: a full model state, or several named ones that train together on the same batches (with
                `direction`).
            train: names of the parameters to train (default: all that the split does not freeze); modules
                with no trained parameter keep their batch-norm statistics.
            prox: (λ, centre): adds the penalty (λ/2)‖p − centre‖² over the trained parameters.
            epochs, steps: length; steps wins, None takes the run's setting.
            batch_size, lr, momentum, weight_decay: None takes the run's setting; batch 0 is the whole data
                set.
            ascent: sharpness-aware ascent (SAM, layer-wise SAM) before each gradient.
            direction: `direction(state, grad, *given)` returns what to descend along; `grad(parameters,
                of="")` is the batch gradient anywhere. It must take per-client tensors through `given`, not
                by closure.
            repeat: steps on each batch before the next is drawn.
            first: how many batches of this purpose's sequence to skip.
            purpose: which random sequence of batches; fits of equal purpose see the same batches in a round.

        Raises:
            ClientError: training failed; names client, round and stage.
        """
        components = {"": start} if isinstance(start, TensorDict) else dict(start)
        if ascent is not None:
            if direction is not None:
                raise TailorflError("fit() takes either `ascent` or `direction`, not both")
            direction, given = ascent.direction, ascent.given(given)
        wanted = set(self.split.trainable if train is None else train)
        names = tuple(n for n in self._cohort.model.parameters if n in wanted)
        config = self.config
        epochs, steps = self._length(epochs, steps)
        strength = prox[0] if prox is not None else None
        options = FitOptions(
            trained=tuple(names for _ in components),
            components=tuple(components),
            lr=config.lr if lr is None else lr,
            momentum=config.momentum if momentum is None else momentum,
            weight_decay=config.weight_decay if weight_decay is None else weight_decay,
            clip=config.clip,
            repeat=repeat,
            prox=None if isinstance(strength, Tensor) else strength,
            direction=direction,
            dp=config.dp,
            number=self._fits,
        )
        self._fits += 1
        if not names or (epochs == 0 and steps is None) or steps == 0 or self._cohort.limit == 0:
            return start if isinstance(start, TensorDict) else dict(start)
        call = _FitCall(self._cohort, options, purpose, self._batch(batch_size), epochs, steps, first)
        moving = self._cohort.model.trained_buffers(names)
        if config.dp is not None:
            check_separable(self._cohort.loss, moving)
        flat: list[Tensor] = []
        changing = {*names, *moving}
        for state in components.values():
            call.fixed_names = tuple(str(n) for n in state.keys() if n not in changing)  # noqa: SIM118
            flat += [state.get(n) for n in names + moving + call.fixed_names]
        call.moving_names = moving
        if prox is not None:
            centre: Mapping[str, Any] = {"": prox[1]} if isinstance(start, TensorDict) else prox[1]
            flat += [centre[c].get(n) for c in components for n in names]
            call.centred = True
            if isinstance(strength, Tensor):
                flat.append(strength)
                call.strong = True
        for item in given:
            parts = list(tree.leaves(item)) if isinstance(item, TensorDict) else [("", item)]
            call.given_paths.append(None if isinstance(item, Tensor) else tuple(p for p, _ in parts))
            flat += [t for _, t in parts]
        result = _apply(_Fit, call, self._position, *flat)
        self.metrics[purpose] = result[0]
        return call.rebuild(components, result[1:], isinstance(start, TensorDict))

    def loss(self, state: TensorDict, part: str = "train") -> Tensor:
        """Returns the mean loss of a model state on this client's `part` ("train" or "val"), 0-d tensor.

        The model is in evaluation mode; the mean over an empty part is 0.
        """
        names = tuple(str(n) for n in state.keys())  # noqa: SIM118
        call = _LossCall(self._cohort, part, names)
        return _apply(_Loss, call, self._position, *[state.get(n) for n in names])[0]

    def gradient(self, state: TensorDict) -> TensorDict:
        """Returns the gradient of the first training batch's loss at `state`, over the trainable parameters.

        Clipped or made private where the run's training is.
        """

        def store(states: TensorDict, grad: Gradient) -> TensorDict:
            g = grad(states["at"], of="at")
            return TensorDict({"at": g * 0.0, "found": g * -1.0}, batch_size=[])

        zero = TensorDict({n: torch.zeros_like(t) for n, t in tree.tensors(state).items()}, batch_size=[])
        metrics = dict(self.metrics)
        out = self.fit(
            {"at": state, "found": zero}, direction=store, steps=1, lr=1.0, momentum=0.0, weight_decay=0.0
        )
        self.metrics = metrics  # the loss of this one batch is not the loss of a training
        return self.parameters(out["found"])

    def parameters(self, state: TensorDict) -> TensorDict:
        """Returns the trainable parameters of a model state, without running statistics and frozen parts."""
        return state.select(*(n for n in self._cohort.model.parameters if n in self._trainable))

    def select(self, part: str) -> tuple[str, ...]:
        """Returns the names of a part of the model: head, body, norm, ..."""
        return Split.of(self._cohort.model.module, personal=part).personal

    def _batch(self, batch_size: int | None) -> int:
        return self.config.batch_size if batch_size is None else batch_size

    def _length(self, epochs: int | None, steps: int | None) -> tuple[int | None, int | None]:
        if epochs is None and steps is None:
            epochs, steps = self.config.epochs, self.config.steps
        return (None, steps) if steps is not None else (epochs, None)


class _FitCall:
    """One `fit` of a cohort: everything that is not a tensor."""

    def __init__(
        self,
        cohort: Cohort,
        options: FitOptions,
        purpose: str,
        batch: int,
        epochs: int | None,
        steps: int | None,
        first: int,
    ) -> None:
        self.cohort, self.options = cohort, options
        self.purpose, self.batch, self.epochs, self.steps, self.first = purpose, batch, epochs, steps, first
        self.moving_names: tuple[str, ...] = ()
        self.fixed_names: tuple[str, ...] = ()
        self.centred = False
        self.strong = False
        self.given_paths: list[tuple[str, ...] | None] = []

    def run(
        self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Sequence[int | None] | None
    ) -> tuple[Tensor, ...]:
        """Trains the clients at `positions`.

        `dims` are the client axes of `tensors`, or None for one client without axis.
        """
        stacked = dims is not None
        cohort, options = self.cohort, self.options
        plan = cohort.plan(positions, self.purpose, self.batch, self.epochs, self.steps, self.first)
        order, back = _by_falling_steps(plan)
        if order is not None:
            plan = BatchPlan(plan.rows[order], plan.count[order])
        clients = len(positions)
        arranged = _Arranged(tensors, dims, clients, None if order is None else torch.from_numpy(order))
        carries = []
        for names in options.trained:
            trained = {n: arranged.own() for n in names}
            moving = {n: arranged.own() for n in self.moving_names}
            shared = set()
            fixed = {}
            for n in self.fixed_names:
                fixed[n], alone = arranged.view()
                if alone:
                    shared.add(n)
            carries.append(Carry(trained, moving, fixed, frozenset(shared)))
        centre = [arranged.spread() for names in options.trained for _ in names] if self.centred else None
        strength = arranged.spread() if self.strong else None
        given = [arranged.spread() for paths in self.given_paths for _ in (("",) if paths is None else paths)]
        noise = cohort.keys(positions, self.purpose + "/noise").astype(np.int64)
        keys = torch.from_numpy(noise if order is None else noise[order]) + self.first * options.repeat
        loop = LocalSGD(Objective(cohort.model, cohort.loss), cohort.source, options, stacked)
        loss = loop.run(carries, plan, centre, strength, given, self._given, keys)
        out = [loss, *(t for c in carries for t in (*c.trained.values(), *c.moving.values()))]
        if back is not None and stacked:
            out = [t.index_select(0, back) for t in out]
        return tuple(out)

    def _given(self, flat: Sequence[Tensor]) -> tuple[Any, ...]:
        rest = iter(flat)
        return tuple(
            next(rest) if paths is None else tree.nest([(p, next(rest)) for p in paths])
            for paths in self.given_paths
        )

    def rebuild(self, start: Mapping[str, TensorDict], tensors: Sequence[Tensor], single: bool) -> Any:
        rest = iter(tensors)
        out = {}
        for (name, state), names in zip(start.items(), self.options.trained, strict=True):
            new = {n: next(rest) for n in (*names, *self.moving_names)}
            out[name] = TensorDict({n: new.get(n, t) for n, t in state.items()}, batch_size=[])
        return out[""] if single else out

    def where(self, positions: Sequence[int]) -> str:
        ids = [self.cohort.ids[p] for p in positions]
        return f"{_who(ids)}, round {self.cohort.round}, stage '{self.purpose}'"


class _Arranged:
    """Hands out the flat tensors of a call in turn, client axis first and clients in the plan's order."""

    def __init__(
        self, tensors: Sequence[Tensor], dims: Sequence[int | None] | None, clients: int, order: Tensor | None
    ) -> None:
        self.rest = iter(zip(tensors, dims if dims is not None else [None] * len(tensors), strict=True))
        self.stacked, self.clients, self.order = dims is not None, clients, order

    def own(self) -> Tensor:
        """The next tensor as a copy that may be written to."""
        tensor, dim = next(self.rest)
        if not self.stacked:
            return tensor.detach().clone()
        if dim is None:
            return (
                tensor.detach()
                .expand(self.clients, *tensor.shape)
                .clone(memory_format=torch.contiguous_format)
            )
        moved = tensor.detach().movedim(dim, 0)
        if self.order is not None:
            return moved.index_select(0, self.order)
        return moved.clone(memory_format=torch.contiguous_format)

    def view(self) -> tuple[Tensor, bool]:
        """The next tensor for reading, and whether all clients share it."""
        tensor, dim = next(self.rest)
        if dim is None:
            return tensor.detach(), True
        moved = tensor.detach().movedim(dim, 0)
        return (moved if self.order is None else moved.index_select(0, self.order)), False

    def spread(self) -> Tensor:
        """The next tensor for reading, with a client axis even where all clients share it (no copy then)."""
        tensor, alone = self.view()
        return tensor.expand(self.clients, *tensor.shape) if alone and self.stacked else tensor


def _who(ids: Sequence[int]) -> str:
    return f"client {ids[0]}" if len(ids) == 1 else f"one of the clients {', '.join(map(str, ids))}"


def _by_falling_steps(plan: BatchPlan) -> tuple[Any, Tensor | None]:
    steps = plan.steps
    if (steps[:-1] >= steps[1:]).all():
        return None, None
    order = np.argsort(-steps, kind="stable")
    return order, torch.from_numpy(np.argsort(order, kind="stable"))


class _LossCall:
    """One evaluation of the loss of a cohort."""

    def __init__(self, cohort: Cohort, part: str, names: tuple[str, ...]) -> None:
        self.cohort, self.names = cohort, names
        self.rows = cohort.val if part == "val" else cohort.members
        self.purpose = f"loss on {part}"

    def run(
        self, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Sequence[int | None] | None
    ) -> tuple[Tensor, ...]:
        cohort, source = self.cohort, self.cohort.source

        def one(state: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
            return cohort.loss(cohort.model(state, x), y, weight)

        if dims is None:
            rows = torch.from_numpy(self.rows[positions[0]])
            weight = (
                None if len(rows) else torch.zeros(0)
            )  # a mean over nothing is 0, as for a client that is all padding
            return (
                one(dict(zip(self.names, tensors, strict=True)), source.take(rows), source.y[rows], weight),
            )
        rows, weight = padded([self.rows[p] for p in positions])
        state = dict(zip(self.names, tensors, strict=True))
        where = dict(zip(self.names, dims, strict=True))
        batch = (source.take(rows), source.y[rows], weight)
        return (torch.func.vmap(one, in_dims=(where, 0, 0, 0))(state, *batch),)

    def where(self, positions: Sequence[int]) -> str:
        ids = [self.cohort.ids[p] for p in positions]
        return f"{_who(ids)}, round {self.cohort.round}, stage '{self.purpose}'"


def padded(rows: Sequence[Rows]) -> tuple[Tensor, Tensor]:
    """Returns rows as one table and 1 for its real entries: int64 and float [clients, widest]."""
    widest = max((len(r) for r in rows), default=0)
    table = np.zeros((len(rows), widest), dtype=np.int64)
    weight = np.zeros((len(rows), widest), dtype=np.float32)
    for i, r in enumerate(rows):
        table[i, : len(r)] = r
        weight[i, : len(r)] = 1.0
    return torch.from_numpy(table), torch.from_numpy(weight)


class _CohortFunction(torch.autograd.Function):
    """A client operation with its own batching rule: one client in `forward`, the whole cohort in `vmap`."""

    @staticmethod
    def forward(call: Any, position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _guarded(call, (int(position),), tensors, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: client operations are not differentiated through."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Any, position: Tensor, *tensors: Tensor) -> Any:
        if in_dims[1] is None:
            raise TailorflError(
                "a client operation was mapped over something other than clients; loop over it instead"
            )
        out = _guarded(call, tuple(position.tolist()), tensors, in_dims[2:])
        return out, tuple(0 for _ in out)


def _guarded(
    call: Any, positions: tuple[int, ...], tensors: Sequence[Tensor], dims: Any
) -> tuple[Tensor, ...]:
    try:
        with torch.no_grad():  # the loop writes in place; gradients are recorded where it asks for them
            result: tuple[Tensor, ...] = call.run(positions, tensors, dims)
    except TailorflError:
        raise
    except Exception as error:
        raise ClientError(f"{call.where(positions)}: {type(error).__name__}: {error}") from error
    return result


def _apply(
    operation: type[_CohortFunction], call: Any, position: Tensor, *tensors: Tensor
) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = operation.apply(call, position, *tensors)  # type: ignore[no-untyped-call]
    return result


class _Fit(_CohortFunction):
    """`Client.fit` as an operation."""


class _Loss(_CohortFunction):
    """`Client.loss` as an operation."""
