"""FlexLoRA, HetLoRA and FLoRA with factors of each client's true rank: nothing is padded while it trains."""

from __future__ import annotations

import torch
from torch import Tensor

from references.plain import Outcome, Problem, State, Trainer, clone, mean_loss, weights_of

LAYERS = (1, 3)


def run(p: Problem, state: State, x: Tensor, scale: float) -> Tensor:
    """Logits of tanh between two layers with LoRA."""
    base = {n: t for n, t in p.module.named_parameters() if ".base." in n}
    z = x.to(base["1.base.weight"])
    for k in LAYERS:
        a, b = state[f"{k}.lora_A.weight"], state[f"{k}.lora_B.weight"]
        y = z @ base[f"{k}.base.weight"].T + base[f"{k}.base.bias"] + scale * (z @ a.T @ b.T)
        z = torch.tanh(y) if k == 1 else y
    return z


def tail(state: State, first: int) -> Tensor:
    """Σ ‖B[:, first:]‖ ‖A[first:]‖."""
    parts = []
    for k in LAYERS:
        a, b = state[f"{k}.lora_A.weight"][first:], state[f"{k}.lora_B.weight"][:, first:]
        parts.append(torch.linalg.matrix_norm(b) * torch.linalg.matrix_norm(a))
    return torch.stack(parts).sum()


def sliced(w: State, rank: int, up: float = 1.0) -> State:
    return {n: (t[:rank] if "lora_A" in n else t[:, :rank] * up).clone() for n, t in w.items()}


def padded(state: State, like: State) -> State:
    out = {n: torch.zeros_like(t) for n, t in like.items()}
    for n, t in state.items():
        out[n][: t.shape[0], : t.shape[1]] = t
    return out


def fitted(p: Problem, start: State, client: int, t: int, scale: float, lam: float, first: int) -> State:
    steps = p.batches(client, t)
    trainer = Trainer(p, start, len(steps))
    for (batch,) in steps:
        point = {n: s.clone().requires_grad_() for n, s in trainer.now.items()}
        loss = mean_loss(run(p, point, batch[0], scale), batch[1])
        if lam:
            loss = loss + lam * tail(point, first)
        found = torch.autograd.grad(loss, list(point.values()))
        trainer.step(dict(zip(point, found, strict=True)))
    return trainer.state


def outcome(p: Problem, w: State, own: list[int], flex: bool) -> Outcome:
    """What clients deploy: their own cut, padded, and which ranks are there at which scale."""
    largest, models = len(w["1.lora_A.weight"]), []
    kept = {n: t for n, t in p.init.items() if n.endswith("kept")}
    for rank in own:
        ratio = largest / rank if flex else 1.0
        there = torch.tensor([ratio if k < rank else 0.0 for k in range(largest)])
        model = padded(sliced(w, rank, 1 / ratio), w)
        models.append({**model, **{n: there.to(t) for n, t in kept.items()}})
    ranks = torch.tensor([float(r) for r in own])
    return Outcome({**w, **kept}, models, {**{f"w/{n}": t for n, t in w.items()}, "ranks": ranks})


def flexlora(p: Problem, ranks: tuple[int, ...], weights: str) -> Outcome:
    own = [ranks[i % len(ranks)] for i in p.clients]
    w = {n: p.init[n].clone() for n in p.parameters}
    largest = len(w["1.lora_A.weight"])
    for t, sampled in enumerate(p.rounds):
        counted = weights_of(p, sampled, weights)
        added = {k: torch.zeros(()) for k in LAYERS}
        for i, a in zip(sampled, counted, strict=True):
            scale = largest / own[i]
            new = fitted(p, sliced(w, own[i], 1 / scale), i, t, scale, 0.0, 0)
            for k in LAYERS:
                product = new[f"{k}.lora_B.weight"] @ new[f"{k}.lora_A.weight"]
                added[k] = added[k] + a / sum(counted) * scale * product
        for k in LAYERS:
            u, s, v = torch.linalg.svd(added[k], full_matrices=False)
            u, s, v = u[:, :largest], s[:largest], v[:largest]
            sign = torch.stack([row[row.abs().argmax()].sign() for row in v])
            w[f"{k}.lora_A.weight"], w[f"{k}.lora_B.weight"] = sign[:, None] * v, u * s * sign
    return outcome(p, clone(w), own, True)


def hetlora(
    p: Problem, ranks: tuple[int, ...], lam: float, prune: float, least: int, weights: str
) -> Outcome:
    own = [ranks[i % len(ranks)] for i in p.clients]
    w = {n: p.init[n].clone() for n in p.parameters}
    for t, sampled in enumerate(p.rounds):
        sent, sizes = [], []
        for i in sampled:
            start, first = sliced(w, own[i]), int(prune * own[i])
            new = fitted(p, start, i, t, 1.0, lam, first)
            if tail(new, first) < tail(start, first):
                own[i] = min(own[i], max(least, first))
            new = sliced(new, own[i])
            products = [new[f"{k}.lora_B.weight"] @ new[f"{k}.lora_A.weight"] for k in LAYERS]
            sizes.append(torch.stack([(m**2).sum() for m in products]).sum().sqrt())
            sent.append(padded(new, w))
        total = torch.stack(sizes).sum()
        w = {n: sum(s / total * v[n] for s, v in zip(sizes, sent, strict=True)) for n in w}  # type: ignore[misc]
    return outcome(p, clone(w), own, False)


def flora(p: Problem, ranks: tuple[int, ...], weights: str) -> Outcome:
    """`p.draws["factors"](client, round)` are the A of a client in a round, [r, in] by layer."""
    own = [ranks[i % len(ranks)] for i in p.clients]
    w = {f"{k}.base.weight": p.init[f"{k}.base.weight"].clone() for k in LAYERS}
    held = [clone(w) for _ in p.clients]
    biases = {k: dict(p.module.named_parameters())[f"{k}.base.bias"] for k in LAYERS}
    version = [0 for _ in p.clients]
    for t, sampled in enumerate(p.rounds):
        gain = {n: torch.zeros_like(v) for n, v in w.items()}
        counted = weights_of(p, sampled, weights)
        for i, a in zip(sampled, counted, strict=True):
            held[i], version[i] = clone(w), t
            start: State = {}
            for k, drawn in p.draws["factors"](i, t).items():
                start[f"{k}.lora_A.weight"] = drawn[: own[i]].clone()
                start[f"{k}.lora_B.weight"] = torch.zeros(
                    len(w[f"{k}.base.weight"]), own[i], dtype=drawn.dtype
                )
            steps = p.batches(i, t)
            trainer = Trainer(p, start, len(steps), list(start))
            for (batch,) in steps:
                point = {n: s.clone().requires_grad_() for n, s in trainer.now.items()}
                z = batch[0].to(biases[1])
                for k in LAYERS:
                    product = point[f"{k}.lora_B.weight"] @ point[f"{k}.lora_A.weight"]
                    z = z @ (w[f"{k}.base.weight"] + product).T + biases[k]
                    z = torch.tanh(z) if k == 1 else z
                found = torch.autograd.grad(mean_loss(z, batch[1]), list(point.values()))
                trainer.step(dict(zip(point, found, strict=True)))
            for k in LAYERS:
                product = trainer.state[f"{k}.lora_B.weight"] @ trainer.state[f"{k}.lora_A.weight"]
                gain[f"{k}.base.weight"] += a / sum(counted) * product
        w = {n: v + gain[n] for n, v in w.items()}
    kept = [
        {**{f"W/{n}": v for n, v in held[i].items()}, "version": torch.tensor(version[i])} for i in p.clients
    ]
    return Outcome({**p.init, **w}, [], {f"w/{n}": v for n, v in w.items()}, kept)
