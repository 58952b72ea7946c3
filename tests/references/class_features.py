"""FedProto, MOON, FedPHP, FedDBE, FedRoD and FedPAC: losses of features, class counts and class means."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from references.global_models import averaged, head_names
from references.plain import (
    Batch,
    Outcome,
    Problem,
    State,
    Term,
    Trainer,
    clone,
    features,
    fit,
    last_linear,
    mean,
    mean_loss,
    weights_of,
)


def shape_of_classes(p: Problem) -> tuple[int, int]:
    """(classes C, width d_z)."""
    head = last_linear(p.module)
    return head.out_features, head.in_features


def seen(p: Problem, state: State, client: int) -> tuple[Tensor, Tensor]:
    """(features, labels) of all training samples, in evaluation mode."""
    x, y = p.whole(client, "train")
    with torch.no_grad():
        return features(copy.deepcopy(p.module).eval(), clone(state), x), y


def class_means(p: Problem, state: State, client: int) -> tuple[Tensor, Tensor]:
    """(means [C, d_z], 0 where there is no sample; counts [C])."""
    z, y = seen(p, state, client)
    means, counts = torch.zeros(shape_of_classes(p)), torch.zeros(shape_of_classes(p)[0])
    for c in range(len(counts)):
        counts[c] = (y == c).sum()
        if counts[c]:
            means[c] = z[y == c].mean(0)
    return means, counts


def near(p: Problem, targets: Tensor, there: Tensor, lam: float) -> Term:
    """λ · MSE of the features of a training pass and the target of their class; 0 for a class without one."""
    module = copy.deepcopy(p.module).train()

    def term(state: State, batch: Batch) -> Tensor:
        z = features(module, {n: t if t.requires_grad else t.clone() for n, t in state.items()}, batch[0])
        apart = [((a - targets[c]) ** 2).mean() for a, c in zip(z, batch[1], strict=True) if there[c]]
        return lam * sum(apart, torch.zeros(())) / len(z)

    return term


def fedproto(p: Problem, lam: float, weights: str) -> Outcome:
    v = [clone(p.of(i).init) for i in p.clients]
    shared, there = torch.zeros(shape_of_classes(p)), torch.zeros(shape_of_classes(p)[0])
    for t, sampled in enumerate(p.rounds):
        sent = []
        for i in sampled:
            own = p.of(i)
            v[i] = fit(own, v[i], p.batches(i, t), term=near(own, shared, there, lam))
            sent.append(class_means(own, v[i], i))
        counted = weights_of(p, sampled, weights)
        for c in range(len(there)):
            able = [(a, means[c]) for a, (means, counts) in zip(counted, sent, strict=True) if counts[c]]
            if able:
                shared[c] = sum(a * m for a, m in able) / sum(a for a, _ in able)  # type: ignore[assignment]
                there[c] = 1
    return Outcome(None, v, {"prototypes": shared, "present": there.bool()})


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1) / (torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1))


def moon(
    p: Problem, mu: float, tau: float, history: int, weights: str, server: dict[str, Any], projection: int = 0
) -> Outcome:
    """The models before are each client's own last ones, newest first; fewer than Q of them at the start."""
    assert last_linear(p.module).in_features == (projection or 8)
    trained: list[list[State]] = [[] for _ in p.clients]
    fixed, moving = copy.deepcopy(p.module).eval(), copy.deepcopy(p.module).train()

    def local(i: int, t: int, w: State) -> State:
        def term(state: State, batch: Batch) -> Tensor:
            now = {n: s if s.requires_grad else s.clone() for n, s in state.items()}
            z = features(moving, now, batch[0])
            with torch.no_grad():
                fixed_z = [features(fixed, clone(s), batch[0]) for s in (w, *trained[i][:history])]
            alike = torch.stack([cosine(z, other) for other in fixed_z]) / tau
            return -mu * torch.log(alike[0].exp() / alike.exp().sum(0)).mean()

        theta = fit(p, w, p.batches(i, t), term=term)
        trained[i].insert(0, clone(theta))
        return theta

    w = averaged(p, local, weights, server)
    return Outcome(w, [])


def mmd(z: Tensor, y: Tensor) -> Tensor:
    """The V-statistic sample by sample, with five kernels about the mean distance of two rows of the joint batch.

    As in the released code, but for a single sample, which has none.
    """
    if len(z) == 1:
        return 0.0 * z.sum()
    both = [*z, *y]
    with torch.no_grad():
        b = sum(((a - c) ** 2).sum() for a in both for c in both) / (len(both) ** 2 - len(both)) + 1e-8

    def kernel(a: Tensor, c: Tensor) -> Tensor:
        return sum(torch.exp(-((a - c) ** 2).sum() / (b * s)) for s in (0.25, 0.5, 1, 2, 4))  # type: ignore[return-value]

    n = len(z) ** 2
    parts = [(z, z, 1), (y, y, 1), (z, y, -2)]
    return sum(k * kernel(a, c) / n for left, right, k in parts for a in left for c in right)  # type: ignore[return-value]


def fedphp(
    p: Problem, lam: float, teach: str, horizon: float, weights: str, server: dict[str, Any]
) -> Outcome:
    v, times = [clone(p.init) for _ in p.clients], [0] * len(p.sizes)
    fixed, moving = copy.deepcopy(p.module).eval(), copy.deepcopy(p.module).train()

    def local(i: int, t: int, w: State) -> State:
        def term(state: State, batch: Batch) -> Tensor:
            now = {n: s if s.requires_grad else s.clone() for n, s in state.items()}
            z, g = features(moving, now, batch[0]), functional_call(moving, dict(now), (batch[0],))
            with torch.no_grad():
                taught = functional_call(fixed, clone(v[i]), (batch[0],))
                y = features(fixed, clone(v[i]), batch[0])
            kd = -(torch.softmax(taught / 4, 1) * torch.log_softmax(g, 1)).sum(1).mean()
            lesson = kd if teach == "kd" else mmd(z, y)
            return lam * lesson - lam * mean_loss(g, batch[1])

        theta = fit(p, w, p.batches(i, t), term=term)
        mu = min(0.9 * times[i] / horizon, 0.9)
        v[i] = {n: mu * v[i][n] + (1 - mu) * s if s.is_floating_point() else s for n, s in theta.items()}
        times[i] += 1
        return theta

    w = averaged(p, local, weights, server)
    counts = [torch.tensor(float(k)) for k in times]
    private = [{**{f"v/{n}": s for n, s in v[i].items()}, "count": counts[i]} for i in p.clients]
    return Outcome(w, v, {}, private)


def feddbe(p: Problem, kappa: float, mu: float, bias: bool, weights: str) -> Outcome:
    """A running mean through which only the last batch has a gradient; a vector that is a tensor of the head."""
    (offset,) = [n for n in p.init if n.endswith("offset")]
    rest = [n for n in p.init if n != offset]
    w, own = clone(p.init), [p.init[offset].clone() for _ in p.clients]
    consensus = torch.zeros_like(w[offset])
    moving = copy.deepcopy(p.module).train()
    for t, sampled in enumerate(p.rounds):
        sent = []
        for i in sampled:
            r = torch.zeros_like(consensus)

            def term(state: State, batch: Batch) -> Tensor:
                nonlocal r
                now = {n: s if s.requires_grad else s.clone() for n, s in state.items()}
                new = (1 - mu) * r + mu * features(moving, now, batch[0]).mean(0)
                r = new.detach()
                return (kappa if t else 0.0) * 0.5 * ((new - consensus) ** 2).mean()  # noqa: B023

            learned = rest if t == 0 or not bias else None
            trained = fit(p, {**w, offset: own[i]}, p.batches(i, t), learned, term)
            if t == 0:
                sent.append({"mean": r})
                continue
            own[i] = trained[offset]
            sent.append({n: trained[n] for n in rest})
        found = mean(sent, weights_of(p, sampled, weights))
        if t == 0:
            consensus = found["mean"]
        else:
            w = {**w, **found}
    server = {"mean": consensus, **{f"w/{n}": w[n] for n in rest}}
    return Outcome(None, [{**w, offset: b} for b in own], server)


def fedrod(p: Problem, gamma: float, personal_rate: float, weights: str, server: dict[str, Any]) -> Outcome:
    """Both heads take their step on one batch, from the outputs before either; model and head clip each by itself."""
    weight, bias = head_names(p)
    own = [{n: torch.zeros_like(p.init[n]) for n in (weight, bias)} for _ in p.clients]

    def local(i: int, t: int, w: State) -> State:
        steps = p.batches(i, t)
        slower = replace(p.train, lr=p.train.lr * personal_rate)
        model = Trainer(p, w, len(steps))
        head = Trainer(p, {**w, **own[i]}, len(steps), (weight, bias), slower)
        counts = torch.bincount(p.whole(i, "train")[1], minlength=shape_of_classes(p)[0])
        prior = gamma * torch.log(counts.clamp(min=1e-12))
        for ((x, y),) in steps:
            point = {n: t.requires_grad_() for n, t in model.now.items()}
            now = {n: t.clone() for n, t in model.rest.items()}
            extra = {n: t.requires_grad_() for n, t in head.now.items()}
            z = features(model.module, {**now, **point}, x)
            g = functional_call(model.module, {**model.rest, **point}, (x,))
            generic = cross_entropy(g + prior, y)
            personal = cross_entropy(g.detach() + z.detach() @ extra[weight].T + extra[bias], y)
            found = torch.autograd.grad(generic, list(point.values()))
            more = torch.autograd.grad(personal, list(extra.values()))
            model.step(dict(zip(point, found, strict=True)))
            head.step(dict(zip(extra, more, strict=True)))
        own[i] = head.now
        return model.state

    w = averaged(p, local, weights, server)
    return Outcome(w, [{**w, **{n: w[n] + own[i][n] for n in own[i]}} for i in p.clients], {}, own)


def best_mixture(variance: Tensor, means: Tensor, client: int) -> Tensor:
    """argmin over the simplex of βᵀ(diag V + G)β by trying every support; weights below 10⁻³ become 0."""
    apart = (means[client] - means).flatten(1)
    a = torch.diag(variance) + apart @ apart.T
    best, lowest = torch.zeros(len(a)), float("inf")
    for size in range(1, len(a) + 1):
        for some in itertools.combinations(range(len(a)), size):
            part = a[list(some)][:, list(some)]
            x = torch.linalg.lstsq(part, torch.ones(size, 1), driver="gelsd").solution[:, 0]
            beta = torch.zeros(len(a))
            beta[list(some)] = x / x.sum() if float(x.sum()) else 0.0
            value = float(beta @ a @ beta)
            if (beta >= 0).all() and float(beta.sum()) > 0.5 and value < lowest - 1e-15:
                best, lowest = beta, value
    best = torch.where(best < 1e-3, torch.zeros(()), best)
    return best / best.sum()


def fedpac(
    p: Problem,
    lam: float,
    head_epochs: int,
    head_lr: float | None,
    mix: bool,
    weights: str,
    head_steps: int | None = None,
) -> Outcome:
    head = head_names(p)
    body = [n for n in p.init if n not in head]
    phi = clone(p.init)
    heads = [{n: p.init[n].clone() for n in head} for _ in p.clients]
    shared, there = torch.zeros(shape_of_classes(p)), torch.zeros(shape_of_classes(p)[0])
    rule = p.train if head_lr is None else replace(p.train, lr=head_lr)
    for t, sampled in enumerate(p.rounds):
        up, moments, variances, after = [], [], [], []
        for i in sampled:
            start = {**phi, **heads[i]}
            z, _ = seen(p, start, i)
            means, counts = class_means(p, start, i)
            moments.append(means * (counts / counts.sum())[:, None])
            spread = (z**2).sum(1).mean() - (moments[-1] ** 2).sum()
            variances.append(spread / len(z))
            targets = torch.where(there[:, None] > 0, shared, means)
            steps = p.batches(i, t, epochs=head_epochs, steps=head_steps)
            model = fit(p, start, steps, head, train=rule)
            term = near(p, targets, torch.ones(len(there)), lam) if there.any() else None
            up.append(fit(p, model, p.batches(i, t), body, term))
            after.append(class_means(p, up[-1], i))
        average = mean(up, weights_of(p, sampled, weights))
        phi = {**phi, **{n: average[n] for n in body}}
        total = torch.stack([counts for _, counts in after]).sum(0)
        sums = torch.stack([means * counts[:, None] for means, counts in after]).sum(0)
        shared = torch.where(total[:, None] > 0, sums / total.clamp(min=1)[:, None], shared)
        there = torch.maximum(there, (total > 0).to(there))
        sent = [{n: s[n] for n in head} for s in up]
        for k, i in enumerate(sampled):
            beta = best_mixture(torch.stack(variances), torch.stack(moments), k)
            heads[i] = mean(sent, beta.tolist()) if mix else sent[k]
    return Outcome(None, [{**phi, **h} for h in heads], {"prototypes": shared, "present": there.bool()})
