"""Engines in this process: sequential, the reference, and vectorized, which maps chunks of clients with `vmap`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import vmap

from tailorfl.core.client import Client
from tailorfl.engines.base import (
    CohortTask,
    CohortUpdates,
    Inference,
    Parts,
    Stacked,
    Stored,
    all_finite,
    finite_clients,
)
from tailorfl.engines.devices import HOST, Place
from tailorfl.engines.memory import COPIES, Peak, Room, fitting, halved, out_of_memory, release, too_large
from tailorfl.engines.state import StateStore
from tailorfl.models.functional import Model
from tailorfl.settings.experiment import DEFAULT
from tailorfl.training import tree
from tailorfl.training.cohort import PLAN_BLOCK, Cohort, padded, rows_at_once
from tailorfl.training.inference import in_passes, one_by_one


class InProcessEngine(ABC):
    """An engine that needs no other process.

    Args:
        device: where clients compute.
        precision: of products in networks: float32, tf32 or bfloat16.
    """

    kind: ClassVar[str]
    """The engine's name in settings."""

    def __init__(self, device: torch.device = HOST, precision: str = DEFAULT.engine.precision) -> None:
        self.place, self.room = Place(device, precision), Room()

    @property
    def name(self) -> str:
        """The engine's name in a run's records: its kind, and its precision if that is not float32."""
        return self.kind if self.precision == "float32" else f"{self.kind}, {self.precision}"

    @property
    def precision(self) -> str:
        """The precision of products."""
        return self.place.precision

    def hold(self, store: StateStore) -> StateStore:
        """Return `store` itself."""
        return store

    def train(self, task: CohortTask, store: StateStore) -> CohortUpdates:
        """Run the function on every client; only one chunk's states are read from the store at a time."""
        out = Stacked(len(task.cohort.ids), self.room, task.unlike)
        for positions in self.chunks(task.cohort):
            part = task.part(positions)
            new, replies, metrics = self.map(part, Stored(store))
            store.stage(part.cohort.ids, new)
            out.put(positions, [replies, metrics, {"finite": finite_clients(new, replies)}])
        return out.updates()

    def map(self, task: CohortTask, states: TensorDict | Stored) -> Parts:
        """Return the function's results for every client, stacked."""
        start = states if isinstance(states, TensorDict) else states.of(task.cohort.ids)
        return self.run(task, start)

    @abstractmethod
    def run(self, task: CohortTask, states: TensorDict) -> Parts:
        """Return the function's results for every client with its state, stacked."""

    def predict(self, task: Inference) -> list[Tensor]:
        """Return the outputs of each model on its rows."""
        if not task.samples:
            return [torch.zeros(0, task.source.outputs)] * task.models
        with self.place.calculating():
            return self.outputs(self.place.inference(task))

    @abstractmethod
    def outputs(self, task: Inference) -> list[Tensor]:
        """Return the outputs of each model in host memory; models and source are on the device.

        There is at least one row.
        """

    @abstractmethod
    def shares(self, task: Inference) -> list[Inference]:
        """Return pieces for several processes, whose joined results are bit-identical to those of the whole."""

    @abstractmethod
    def chunk_of(self, cohort: Cohort) -> int:
        """Return the number of clients of a chunk."""

    def chunks(self, cohort: Cohort) -> Iterator[Tensor]:
        """Yield the positions of each chunk's clients, int64 [clients], those with most samples first.

        The size is computed for each chunk, since the last chunk may have shown how many clients fit into memory.
        """
        return cut(cohort, partial(self.next_chunk, cohort))

    def next_chunk(self, cohort: Cohort, remaining: Tensor) -> Tensor:
        """Return the first of the `remaining` positions, which make up the next chunk."""
        return remaining[: evenly(len(remaining), self.chunk_of(cohort))]


def largest_first(cohort: Cohort) -> Tensor:
    """Return the positions of a cohort's clients, int64 [clients], those with most samples first."""
    return torch.from_numpy(np.argsort(-cohort.sizes, kind="stable"))


def cut(cohort: Cohort, first_of: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Yield the positions of a cohort's clients in parts; `first_of` takes each part from the remaining ones."""
    remaining = largest_first(cohort)
    while len(remaining):
        part = first_of(remaining)
        yield part
        remaining = remaining[len(part) :]


def evenly(clients: int, most: int) -> int:
    """Return the size of the next chunk if `clients` are left: as few chunks as possible, of similar size."""
    return -(-clients // -(-clients // most))


CHUNKS = 64
"""Largest number of chunks of a cohort."""
PIECE_BYTES = 16 * 2**20
"""Largest size in bytes of the models of clients whose batches one process plans together."""
SHARES = 8
"""Largest number of parts into which an evaluation's models are cut for several processes."""


class Sequential(InProcessEngine):
    """Runs clients in a loop; needs the memory of one client at a time."""

    kind = "sequential"

    def chunk_of(self, cohort: Cohort) -> int:
        """Return the number of clients of a chunk, the unit of work for workers; results do not depend on it."""
        return -(-len(cohort.ids) // CHUNKS)

    def train(self, task: CohortTask, store: StateStore) -> CohortUpdates:
        """Run the function on every client; each result is written directly to its place in the stack."""
        out = Stacked(len(task.cohort.ids), self.room, task.unlike)
        for positions in self._pieces(task.cohort):
            part = task.part(positions)
            new = Stacked(len(positions), self.room, part.unlike)
            results = self._results(part, Stored(store).of(part.cohort.ids))
            for k, (at, (state, reply, metrics)) in enumerate(zip(positions.tolist(), results, strict=True)):
                new.put(k, [state])
                out.put(at, [reply, metrics, {"finite": all_finite(state, reply)}])
            store.stage(part.cohort.ids, *new.parts())
        return out.updates()

    def _pieces(self, cohort: Cohort) -> Iterator[Tensor]:
        """Yield the positions of clients whose batches are planned at once, int64; small models exceed a chunk."""
        fitting = PIECE_BYTES // (4 * max(sum(cohort.model.sizes.values()), 1))
        most = min(max(fitting, 1), PLAN_BLOCK)
        return cut(cohort, lambda remaining: remaining[: evenly(len(remaining), most)])

    def run(self, task: CohortTask, states: TensorDict) -> Parts:
        """Return the function's results for every client, stacked."""
        out = Stacked(len(task.cohort.ids), self.room, task.unlike)
        for position, results in enumerate(self._results(task, states)):
            out.put(position, results)
        return out.parts()

    def _results(self, task: CohortTask, states: TensorDict) -> Iterator[list[dict[str, Tensor]]]:
        """Yield the function's results for one client after another, by path."""
        cohort, received, index = task.cohort, task.received, task.index
        home = self.place.cohort(cohort)
        everyone = self._moved(received) if index is None else received
        for position in range(len(cohort.ids)):
            client = Client(home, torch.tensor(position))
            message = everyone if index is None else self._moved(received[index[position]])
            try:
                with self.place.calculating():
                    results = task.function(client, self._moved(states[position]), message)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                raise too_large(cohort.part([position]), self.place.device) from error
            yield [dict(tree.leaves(part)) for part in results]

    def _moved(self, part: TensorDict) -> TensorDict:
        """Return the tensors on the device."""
        if self.place.is_host:
            return part
        moved: TensorDict = tree.nest(self.place.tensors(dict(tree.leaves(part))).items(), part.batch_size)
        return moved

    def outputs(self, task: Inference) -> list[Tensor]:
        """Return the outputs of each model on its rows."""
        models = one_by_one(task.model, tree.tensors(task.states), task.models, task.source.x.device)

        def of_all(x: Tensor) -> Tensor:
            return torch.stack([model(x) for model in models]).to(HOST)

        if isinstance(task.rows, Tensor):  # all models share the samples of a pass
            return list(in_passes(of_all, task.source, task.rows, dim=1))
        return [
            in_passes(model, task.source, rows).to(HOST)
            if len(rows)
            else torch.zeros(0, task.source.outputs, device=HOST)
            for model, rows in zip(models, task.rows, strict=True)
        ]

    def shares(self, task: Inference) -> list[Inference]:
        """Return pieces of some models each; for a single model, pieces of some samples each."""
        if task.models == 1:
            return task.of_rows(rows_at_once(task.source))
        return task.of_models(-(-task.models // SHARES))


CHUNK_BYTES = 16 * 2**20
"""Bytes of a chunk's parameters if its size is chosen automatically: what fits into a large cache."""
FEWEST, MOST = 4, 1024
"""Limits of a chunk size that is chosen automatically."""
SHARED = 4
"""The number of chunks, if chosen automatically, is a multiple of this, so that 2 or 4 workers have equal shares."""
PROBE = 2
"""Number of clients of the first chunk on a GPU, whose memory is measured."""

Found = list[dict[str, Tensor]]


class Vectorized(InProcessEngine):
    """Cuts a cohort into chunks of clients of similar size and maps each chunk at once.

    Args:
        chunk: number of clients in a chunk; None chooses by the size of the model and the memory.
        device: where clients compute.
        precision: of products in networks.

    Attribute `most` is the number of clients that fit into memory at once, after more did not fit.
    """

    kind = "vectorized"

    def __init__(
        self, chunk: int | None = None, device: torch.device = HOST, precision: str = DEFAULT.engine.precision
    ) -> None:
        super().__init__(device, precision)
        self.chunk = chunk
        self.most: int | None = None

    def chunk_of(self, cohort: Cohort) -> int:
        """Return the number of clients that train together."""
        size = self.chunk if self.chunk is not None else self._fitting(cohort)
        return size if self.most is None else min(size, self.most)

    def _fitting(self, cohort: Cohort) -> int:
        model, device = cohort.model, self.place.device
        if device.type == "cuda":
            client_bytes = self.place.bytes_each.get(model)
            return PROBE if client_bytes is None else min(MOST, fitting(device, client_bytes))
        # A frozen backbone is not copied for each client, but its activations are.
        scalars = model.scalars + model.held_scalars
        size = int(np.clip(CHUNK_BYTES // (4 * scalars), FEWEST, MOST))
        clients = len(cohort.ids)
        if clients > size:
            chunks = -(-clients // size // SHARED) * SHARED
            size = max(-(-clients // chunks), FEWEST)
        return min(size, fitting(device, COPIES * 4 * model.scalars))

    def run(self, task: CohortTask, states: TensorDict) -> Parts:
        """Return the function's results for every client, stacked."""
        cohort, move = task.cohort, self.place.tensors
        state_leaves, received_leaves = dict(tree.leaves(states)), dict(tree.leaves(task.received))
        remaining, out = largest_first(cohort), Stacked(len(cohort.ids), self.room, task.unlike)
        home = replace(task, cohort=self.place.cohort(cohort))
        everyone = move(received_leaves) if task.index is None else {}

        def apply(part: CohortTask, chosen: Tensor) -> Found:
            chosen_states = move({p: t.index_select(0, chosen) for p, t in state_leaves.items()})
            if part.index is None:
                return _apply(part, chosen_states, everyone)
            return _apply(part, chosen_states, move({p: t[part.index] for p, t in received_leaves.items()}))

        while len(remaining):
            chosen = self.next_chunk(cohort, remaining)
            # A chunk that does not fit is run again, so its record counts only when it has finished.
            part = home.chunk(chosen)
            results = self._attempt(cohort.model, part.cohort, partial(apply, part, chosen))
            if results is None:
                release(self.place.device)
                continue
            out.put(chosen, results)
            task.note(part.cohort.record)
            remaining = remaining[len(chosen) :]
        return out.parts()

    def _attempt(self, model: Model, part: Cohort, run: Callable[[], Found]) -> Found | None:
        """Return the results of `run` for a part of the cohort, or None if memory was not enough for it.

        Raises:
            MemoryLimitError: memory was not enough for a single client.
        """
        device = self.place.device
        peak = Peak(device) if device.type == "cuda" else None
        try:
            with self.place.calculating():
                results = run()
        except Exception as error:
            if not out_of_memory(error):
                raise
            self.most = halved(part, device, error)
            return None
        if peak is not None:
            client_bytes = peak.bytes() / len(part.ids)
            self.place.bytes_each[model] = max(client_bytes, self.place.bytes_each.get(model, 0.0))
        return results

    def outputs(self, task: Inference) -> list[Tensor]:
        """Return the outputs of each model on its rows."""
        rows, states, common = task.rows, tree.tensors(task.states), isinstance(task.rows, Tensor)
        table = rows if isinstance(rows, Tensor) else padded([r.numpy() for r in rows])[0]
        device = task.source.x.device
        if common and task.model.channels_last(device):
            # One network after another on a few images: the models share only these.
            models_alone = one_by_one(task.model, states, task.models, device)
            return list(
                in_passes(
                    lambda x: torch.stack([m(x) for m in models_alone]),
                    task.source,
                    table,
                    task.models,
                    dim=1,
                )
            )
        models = vmap(task.model, in_dims=(0, None if common else 0))
        table_outputs = in_passes(
            lambda x: models(states, x).to(HOST), task.source, table, task.models, dim=1
        )
        return (
            list(table_outputs)
            if common
            else [of_model[: len(r)] for of_model, r in zip(table_outputs, rows, strict=True)]
        )

    def shares(self, task: Inference) -> list[Inference]:
        """Return pieces of all models on some samples each, as in the passes of one process."""
        return task.of_rows(rows_at_once(task.source, task.models))


def _apply(task: CohortTask, states: dict[str, Tensor], received: dict[str, Tensor]) -> Found:
    """Map the function over `states` [clients, ...] and `received`, which is [clients, ...] if there is an index."""
    parts = 0

    def one(position: Tensor, state: dict[str, Tensor], message: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal parts
        results = task.function(
            Client(task.cohort, position), tree.nest(state.items()), tree.nest(message.items())
        )
        parts = len(results)
        # The position is returned too, so that a function with nothing to return is still mapped.
        return {
            "position": position,
            **{f"{i}:{p}": t for i, part in enumerate(results) for p, t in tree.leaves(part)},
        }

    positions = torch.arange(len(task.cohort.ids), device=HOST)  # read on the host, not used in computations
    message_axis = None if task.index is None else 0
    flat = vmap(one, in_dims=(0, 0 if states else None, message_axis))(positions, states, received)
    out: list[dict[str, Tensor]] = [{} for _ in range(parts)]
    for key, tensor in flat.items():
        part, colon, path = key.partition(":")
        if colon:
            out[int(part)][path] = tensor
    return out
