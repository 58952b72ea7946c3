"""GPFL: features that a vector changes before the head."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, layer_norm

from references.plain import Batch, Outcome, Problem, State, clone, fit, mean, weights_of


def into_head(module: nn.Module, state: State, x: Tensor) -> Tensor:
    """What goes into the layer that the method put in the place of the head."""
    found: list[Tensor] = []
    head = module.get_submodule(str(module.feature_layer))
    handle = head.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    functional_call(module, {n: t if t.requires_grad else t.clone() for n, t in state.items()}, (x,))
    handle.remove()
    return found[0]


def conditioned(z: Tensor, u: Tensor, state: State, inside: str) -> Tensor:
    """relu(z (1 + γ(u)) + β(u)), written out."""
    found = []
    for part in ("scale", "shift"):
        own = {n.removeprefix(f"{inside}{part}."): t for n, t in state.items()}
        hidden = (own["0.weight"] @ u + own["0.bias"]).clamp(min=0)
        found.append(layer_norm(hidden, hidden.shape, own["2.weight"], own["2.bias"]))
    return (z * (1 + found[0]) + found[1]).clamp(min=0)


def gpfl(p: Problem, lam: float, mu: float, conditions: str, weights: str) -> Outcome:
    (name,) = [n for n in p.init if n.endswith("embeddings")]
    root = name.removesuffix("embeddings")
    inside, condition = f"{root}conditioning.", f"{root}condition"
    head = [n for n in (f"{root}weight", f"{root}bias") if n in p.init]
    shared = {n: t.clone() for n, t in p.init.items() if n not in (*head, condition)}
    own = [{n: p.init[n].clone() for n in head} for _ in p.clients]
    last = [torch.zeros_like(p.init[name]) for _ in p.clients]
    moving = copy.deepcopy(p.module).train()

    def share(i: int) -> Tensor:
        counts = torch.bincount(p.whole(i, "train")[1], minlength=len(shared[name]))
        return counts.to(shared[name]) / counts.sum()

    def deployed(i: int) -> State:
        of = last[i] if conditions == "released" else shared[name]
        return {**shared, **own[i], condition: share(i) @ of}

    for t, sampled in enumerate(p.rounds):
        sent = []
        for i in sampled:
            received = shared[name].clone()
            g = (last[i] if conditions == "released" else received).mean(0)

            def term(state: State, batch: Batch) -> Tensor:
                x, y = batch
                z = conditioned(into_head(moving, state, x), g, state, inside)  # noqa: B023
                e = state[name]
                lengths = [torch.linalg.vector_norm(v, dim=1).clamp(min=1e-12) for v in (z, e)]
                cosines = z @ e.T / (lengths[0][:, None] * lengths[1])
                decay = [e, *(s for n, s in state.items() if n.startswith(inside))]
                far = ((z - received[y]) ** 2).sum().sqrt()  # noqa: B023
                return cross_entropy(cosines, y) + lam * far + sum(mu / 2 * (s**2).sum() for s in decay)

            trained = fit(p, deployed(i), p.batches(i, t), term=term)
            own[i], last[i] = {n: trained[n] for n in head}, trained[name].clone()
            sent.append({n: trained[n] for n in shared})
        shared = mean(sent, weights_of(p, sampled, weights))
    return Outcome(None, [deployed(i) for i in p.clients], clone(shared))
