"""PLGU-LF and PLGU-GRep: scores of layers, layer-wise ascent, frozen layers."""

from __future__ import annotations

from torch import Tensor

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


def layers_of(names: list[str]) -> list[list[str]]:
    """A layer is a module's weight and bias, in the order of the model."""
    owners = list(dict.fromkeys(n.rpartition(".")[0] for n in names))
    return [[n for n in names if n.rpartition(".")[0] == o] for o in owners]


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


def perturbation(g: State, xi: list[float], layers: list[list[str]], rho: float, form: str) -> State:
    """ε_l = ρ ξ_l g_l/‖g‖, or ASAM's ρ ξ_l² g_l/‖ξ g‖."""
    scale = {n: x for layer, x in zip(layers, xi, strict=True) for n in layer}
    if form == "asam":
        total: Tensor = norm_of({n: scale[n] * g[n] for n in g})
        return {n: rho * scale[n] ** 2 * g[n] / total for n in g}
    return {n: rho * scale[n] * g[n] / norm_of(g) for n in g}


def plgu_lf(
    p: Problem,
    personal_layers: int,
    rho: float,
    score_norm: str,
    lwsam_form: str,
    grad_at: str,
    weights: str,
) -> Outcome:
    layers = layers_of(p.parameters)
    w, v = clone(p.init), everywhere(p)
    for t, sampled in enumerate(p.rounds):
        up = []
        for i in sampled:
            difference = sub({n: v[i][n] for n in p.parameters}, {n: w[n] for n in p.parameters})
            raw, xi = scores(difference, layers, "sum"), scores(difference, layers, score_norm)
            deepest_first = sorted(range(len(layers)), key=lambda k: (-raw[k], -k))
            kept = [n for k in deepest_first[:personal_layers] for n in layers[k]]
            steps = p.batches(i, t)
            theta = Trainer(p, {n: v[i][n] if n in kept else w[n] for n in w}, len(steps))
            omega = Trainer(p, w, len(steps))
            for (batch,) in steps:
                g = theta.gradient(batch)
                around = omega if grad_at == "global" else theta
                uphill = add(around.now, perturbation(g, xi, layers, rho, lwsam_form))
                flat = omega.gradient(batch, at=uphill)
                theta.step(g)
                omega.step(flat)
            v[i] = theta.state
            up.append(omega.state)
        w = mean(up, weights_of(p, sampled, weights))
    return Outcome(w, v)


def plgu_grep(  # plain steps of the body, of which clipping sees the sum
    p: Problem,
    head_epochs: int,
    body_steps: int,
    rho: float,
    score_norm: str,
    lwsam_form: str,
    reuse_grad: bool,
    personal_part: str,
    weights: str,
    final_personal_epochs: int,
) -> Outcome:
    own = part(p, personal_part)
    body = [n for n in p.parameters if n not in own]
    layers = layers_of(body)

    def local(i: int, t: int, state: State) -> State:
        state = fit(p, state, p.batches(i, t, epochs=head_epochs), own)
        steps = p.batches(i, t, steps=body_steps)
        phi = Trainer(p, state, len(steps), body, plain(p.train))
        for (batch,) in steps:
            g = phi.gradient(batch)
            after = add(phi.now, g, -p.train.lr)
            xi = scores(sub(after, phi.now), layers, score_norm)
            uphill = g if reuse_grad else phi.gradient(batch, at=after, update_norms=False)
            at = add(after, perturbation(uphill, xi, layers, rho, lwsam_form))
            flat = phi.gradient(batch, at=at, update_norms=False)
            phi.step({n: g[n] + flat[n] for n in g})
        return phi.state

    return split(p, local, own, weights, final_personal_epochs)
