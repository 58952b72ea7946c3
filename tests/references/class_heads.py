"""FedGH and FedTGP: a head, or prototypes, that a server trains on class means."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from references.class_features import class_means, near, shape_of_classes
from references.global_models import head_names
from references.plain import Outcome, Problem, State, clone, fit, weights_of


def fedgh(p: Problem, server_lr: float, deploy: str, weights: str) -> Outcome:
    """The header is a module of its own with an optimizer of its own, one step a pair."""
    classes, width = shape_of_classes(p.of(0))
    header = torch.nn.Linear(width, classes)
    optimizer = torch.optim.SGD(header.parameters(), server_lr)
    kinds = {p.kind(i): p.of(i) for i in p.clients}
    first = kinds[next(iter(p.siblings))] if p.siblings else p
    with torch.no_grad():
        for parameter, name in zip((header.weight, header.bias), head_names(first), strict=True):
            parameter.copy_(first.init[name])

    def headed(q: Problem, state: State) -> State:
        now = {"weight": header.weight.detach().clone(), "bias": header.bias.detach().clone()}
        return {**state, **dict(zip(head_names(q), now.values(), strict=True))}

    v = [clone(p.of(i).init) for i in p.clients]
    for t, sampled in enumerate(p.rounds):
        sent = []
        for i in sampled:
            q = p.of(i)
            v[i] = fit(q, headed(q, v[i]), p.batches(i, t))
            means, counts = class_means(q, v[i], i)
            sent += [(means[c], c) for c in range(classes) if counts[c]]
        for z, c in sent:
            optimizer.zero_grad()
            cross_entropy(header(z)[None], torch.tensor([c])).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(header.parameters(), 50.0)
            optimizer.step()
    server = {n: t.detach() for n, t in header.named_parameters()}
    models = v if deploy == "trained" else [headed(p.of(i), v[i]) for i in p.clients]
    return Outcome(None, models, server)


class Prototypes(torch.nn.Module):
    """P̂ = L₂ relu(L₁ e)."""

    def __init__(self, classes: int, width: int, start: State) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(classes, width)
        self.middle = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())
        self.last = torch.nn.Linear(width, width)
        names = ("embedding", "first", "first_bias", "second", "second_bias")
        with torch.no_grad():
            for parameter, name in zip(self.parameters(), names, strict=True):
                parameter.copy_(start[f"made_from/{name}"])

    def forward(self) -> Tensor:
        found: Tensor = self.last(self.middle(self.embedding.weight))
        return found


def fedtgp(
    p: Problem,
    lam: float,
    predict: str,
    tau: float,
    server_passes: int,
    server_lr: float,
    server_batch: int,
    weights: str,
) -> Outcome:
    classes, width = shape_of_classes(p.of(0))
    network = Prototypes(classes, width, p.first_server)
    v = [clone(p.of(i).init) for i in p.clients]
    shared, there = torch.zeros(classes, width), torch.zeros(classes)
    for t, sampled in enumerate(p.rounds):
        pairs, counted = [], []
        for i, a in zip(sampled, weights_of(p, sampled, weights), strict=True):
            q = p.of(i)
            v[i] = fit(q, v[i], p.batches(i, t), term=near(q, shared, there, lam))
            means, counts = class_means(q, v[i], i)
            pairs += [(means[c], c) for c in range(classes) if counts[c]]
            counted += [a for c in range(classes) if counts[c]]
        margin = min(widest(pairs, counted), tau)
        optimizer = torch.optim.SGD(network.parameters(), lr=server_lr)
        for order in p.orders(t, len(pairs), server_passes):
            for k in range(0, len(order), server_batch):
                some = [pairs[j] for j in order[k : k + server_batch].tolist()]
                found = network()
                losses = []
                for z, c in some:
                    scores = -torch.stack([torch.dist(z, found[k]) for k in range(classes)])
                    scores = scores - margin * torch.eye(classes)[c]
                    losses.append(scores.logsumexp(0) - scores[c])
                optimizer.zero_grad()
                (sum(losses) / len(losses)).backward()  # type: ignore[union-attr,no-untyped-call]
                optimizer.step()
        shared, there = network().detach(), torch.ones(classes)
    models = v if predict == "head" else [by_distance(p.of(i), v[i], shared) for i in p.clients]
    return Outcome(None, models, {"prototypes": shared, "present": there.bool()})


def widest(pairs: list[tuple[Tensor, int]], weights: list[float]) -> float:
    """The largest distance of a class's mean prototype to the nearest other one."""
    middle = {}
    for c in {c for _, c in pairs}:
        own = [(a, z) for a, (z, k) in zip(weights, pairs, strict=True) if k == c]
        middle[c] = sum(a * z for a, z in own) / sum(a for a, _ in own)
    return max(min(float(torch.dist(middle[c], middle[k])) for k in middle if k != c) for c in middle)  # type: ignore[arg-type]


def by_distance(p: Problem, state: State, prototypes: Tensor) -> State:
    """With the head whose outputs are −‖z − P̂_c‖² but for ‖z‖², which all classes have."""
    weight, bias = head_names(p)
    return {**state, weight: 2 * prototypes, bias: -(prototypes**2).sum(1)}
