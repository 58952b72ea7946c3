"""A personal model on every client: LocalTrain, MR-MTL, Ditto, pFedMe, APFL, L2GD, Per-FedAvg."""

from __future__ import annotations

from dataclasses import replace
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
    mean_loss,
    outputs,
    plain,
    pull,
    sub,
    weights_of,
)


def everywhere(p: Problem) -> list[State]:
    """Personal models that start where the global one does."""
    return [clone(p.init) for _ in p.clients]


def local(p: Problem, own_init: bool = False, **options: Any) -> Outcome:
    v = [clone(s) for s in p.first_private] if own_init else everywhere(p)
    for t, sampled in enumerate(p.rounds):
        for i in sampled:
            v[i] = fit(p, v[i], p.batches(i, t))
    return Outcome(None, v)


def local_average(p: Problem, weights: str) -> Outcome:
    """The reported global model is the mean of the models that came up last."""
    v = local(p).personal
    last = p.rounds[-1]
    return Outcome(mean([v[i] for i in last], weights_of(p, last, weights)), v)


def mr_mtl(p: Problem, lam: float, mean_of: str, weights: str) -> Outcome:
    """v̄ is the mean of ALL clients' latest models, or steps by m/N to that of the sampled ones."""
    v, centre = everywhere(p), clone(p.init)
    for t, sampled in enumerate(p.rounds):
        for i in sampled:
            v[i] = fit(p, v[i], p.batches(i, t), term=pull(lam, centre))
        if mean_of == "all":
            centre = mean(v, weights_of(p, p.clients, weights))
        else:
            here = weights_of(p, sampled, weights)
            new = mean([v[i] for i in sampled], here)
            centre = add(centre, sub(new, centre), sum(here) / sum(weights_of(p, p.clients, weights)))
    return Outcome(None, v, {n: t for n, t in centre.items() if t.is_floating_point()})


def ditto(
    p: Problem,
    lam: float,
    weights: str,
    personal_epochs: int | None,
    dynamic_lam: tuple[float, ...],
    dynamic_every: str,
    personal_steps: int | None = None,
) -> Outcome:
    """λ is chosen by validation loss after a round, or after every step, which is then a plain one."""
    w, v = clone(p.init), everywhere(p)
    for t, sampled in enumerate(p.rounds):
        up = []
        for i in sampled:
            up.append(fit(p, w, p.batches(i, t)))
            steps = p.batches(i, t, epochs=personal_epochs, steps=personal_steps)
            every = dynamic_lam and dynamic_every == "step"
            rule = plain(p.train) if every else p.train
            for piece in [[s] for s in steps] if every else [steps]:
                tried = [
                    fit(p, v[i], piece, term=pull(each, w), train=rule) for each in dynamic_lam or (lam,)
                ]
                v[i] = min(tried, key=lambda s: validation_loss(p, s, i)) if dynamic_lam else tried[0]
        w = mean(up, weights_of(p, sampled, weights))
    return Outcome(w, v)


def validation_loss(p: Problem, state: State, client: int, part: str = "val") -> float:
    x, y = p.whole(client, part)
    if not len(y):
        return 0.0
    return float(mean_loss(outputs(p, state, x), y))


def pfedme(
    p: Problem,
    lam: float,
    inner_steps: int,
    local_rounds: int,
    lr: float,
    personal_lr: float | None,
    inner_wd: float,
    beta: float,
    weights: str,
    personal_epochs: int | None,
    personal_steps: int | None = None,
    keep: str = "theta",
) -> Outcome:
    """θ is warm-started within a round; with `personal_epochs` it goes on from the round before."""
    w, v = clone(p.init), everywhere(p)
    rate = p.train.lr if personal_lr is None else personal_lr
    for t, sampled in enumerate(p.rounds):
        up = []
        for i in sampled:
            if personal_epochs is not None or personal_steps is not None:
                rule = replace(p.train, lr=rate)
                steps = p.batches(i, t, epochs=personal_epochs, steps=personal_steps)
                v[i] = fit(p, v[i], steps, term=pull(lam, w), train=rule)
                up.append(step_to(p, w, v[i], lr * lam))
                continue
            theta, own = clone(w), clone(w)
            for r in range(local_rounds):
                (step,) = p.batches(i, t, steps=1, first=r)
                rule = replace(p.train, lr=rate, weight_decay=p.train.weight_decay + inner_wd)
                theta = fit(p, theta, [step] * inner_steps, term=pull(lam, own), train=rule)
                own = step_to(p, own, theta, lr * lam)
            v[i] = own if keep == "w" else theta
            up.append(own)
        average = mean(up, weights_of(p, sampled, weights))
        w = {n: (1 - beta) * w[n] + beta * average[n] if n in p.parameters else average[n] for n in w}
    return Outcome(w, v)


def step_to(p: Problem, w: State, theta: State, share: float) -> State:
    """w − share (w − θ); running statistics are θ's."""
    return {n: w[n] - share * (w[n] - theta[n]) if n in p.parameters else theta[n] for n in w}


def apfl(p: Problem, alpha: float, adaptive: bool, mixture: str, personal_w: str, weights: str) -> Outcome:
    w, v = clone(p.init), everywhere(p)
    last, mix = everywhere(p), [alpha for _ in p.clients]
    for t, sampled in enumerate(p.rounds):
        for i in sampled:
            steps = p.batches(i, t)
            own, personal = Trainer(p, w, len(steps)), Trainer(p, v[i], len(steps))
            if adaptive:
                (first,) = steps[0]
                g = personal.gradient(first, at=mixed(p, mix[i], personal.now, own.now), update_norms=False)
                g = personal.clipped(g)
                slope = sum((g[n] * (personal.now[n] - own.now[n])).sum() for n in g)
                mix[i] = min(max(mix[i] - p.train.lr * float(slope), 0.0), 1.0)
            for (batch,) in steps:
                before = own.now
                own.step(own.gradient(batch))
                w_seen = own.now if mixture == "new" else before
                g = personal.gradient(batch, at=mixed(p, mix[i], personal.now, w_seen))
                personal.step({n: mix[i] * d for n, d in g.items()})
            v[i], last[i] = personal.state, own.state
        w = mean([last[i] for i in sampled], weights_of(p, sampled, weights))
    deployed = [w if personal_w == "global" else last[i] for i in p.clients]
    personal_models = [mixed(p, mix[i], v[i], deployed[i]) for i in p.clients]
    private = [{"alpha": torch.tensor(mix[i]), **{f"v/{n}": x for n, x in v[i].items()}} for i in p.clients]
    return Outcome(w, personal_models, {}, private)


def mixed(p: Problem, alpha: float, v: State, w: State) -> State:
    """Of the parameters; v's running statistics were measured at the mixture."""
    return {n: alpha * v[n] + (1 - alpha) * w[n] if n in p.parameters else v[n] for n in v}


def l2gd(
    p: Problem, lam: float, p_mean: float, smoothness: float | None, weights: str, **options: Any
) -> Outcome:
    """One iteration a round with a shared coin; x̄ is exchanged where it turns from 0 to 1."""
    x, known, coins = everywhere(p), clone(p.init), p.draws["coins"]
    prob = p_mean if smoothness is None else lam / (lam + smoothness)
    for t, sampled in enumerate(p.rounds):
        for i in p.clients:
            if coins[t]:
                share = p.train.lr * lam * (1 - prob) / prob
                x[i] = add(x[i], sub(x[i], known), -share)
            else:
                x[i] = fit(p, x[i], p.batches(i, t, steps=1))
        if not coins[t] and coins[t + 1]:
            known = mean([x[i] for i in sampled], weights_of(p, sampled, weights))
    return Outcome(known, x)


def per_fedavg(
    p: Problem, alpha: float, variant: str, delta: float, adapt_steps: int, weights: str
) -> Outcome:
    w = clone(p.init)
    for t, sampled in enumerate(p.rounds):
        up = []
        for i in sampled:
            steps = p.batches(i, t, per_step=3 if variant == "HF" else 2)
            model = Trainer(p, w, len(steps))
            for b1, b2, *b3 in steps:
                now = model.now
                adapted = add(now, model.gradient(b1), -alpha)
                g = model.gradient(b2, at=adapted, update_norms=False)
                if b3:
                    high = model.gradient(b3[0], at=add(now, g, delta), update_norms=False)
                    low = model.gradient(b3[0], at=add(now, g, -delta), update_norms=False)
                    g = {n: g[n] - alpha * (high[n] - low[n]) / (2 * delta) for n in g}
                model.step(g)
            up.append(model.state)
        w = mean(up, weights_of(p, sampled, weights))
    rule, last = replace(plain(p.train), lr=alpha), len(p.rounds)
    adapted_models = [
        fit(p, w, p.batches(i, last, steps=adapt_steps, purpose="finetune"), train=rule) for i in p.clients
    ]
    return Outcome(w, adapted_models)
