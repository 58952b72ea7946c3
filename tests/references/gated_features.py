"""GPFL and FedCP: features that a vector changes, or a gate splits, before the head."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, layer_norm

from references.plain import Batch, Outcome, Problem, State, Trainer, clone, fit, mean, mean_loss, weights_of


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


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """The V-statistic pair by pair."""

    def kernel(one: Tensor, other: Tensor) -> Tensor:
        square = ((one - other) ** 2).sum()
        return sum(torch.exp(-square / (2 * s)) for s in (10, 15, 20, 50))  # type: ignore[return-value]

    n = len(a) ** 2
    parts = [(a, a, 1), (b, b, 1), (a, b, -2)]
    return sum(k * kernel(one, other) / n for left, right, k in parts for one in left for other in right)  # type: ignore[return-value]


def fedcp(p: Problem, lam: float, weights: str) -> Outcome:
    """Both heads and the gate by hand; `p.draws["noise"]` (client, round, step, shape) is what the gate draws."""
    (context,) = [n for n in p.init if n.endswith("context")]
    root = context.removesuffix("context")
    common = [n for n in p.init if ".common." in n]
    head = [n.replace(".common.", ".") for n in common]
    body, still = copy.deepcopy(p.module).train(), copy.deepcopy(p.module).eval()
    for module in (body, still):
        module.set_submodule(root.rstrip("."), nn.Identity())  # what comes out are features
    shared = {n: t.clone() for n, t in p.init.items() if n not in (*head, context)}
    own = [{n: p.init[n].clone() for n in (*head, context)} for _ in p.clients]

    def through(module: nn.Module, state: State, x: Tensor) -> Tensor:
        return functional_call(module, {n: t for n, t in state.items() if not n.startswith(root)}, (x,))

    def outputs(state: State, z: Tensor, noise: Tensor) -> Tensor:
        w = {n.removeprefix(root): t for n, t in state.items()}
        c = w["context"] / torch.linalg.vector_norm(w["context"])
        hidden = (z * c) @ w["gate.inner.0.weight"].T + w["gate.inner.0.bias"]
        hidden = layer_norm(hidden, hidden.shape[1:], w["gate.inner.1.weight"], w["gate.inner.1.bias"])
        pair = (hidden.clamp(min=0) + noise).reshape(len(z), 2, -1).softmax(1)
        r, s = pair[:, 0], pair[:, 1]
        return (r * z) @ w["weight"].T + w["bias"] + (s * z) @ w["common.weight"].T + w["common.bias"]

    for t, sampled in enumerate(p.rounds):
        sent = []
        for i in sampled:
            start = {**shared, **own[i]}
            steps = p.batches(i, t)
            trainer = Trainer(p, start, len(steps), [n for n in p.parameters if n not in common])
            for k, (batch,) in enumerate(steps):
                x, y = batch
                point = {n: s.clone().requires_grad_() for n, s in trainer.now.items()}
                state = {**trainer.rest, **point}
                z = through(body, state, x)
                with torch.no_grad():
                    before = through(still, clone(start), x)
                noise = p.draws["noise"](i, t, k, (len(z), 2 * z.shape[1]))
                loss = mean_loss(outputs(state, z, noise), y) + lam * mmd(z, before)
                found = torch.autograd.grad(loss, list(point.values()))
                trainer.step(dict(zip(point, found, strict=True)))
            trained = trainer.state
            own[i] = {**{n: trained[n] for n in head}, context: trained[f"{root}weight"].sum(0)}
            up = {n: trained[n] for n in shared}
            for n, mine in zip(common, head, strict=True):
                up[n] = 0.5 * (trained[mine] + shared[n])
            sent.append(up)
        shared = mean(sent, weights_of(p, sampled, weights))
    return Outcome(None, [{**shared, **v} for v in own], clone(shared), clone_each(own))


def clone_each(states: list[State]) -> list[State]:
    return [clone(s) for s in states]
