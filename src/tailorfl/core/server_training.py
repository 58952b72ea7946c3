"""Training on the server: an optimizer of the averaged update, and distillation on the public set.

Server optimizers take FedAvg's averaged update as a pseudo-gradient (Reddi et al., "Adaptive Federated Optimization",
ICLR 2021):

    Δ = Σ a_i (θ_i − w)
    sgd      m = β₁ m + Δ;                 w = w + η m
    adam     m = β₁ m + (1−β₁) Δ;  v = β₂ v + (1−β₂) Δ²;                w = w + η m / (√v + ε)
    yogi     m as adam;            v = v − (1−β₂) Δ² sign(v − Δ²);      w = w + η m / (√v + ε)
    adagrad  m as adam;            v = v + Δ²;                          w = w + η m / (√v + ε)

No bias correction, as in the paper. Buffers (running statistics) are not optimised: they become the average.

| symbol | here |
|---|---|
| η | `lr` |
| β₁, β₂ | `momentum`, `beta2` |
| ε (τ in the paper) | `eps` |
| v₀ | `initial` |

In distillation a model learns from the mean prediction of others on the public set:

    teacher(x) = σ(mean_k f_k(x) / T)            `average` = logits   (Lin et al., NeurIPS 2020, and their code)
                 mean_k σ(f_k(x) / T)            `average` = probabilities (the sum of one KL a teacher)
    R steps of Adam on  (T²/B) Σ_x KL( teacher(x) ‖ σ(f_w(x) / T) ),  learning rate by cosine to 0

σ is the softmax, or with `link` = sigmoid the sigmoid of every label. The single output of a binary task always has the
sigmoid, which is the softmax of 0 and the output. Teachers are frozen and in evaluation mode.
So is the student: dropout is off and the norms keep the statistics that clients measured on private data, which
public data of another kind would overwrite. The optimizer starts afresh every round. If public images are augmented,
teachers and student see the same augmented images, new ones in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from tensordict import TensorDict
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from tailorfl.core.context import Context
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError
from tailorfl.models.functional import Model
from tailorfl.training import tree
from tailorfl.training.cohort import rows_at_once
from tailorfl.training.keys import generator, torch_seed
from tailorfl.training.objective import LOSSES

Kind = Literal["sgd", "adam", "yogi", "adagrad"]


class ServerOptimizer(BaseModel):
    """One server step; its state is a TensorDict that the server keeps between rounds."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Kind = "sgd"
    lr: float = Field(default=1.0, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    initial: float = Field(default=0.0, ge=0)

    @property
    def is_plain_average(self) -> bool:
        """Whether the new parameters are w + Δ, so that the average itself can be taken without rounding."""
        return self.kind == "sgd" and self.lr == 1 and self.momentum == 0

    def start(self, parameters: TensorDict) -> TensorDict:
        """Return the state before the first round."""
        out = {}
        if self.kind != "sgd" or self.momentum > 0:
            out["m"] = parameters.apply(torch.zeros_like)
        if self.kind != "sgd":
            out["v"] = parameters.apply(lambda t: torch.full_like(t, self.initial))
        return TensorDict(out, batch_size=[])

    def step(self, w: TensorDict, update: TensorDict, state: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Return (new parameters, new state) for the averaged update Δ.

        `w` and `update` hold parameters only.
        """
        if self.kind == "sgd":
            if self.momentum == 0:
                return w + update * self.lr, state
            m = state["m"] * self.momentum + update
            return w + m * self.lr, TensorDict({"m": m}, batch_size=[])
        m = state["m"] * self.momentum + update * (1 - self.momentum)
        square = update * update
        if self.kind == "adam":
            v = state["v"] * self.beta2 + square * (1 - self.beta2)
        elif self.kind == "yogi":
            v = state["v"] - square * (state["v"] - square).sign() * (1 - self.beta2)
        else:
            v = state["v"] + square
        return w + (m * self.lr) / (v.sqrt() + self.eps), TensorDict({"m": m, "v": v}, batch_size=[])


Teacher = Tensor | Callable[[Tensor], Tensor]
"""Probabilities of every public sample, [P, C], or a function from samples [batch, ...] to theirs, [batch, C]."""


class ServerDistillation(BaseModel):
    """Settings of distillation on the server: its teacher, its length, and which model is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    steps: int = Field(
        default=100, ge=0, description="R: largest number of steps of Adam per round; 0: no distillation"
    )
    lr: float = Field(default=1e-4, gt=0, description="learning rate of Adam, decreasing to 0 by cosine")
    batch_size: int = Field(default=128, ge=1, description="public samples per step")
    temperature: float = Field(default=1.0, gt=0, description="T: divides all logits")
    average: Literal["logits", "probabilities"] = Field(
        default="logits", description="outputs of the teachers to average"
    )
    link: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="softmax over all classes, or a sigmoid for each label"
    )
    rounds: int | None = Field(
        default=None, ge=0, description="number of first rounds with distillation; null: all"
    )
    select: Literal["last", "best"] = Field(
        default="last", description="the last model, or the best one on the server's validation samples"
    )
    patience: int = Field(
        default=1000, ge=1, description="steps without a better validation loss before `best` stops"
    )
    check_every: int = Field(
        default=50, ge=1, description="steps between evaluations on the validation samples"
    )

    @model_validator(mode="after")
    def _patience_is_seen(self) -> Self:
        if self.patience < self.check_every:
            raise ValueError("patience should be at least check_every")
        return self

    def check(self, context: Context) -> None:
        """Raise ConfigError if the run lacks something these settings need, or its outputs are not probabilities."""
        if context.task in ("regression", "counts", "survival", "generation"):
            raise ConfigError(
                f"distillation needs class probabilities, which a {context.task} task does not have"
            )
        if self.select == "best" and context.validation is None:
            raise ConfigError(
                "distillation with select = best needs validation samples on the server, which the partition "
                "'dirichlet_perada' reserves; use that partition, or set select = last"
            )

    @property
    def off(self) -> bool:
        """Whether no round distils."""
        return not self.active(0)

    def active(self, round: int) -> bool:
        """Whether a round, counted from 0, distils at all."""
        return self.steps > 0 and (self.rounds is None or round < self.rounds)

    def teacher(self, ensembles: Sequence[tuple[Model, TensorDict]], public: Source) -> Teacher:
        """Return the teacher for `distil`: `targets`, or the ensembles as a function if images are augmented."""
        if public.augment == "none":
            return self.targets(ensembles, public)
        return lambda x: self._probabilities(ensembles, public, lambda size: torch.split(x, size))

    def targets(self, ensembles: Sequence[tuple[Model, TensorDict]], public: Source) -> Tensor:
        """Return the teacher's probabilities on the public set, [P, C]; every model of every ensemble counts once.

        `ensembles`: (architecture, its models [clients, ...]).
        """
        rows = torch.arange(len(public))
        return self._probabilities(
            ensembles, public, lambda size: (public.take(part) for part in torch.split(rows, size))
        )

    def _probabilities(
        self,
        ensembles: Sequence[tuple[Model, TensorDict]],
        public: Source,
        pieces: Callable[[int], Iterable[Tensor]],
    ) -> Tensor:
        """Return the teacher's probabilities on samples, [samples, C]; `pieces(size)` yields them in batches."""
        clients = [models.batch_size[0] for _, models in ensembles]
        sums = [
            self._sum(model, tree.tensors(models), pieces(rows_at_once(public, count)))
            for (model, models), count in zip(ensembles, clients, strict=True)
        ]
        mean = torch.stack(sums).sum(0) / sum(clients)
        return mean if self.average == "probabilities" else self._link(mean)

    def _sum(self, model: Model, states: dict[str, Tensor], samples: Iterable[Tensor]) -> Tensor:
        """Return the sum over models [clients, ...] of their logits or probabilities (`average`), [samples, C]."""
        sums = []
        with torch.no_grad():
            for x in samples:
                logits = vmap(model, in_dims=(0, None))(states, x) / self.temperature
                sums.append((self._link(logits) if self.average == "probabilities" else logits).sum(0))
        return torch.cat(sums)

    def distil(self, student: TensorDict, teacher: Teacher, context: Context, round: int) -> TensorDict:
        """Return the student after R steps towards `teacher`; `student` itself is not changed.

        Parameters that the split freezes stay as they are.
        """
        if not self.active(round):
            return student
        trainable = set(context.split.trainable)
        learned = {
            n: student.get(n).detach().clone().requires_grad_()
            for n in context.model.parameters
            if n in trainable
        }
        state = {**tree.tensors(student), **learned}
        optimizer = torch.optim.Adam(list(learned.values()), lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        best = _Best(self.patience, context) if self.select == "best" else None
        public = context.public
        assert public is not None
        key = torch.tensor(torch_seed(context.seed, "distilled images", context.architecture, round))
        for step, rows in enumerate(self._batches(len(public), context, round)):
            if best is not None and step % self.check_every == 0 and best.stops(step, state, learned):
                break
            x = public.take_augmented(rows, key + step)
            targets = teacher[rows] if isinstance(teacher, Tensor) else teacher(x)
            with torch.enable_grad():
                loss = self.loss(context.model(state, x), targets)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        if best is not None:
            best.stops(self.steps, state, learned)
            learned = best.kept
        return TensorDict({n: learned[n].detach() if n in learned else t for n, t in student.items()})

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return T² times the mean over samples of KL(targets ‖ prediction), 0-d; both are [batch, C]."""
        logits = outputs / self.temperature
        if self._is_softmax(outputs):
            per_sample = F.kl_div(F.log_softmax(logits, 1), targets, reduction="none").sum(1)
        else:
            cross = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
            entropy = F.binary_cross_entropy(targets, targets, reduction="none")
            per_sample = (cross - entropy).sum(1)
        return per_sample.mean() * self.temperature**2

    def _link(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self._is_softmax(logits) else logits.sigmoid()

    def _is_softmax(self, outputs: Tensor) -> bool:
        return self.link == "softmax" and outputs.shape[-1] > 1

    def _batches(self, samples: int, context: Context, round: int) -> Sequence[Tensor]:
        """Return the rows of every step: passes over the public set, each in a new random order."""
        rng = generator(context.seed, "distil", context.architecture, round)
        rows = self.steps * min(self.batch_size, samples)
        order = [torch.from_numpy(rng.permutation(samples)) for _ in range(-(-rows // samples))]
        return torch.split(torch.cat(order)[:rows], min(self.batch_size, samples))


class _Best:
    """Keeps the parameters with the lowest loss on the server's validation samples."""

    def __init__(self, patience: int, context: Context) -> None:
        self._patience, self._context = patience, context
        self._lowest, self._found = float("inf"), 0
        self.kept: dict[str, Tensor] = {}

    def stops(self, step: int, state: dict[str, Tensor], learned: dict[str, Tensor]) -> bool:
        """Evaluate the model after `step` steps; return whether it has not improved for too long."""
        source, context = self._context.validation, self._context
        assert source is not None
        with torch.no_grad():
            parts = torch.split(torch.arange(len(source)), rows_at_once(source))
            outputs = torch.cat([context.model(state, source.take(rows)) for rows in parts])
            value = float(LOSSES[source.task](outputs, source.y, None))
        if value < self._lowest:
            self._lowest, self._found = value, step
            self.kept = {n: t.detach().clone() for n, t in learned.items()}
        return step - self._found >= self._patience
