"""APPLE (Luo and Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022).

    min over c_i, p_i:  F_i(θ_i) + κ_t ‖p_i − p⁰‖²,   θ_i = Σ_j p_ij c_j
    every client owns a core model c_i, and learns whom to listen to

    server sends all c_j, j ≠ i
    client i:  steps on both:   ∂/∂c_i = p_ii ∇F(θ_i),     ∂/∂p_ij = ⟨∇F(θ_i), c_j⟩ + 2 κ_t (p_ij − p⁰_j)
               sends c_i;  p_i, which is not bounded, never leaves
    server:    keeps the c_i                                        deployed: θ_i of the present cores
    p⁰_j = n_j/n;    κ_t = μ 10^(−3 t/H)  or  μ (1 + cos(π t/H))/2   in round t < H, then 0

The penalty is the official code's (the paper has a half of it). The rate of p_i is a tenth of the cores'; momentum is
the run's for both, its weight decay is of c_i and of p_i − p⁰, and its clip bounds the gradient of each by itself. The
cores begin at one initial model. Only parameters travel: running statistics are those of a client's own passes. Clients
deploy the cores of the moment, and not those of their last training, so nothing but c_i and p_i is kept. All cores go
to everyone: a client that downloads some of them would have to tell the server p_i to choose by it, as the official
code does in memory. A newcomer has p⁰ over all cores and begins with their mean as its own, which counts 0.

| symbol | here |
|---|---|
| c_1..c_N, p⁰ | server state `core`, `prior` |
| c_i; p_ij − p⁰_j of the others, by id; the same of p_ii | client state `core`; `others`; `own` |
| η of p_i in units of the cores' | `rate` |
| κ_t: μ, H (the code: a tenth of its rounds), its form | `mu`, `horizon`, `decay` |
| p⁰ by samples, or alike | `prior` |
"""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient, Replies
from tailorfl.core.method import Family, Grid, Method, register
from tailorfl.core.reduction import Facts, Reduction, to_local
from tailorfl.training import tree
from tailorfl.training.gradients import Gradient
from tailorfl.training.update import Optimizer


@register
class APPLE(Method):
    """Every client owns a core model, and deploys a combination of all of them that it learns."""

    name: ClassVar[str] = "apple"
    title: ClassVar[str] = "APPLE"
    paper: ClassVar[str] = "Luo and Wu, IJCAI 2022"
    family: ClassVar[Family] = "mixture"
    use: ClassVar[str] = "few clients that learn whom to listen to, for N models down"
    grid: ClassVar[Grid] = {"rate": (0.01, 0.1, 1.0), "mu": (0.01, 0.1, 1.0)}
    has_global: ClassVar[bool] = False
    rate: float = Field(0.1, ge=0, description="rate of p_i in units of the run's; 0 leaves p⁰")
    mu: float = Field(0.1, ge=0, description="μ: pull of p_i to p⁰ in the first round")
    horizon: float = Field(16.0, gt=0, description="H: rounds after which nothing pulls p_i any more")
    decay: Literal["exponential", "cosine"] = Field(
        "exponential", description="how the pull falls until then"
    )
    prior: Literal["samples", "uniform", "own"] = Field(
        "samples", description="p⁰: shares of the training samples, 1/N, or 1 of the own core"
    )

    def server_state(self, ctx: Context) -> TensorDict:
        every, count = ctx.init.select(*ctx.model.parameters), ctx.num_clients
        cores = {n: t.expand(count, *t.shape).clone() for n, t in tree.tensors(every).items()}
        sizes = torch.tensor(ctx.sizes, dtype=ctx.dtype)
        shares = {"samples": sizes / sizes.sum().clamp(min=1), "own": sizes * 0.0}
        uniform = torch.full((count,), 1 / count, dtype=ctx.dtype)
        return TensorDict({"core": TensorDict(cores), "prior": shares.get(self.prior, uniform)})

    def client_state(self, ctx: Context) -> TensorDict:
        zero = torch.zeros((), dtype=ctx.dtype)
        return TensorDict({"core": ctx.init, "others": zero.expand(ctx.num_clients).clone(), "own": zero})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict | PerClient:
        table = as_table(server)
        count = table.batch_size[0]
        if count == 1:
            return tree.empty()
        # N − 1 of them to everyone; one that joins late gets all of them, by `welcome`.
        others = [[j for j in range(count) if j != i][: count - 1] for i in clients]
        return PerClient(table, torch.tensor(others, dtype=torch.int64))

    def welcome(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return TensorDict(dict(as_table(server).items()))

    def pull(self, round: int) -> float:
        """Returns κ_t."""
        share = round / self.horizon
        if share >= 1:
            return 0.0
        return self.mu * (
            10 ** (-3 * share) if self.decay == "exponential" else (1 + math.cos(math.pi * share)) / 2
        )

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        gap, prior, cores = self.shares(client, state, received)
        trained = client.fit(
            {"core": state["core"], "p": gap},
            direction=partial(jointly, kappa=self.pull(client.round)),
            given=(cores, prior),
            optimizer=Optimizer(own=self.rate),
        )
        core, others = trained["core"], state["others"]
        if "owner" in received.keys():  # noqa: SIM118
            others = others.scatter(0, received["owner"], trained["p"]["others"])
        new = TensorDict({"core": core, "others": others, "own": trained["p"]["own"]})
        return new, TensorDict({"core": client.parameters(core)})

    def shares(
        self, client: Client, state: TensorDict, received: TensorDict
    ) -> tuple[TensorDict, TensorDict, TensorDict]:
        """Returns p_i − p⁰ and p⁰ as `own` and `others` [received cores], and those cores."""
        if "owner" not in received.keys():  # noqa: SIM118
            nobody = state["others"][:0]
            cores = {n: t[None][:0] for n, t in tree.tensors(client.parameters(state["core"])).items()}
            prior = TensorDict({"own": torch.ones_like(state["own"]), "others": nobody})
            return TensorDict({"own": state["own"], "others": nobody}), prior, TensorDict(cores)
        known, others = received["prior"], state["others"].gather(0, received["owner"])
        prior = TensorDict({"own": 1 - known.sum(), "others": known})
        return TensorDict({"own": state["own"], "others": others}), prior, received["core"]

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        rows = torch.tensor(replies.clients)
        old, new = tree.tensors(server["core"]), replies.stack["core"]
        cores = {n: t.index_copy(0, rows, new[n]) for n, t in old.items()}
        return TensorDict({"core": TensorDict(cores), "prior": server["prior"]})

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        mean = {n: t.mean(0) for n, t in tree.tensors(server["core"]).items()}
        return TensorDict({"core": TensorDict(mean)})

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        gap, prior, cores = self.shares(client, state, received)
        return tree.merge(state["core"], combined(client.parameters(state["core"]), cores, prior + gap))

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        prior = received["prior"] / received["prior"].sum()
        mean = {n: torch.tensordot(prior, t, dims=1) for n, t in tree.tensors(received["core"]).items()}
        return TensorDict({**dict(state.items()), "core": tree.merge(state["core"], TensorDict(mean))})

    def reductions(self, facts: Facts) -> tuple[Reduction, ...]:
        if self.rate == 0 and self.prior == "own":
            return (to_local("with p_i = e_i that does not learn"),)
        return ()


def as_table(server: TensorDict) -> TensorDict:
    """Returns what is known of each core, [N]: the core, whose it is, and p⁰."""
    count = len(server["prior"])
    cores = TensorDict(tree.tensors(server["core"]), batch_size=[count])
    owner = torch.arange(count)
    return TensorDict({"core": cores, "owner": owner, "prior": server["prior"]}, batch_size=[count])


def combined(core: TensorDict, cores: TensorDict, p: TensorDict) -> TensorDict:
    """Returns θ = p_ii c_i + Σ_j p_ij c_j, of the names of `core`."""
    others, own = p["others"], p["own"]
    found = {
        n: own.to(t.dtype) * t + torch.tensordot(others.to(t.dtype), cores[n], dims=1)
        for n, t in tree.tensors(core).items()
    }
    return TensorDict(found)


def jointly(
    state: TensorDict, grad: Gradient, cores: TensorDict, prior: TensorDict, kappa: float
) -> TensorDict:
    """Returns the direction of (c_i, p_i − p⁰)."""
    core, gap = state["core"], state["p"]
    p = prior + gap
    slope = tree.tensors(grad(combined(core, cores, p), of="core"))
    along = {n: (cores[n] * g).flatten(1).sum(1) for n, g in slope.items()}
    own = torch.stack([(core[n] * g).sum() for n, g in slope.items()]).sum()
    of_p = {
        "own": own + 2 * kappa * gap["own"],
        "others": torch.stack(list(along.values())).sum(0) + 2 * kappa * gap["others"],
    }
    return TensorDict(
        {"core": TensorDict({n: g * p["own"] for n, g in slope.items()}), "p": TensorDict(of_p)}
    )
