"""One global model: Centralized, FedAvg and server optimizers, FedProx, FedSAM, FedAvg+FT, FedIT, FedLoRA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from references.plain import (
    Outcome,
    Problem,
    State,
    Trainer,
    add,
    clone,
    fit,
    mean,
    norm_of,
    plain,
    pull,
    sub,
    weights_of,
)

Local = Callable[[int, int, State], State]
"""(client, round, received): the trained copy."""


def centralized(p: Problem, **options: Any) -> Outcome:
    w = p.init
    for t in range(len(p.rounds)):
        w = fit(p, w, p.batches(-1, t))
    return Outcome(w, [])


def mean_products(states: list[State], weights: list[float]) -> State:
    """The mean of the products B A of every pair of factors, as factors of the same rank with A's scale."""
    out = mean(states, weights)
    shares = [a / sum(weights) for a in weights]
    for n in [n for n in out if "lora_A" in n]:
        other = n.replace("lora_A", "lora_B")
        product = sum(a * s[other] @ s[n] for a, s in zip(shares, states, strict=True))
        rank = len(out[n])
        scale = (sum(a * (s[n] ** 2).sum() for a, s in zip(shares, states, strict=True)) / rank) ** 0.5
        u, size, v = torch.linalg.svd(product, full_matrices=False)  # type: ignore[arg-type]
        v, columns = v[:rank], u[:, :rank] * size[:rank]
        sign = torch.stack([row[row.abs().argmax()].sign() for row in v])
        out[n], out[other] = scale * sign[:, None] * v, columns * sign / scale
    return out


def averaged(
    p: Problem, local: Local, weights: str, server: dict[str, Any], averages: str = "factors"
) -> State:
    """Rounds of FedAvg: Δ = Σ a_i (θ_i − w), and the server's optimizer (Reddi et al., 2021, algorithm 2)."""
    kind, eta = server["kind"], server["lr"]
    b1, b2, eps = server["momentum"], server["beta2"], server["eps"]
    w = clone(p.init)
    m = {n: torch.zeros_like(w[n]) for n in p.parameters}
    v = {n: torch.full_like(w[n], server["initial"]) for n in p.parameters}
    for t, sampled in enumerate(p.rounds):
        combine = mean_products if averages == "product" else mean
        average = combine([local(i, t, clone(w)) for i in sampled], weights_of(p, sampled, weights))
        for n in p.parameters:
            delta = average[n] - w[n]
            if kind == "sgd":
                m[n] = b1 * m[n] + delta
                w[n] = w[n] + eta * m[n]
                continue
            m[n] = b1 * m[n] + (1 - b1) * delta
            if kind == "adam":
                v[n] = b2 * v[n] + (1 - b2) * delta**2
            elif kind == "yogi":
                v[n] = v[n] - (1 - b2) * delta**2 * torch.sign(v[n] - delta**2)
            else:
                v[n] = v[n] + delta**2
            w[n] = w[n] + eta * m[n] / (torch.sqrt(v[n]) + eps)
        for n in w:
            if n not in p.parameters:
                w[n] = average[n]
    return w


def fedavg(p: Problem, weights: str, server: dict[str, Any], averages: str = "factors") -> Outcome:
    return Outcome(averaged(p, lambda i, t, w: fit(p, w, p.batches(i, t)), weights, server, averages), [])


def deployed_everywhere(p: Problem, **options: Any) -> Outcome:
    """FedAvg, whose global model every client deploys."""
    found = fedavg(p, **options)
    assert found.shared is not None
    return Outcome(found.shared, [found.shared for _ in p.clients])


def cyclic(p: Problem, order: str, transfer: bool, **options: Any) -> Outcome:
    """One client a round, drawn or by number, trains the model that the one before it left, or its own."""
    models = [clone(p.init) for _ in p.clients]
    w = clone(p.init)
    for t, (i,) in enumerate(p.rounds):
        assert order == "drawn" or i == t % len(p.sizes)
        if transfer:
            w = fit(p, w, p.batches(i, t))
        else:
            models[i] = fit(p, models[i], p.batches(i, t))
    return Outcome(w, []) if transfer else Outcome(models[0], [], {}, models)


def fedprox(p: Problem, mu: float, weights: str, server: dict[str, Any]) -> Outcome:
    def local(i: int, t: int, w: State) -> State:
        return fit(p, w, p.batches(i, t), term=pull(mu, w))

    return Outcome(averaged(p, local, weights, server), [])


def fedsam(p: Problem, rho: float, weights: str, server: dict[str, Any]) -> Outcome:
    def local(i: int, t: int, w: State) -> State:
        steps = p.batches(i, t)
        model = Trainer(p, w, len(steps))
        for (batch,) in steps:
            g = model.gradient(batch)
            uphill = add(model.now, g, rho / (norm_of(g) + 1e-12))
            model.step(model.gradient(batch, at=uphill, update_norms=False))
        return model.state

    return Outcome(averaged(p, local, weights, server), [])


def fedavg_ft(
    p: Problem,
    weights: str,
    server: dict[str, Any],
    ft_epochs: int,
    ft_scope: str,
    averages: str = "factors",
    ft_steps: int | None = None,
) -> Outcome:
    w = averaged(p, lambda i, t, w: fit(p, w, p.batches(i, t)), weights, server, averages)
    return Outcome(w, tuned(p, w, ft_epochs, head_names(p) if ft_scope == "head" else p.parameters, ft_steps))


def tuned(p: Problem, w: State, epochs: int, only: list[str], steps: int | None) -> list[State]:
    """Every client's copy of w after so many epochs, or else steps, on its own data."""
    last = len(p.rounds)
    return [
        fit(p, w, p.batches(i, last, epochs=epochs, steps=steps, purpose="finetune"), only) for i in p.clients
    ]


def head_names(p: Problem) -> list[str]:
    """The last linear layer's."""
    owner = [n.rpartition(".")[0] for n, m in p.module.named_parameters() if m.ndim == 2][-1]
    return [n for n in p.parameters if n.rpartition(".")[0] == owner]


def share_of(p: Problem, client: int, weights: str) -> float:
    """p_i among ALL clients."""
    everyone = weights_of(p, p.clients, weights)
    return everyone[client] / sum(everyone)


def scaffold(p: Problem, global_lr: float, weights: str) -> Outcome:
    """Option II, with plain steps whatever the optimizer of the run; the local gradient is clipped, not the step."""
    w = clone(p.init)
    zero = {n: torch.zeros_like(w[n]) for n in p.parameters}
    c, own = clone(zero), [clone(zero) for _ in p.clients]
    for t, sampled in enumerate(p.rounds):
        moved, changed = [], []
        for i in sampled:
            steps = p.batches(i, t)
            y = Trainer(p, w, len(steps), train=plain(p.train))
            shift = sub(c, own[i])
            for (batch,) in steps:
                y.step(add(y.clipped(y.gradient(batch)), shift), clip=False)
            travelled = len(steps) * p.train.lr
            new = {n: own[i][n] - c[n] + (w[n] - y.now[n]) / travelled for n in p.parameters}
            moved.append(y.state)
            changed.append({n: share_of(p, i, weights) * (new[n] - own[i][n]) for n in new})
            own[i] = new
        average = mean(moved, weights_of(p, sampled, weights))
        w = {n: w[n] + global_lr * (average[n] - w[n]) if n in p.parameters else average[n] for n in w}
        c = {n: c[n] + sum(d[n] for d in changed) for n in c}
    return Outcome(w, [], {f"correction/{n}": v for n, v in c.items()}, own)


def feddyn(p: Problem, alpha: float, scale_alpha: bool, weights: str) -> Outcome:
    """With `scale_alpha` a client's own α is α n̄/n_i; the server's stays."""
    w = clone(p.init)
    zero = {n: torch.zeros_like(w[n]) for n in p.parameters}
    h, own = clone(zero), [clone(zero) for _ in p.clients]
    average_size = sum(p.sizes) / len(p.sizes)
    for t, sampled in enumerate(p.rounds):
        trained = []
        for i in sampled:
            a = alpha * average_size / p.sizes[i] if scale_alpha else alpha
            steps = p.batches(i, t)
            model = Trainer(p, w, len(steps))
            for (batch,) in steps:
                g, now = model.gradient(batch), model.now
                model.step({n: g[n] - own[i][n] + a * (now[n] - w[n]) for n in g})
            trained.append(model.state)
            own[i] = {n: own[i][n] - a * (trained[-1][n] - w[n]) for n in zero}
        shares = [share_of(p, i, weights) for i in sampled]
        h = {
            n: h[n] - alpha * sum(a * (s[n] - w[n]) for a, s in zip(shares, trained, strict=True)) for n in h
        }
        average = mean(trained, weights_of(p, sampled, weights))
        w = {n: average[n] - h[n] / alpha if n in h else average[n] for n in w}
    return Outcome(w, [], {f"correction/{n}": v for n, v in h.items()}, own)
