"""Client operations with their own batching rule: for a single client, or for a whole cohort's tensors at once.

`torch.autograd.Function` lets an operation define its behaviour under `torch.func.vmap`: its `vmap` receives the
physical tensors of all clients. So `local` is mapped over a cohort as pure code for one client, while the training
inside works in place, on contiguous memory, and only on clients that still have batches.

Such an operation only accepts a flat list of tensors, so all inputs (models, centres, inputs of directions and terms)
are flattened before it and unflattened inside, with torch's pytrees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tailorfl.data.source import Source
from tailorfl.errors import ClientError, TailorflError
from tailorfl.hashing import uniform
from tailorfl.models.functional import Model
from tailorfl.training.cohort import Cohort

Result = TypeVar("Result", covariant=True)


class Packed(NamedTuple):
    """The tensors of a tree in order, and the tree's structure."""

    leaves: list[Tensor]
    form: TreeSpec

    @classmethod
    def of(cls, tree: Any) -> Packed:
        """Pack tensors, TensorDicts, mappings and tuples.

        Raises:
            TailorflError: the tree holds anything else.
        """
        if isinstance(tree, tuple) and not tree:
            return NOTHING
        leaves, form = tree_flatten(tree)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise TailorflError(
                    "only tensors, and TensorDicts, mappings and tuples of them, can be passed into a client's "
                    f"training, not {leaf!r}; put a number that is equal for all clients into the function, and make "
                    "any other a tensor"
                )
        return cls(leaves, form)

    def map(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """Return the tree with every tensor changed."""
        return Packed([change(leaf) for leaf in self.leaves], self.form) if self.leaves else self

    def unpack(self) -> Any:
        """Return the original tree."""
        return tree_unflatten(self.leaves, self.form)


NOTHING = Packed(*tree_flatten(()))


class Mapped(NamedTuple):
    """A tensor of a cohort that is mapped over its clients."""

    tensor: Tensor
    axis: int | None
    """The axis of clients; None: all clients share the tensor."""


class Layout:
    """Prepares tensors of one client, without an axis of clients, for training."""

    stacked = False
    """Whether tensors have an axis of clients."""

    def copies(self, tensors: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
        """Return writable copies of some tensors."""
        return {name: tensors[name].detach().clone() for name in names}

    def views(self, tensors: Sequence[Any]) -> list[Tensor]:
        """Return read-only views of tensors; for a cohort always with an axis of clients, even of shared tensors."""
        return [tensor.detach() for tensor in tensors]

    def parts(self, tensors: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return read-only views: (each client's own tensors, [clients, ...]; tensors that all clients share)."""
        return {}, {name: tensor.detach() for name, tensor in tensors.items()}

    def results(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return results in the original order of clients, in contiguous memory."""
        return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


class CohortLayout(Layout):
    """`Mapped` tensors of a cohort, [clients, ...] in memory.

    Args:
        clients: their number.
        order: the order for training, positions [clients]; None keeps the original order.
    """

    stacked = True

    def __init__(self, clients: int, order: Tensor | None = None) -> None:
        self.clients, self.order = clients, order

    def copies(self, tensors: Mapping[str, Mapped], names: Sequence[str]) -> dict[str, Tensor]:
        """Return writable copies of some tensors."""
        return {name: self._copy(tensors[name]) for name in names}

    def _copy(self, mapped: Mapped) -> Tensor:
        moved = self._view(mapped)
        if mapped.axis is not None and self.order is not None:
            return moved
        return moved.clone(memory_format=torch.contiguous_format)

    def views(self, tensors: Sequence[Mapped]) -> list[Tensor]:
        """Return read-only views of tensors with an axis of clients; shared tensors are expanded, not copied."""
        return [self._view(mapped) for mapped in tensors]

    def _view(self, mapped: Mapped) -> Tensor:
        shared = mapped.tensor.detach()
        if mapped.axis is None:
            return shared.expand(self.clients, *shared.shape)
        moved = shared.movedim(mapped.axis, 0)
        return moved if self.order is None else moved.index_select(0, self.order)

    def parts(self, tensors: Mapping[str, Mapped]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return read-only views: (each client's own tensors, [clients, ...]; tensors that all clients share)."""
        unshared = {name: self._view(mapped) for name, mapped in tensors.items() if mapped.axis is not None}
        return unshared, {
            name: mapped.tensor.detach() for name, mapped in tensors.items() if mapped.axis is None
        }

    def results(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return results [clients, ...] in the original order of clients."""
        if self.order is None:
            return {name: tensor.detach() for name, tensor in tensors.items()}
        back = self.order.argsort()
        return {name: tensor.detach().index_select(0, back) for name, tensor in tensors.items()}


class Operation(ABC, Generic[Result]):
    """Something that clients of a cohort do with tensors; `stage` is its name in messages."""

    cohort: Cohort
    stage: str

    @abstractmethod
    def run(self, positions: tuple[int, ...], inputs: Any, stacked: bool) -> Result:
        """Return the result for the clients at `positions` of the cohort, a tree of tensors [clients, ...].

        `inputs` is a tree (dicts, lists, tuples) whose leaves are `Mapped` if `stacked`. Otherwise there is one client,
        and neither its tensors nor the result have an axis of clients.
        """

    def where(self, positions: Sequence[int]) -> str:
        """Name clients, round and stage for error messages."""
        clients = who([self.cohort.ids[p] for p in positions])
        return f"{clients}, round {self.cohort.round + 1}, stage '{self.stage}'"


def apply(operation: Operation[Result], position: Tensor, inputs: Any = ()) -> Result:
    """Return the result of an operation for the client at `position`, alone or under `torch.func.vmap`.

    Raises:
        ClientError: it failed; names client, round and stage.
    """
    if not torch._C._are_functorch_transforms_active():
        # A single client needs no map, and torch's overhead for the function exceeds the time of a small step.
        return _guarded(operation, (int(position),), inputs, False)
    leaves, form = tree_flatten(inputs)
    call = _Call(operation, form)
    flat = _CohortFunction.apply(call, position, *leaves)  # type: ignore[no-untyped-call]
    result: Result = tree_unflatten(list(flat), call.result)
    return result


class _Call:
    """An operation on flat tensors, and the structures of its input and output trees."""

    def __init__(self, operation: Operation[Any], form: TreeSpec) -> None:
        self.operation, self.form, self.result = operation, form, form

    def run(self, positions: tuple[int, ...], leaves: Sequence[Any], stacked: bool) -> tuple[Tensor, ...]:
        inputs = tree_unflatten(list(leaves), self.form)
        flat, self.result = tree_flatten(_guarded(self.operation, positions, inputs, stacked))
        return tuple(flat)


class _CohortFunction(torch.autograd.Function):
    """A client operation with its own batching rule: one client in `forward`, the whole cohort in `vmap`."""

    @staticmethod
    def forward(call: _Call, position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return call.run((int(position),), tensors, False)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: client operations are not differentiated through."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, position: Tensor, *tensors: Tensor) -> Any:
        if in_dims[1] is None:
            raise TailorflError(
                "a client operation was mapped over something other than clients; loop over it instead"
            )
        out = call.run(tuple(position.tolist()), list(map(Mapped, tensors, in_dims[2:])), True)
        return out, tuple(0 for _ in out)


def _guarded(operation: Operation[Result], positions: tuple[int, ...], inputs: Any, stacked: bool) -> Result:
    try:
        with torch.no_grad():  # operations write in place, and enable gradients where they need them
            return operation.run(positions, inputs, stacked)
    except TailorflError:
        raise
    except Exception as error:
        raise ClientError(f"{operation.where(positions)}: {type(error).__name__}: {error}") from error


class Drawn(Operation[tuple[Tensor, ...]]):
    """Uniform random numbers of given shapes, from each client's key of the round, for a method's own draws."""

    def __init__(
        self, cohort: Cohort, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, purpose: str
    ) -> None:
        self.cohort, self.shapes, self.dtype, self.stage = cohort, shapes, dtype, f"drawn: {purpose}"

    def run(self, positions: tuple[int, ...], inputs: Any, stacked: bool) -> tuple[Tensor, ...]:
        """Return the numbers, [clients, ...] each, or [...] for one client."""
        keys = torch.from_numpy(self.cohort.keys(positions, self.stage).astype(np.int64))
        device = self.cohort.device
        drawn = [
            torch.stack([uniform(key, number, torch.Size(shape), device, self.dtype) for key in keys])
            for number, shape in enumerate(self.shapes)
        ]
        return tuple(t if stacked else t[0] for t in drawn)


class TrainingSamples(NamedTuple):
    """The training samples of one client, in host memory, and facts about its training.

    Attributes:
        x: [samples, *input shape].
        y: their targets.
        source: their data set; only its facts about targets may be used, not its other samples.
        model: the model that the client deploys.
        steps: largest number of steps; None: no limit.
        seed: derived from the client, the round and the run's seed.
    """

    x: Tensor
    y: Tensor
    source: Source
    model: Model
    steps: int | None
    seed: int


Computed = Callable[[TrainingSamples, TensorDict], Mapping[str, Tensor]]
"""(samples, inputs) -> tensors by name, whose shapes do not depend on the samples; there may be no samples."""


class ExternalTraining(Operation[dict[str, Tensor]]):
    """A function of another library, applied to each client's samples, one client after another."""

    stage = "training by another library"

    def __init__(self, cohort: Cohort, of: Computed) -> None:
        self.cohort, self.of = cohort, of

    def run(self, positions: tuple[int, ...], inputs: Any, stacked: bool) -> dict[str, Tensor]:
        """Return the function's tensors, [clients, ...] or those of one client."""
        results = [self._of_client(k, position, inputs) for k, position in enumerate(positions)]
        tensors = {name: torch.stack([result[name] for result in results]) for name in results[0]}
        return {name: (t if stacked else t[0]).to(self.cohort.device) for name, t in tensors.items()}

    def _of_client(self, k: int, position: int, inputs: Mapping[str, Any]) -> Mapping[str, Tensor]:
        cohort, source, host = self.cohort, self.cohort.source, torch.device("cpu")
        members = cohort.members[position]
        rows = torch.from_numpy(members[:0] if cohort.counting else members).to(source.x.device)
        seed, model = int(cohort.keys((position,), "external")[0] % 2**31), cohort.model.on(host)
        x, y = source.take(rows).cpu(), source.targets(rows).cpu()
        samples = TrainingSamples(x, y, source, model, cohort.limit, seed)
        given = {name: _client_tensor(tensor, k).detach().cpu() for name, tensor in inputs.items()}
        with host:
            return self.of(samples, TensorDict(given, batch_size=[]))


def _client_tensor(tensor: Tensor | Mapped, k: int) -> Tensor:
    if isinstance(tensor, Tensor):
        return tensor
    return tensor.tensor if tensor.axis is None else tensor.tensor.select(tensor.axis, k)


def who(ids: Sequence[int]) -> str:
    """Name clients for error messages."""
    return f"client {ids[0]}" if len(ids) == 1 else f"one of the clients {', '.join(map(str, ids))}"
