"""APPLE: cores and shares as the leaves of one graph, with an optimizer for each."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor
from torch.func import functional_call

from references.plain import Outcome, Problem, State, Trainer, clone, mean_loss


def combined(p: Problem, cores: list[State], shares: Tensor) -> State:
    return {n: sum(a * core[n] for a, core in zip(shares, cores, strict=True)) for n in p.parameters}  # type: ignore[misc]


def trained(
    p: Problem,
    cores: list[State],
    i: int,
    t: int,
    start: tuple[State, Tensor],
    prior: Tensor,
    rate: float,
    kappa: float,
) -> tuple[State, Tensor]:
    """(c_i, p_i) of a client; p_i − p⁰ is what the optimizer moves."""
    steps, module = p.batches(i, t), copy.deepcopy(p.module).train()
    one = Trainer(p, start[0], len(steps))
    gap = (start[1] - prior).clone().requires_grad_()
    slow = copy.copy(one.rule)
    rule: torch.optim.Optimizer
    if slow.adamw:
        rule = torch.optim.AdamW([gap], slow.lr * rate, weight_decay=slow.weight_decay)
    else:
        rule = torch.optim.SGD([gap], slow.lr * rate, momentum=slow.momentum, weight_decay=slow.weight_decay)
    falls = torch.optim.lr_scheduler.LambdaLR(
        rule, lambda k: 1 - k / len(steps) if slow.linear and k < len(steps) else 1.0
    )
    for (batch,) in steps:
        own = {n: v.detach().clone().requires_grad_() for n, v in one.now.items()}
        shares = prior + gap
        every = [own if j == i else core for j, core in enumerate(cores)]
        theta = combined(p, every, shares)
        loss = mean_loss(functional_call(module, {**one.rest, **theta}, (batch[0],)), batch[1])
        loss = loss + kappa * (gap**2).sum()
        *slopes, of_gap = torch.autograd.grad(loss, [*own.values(), gap])
        gap.grad = of_gap
        if slow.clip is not None:
            torch.nn.utils.clip_grad_norm_([gap], slow.clip)
        one.step(dict(zip(own, slopes, strict=True)))
        rule.step()
        falls.step()
    return one.state, (prior + gap).detach()


def apple(
    p: Problem, rate: float, mu: float, horizon: float, decay: str, prior: str, weights: str = ""
) -> Outcome:
    count, sizes = len(p.sizes), torch.tensor([float(n) for n in p.sizes])
    first = sizes / sizes.sum() if prior == "samples" else torch.full((count,), 1 / count)
    cores = [{n: p.init[n].clone() for n in p.parameters} for _ in p.clients]
    own, shares = [clone(p.init) for _ in p.clients], [first.clone() for _ in p.clients]
    for t, sampled in enumerate(p.rounds):
        fallen = (
            10 ** (-3 * t / horizon) if decay == "exponential" else (1 + math.cos(math.pi * t / horizon)) / 2
        )
        kappa, sent = mu * fallen if t < horizon else 0.0, {}
        for i in sampled:
            own[i], shares[i] = trained(p, cores, i, t, (own[i], shares[i]), first, rate, kappa)
            sent[i] = {n: own[i][n].clone() for n in p.parameters}
        for i, core in sent.items():
            cores[i] = core
    models = [{**own[i], **combined(p, cores, shares[i])} for i in p.clients]
    kept = [{"own": shares[i][i] - first[i]} for i in p.clients]
    return Outcome(
        None, models, {f"core/{n}": torch.stack([c[n] for c in cores]) for n in p.parameters}, kept
    )
