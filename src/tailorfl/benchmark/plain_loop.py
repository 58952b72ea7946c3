"""FedAvg's round as one writes it for speed in plain PyTorch: what the engines are measured against.

One module for all clients, resident tensors, `torch.autograd.grad`, and updates of all tensors in one call; no
DataLoader, no optimizer object, no states, no checks. Given the batches of a round it computes what the engines do, up
to rounding. Only dropout masks differ, which it draws as torch does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from tailorfl.data.source import Source
from tailorfl.models.dropout import Dropout
from tailorfl.models.functional import Model
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.objective import Loss
from tailorfl.training.update import BETA_1, BETA_2, EPS

RESIDENT_BYTES = 2**30
"""Images are normalised once for all rounds where that takes no more than this, else batch by batch."""


@dataclass(frozen=True)
class LoopFit:
    """One training of a client, from the received model on."""

    batches: Sequence[Tensor]
    """Rows of the source, [batch] int64 each; one step for each."""
    trained: tuple[str, ...] = ()
    """Names of the parameters that are trained; none names all."""


@dataclass(frozen=True)
class LoopClient:
    """What one client does in a round."""

    share: float
    """The weight of its first trained model in the average."""
    fits: Sequence[LoopFit]
    key: int = 0
    """Decides how images are augmented, together with the number of the batch."""


class PlainLoop:
    """The loop for one model and one set of training settings; differential privacy is not in it.

    Args:
        model: the clients' model; its frozen tensors are shared, the others are the loop's own.
        source: the samples.
        loss: of a batch.
        config: batch sizes and lengths are given with the clients instead.
    """

    def __init__(self, model: Model, source: Source, loss: Loss, config: TrainConfig) -> None:
        self.config, self._source, self._loss = config, source, loss
        self._module = _own_copy(model)
        tensors = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        names = (*model.parameters, *model.buffers)
        self._held = {n: tensors[n] for n in names if tensors[n].is_floating_point()}
        self._all = model.parameters
        self._norms = _norms(self._module)
        self._model = model
        self._trained: tuple[str, ...] = ()
        self._x = _resident(source)

    def round(self, start: Mapping[str, Tensor], clients: Iterable[LoopClient]) -> dict[str, Tensor]:
        """Returns the average of the clients' first models by name, all of which train from `start`.

        Parameters and running statistics are averaged; counters of batches are left out.
        """
        held = list(self._held.values())
        begin = [start[name] for name in self._held]
        total = [torch.zeros_like(t) for t in begin]
        with torch.no_grad():
            for client in clients:
                for number, fit in enumerate(client.fits):
                    torch._foreach_copy_(held, begin)
                    self._train(fit, client.key)
                    if number == 0:
                        torch._foreach_add_(total, held, alpha=client.share)
        return dict(zip(self._held, total, strict=True))

    def gradients(self, fit: LoopFit, number: int = 0, key: int = 0) -> list[Tensor]:
        """Returns the gradients of batch `number` of a fit at the present values, in the order of its parameters."""
        params, rows = self._prepare(fit.trained), fit.batches[number]
        with torch.enable_grad():
            outputs = self._module(self._inputs(rows, key + number))
            loss = self._loss(outputs, self._source.y.index_select(0, rows), None)
            return list(torch.autograd.grad(loss, params, materialize_grads=True))

    def _train(self, fit: LoopFit, key: int) -> None:
        params, config = self._prepare(fit.trained), self.config
        adaptive = config.optimizer == "adamw"
        copies = 2 if adaptive else 1 if config.momentum else 0
        memory = [[torch.zeros_like(p) for p in params] for _ in range(copies)]
        counts = [torch.zeros(()) for _ in params] if adaptive else []
        for number in range(len(fit.batches)):
            gradients = self.gradients(fit, number, key)
            if config.clip is not None:
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
                torch._foreach_mul_(gradients, (config.clip / (norm + 1e-6)).clamp(max=1.0))
            decays = config.schedule == "linear"
            lr = config.lr * (1.0 - number / len(fit.batches)) if decays else config.lr
            if adaptive:
                _adamw(params, gradients, memory, counts, lr, config.weight_decay)
                continue
            if config.weight_decay:
                torch._foreach_add_(gradients, params, alpha=config.weight_decay)
            if config.momentum:
                torch._foreach_mul_(memory[0], config.momentum)
                torch._foreach_add_(memory[0], gradients)
                gradients = memory[0]
            torch._foreach_add_(params, gradients, alpha=-lr)

    def _prepare(self, trained: tuple[str, ...]) -> list[Tensor]:
        """The parameters to train, which alone ask for gradients; norms without any keep their statistics."""
        names = trained or self._all
        if names != self._trained:
            self._trained, wanted = names, set(names)
            for name, parameter in self._module.named_parameters():
                parameter.requires_grad_(name in wanted)
            active = {buffer.rpartition(".")[0] for buffer in self._model.trained_buffers(names)}
            for name, norm in self._norms.items():
                norm.train(name in active)
        return [self._held[n] for n in names]

    def _inputs(self, rows: Tensor, key: int) -> Tensor:
        if self._source.augment != "none":
            return self._source.take_augmented(rows, torch.tensor(key))
        return self._source.take(rows) if self._x is None else self._x.index_select(0, rows)


def shuffled(rows: Tensor, batch: int, batches: int, min_batch: int = 1) -> list[Tensor]:
    """Returns `batches` batches of `rows` [samples] int64, in as many passes of new random order as that takes.

    `batch` 0 takes all rows at once; a rest of fewer than `min_batch` rows is left out of a pass.
    """
    found: list[Tensor] = []
    while len(found) < batches and len(rows) >= min_batch:
        order = rows[torch.randperm(len(rows))]
        found += [part for part in torch.split(order, batch or len(rows)) if len(part) >= min_batch]
    return found[:batches]


def _adamw(
    params: list[Tensor],
    gradients: list[Tensor],
    memory: list[list[Tensor]],
    counts: list[Tensor],
    lr: float,
    weight_decay: float,
) -> None:
    adamw(
        params,
        gradients,
        memory[0],
        memory[1],
        [],
        counts,
        fused=True,
        amsgrad=False,
        beta1=BETA_1,
        beta2=BETA_2,
        lr=lr,
        weight_decay=weight_decay,
        eps=EPS,
        maximize=False,
    )


def _own_copy(model: Model) -> nn.Module:
    """The module in training mode with values of its own where they may change, and torch's own dropout."""
    frozen = [t for n, t in _tensors(model.module) if n in model.frozen]
    module = copy.deepcopy(model.module, {id(t): t for t in frozen}).train()
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, Dropout):
                setattr(parent, name, nn.Dropout(part.p))
    return module


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _norms(module: nn.Module) -> dict[str, nn.Module]:
    """Norm layers with running statistics, by name."""
    found = module.named_modules()
    return {name: part for name, part in found if getattr(part, "running_mean", None) is not None}


def _resident(source: Source) -> Tensor | None:
    """All samples as the model sees them, or None where they are made batch by batch."""
    if source.x.dtype != torch.uint8:
        return source.x
    fits = 4 * len(source) * math.prod(source.input_shape) <= RESIDENT_BYTES
    return source.take(torch.arange(len(source))) if fits else None
