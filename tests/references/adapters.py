"""FedDPA: sets of LoRA beside one another, by hand on the network of `world.LoRALinear`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from references.plain import Outcome, Problem, State, Trainer, clone, mean, mean_loss, weights_of


def run(p: Problem, state: State, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs, features) of tanh between two layers; `weights` [2] or [batch, 2] of the global and the local set."""
    base = {n: t for n, t in p.module.named_parameters() if ".base." in n}
    w = weights.expand(len(x), 2)

    def layer(k: int, z: Tensor) -> Tensor:
        out = z @ base[f"network.{k}.base.weight"].T + base[f"network.{k}.base.bias"]
        for j, which in enumerate(("shared", "own")):
            a, b = (state[f"network.{k}.lora_{f}.{which}.weight"] for f in "AB")
            out = out + w[:, j : j + 1] * (z @ a.T @ b.T)
        return out

    z = torch.tanh(layer(1, x.to(w)))
    return layer(3, z), z


def fitted(p: Problem, start: State, client: int, t: int, only: list[str], mix: Sequence[float]) -> State:
    steps = p.batches(client, t)
    trainer = Trainer(p, start, len(steps), only)
    for (batch,) in steps:
        point = {n: s.clone().requires_grad_() for n, s in trainer.now.items()}
        logits, _ = run(p, {**trainer.rest, **point}, batch[0], torch.tensor(mix))
        found = torch.autograd.grad(mean_loss(logits, batch[1]), list(point.values()))
        trainer.step(dict(zip(point, found, strict=True)))
    return trainer.state


def feddpa(
    p: Problem, a: float, compared: int, most_dynamic: float, dynamic_on: str, weights: str
) -> Outcome:
    """Every client compares with all its samples, or the run would draw which."""
    assert compared >= max(p.sizes)
    local = [n for n in p.parameters if ".own." in n]
    common = [n for n in p.parameters if ".shared." in n]
    g = {n: p.init[n].clone() for n in common}
    own = [{n: p.init[n].clone() for n in local} for _ in p.clients]
    known = [False] * len(p.sizes)
    for t, sampled in enumerate(p.rounds):
        sent = []
        for i in sampled:
            if t:
                trained = fitted(p, {**g, **own[i]}, i, t, local, (1 - a, a))
                own[i], known[i] = {n: trained[n] for n in local}, True
            trained = fitted(p, {**g, **own[i]}, i, t, common, (1.0, 0.0))
            sent.append({n: trained[n] for n in common})
        g = mean(sent, weights_of(p, sampled, weights))
    models, width = [], p.init["memory"]
    for i in p.clients:
        state = {**g, **own[i]}
        _, e = run(p, state, p.whole(i, "train")[0], torch.tensor([0.0, 1.0]))
        memory = most_dynamic * torch.stack([v / torch.linalg.vector_norm(v) for v in e]).mean(0)
        by_global = dynamic_on == "global"
        mix = [0.0, 1.0] if known[i] and by_global else [1.0, 0.0]
        memory = torch.zeros_like(width) if not known[i] else memory if by_global else -memory
        models.append(clone({**state, "mix": torch.tensor(mix), "memory": memory}))
    start = {n: t for n, t in p.init.items() if n not in common}
    return Outcome({**g, **start}, models)
