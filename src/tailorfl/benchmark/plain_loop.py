"""FedAvg's round in plain PyTorch, written for speed: the baseline of the engines.

One module for all clients, resident tensors, the batches of a client gathered at once, `torch.autograd.grad`, and
updates of all tensors in one call; no DataLoader, no optimizer object, no states, no checks. The network and the
processor decide which variant is fastest, so `fastest` tries layouts of images and convolutions, and update kernels.

Given the batches of a round it computes the same as the engines, up to rounding. Only dropout masks differ, which it
draws as torch does.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from tailorfl.benchmark.clock import one_thread, timed
from tailorfl.data.source import Source
from tailorfl.models.dropout import Dropout
from tailorfl.models.functional import Model
from tailorfl.models.skeleton import laid_out, tensors_of
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import Loss
from tailorfl.training.update import BETA_1, BETA_2, EPS

RESIDENT_BYTES = 2**30
"""Images are normalised once for all rounds if that takes no more than this, else batch by batch."""
GATHERED_BYTES = 2**20
"""Inputs of a client's batches are gathered at once up to this size, so that they stay in the cache."""
TRIAL_STEPS, TRIAL_PASSES, TRIAL_SECONDS = 4, 3, 0.1
"""Steps of one client on which a variant is tried, least number of trials, and least seconds for them."""
SGD: dict[str, Any] = {"dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
ADAMW: dict[str, Any] = {
    "fused": True, "amsgrad": False, "maximize": False, "beta1": BETA_1, "beta2": BETA_2, "eps": EPS,
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One way to do the same arithmetic."""

    channels_last: bool = False
    """Layout of images and of the weights of convolutions."""
    fused: bool = False
    """Whether SGD updates all tensors in one fused kernel instead of by `torch._foreach_add_`."""

    def __str__(self) -> str:
        layout = "channels last" if self.channels_last else "default layout"
        return f"{layout}, {'fused' if self.fused else 'foreach'} update"


@dataclass(frozen=True)
class LoopClient:
    """The work of one client in a round."""

    share: float
    """The weight of its model in the average."""
    batches: Sequence[Tensor]
    """Rows of the source, [batch] int64 each; one step per batch."""
    key: int = 0
    """Determines, together with the number of the batch, how images are augmented."""


class PlainLoop:
    """The loop for one model and one set of training settings, without differential privacy.

    Args:
        model: the clients' model; its frozen tensors are shared, the others are the loop's own.
        source: the samples.
        loss: the loss of a batch.
        config: training settings; batch sizes and lengths come from the clients' batches instead.
        variant: how it computes.
    """

    def __init__(
        self,
        model: Model,
        source: Source,
        loss: Loss,
        config: TrainConfig,
        variant: Variant = Variant(),
    ) -> None:
        self.config, self._source, self._loss, self.variant = config, source, loss, variant
        self._module = _own_copy(model, variant.channels_last)
        tensors = tensors_of(self._module)
        names = (*model.parameters, *model.buffers)
        self._held = {n: tensors[n] for n in names if tensors[n].is_floating_point()}
        self._parameters = [self._held[name] for name in model.parameters]
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(name in model.parameters)
        self._x = None if source.augment != "none" else _resident(source)
        if self._x is not None and variant.channels_last:
            self._x = self._x.movedim(1, -1).contiguous()

    def round(self, start: Mapping[str, Tensor], clients: Iterable[LoopClient]) -> dict[str, Tensor]:
        """Return the average, by name, of the clients' models, which all train from `start`.

        Parameters and running statistics are averaged; counters of batches are left out.
        """
        values = [t.detach() for t in self._held.values()]
        begin = [laid_out(start[name], self.variant.channels_last) for name in self._held]
        total = [torch.zeros_like(t) for t in values]
        for client in clients:
            torch._foreach_copy_(values, begin)
            self._train(client)
            torch._foreach_add_(total, values, alpha=client.share)
        return {name: t.contiguous() for name, t in zip(self._held, total, strict=True)}

    def _train(self, client: LoopClient) -> None:
        params, config = self._parameters, self.config
        # The same memory, which autograd does not track.
        update = _Update([p.detach() for p in params], config, self.variant.fused)
        lr = config.lr
        for number, (x, y) in enumerate(self._batches(client.batches, client.key)):
            loss = self._loss(self._module(x), y, None)
            gradients = list(torch.autograd.grad(loss, params, materialize_grads=True))
            if config.clip is not None:
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
                torch._foreach_mul_(gradients, (config.clip / (norm + 1e-6)).clamp(max=1.0))
            if config.schedule == "linear":
                lr = config.lr * (1.0 - number / len(client.batches))
            update(gradients, lr)

    def _batches(self, batches: Sequence[Tensor], key: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of batches; `key` is that of the first batch, and grows by one with each."""
        source, last = self._source, self.variant.channels_last
        if self._x is None:
            for number, rows in enumerate(batches):
                x = source.take_augmented(rows, torch.tensor(key + number))
                yield laid_out(x, last), source.y.index_select(0, rows)
            return
        widest = max(map(len, batches), default=1) * math.prod(source.input_shape) * self._x.element_size()
        remaining = iter(batches)
        while some := list(islice(remaining, max(GATHERED_BYTES // max(widest, 1), 1))):
            rows, sizes = torch.cat(some), [len(batch) for batch in some]
            x = self._x.index_select(0, rows)
            x = x.movedim(-1, 1) if last else x
            y = source.y.index_select(0, rows)
            yield from zip(torch.split(x, sizes), torch.split(y, sizes), strict=True)


def fastest(
    model: Model,
    source: Source,
    loss: Loss,
    config: TrainConfig,
    start: Mapping[str, Tensor],
    clients: Sequence[LoopClient],
) -> PlainLoop:
    """Return the loop in the variant that trains this model fastest here, tried on one of the clients.

    The variants take turns and are compared by their shortest times; torch's random state stays as it was.
    """
    training = [client for client in clients if client.batches]
    if not training:
        return PlainLoop(model, source, loss, config)
    trial = LoopClient(1.0, training[0].batches[:TRIAL_STEPS])
    loops = [PlainLoop(model, source, loss, config, variant) for variant in variants(model, source, config)]
    times: list[list[float]] = [[] for _ in loops]
    begin = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        while len(times[0]) < TRIAL_PASSES or time.perf_counter() - begin < TRIAL_SECONDS * len(loops):
            for loop, loop_times in zip(loops, times, strict=True):
                took = timed(lambda loop=loop: loop.round(start, [trial]))  # type: ignore[misc]
                loop_times.append(took.process if one_thread() else took.wall)
    return min(zip(loops, times, strict=True), key=lambda tried: min(tried[1]))[0]


def variants(model: Model, source: Source, config: TrainConfig) -> list[Variant]:
    """Return the variants that differ for a model: layouts if it convolves images, kernels of SGD's update."""
    convolves = any(isinstance(part, nn.Conv2d) for part in model.module.modules())
    layouts = (False, True) if convolves and len(source.input_shape) == 3 else (False,)
    kernels = (False, True) if config.optimizer == "sgd" else (False,)
    return [Variant(last, fused) for last in layouts for fused in kernels]


def shuffled(rows: Tensor, batch: int, gradients: int, min_batch: int = 1) -> list[Tensor]:
    """Return batches of `rows` [samples] int64, in passes of new random order, with at least `gradients` rows in all.

    `batch` 0 takes all rows at once; a remainder of fewer than `min_batch` rows is left out of a pass.
    """
    batches: list[Tensor] = []
    while gradients > 0 and len(rows) >= min_batch:
        for part in torch.split(rows[torch.randperm(len(rows))], batch or len(rows)):
            if len(part) >= min_batch and gradients > 0:
                batches.append(part)
                gradients -= len(part)
    return batches


class _Update:
    """The update of all tensors in one call: torch's fused kernels, or `_foreach` operations for SGD."""

    def __init__(self, values: list[Tensor], config: TrainConfig, fused: bool) -> None:
        self._values, self._config, self._fused = values, config, fused
        self._adamw = config.optimizer == "adamw"
        moments = 2 if self._adamw else 1 if config.momentum else 0
        self._moments = [[torch.zeros_like(value) for value in values] for _ in range(moments)]
        self._counts = [torch.zeros(()) for _ in values] if self._adamw else []

    def __call__(self, gradients: list[Tensor], lr: float) -> None:
        decay = self._config.weight_decay
        if self._adamw:
            first, second = self._moments
            adamw(
                self._values, gradients, first, second, [], self._counts, lr=lr, weight_decay=decay, **ADAMW
            )
        elif self._fused:
            moments = self._moments[0] if self._moments else []
            momentum = self._config.momentum
            torch._fused_sgd_(
                self._values, gradients, moments, lr=lr, weight_decay=decay, momentum=momentum, **SGD
            )
        else:
            if decay:
                torch._foreach_add_(gradients, self._values, alpha=decay)
            if self._moments:
                torch._foreach_mul_(self._moments[0], self._config.momentum)
                torch._foreach_add_(self._moments[0], gradients)
                gradients = self._moments[0]
            torch._foreach_add_(self._values, gradients, alpha=-lr)


def _own_copy(model: Model, channels_last: bool) -> nn.Module:
    """Return a copy of the module in training mode, with torch's own dropout; it shares frozen tensors if it can."""
    tensors = chain(model.module.named_parameters(), model.module.named_buffers())
    frozen = [t for n, t in tensors if n in model.frozen]
    # In another layout frozen tensors cannot be shared.
    memo = {} if channels_last else {id(t): t for t in frozen}
    module = copy.deepcopy(model.module, memo).train()
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, Dropout):
                setattr(parent, name, part.plain(part.p))
    if channels_last:
        for parameter in module.parameters():
            parameter.data = laid_out(parameter.data, True)
    return module


def _resident(source: Source) -> Tensor | None:
    """Return all samples as the model sees them, or None if they are prepared batch by batch."""
    if source.x.dtype != torch.uint8:
        return source.x
    fits = 4 * len(source) * math.prod(source.input_shape) <= RESIDENT_BYTES
    return source.take(torch.arange(len(source))) if fits else None
