"""FedALA: where local training starts, mixed entry by entry out of the received model and the client's last one."""

from __future__ import annotations

import math
from typing import Any

import torch

from references.global_models import averaged, head_names
from references.plain import Outcome, Problem, State, Trainer, clone, fit, plain


def fedala(
    p: Problem,
    eta: float,
    share: float,
    first_passes: int,
    start: float,
    weights: str,
    server: dict[str, Any],
) -> Outcome:
    """W learns where a client starts from and, again, before its model is used; until it has met a w ≠ θ it is new."""
    tail = head_names(p)
    last = [{n: p.init[n].clone() for n in tail} for _ in p.clients]
    learnt = [{n: torch.full_like(p.init[n], start) for n in tail} for _ in p.clients]
    met = [False for _ in p.clients]

    def mixed(w: State, theta: State, mix: State) -> State:
        return {n: mix[n] * w[n] + (1 - mix[n]) * theta[n] for n in tail}

    def learn(i: int, t: int, w: State) -> State:
        """W_i after what it learns about this w."""
        mix = clone(learnt[i])
        if all(torch.equal(w[n], last[i][n]) for n in tail):
            return mix
        steps = math.ceil(share * len(p.batches(i, t, epochs=1))) * (1 if met[i] else first_passes)
        model = Trainer(p, w, 1, tail, plain(p.train))
        for (batch,) in p.batches(i, t, steps=steps, purpose="mixture"):
            found = model.gradient(batch, at=mixed(w, last[i], mix), update_norms=False)
            g = model.clipped(found)
            mix = {n: (mix[n] - eta * g[n] * (w[n] - last[i][n])).clamp(0, 1) for n in tail}
        return mix

    def local(i: int, t: int, w: State) -> State:
        mix = learn(i, t, w)
        met[i] = met[i] or any(not torch.equal(w[n], last[i][n]) for n in tail)
        theta = fit(p, {**w, **mixed(w, last[i], mix)}, p.batches(i, t))
        learnt[i], last[i] = mix, {n: theta[n].clone() for n in tail}
        return theta

    w, end = averaged(p, local, weights, server), len(p.rounds)
    models = [{**w, **mixed(w, last[i], learn(i, end, w))} for i in p.clients]
    private = [
        {**{f"theta/{n}": last[i][n] for n in tail}, **{f"mix/{n}": learnt[i][n] for n in tail}}
        for i in p.clients
    ]
    return Outcome(w, models, {}, private)
