"""FedEM: M networks apart from each other, each with an optimizer of its own, and expectations sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from references.plain import Batch, Outcome, Problem, State, Trainer, clone, mean, outputs, weights_of

SHARES = "mixture.shares"


def networks(p: Problem, state: State) -> list[tuple[Problem, State]]:
    """Every network of a mixture as a problem of its own."""
    inside = p.module.networks
    assert isinstance(inside, nn.ModuleList)
    found = []
    for m, network in enumerate(inside):
        own = {
            n.removeprefix(f"networks.{m}."): t for n, t in state.items() if n.startswith(f"networks.{m}.")
        }
        found.append((replace(p, module=network, init=own), own))
    return found


def together(states: Sequence[State]) -> State:
    return {f"networks.{m}.{n}": t for m, state in enumerate(states) for n, t in state.items()}


def expected(parts: list[tuple[Problem, State]], shares: Tensor, batch: Batch) -> Tensor:
    """q [samples, M]: π_m exp(−ℓ_m) over its sum, of one sample after another."""
    x, y = batch
    loss = [
        [cross_entropy(o[None], c[None]) for o, c in zip(outputs(q, s, x), y, strict=True)] for q, s in parts
    ]
    likely = torch.stack([a * torch.exp(-torch.stack(own)) for a, own in zip(shares, loss, strict=True)], 1)
    return likely / likely.sum(1, keepdim=True)


def trained(p: Problem, start: State, shares: Tensor, i: int, t: int) -> State:
    parts, steps = networks(p, start), p.batches(i, t)
    trainers = [Trainer(q, s, len(steps)) for q, s in parts]
    for (batch,) in steps:
        q = expected(parts, shares, batch)
        gradients = []
        for m, one in enumerate(trainers):
            point = {n: v.detach().clone().requires_grad_() for n, v in one.now.items()}
            out = functional_call(one.module, {**one.rest, **point}, (batch[0],))
            loss = (q[:, m] * cross_entropy(out, batch[1], reduction="none")).mean()
            gradients.append(dict(zip(point, torch.autograd.grad(loss, list(point.values())), strict=True)))
        if p.train.clip is not None:
            norm = sum((g**2).sum() for own in gradients for g in own.values()) ** 0.5
            scale = min(1.0, p.train.clip / (float(norm) + 1e-6))
            gradients = [{n: g * scale for n, g in own.items()} for own in gradients]
        for one, own in zip(trainers, gradients, strict=True):
            one.step(own, clip=False)
    return together([one.state for one in trainers])


def fedem(p: Problem, components: int, normalise: str, newcomer_passes: int, weights: str) -> Outcome:
    shared = {n: t for n, t in clone(p.init).items() if n != SHARES}
    shares = [torch.full((components,), 1.0 / components) for _ in p.clients]
    took_part = set()
    everyone = sum(weights_of(p, list(p.clients), weights))
    for t, sampled in enumerate(p.rounds):
        sent = []
        for i in sampled:
            sent.append(trained(p, shared, shares[i], i, t))
            shares[i] = expected(networks(p, shared), shares[i], p.whole(i, "train")).mean(0)
            took_part.add(i)
        counted = weights_of(p, sampled, weights)
        average = mean(sent, counted)
        step = sum(counted) / everyone if normalise == "all" else 1.0
        for n, new in average.items():
            moving = n in dict(p.module.named_parameters())
            shared[n] = shared[n] + step * (new - shared[n]) if moving else new
    models = []
    for i in p.clients:
        own = shares[i]
        for _ in range(0 if i in took_part else newcomer_passes):
            own = expected(networks(p, shared), own, p.whole(i, "train")).mean(0)
        models.append({**shared, SHARES: own})
    return Outcome(None, models, shared)
