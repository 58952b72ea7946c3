"""APPLE (Luo and Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022).

    min over c_i, p_i:  F_i(θ_i) + κ_t ‖p_i − p⁰‖²,   θ_i = Σ_j p_ij c_j
    every client owns a core model c_i, and learns its weights p_i of all cores

    server sends all c_j, j ≠ i
    client i:  steps on both:   ∂/∂c_i = p_ii ∇F(θ_i),     ∂/∂p_ij = ⟨∇F(θ_i), c_j⟩ + 2 κ_t (p_ij − p⁰_j)
               sends c_i;  p_i, which is not bounded, stays on the client
    server:    keeps the c_i                                        deployed: θ_i of the current cores
    p⁰_j = n_j/n;    κ_t = μ 10^(−3 t/H)  or  μ (1 + cos(π t/H))/2   in round t < H, then 0

The penalty is the official code's (the paper has half of it). The rate of p_i is a tenth of the cores'; both use the
run's momentum, its weight decay applies to c_i and to p_i − p⁰, and its clip bounds the gradient of each separately.
The cores begin at one initial model. Only parameters are sent: running statistics come from a client's own passes.
Clients deploy the current cores, not those of their last training, so they keep only c_i and p_i. A newcomer has p⁰
over all cores and begins with their mean as its own core, which has weight 0.

With `downloads` = M a client gets M cores per round and keeps all cores, the others as it last received them; θ_i uses
the cores it holds. With its core it sends a request for the next ones: first those it never got, then j with a chance
that grows as max(1.5, λ t M/N)^|p_ij|, drawn without replacement. The server draws the first ones. So the server learns
which cores a client requests, but not p_i. (In the official code a client chooses in memory, and never records which
cores it has seen.)

| symbol | here |
|---|---|
| c_1..c_N, p⁰ | server state `core`, `prior` |
| c_i; p_ij − p⁰_j of the others, by id; the same of p_ii | client state `core`; `others`; `own` |
| η of p_i in units of the cores' | `rate` |
| κ_t: μ, H (the code: a tenth of its rounds), its form | `mu`, `horizon`, `decay` |
| p⁰ by samples, or equal | `prior` |
| M, λ | `downloads`, `greed`; cores held and seen, and p⁰: client state `held`, `seen`, `prior`; requested: `asked` |
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient, Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import exposure, to_local
from tailorfl.methods.mixtures import copies, replaced
from tailorfl.training import tree
from tailorfl.training.gradients import Gradient
from tailorfl.training.keys import generator
from tailorfl.training.update import Optimizer

FIRST = 1e4
"""Larger than any score of a core: one that was never seen comes before all that were."""


@register
class APPLE(Method):
    """Every client owns a core model, and deploys a combination of all cores that it learns."""

    fixed_clients = "every client weights the models of all others"
    name = "apple"
    title = "APPLE"
    paper = "Luo and Wu, IJCAI 2022"
    family = "mixture"
    use = "few clients that learn whose models to use, with N models downloaded"
    grid = {"rate": (0.01, 0.1, 1.0), "mu": (0.01, 0.1, 1.0)}
    special_cases = [to_local("with a fixed p_i = e_i", rate=0, prior="own")]
    exposures = [
        exposure("the cores that a client requests, by its data (downloads)", "client", downloads__not=None)
    ]
    has_global = False
    rate: float = Field(0.1, ge=0, description="rate of p_i as a multiple of the run's; 0: p⁰ is kept")
    mu: float = Field(0.1, ge=0, description="μ: pull of p_i to p⁰ in the first round")
    horizon: float = Field(16.0, gt=0, description="H: rounds after which the pull of p_i is 0")
    decay: Literal["exponential", "cosine"] = Field(
        "exponential", description="shape of the decrease of the pull until then"
    )
    prior: Literal["samples", "uniform", "own"] = Field(
        "samples", description="p⁰: shares of the training samples, 1/N, or 1 for the client's own core"
    )

    downloads: int | None = Field(
        None, ge=1, description="M: number of cores that a client receives per round; null: all but its own"
    )
    greed: float = Field(1.0, ge=0, description="λ: how soon the limited downloads follow p_i")

    def server_state(self, ctx: Context) -> TensorDict:
        count = ctx.num_clients
        cores = copies(ctx.init.select(*ctx.model.parameters), count)
        sizes = torch.tensor(ctx.sizes, dtype=ctx.dtype)
        shares = {"samples": sizes / sizes.sum().clamp(min=1), "own": sizes * 0.0}
        uniform = torch.full((count,), 1 / count, dtype=ctx.dtype)
        state = {"core": cores, "prior": shares.get(self.prior, uniform)}
        if limit := self.limit(count):
            first = [
                generator(ctx.seed, "first cores", i).permutation(count - 1)[:limit] for i in range(count)
            ]
            rows = torch.from_numpy(np.stack(first)).sort(1).values
            state["asked"] = rows + (rows >= torch.arange(count)[:, None])  # never one's own
        return TensorDict(state)

    def limit(self, clients: int) -> int:
        """Return M if a client gets fewer cores than there are others; else 0."""
        return self.downloads if self.downloads is not None and self.downloads < clients - 1 else 0

    def client_state(self, ctx: Context) -> TensorDict:
        zero = torch.zeros((), dtype=ctx.dtype)
        zeros = zero.expand(ctx.num_clients).clone()
        state = {"core": ctx.init, "others": zeros, "own": zero}
        if self.limit(ctx.num_clients):
            # All cores begin at the initial model, which every client has.
            server = self.server_state(ctx)
            state |= {"held": server["core"], "prior": server["prior"], "seen": zeros.clone()}
        return TensorDict(state)

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict | PerClient:
        table = as_table(server)
        count = table.batch_size[0]
        if count == 1:
            return tree.empty()
        if "asked" in server.keys() and all(i < count for i in clients):  # noqa: SIM118
            return PerClient(table, server["asked"][list(clients)])
        # N − 1 cores to every client; one that joins late gets all of them, by `welcome`.
        rows = [[j for j in range(count) if j != i][: count - 1] for i in clients]
        return PerClient(table, torch.tensor(rows, dtype=torch.int64))

    def welcome(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return TensorDict(dict(as_table(server).items()))

    def pull(self, round: int) -> float:
        """Return κ_t."""
        share = round / self.horizon
        if share >= 1:
            return 0.0
        return self.mu * (
            10 ** (-3 * share) if self.decay == "exponential" else (1 + math.cos(math.pi * share)) / 2
        )

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        if "held" in state.keys():  # noqa: SIM118
            state = downloaded(state, received)
        gap, prior, cores = self.shares(client, state, received)
        trained = client.fit(
            {"core": state["core"], "p": gap},
            direction=partial(jointly, kappa=self.pull(client.round)),
            given=(cores, prior),
            optimizer=Optimizer(own=self.rate),
        )
        core, gaps = trained["core"], state["others"]
        new = {"core": core, "own": trained["p"]["own"]}
        reply: dict[str, Any] = {"core": client.parameters(core)}
        if "held" in state.keys():  # noqa: SIM118
            new |= {n: state[n] for n in ("held", "prior", "seen")}
            gaps = trained["p"]["others"]
            reply["asked"] = self.asked(client, gaps, state)
        elif "owner" in received.keys():  # noqa: SIM118
            gaps = gaps.scatter(0, received["owner"], trained["p"]["others"])
        return TensorDict({**new, "others": gaps}), TensorDict(reply)

    def asked(self, client: Client, gaps: Tensor, state: TensorDict) -> Tensor:
        """Return the M cores that a client requests next, int64 [M] in ascending order; p_ij − p⁰_j are `gaps`."""
        count = len(gaps)
        limit = self.limit(count)
        base = max(1.5, self.greed * (client.round + 1) * limit / count)
        shares = (state["prior"] + gaps).abs()
        drawn = client.drawn({"each core": (count,)}, "cores to download")["each core"]
        # The largest log-probabilities plus Gumbel noise are a draw without replacement by these probabilities.
        wish = shares * math.log(base) - (-drawn.log()).log()
        number = torch.arange(count, device=wish.device)
        wish = torch.where(state["seen"] > 0, wish, wish + FIRST)
        wish = torch.where(number == client.id, -torch.inf, wish)
        return wish.topk(limit).indices.sort().values

    def shares(
        self, client: Client, state: TensorDict, received: TensorDict
    ) -> tuple[TensorDict, TensorDict, TensorDict]:
        """Return p_i − p⁰ and p⁰ as `own` and `others` [received cores, or all that are held], and those cores."""
        if "held" in state.keys():  # noqa: SIM118
            is_own = torch.arange(len(state["prior"]), device=state["prior"].device) == client.id
            mask = (~is_own).to(state["prior"].dtype)
            other_cores = {
                n: t * mask.reshape(-1, *(1,) * (t.ndim - 1)) for n, t in tree.tensors(state["held"]).items()
            }
            shares = state["prior"] * mask
            prior = TensorDict({"own": 1 - shares.sum(), "others": shares})
            gap = TensorDict({"own": state["own"], "others": state["others"]})
            return gap, prior, TensorDict(other_cores)
        if "owner" not in received.keys():  # noqa: SIM118
            no_gaps = state["others"][:0]
            cores = {n: t[None][:0] for n, t in tree.tensors(client.parameters(state["core"])).items()}
            prior = TensorDict({"own": torch.ones_like(state["own"]), "others": no_gaps})
            return TensorDict({"own": state["own"], "others": no_gaps}), prior, TensorDict(cores)
        shares, gaps = received["prior"], state["others"].gather(0, received["owner"])
        prior = TensorDict({"own": 1 - shares.sum(), "others": shares})
        return TensorDict({"own": state["own"], "others": gaps}), prior, received["core"]

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        rows = torch.tensor(replies.clients)
        state = {"core": replaced(server["core"], rows, replies.stack["core"]), "prior": server["prior"]}
        if "asked" in server.keys():  # noqa: SIM118
            state["asked"] = server["asked"].index_copy(0, rows, replies.stack["asked"])
        return TensorDict(state)

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        mean = {n: t.mean(0) for n, t in tree.tensors(server["core"]).items()}
        return TensorDict({"core": TensorDict(mean)})

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        if "held" in state.keys():  # noqa: SIM118
            state = downloaded(state, received)
        gap, prior, cores = self.shares(client, state, received)
        return tree.merge(state["core"], combined(client.parameters(state["core"]), cores, prior + gap))

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        prior = torch.where(received["prior"].any(), received["prior"], 1.0)  # e_i: their plain mean
        prior = prior / prior.sum()
        mean = {n: torch.tensordot(prior, t, dims=1) for n, t in tree.tensors(received["core"]).items()}
        return TensorDict({**dict(state.items()), "core": tree.merge(state["core"], TensorDict(mean))})


def as_table(server: TensorDict) -> TensorDict:
    """Return a table of the cores, [N]: the core, its owner, and p⁰."""
    count = len(server["prior"])
    cores = TensorDict(tree.tensors(server["core"]), batch_size=[count])
    owner = torch.arange(count)
    return TensorDict({"core": cores, "owner": owner, "prior": server["prior"]}, batch_size=[count])


def downloaded(state: TensorDict, received: TensorDict) -> TensorDict:
    """Return a client's state with the received cores in place of its older copies of them."""
    rows = torch.nn.functional.one_hot(received["owner"], len(state["prior"]))  # [M, N]
    received_now = rows.sum(0) > 0
    position = rows.argmax(0)
    cores = {}
    for n, t in tree.tensors(state["held"]).items():
        new = received["core"][n].index_select(0, position)
        cores[n] = torch.where(received_now.reshape(-1, *(1,) * (t.ndim - 1)), new, t)
    ever_received = torch.where(received_now, torch.ones_like(state["seen"]), state["seen"])
    return TensorDict({**dict(state.items()), "held": TensorDict(cores), "seen": ever_received})


def combined(core: TensorDict, cores: TensorDict, p: TensorDict) -> TensorDict:
    """Return θ = p_ii c_i + Σ_j p_ij c_j, for the names in `core`."""
    shares, own_share = p["others"], p["own"]
    model = {
        n: own_share.to(t.dtype) * t + torch.tensordot(shares.to(t.dtype), cores[n], dims=1)
        for n, t in tree.tensors(core).items()
    }
    return TensorDict(model)


def jointly(
    state: TensorDict, grad: Gradient, cores: TensorDict, prior: TensorDict, kappa: float
) -> TensorDict:
    """Return the direction of (c_i, p_i − p⁰)."""
    core, gap = state["core"], state["p"]
    p = prior + gap
    slope = tree.tensors(grad(combined(core, cores, p), of="core"))
    along = {n: (cores[n] * g).flatten(1).sum(1) for n, g in slope.items()}
    own_slope = torch.stack([(core[n] * g).sum() for n, g in slope.items()]).sum()
    of_p = {
        "own": own_slope + 2 * kappa * gap["own"],
        "others": torch.stack(list(along.values())).sum(0) + 2 * kappa * gap["others"],
    }
    return TensorDict(
        {"core": TensorDict({n: g * p["own"] for n, g in slope.items()}), "p": TensorDict(of_p)}
    )
