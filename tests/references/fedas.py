"""FedAS: a body aligned to the client's old features, and bodies weighed by Fisher information."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import mse_loss

from references.class_features import class_means
from references.global_models import head_names
from references.plain import (
    Batch,
    Batches,
    Outcome,
    Problem,
    State,
    Trainer,
    clone,
    features,
    fit,
    mean,
    mean_loss,
    weights_of,
)


class Aligning(Trainer):
    """Its gradient is of the distance to the old means alone."""

    means: Tensor

    def gradient(self, batch: Batch, *_: object, **__: object) -> State:
        point = {n: t.detach().clone().requires_grad_() for n, t in self.now.items()}
        z = features(self.module, {**self.rest, **point}, batch[0])
        loss = sum(
            mse_loss(z[batch[1] == c], self.means[c].expand_as(z[batch[1] == c])) for c in batch[1].unique()
        )
        found = torch.autograd.grad(loss, list(point.values()))  # type: ignore[arg-type]
        return dict(zip(point, found, strict=True))


def align(p: Problem, start: State, means: Tensor, steps: Batches, rate: float | None) -> State:
    body = [n for n in p.parameters if n not in head_names(p)]
    settings = p.train if rate is None else replace(p.train, lr=rate)
    trainer = Aligning(p, start, len(steps), body, settings)
    trainer.means = means
    for (batch,) in steps:
        trainer.step(trainer.gradient(batch))
    return trainer.state


def information(p: Problem, state: State, steps: Batches) -> float:
    module, found = copy.deepcopy(p.module).eval(), 0.0
    for (x, y), *_ in steps:
        point = {n: state[n].detach().clone().requires_grad_() for n in p.parameters}
        loss = mean_loss(functional_call(module, {**clone(state), **point}, (x,)), y)
        found += sum(float((g**2).sum()) for g in torch.autograd.grad(loss, list(point.values())))
    return found


def fedas(
    p: Problem,
    align_epochs: int,
    align_lr: float | None,
    fisher: bool,
    weights: str,
    align_steps: int | None = None,
) -> Outcome:
    head = head_names(p)
    v, shared = [clone(p.init) for _ in p.clients], {n: t for n, t in clone(p.init).items() if n not in head}
    for t, sampled in enumerate(p.rounds):
        counted = []
        for i in sampled:
            means, _ = class_means(p, v[i], i)
            model = {**v[i], **shared}
            if align_epochs or align_steps:
                steps = p.batches(
                    i, t, epochs=None if align_steps else align_epochs, steps=align_steps, purpose="align"
                )
                model = align(p, model, means, steps, align_lr)
            v[i] = fit(p, model, p.batches(i, t))
            counted.append(information(p, v[i], p.batches(i, t, epochs=1, purpose="fisher")))
        bodies = [{n: s for n, s in v[i].items() if n not in head} for i in sampled]
        shared = mean(bodies, counted if fisher else weights_of(p, sampled, weights))
    return Outcome(None, v, shared)
