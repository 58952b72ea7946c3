"""pFedHN and PLGU-GHN: an MLP on the server writes every client's model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from references.plain import Outcome, Problem, State, clone, fit, mean, norm_of, sub, weights_of


def write(p: Problem, phi: State, e: Tensor, statistics: State) -> State:
    """h(e; φ): embedding -> hidden, then ReLU and linear for every further trunk layer, one linear head a tensor.

    Running statistics are as given.
    """
    z = linear(e, phi["trunk_w/0"], phi["trunk_b/0"])
    depth = sum(n.startswith("trunk_w/") for n in phi) - 1
    for k in range(1, depth + 1):
        z = linear(torch.relu(z), phi[f"trunk_w/{k}"], phi[f"trunk_b/{k}"])
    written = {
        n: linear(z, phi[f"head_w/{n}"], phi[f"head_b/{n}"]).reshape(p.init[n].shape) for n in p.parameters
    }
    return {n: written.get(n, statistics.get(n, t)) for n, t in p.init.items()}


def vjp(p: Problem, phi: State, e: Tensor, change: State) -> tuple[State, Tensor]:
    """The gradient of <change, h(e; φ)> by φ and by e."""
    phi = {n: t.detach().clone().requires_grad_() for n, t in phi.items()}
    e = e.detach().clone().requires_grad_()
    written = write(p, phi, e, {})
    value = sum((change[n] * written[n]).sum() for n in p.parameters)
    grads = torch.autograd.grad(value, [*phi.values(), e])  # type: ignore[arg-type]
    return dict(zip(phi, grads[:-1], strict=True)), grads[-1]


def average(p: Problem, found: dict[int, State], weights: str) -> State:
    """Σ a_i g_i of the sampled clients' gradients."""
    return mean(list(found.values()), weights_of(p, list(found), weights))


def start(p: Problem) -> tuple[State, Tensor]:
    phi = {n.partition("/")[2]: t.clone() for n, t in p.first_server.items() if n.startswith("phi/")}
    return phi, p.first_server["embeddings"].clone()


def changes(
    p: Problem, phi: State, e: Sequence[Tensor], t: int, statistics: State
) -> tuple[dict[int, State], dict[int, State]]:
    """Δ_i = θ_i − θ̃_i of the sampled clients, and their θ̃_i."""
    sent = {i: {k: s.detach() for k, s in write(p, phi, e[i], statistics).items()} for i in p.rounds[t]}
    trained = {i: fit(p, s, p.batches(i, t)) for i, s in sent.items()}
    return {i: sub(s, trained[i]) for i, s in sent.items()}, trained


def done(p: Problem, phi: State, e: Tensor, statistics: State) -> Outcome:
    server = {**{f"phi/{n}": t for n, t in phi.items()}, "embeddings": e}
    with torch.no_grad():
        return Outcome(None, [clone(write(p, phi, e[i], statistics)) for i in p.clients], server)


def pfedhn(
    p: Problem,
    server_lr: float,
    server_momentum: float,
    server_weight_decay: float,
    server_clip: float | None,
    weights: str,
    rho: float | None = None,
    **shape: int,
) -> Outcome:
    """A torch optimizer over φ and the embeddings; one of a client that is not sampled has no gradient and stays.

    With `rho` all gradients are those at φ + ρ g/‖g‖ (PLGU-GHN).
    """
    phi, table = start(p)
    e = [row.clone().requires_grad_() for row in table]
    variables = [*(t.requires_grad_() for t in phi.values()), *e]
    optimizer = torch.optim.SGD(
        variables, server_lr, momentum=server_momentum, weight_decay=server_weight_decay
    )
    statistics: State = {}
    for t in range(len(p.rounds)):
        delta, trained = changes(p, phi, e, t, statistics)
        statistics = {n: s for n, s in average(p, trained, weights).items() if n not in p.parameters}
        at = {n: t.detach().clone() for n, t in phi.items()}
        if rho is not None:
            g = average(p, {i: vjp(p, at, e[i], change)[0] for i, change in delta.items()}, weights)
            at = {n: at[n] + rho * g[n] / norm_of(g) for n in at}
        found = {i: vjp(p, at, e[i], change) for i, change in delta.items()}
        optimizer.zero_grad()
        for n, g in average(p, {i: g for i, (g, _) in found.items()}, weights).items():
            phi[n].grad = g
        for i, (_, g) in found.items():
            e[i].grad = g
        if server_clip is not None:
            torch.nn.utils.clip_grad_norm_(variables, server_clip)
        optimizer.step()
    return done(p, clone(phi), torch.stack(e).detach(), statistics)
