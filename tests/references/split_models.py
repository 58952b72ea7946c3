"""A shared part u and a personal part v_i of one model: FedPer, FedRep, FedAlt, FedSim, FedBN, LG-FedAvg, FedBABU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from references.global_models import head_names, tuned
from references.plain import Batch, Outcome, Problem, State, Term, clone, fit, mean, weights_of

Local = Callable[[int, int, State], State]


def part(p: Problem, name: str) -> list[str]:
    """Names of the state that a part has: head, extractor[:k], norm, input, all, none, or a sum of them."""
    if "+" in name:
        return [n for word in name.split("+") for n in part(p, word)]
    linear = [n for n, m in p.module.named_modules() if isinstance(m, nn.Linear)]
    norm = [n for n, m in p.module.named_modules() if isinstance(m, nn.BatchNorm1d | nn.GroupNorm)]
    owner = {n: n.rpartition(".")[0] for n in p.init}
    if name == "head":
        return head_names(p)
    if name.startswith("extractor"):
        last = linear[-int(name.partition(":")[2] or 1) :]
        return [n for n in p.init if owner[n] not in last]
    if name == "norm":
        return [n for n in p.init if owner[n] in norm]
    if name.startswith("lora_"):
        return [n for n in p.init if name in n]
    return list(p.init) if name == "all" else []


def split(
    p: Problem,
    local: Local,
    personal: list[str],
    weights: str,
    final_epochs: int,
    server_lr: float = 1.0,
    final_steps: int | None = None,
) -> Outcome:
    """Rounds of u = u − η_s Σ a_i (u − u_i), everyone deploying the present u with its own v_i."""
    u, v = clone(p.init), [{n: p.init[n].clone() for n in personal} for _ in p.clients]
    for t, sampled in enumerate(p.rounds):
        up = []
        for i in sampled:
            trained = local(i, t, {**u, **v[i]})
            v[i] = {n: trained[n] for n in personal}
            up.append({n: s for n, s in trained.items() if n not in personal})
        average = mean(up, weights_of(p, sampled, weights))
        for n, new in average.items():
            u[n] = u[n] - server_lr * (u[n] - new) if n in p.parameters else new
    shared = {n: t for n, t in u.items() if n not in personal}
    models, last = [{**u, **v[i]} for i in p.clients], len(p.rounds)
    if final_epochs or final_steps:
        models = [
            fit(
                p, m, p.batches(i, last, epochs=final_epochs, steps=final_steps, purpose="finetune"), personal
            )
            for i, m in zip(p.clients, models, strict=True)
        ]
    return Outcome(None, models, shared)


def held(p: Problem, own: list[str], lam: float, centre: str) -> Term:
    """(λ/2)‖v − c‖² of the personal part alone, wherever it trains."""

    def term(state: State, batch: Batch) -> Tensor:
        moving = [n for n in own if state[n].requires_grad]
        to = p.init if centre == "start" else {n: torch.zeros_like(p.init[n]) for n in moving}
        return lam / 2 * sum(((state[n] - to[n]) ** 2).sum() for n in moving)  # type: ignore[return-value]

    return term


def together(
    p: Problem,
    personal_part: str,
    weights: str,
    final_personal_epochs: int,
    lam: float = 0.0,
    centre: str = "start",
    server_lr: float = 1.0,
    final_personal_steps: int | None = None,
    **options: Any,
) -> Outcome:
    """FedPer, FedSim, FedBN and LG-FedAvg: one training of both parts."""
    own = part(p, personal_part)
    term = held(p, own, lam, centre) if lam else None
    return split(
        p,
        lambda i, t, s: fit(p, s, p.batches(i, t), term=term),
        own,
        weights,
        final_personal_epochs,
        server_lr,
        final_personal_steps,
    )


def alternating(
    p: Problem,
    personal_part: str,
    weights: str,
    final_personal_epochs: int,
    head_epochs: int,
    body_epochs: int,
    lam: float = 0.0,
    centre: str = "start",
    server_lr: float = 1.0,
    head_steps: int | None = None,
    body_steps: int | None = None,
) -> Outcome:
    """FedRep and FedAlt: first v_i under u, then u under the new v_i."""
    own = part(p, personal_part)
    rest = [n for n in p.init if n not in own]
    term = held(p, own, lam, centre) if lam else None

    def local(i: int, t: int, state: State) -> State:
        state = fit(p, state, p.batches(i, t, epochs=head_epochs, steps=head_steps), own, term)
        return fit(p, state, p.batches(i, t, epochs=body_epochs, steps=body_steps), rest)

    return split(p, local, own, weights, final_personal_epochs, server_lr)


def fedbabu(
    p: Problem, weights: str, personal_part: str, ft_epochs: int, ft_scope: str, ft_steps: int | None = None
) -> Outcome:
    """The head stays as it was drawn until deployment."""
    head = part(p, personal_part)
    body = [n for n in p.init if n not in head]
    w = clone(p.init)
    for t, sampled in enumerate(p.rounds):
        trained = [fit(p, w, p.batches(i, t), body) for i in sampled]
        w = {**mean(trained, weights_of(p, sampled, weights)), **{n: p.init[n] for n in head}}
    return Outcome(
        w, tuned(p, w, ft_epochs, {"head": head, "body": body, "full": list(p.init)}[ft_scope], ft_steps)
    )
