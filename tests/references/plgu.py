"""PLGU-LF and PLGU-GRep: scores of layers, layer-wise ascent, frozen layers."""

from __future__ import annotations

import math

from torch import nn

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
    sub,
    weights_of,
)
from references.split_models import part, split
from references.two_models import everywhere


def layers_of(p: Problem, names: list[str]) -> list[list[str]]:
    """A layer is a linear module's weight and bias and what the norm after it has, in the order of the model."""
    out: list[list[str]] = []
    for owner, module in p.module.named_modules():
        own = [n for n in names if n.rpartition(".")[0] == owner]
        if isinstance(module, nn.Linear) and own:
            out.append(own)
        elif own:
            out[-1] += own
    return out


def scores(difference: State, layers: list[list[str]], norm: str) -> list[float]:
    """ξ_l = ‖a_l − b_l‖ / dim_l and its normalisation; all zero is uniform."""
    raw = [
        float(norm_of({n: difference[n] for n in layer})) / sum(difference[n].numel() for n in layer)
        for layer in layers
    ]
    count = len(layers)
    if norm == "ones":
        return [1.0] * count
    if norm == "none":
        return raw if sum(raw) > 0 else [1.0 / count] * count
    share = [r / sum(raw) for r in raw] if sum(raw) > 0 else [1.0 / count] * count
    return [s * count for s in share] if norm == "mean" else share


def perturbation(
    g: State, xi: list[float], layers: list[list[str]], rho: float, form: str, power: float
) -> State:
    """ε_l = ξ_l δ_l(g), or ASAM's ξ_l δ_l(ξ g); δ(g) = ρ sign(g) |g|^{q−1} / (‖g‖_q^q)^{1/p} with 1/p + 1/q = 1."""
    scale = {n: x for layer, x in zip(layers, xi, strict=True) for n in layer}
    if form == "asam":
        g = {n: scale[n] * t for n, t in g.items()}
    if math.isinf(power):
        return {n: rho * scale[n] * t.sign() for n, t in g.items()}
    q = power / (power - 1)
    total = sum((t.abs() ** q).sum() for t in g.values()) ** (1 / power)
    return {n: rho * scale[n] * t.sign() * t.abs() ** (q - 1) / total for n, t in g.items()}


def plgu_lf(
    p: Problem,
    personal_layers: int,
    rho: float,
    score_norm: str,
    lwsam_form: str,
    grad_at: str,
    eps_from: str,
    power: float,
    weights: str,
) -> Outcome:
    layers = layers_of(p, p.parameters)
    w, v = clone(p.init), everywhere(p)
    for t, sampled in enumerate(p.rounds):
        up = []
        for i in sampled:
            difference = sub({n: v[i][n] for n in p.parameters}, {n: w[n] for n in p.parameters})
            raw, xi = scores(difference, layers, "sum"), scores(difference, layers, score_norm)
            deepest_first = sorted(range(len(layers)), key=lambda k: (-raw[k], -k))
            whole = layers_of(p, list(w))
            kept = [n for k in deepest_first[:personal_layers] for n in whole[k]]
            steps = p.batches(i, t)
            theta = Trainer(p, {n: v[i][n] if n in kept else w[n] for n in w}, len(steps))
            omega = Trainer(p, w, len(steps))
            for (batch,) in steps:
                g = theta.gradient(batch)
                slope = g if eps_from == "personal" else omega.gradient(batch)
                around = omega if grad_at == "global" else theta
                uphill = add(around.now, perturbation(slope, xi, layers, rho, lwsam_form, power))
                flat = omega.gradient(batch, at=uphill, update_norms=eps_from == "personal")
                theta.step(g)
                omega.step(flat)
            v[i] = theta.state
            up.append(omega.state)
        w = mean(up, weights_of(p, sampled, weights))
    return Outcome(w, v)


def plgu_grep(  # plain steps of the body, each of a clipped gradient
    p: Problem,
    head_epochs: int,
    body_steps: int,
    rho: float,
    score_norm: str,
    lwsam_form: str,
    reuse_grad: bool,
    power: float,
    personal_part: str,
    weights: str,
    final_personal_epochs: int,
    head_steps: int | None = None,
) -> Outcome:
    own = part(p, personal_part)
    body = [n for n in p.parameters if n not in own]
    layers = layers_of(p, body)

    def local(i: int, t: int, state: State) -> State:
        state = fit(p, state, p.batches(i, t, epochs=head_epochs, steps=head_steps), own)
        steps = p.batches(i, t, steps=body_steps)
        phi = Trainer(p, state, len(steps), body, plain(p.train))
        for (batch,) in steps:
            g = phi.clipped(phi.gradient(batch))
            after = add(phi.now, g, -p.train.lr)
            xi = scores(sub(after, phi.now), layers, score_norm)
            uphill = g if reuse_grad else phi.clipped(phi.gradient(batch, at=after, update_norms=False))
            at = add(after, perturbation(uphill, xi, layers, rho, lwsam_form, power))
            flat = phi.clipped(phi.gradient(batch, at=at, update_norms=False))
            phi.step({n: g[n] + flat[n] for n in g}, clip=False)
        return phi.state

    return split(p, local, own, weights, final_personal_epochs)
