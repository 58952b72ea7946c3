"""Models taught on public data: FedDF and PerAda on the server, PerFed-CKT on the clients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from references.plain import Outcome, Problem, State, Trainer, clone, fit, mean, outputs, pull, weights_of
from references.two_models import everywhere


def teaching(teachers: Sequence[tuple[Problem, State]], distil: dict[str, Any]) -> Tensor:
    """The teachers' mean prediction on the public set, whatever their architectures."""
    link = torch.sigmoid if distil["link"] == "sigmoid" else (lambda z: z.softmax(-1))
    logits = torch.stack([outputs(q, s, q.public) / distil["temperature"] for q, s in teachers])
    return link(logits.mean(0)) if distil["average"] == "logits" else link(logits).mean(0)


def distilled(p: Problem, student: State, teacher: Tensor, t: int, distil: dict[str, Any]) -> State:
    """R steps of Adam, at a rate that falls by cosine to 0, on T² KL(teacher ‖ student).

    With `select` = best the model with the lowest validation loss that was seen is kept.
    """
    steps, temperature = distil["steps"], distil["temperature"]
    if steps == 0 or (distil["rounds"] is not None and t >= distil["rounds"]):
        return student
    params = {n: student[n].clone().requires_grad_() for n in p.parameters}
    module = p.module.eval()
    optimizer = torch.optim.Adam(list(params.values()), distil["lr"])
    seen: list[tuple[float, int, State]] = []

    def look(step: int) -> bool:
        x, y = p.validation
        loss = float(cross_entropy(outputs(p, {**student, **params}, x), y))
        seen.append((loss, step, clone(params)))
        return step - min(seen, key=lambda s: s[0])[1] >= distil["patience"]

    best = distil["select"] == "best"
    for k, rows in enumerate(p.distil_batches(t, distil["batch_size"], steps)):
        if best and k % distil["check_every"] == 0 and look(k):
            break
        optimizer.param_groups[0]["lr"] = distil["lr"] * (1 + math.cos(math.pi * k / steps)) / 2
        q, z = teacher[rows], functional_call(module, {**student, **params}, (p.public[rows],)) / temperature
        if distil["link"] == "sigmoid":
            s = torch.sigmoid(z)
            kl = q * (q.log() - s.log()) + (1 - q) * ((1 - q).log() - (1 - s).log())
        else:
            kl = q * (q.log() - z.log_softmax(-1))
        optimizer.zero_grad()
        (temperature**2 * kl.sum() / len(rows)).backward()
        optimizer.step()
    else:
        if best:
            look(steps)
    params = min(seen, key=lambda s: s[0])[2] if best else params
    return {n: params[n].detach() if n in params else s for n, s in student.items()}


def feddf(p: Problem, weights: str, distil: dict[str, Any]) -> Outcome:
    """Of one architecture or several, whose clients teach all of them."""
    kinds = p.siblings or {"": p}
    w = {kind: clone(q.init) for kind, q in kinds.items()}
    for t, sampled in enumerate(p.rounds):
        trained = {i: fit(p.of(i), w[p.kind(i)], p.batches(i, t)) for i in sampled}
        teacher = teaching([(p.of(i), s) for i, s in trained.items()], distil)
        for kind, q in kinds.items():
            members = [i for i in sampled if p.kind(i) == kind]
            if members:
                w[kind] = mean([trained[i] for i in members], weights_of(p, members, weights))
            w[kind] = distilled(q, w[kind], teacher, t, distil)
    server = {f"w {kind}/{n}": x for kind, model in w.items() for n, x in model.items()}
    return Outcome(None if p.siblings else w[""], [], server)


def perada(
    p: Problem,
    lam: float,
    personal_epochs: int | None,
    personal_lr: float | None,
    variant: str,
    weights: str,
    distil: dict[str, Any],
    personal_steps: int | None = None,
) -> Outcome:
    """`released` has the penalty λ‖·‖², twice as strong."""
    strength = 2 * lam if variant == "released" else lam
    rule = p.train if personal_lr is None else replace(p.train, lr=personal_lr)
    w, v = clone(p.init), everywhere(p)
    for t, sampled in enumerate(p.rounds):
        trained = []
        for i in sampled:
            steps = p.batches(i, t, epochs=personal_epochs, steps=personal_steps)
            v[i] = fit(p, v[i], steps, term=pull(strength, w), train=rule)
            trained.append(fit(p, w, p.batches(i, t)))
        teacher = teaching([(p, s) for s in trained], distil)
        w = distilled(p, mean(trained, weights_of(p, sampled, weights)), teacher, t, distil)
    return Outcome(w, v)


def perfed_ckt(
    p: Problem,
    clusters: int,
    lam: float,
    public_batch: int,
    warm_rounds: int,
    first_round: str,
    **options: Any,
) -> Outcome:
    """In the first round there are no centroids yet: clients train alone, or not at all, and upload; in warm ones they
    only train.
    """
    w = [clone(s) for s in p.first_private]
    centroids: list[Tensor] = []
    for t, sampled in enumerate(p.rounds):
        said = []
        for i in sampled:
            before = outputs(p.of(i), w[i], p.public).softmax(1)
            target = min(centroids, key=lambda c: float(((c - before) ** 2).sum())) if centroids else None
            if t != warm_rounds or first_round == "train":
                w[i] = taught(p.of(i), w[i], i, t, target, lam, public_batch)
            said.append(outputs(p.of(i), w[i], p.public).softmax(1))
        centroids = k_means(said, clusters) if t >= warm_rounds else []
    found = torch.stack(sorted(centroids, key=lambda c: float(c[0, 0])))
    return Outcome(None, w, {"centroids": found})


def taught(p: Problem, start: State, i: int, t: int, target: Tensor | None, lam: float, size: int) -> State:
    """Step on F + (λ/b') Σ ‖s − s̄‖², a private and a public batch each; the public one in evaluation mode."""
    steps = p.batches(i, t)
    model = Trainer(p, start, len(steps))
    public = p.public_batches(i, t, size, len(steps))
    for (batch,), rows in zip(steps, public, strict=True):
        g = model.gradient(batch)
        if target is not None:
            point = {n: x.requires_grad_() for n, x in model.now.items()}
            s = functional_call(p.module.eval(), {**model.rest, **point}, (p.public[rows],)).softmax(1)
            loss = lam * ((target[rows] - s) ** 2).sum() / len(rows)
            more = torch.autograd.grad(loss, list(point.values()))
            g = {n: g[n] + d for n, d in zip(point, more, strict=True)}
        model.step(g)
    return model.state


def k_means(points: Sequence[Tensor], clusters: int) -> list[Tensor]:
    """The best partition of all; a centroid is the mean of its members."""
    distinct = len({tuple(x.flatten().tolist()) for x in points})
    best: tuple[float, list[Tensor]] = (math.inf, [])
    for labels in itertools.product(range(min(clusters, distinct)), repeat=len(points)):
        if len(set(labels)) < min(clusters, distinct):
            continue
        groups = [[x for x, k in zip(points, labels, strict=True) if k == c] for c in sorted(set(labels))]
        means = [torch.stack(g).mean(0) for g in groups]
        inertia = sum(float(((x - m) ** 2).sum()) for g, m in zip(groups, means, strict=True) for x in g)
        best = min(best, (inertia, means), key=lambda b: b[0])
    return best[1]
