"""Several models: HypCluster's, IFCA's and CFL's on the server, FedFomo's mixtures of other clients' models."""

from __future__ import annotations

from typing import Any

import torch

from references.plain import Outcome, Problem, State, Trainer, clone, fit, mean, norm_of, weights_of
from references.two_models import everywhere, validation_loss


def hypcluster(p: Problem, clusters: int, weights: str) -> Outcome:
    w = [{n: p.first_server[f"{j}/{n}"].clone() for n in p.init} for j in range(clusters)]

    def best(i: int) -> int:
        losses = [validation_loss(p, model, i, "train") for model in w]
        return losses.index(min(losses))

    for t, sampled in enumerate(p.rounds):
        choice = {i: best(i) for i in sampled}
        trained = {i: fit(p, w[choice[i]], p.batches(i, t)) for i in sampled}
        for j in range(clusters):
            members = [i for i in sampled if choice[i] == j]
            if members:
                w[j] = mean([trained[i] for i in members], weights_of(p, members, weights))
    server = {f"{j}/{n}": s for j in range(clusters) for n, s in w[j].items()}
    return Outcome(None, [clone(w[best(i)]) for i in p.clients], server)


def ifca(p: Problem, clusters: int, weights: str, send: str, warm_rounds: int) -> Outcome:
    """Which clients begin with which model is drawn: `member` of the server's first state."""
    w = [{n: p.first_server[f"{j}/{n}"].clone() for n in p.init} for j in range(clusters)]

    def best(i: int, t: int) -> int:
        if t < warm_rounds:
            return int(p.first_server["member"][i])
        losses = [validation_loss(p, model, i, "train") for model in w]
        return losses.index(min(losses))

    for t, sampled in enumerate(p.rounds):
        choice = {i: best(i, t) for i in sampled}
        everyone = weights_of(p, sampled, weights)
        for j in range(clusters):
            members = [i for i in sampled if choice[i] == j]
            if not members:
                continue
            if send == "models":
                trained = [fit(p, w[j], p.batches(i, t)) for i in members]
                w[j] = mean(trained, weights_of(p, members, weights))
                continue
            new = clone(w[j])
            for i, a in zip(sampled, everyone, strict=True):
                if i in members:
                    trainer = Trainer(p, w[j], 1)
                    step = trainer.clipped(trainer.gradient(p.whole(i, "train")))
                    for n in p.parameters:
                        new[n] -= p.train.lr * a / sum(everyone) * step[n]
            w[j] = new
    server = {f"{j}/{n}": s for j in range(clusters) for n, s in w[j].items()}
    return Outcome(None, [clone(w[best(i, len(p.rounds))]) for i in p.clients], server)


def fedfomo(p: Problem, fallback: str, norm: str, **options: Any) -> Outcome:
    """Who downloads whose model is drawn: `downloads[t][i]`."""
    theta, previous = everywhere(p), everywhere(p)
    pool: dict[int, State] = {}
    affinity = torch.zeros(len(p.sizes), len(p.sizes))
    for t, sampled in enumerate(p.rounds):
        uploads = {}
        for i in sampled:
            others = p.draws["downloads"][t][i]
            candidates = {i: theta[i], **{n: pool[n] for n in others}}
            gain = {n: worth(p, i, previous[i], model, norm) for n, model in candidates.items()}
            for n in others:
                affinity[i, n] += gain[n]
            if max(gain.values()) > 0:
                mixed = mean(list(candidates.values()), [max(g, 0.0) for g in gain.values()])
            else:
                mixed = clone(theta[i] if fallback == "own" or t == 0 else previous[i])
            previous[i] = mixed
            theta[i] = uploads[i] = fit(p, mixed, p.batches(i, t))
        pool = uploads
    private = [
        {
            **{f"theta/{n}": s for n, s in theta[i].items()},
            **{f"previous/{n}": s for n, s in previous[i].items()},
        }
        for i in p.clients
    ]
    return Outcome(None, theta, {"affinity": affinity}, private)


def worth(p: Problem, i: int, baseline: State, model: State, norm: str) -> float:
    """Δ: what the validation loss falls by, a unit of distance of the parameters."""
    if not len(p.whole(i, "val")[1]):
        return 0.0
    apart = {n: model[n] - baseline[n] for n in p.parameters}
    gap = norm_of(apart) if norm == "l2" else sum(t.abs().sum() for t in apart.values())
    return (validation_loss(p, baseline, i) - validation_loss(p, model, i)) / (float(gap) + 1e-5)


def cfl(
    p: Problem, eps1: float, eps2: float, first_split: int, gamma: float, weights: str, **options: Any
) -> Outcome:
    """Clusters as lists of clients; two parts by joining the nearest until two are left."""
    models, groups = [clone(p.init)], [list(p.clients)]

    def cluster_of(i: int) -> int:
        return next(c for c, group in enumerate(groups) if i in group)

    for t, sampled in enumerate(p.rounds):
        theta = {i: fit(p, models[cluster_of(i)], p.batches(i, t)) for i in sampled}
        moved = {
            i: torch.cat([(theta[i][n] - models[cluster_of(i)][n]).flatten() for n in p.parameters])
            for i in sampled
        }
        for c in range(len(groups)):
            group = groups[c]
            if t < first_split or len(group) < 3 or not set(group) <= set(sampled):
                continue
            a = weights_of(p, group, weights)
            middle = sum(moved[i] * x for i, x in zip(group, a, strict=True)) / sum(a)
            if float(middle.norm()) >= eps1 or max(float(moved[i].norm()) for i in group) <= eps2:  # type: ignore[union-attr]
                continue
            parts = [[i] for i in group]
            cosine = {
                (i, j): float(torch.cosine_similarity(moved[i], moved[j], 0)) for i in group for j in group
            }
            while len(parts) > 2:
                pairs = [(k, m) for m in range(len(parts)) for k in range(m)]
                k, m = max(pairs, key=lambda q: min(cosine[i, j] for i in parts[q[0]] for j in parts[q[1]]))
                parts[k] += parts.pop(m)
            nearest = max(cosine[i, j] for i in parts[0] for j in parts[1])
            if gamma and ((1 - nearest) / 2) ** 0.5 <= gamma:
                continue
            stays, leaves = sorted(parts, key=min)
            groups[c] = stays
            groups.append(leaves)
            models.append(models[c])
        for c, group in enumerate(groups):
            here = [i for i in group if i in sampled]
            if here:
                found = mean([theta[i] for i in here], weights_of(p, here, weights))
                models[c] = {
                    n: s if s.is_floating_point() else torch.stack([theta[i][n] for i in here]).amax(0)
                    for n, s in found.items()
                }
    member = torch.tensor([cluster_of(i) for i in p.clients])
    return Outcome(None, [clone(models[cluster_of(i)]) for i in p.clients], {"member": member})
