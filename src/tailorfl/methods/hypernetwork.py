"""A hypernetwork on the server generates every client's model.

pFedHN (Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021)

    min over φ, e:  Σ_i p_i F_i(h(e_i; φ)),   h and the embeddings e_i live on the server

    server sends θ_i = h(e_i; φ)
    client i:  θ̃ = LocalSGD(θ_i, K steps);   sends Δ_i = θ_i − θ̃
    server:    g_φ = Σ_S a_i vjp_φ(h(e_i; φ), Δ_i),   g_e_i = vjp_e(h(e_i; φ), Δ_i);   clip;   one SGD step on φ and e_i

The paper defines Δ as θ̃ − θ and then subtracts; the code uses θ − θ̃ = Σ η∇F, a descent direction, as here.

PLGU-GHN (Qu et al., CVPR 2023): sharpness-aware in φ, Δ_i not recomputed at φ + ε

    g = Σ_S a_i vjp_φ(h(e_i; φ), Δ_i);   ε = ρ g/‖g‖
    g_φ = Σ_S a_i vjp_φ(h(e_i; φ + ε), Δ_i);   g_e_i = vjp_e(h(e_i; φ + ε), Δ_i);   then the step of pFedHN

The paper takes a plain step of α in both (`{server_momentum: 0, server_weight_decay: 0, server_clip: null}`), which is
unstable across seeds: the default is the outer optimizer of pFedHN, so that the two methods differ only by the ascent.

The hypernetwork: embedding -> `hidden`, `depth` times (ReLU, hidden -> hidden), one linear head for each tensor. The
papers draw heads like any layer, so that h first generates models of a scale that no initialisation would choose, and
learn slowly (pFedHN: α = 0.01, 5 000 steps). By default (`start: model`) the heads' biases begin as the run's initial
model and their weights at 0: h(e_i; φ) is then that model for every client, a step of α = 1 moves the biases as FedAvg
does, and the weights learn how clients differ. The papers' settings: `{start: drawn, server_lr: 0.01}`, and ρ = 0.05.

| symbol | here |
|---|---|
| φ, e_i | server state `phi`, `embeddings` |
| α (outer step) | `server_lr`, `server_momentum`, `server_weight_decay`, `server_clip` |
| ρ | `rho` |
| K, η | the run's training settings |
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn import functional as F

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient, Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import becomes, options_but
from tailorfl.training import tree
from tailorfl.training.keys import torch_seed
from tailorfl.training.update import along

_TINY = 1e-12


@register
class PFedHN(Method):
    """A hypernetwork trained with the clients' updates as gradients."""

    fixed_clients = "its hypernetwork has an embedding of every client"
    name = "pfedhn"
    title = "pFedHN"
    paper = "Shamsian et al., ICML 2021"
    family = "hypernet"
    use = "many alike networks made by one; clients that send little"
    grid = {"server_lr": (0.01, 0.05, 0.1, 0.5)}
    has_global = False
    embedding: int | None = Field(None, ge=1, description="length of e_i; default int(1 + N/4)")
    hidden: int = Field(100, ge=1, description="width of the hypernetwork")
    depth: int = Field(3, ge=0, description="hidden layers after the first")
    server_lr: float = Field(0.1, gt=0, description="α: step of the hypernetwork and the embeddings")
    start: Literal["model", "drawn"] = Field(
        "model",
        description="what h first writes: the initial model for all, or what drawn heads give (the papers)",
    )
    server_momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the outer SGD")
    server_weight_decay: float = Field(1e-3, ge=0, description="weight decay of the outer SGD")
    server_clip: float | None = Field(50.0, gt=0, description="largest norm of the outer gradient")

    def server_state(self, ctx: Context) -> TensorDict:
        width = self.embedding or int(1 + ctx.num_clients / 4)
        sizes = {n: ctx.init.get(n).numel() for n in ctx.split.trainable}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(ctx.seed, "hypernetwork"))
            trunk = [
                torch.nn.Linear(width if d == 0 else self.hidden, self.hidden) for d in range(self.depth + 1)
            ]
            heads = {n: torch.nn.Linear(self.hidden, size) for n, size in sizes.items()}
            embeddings = torch.randn(ctx.num_clients, width).to(ctx.dtype)
        for layer in (*trunk, *heads.values()):
            layer.to(ctx.dtype)
        if self.start == "model":
            for n, layer in heads.items():
                layer.weight.data.zero_()
                layer.bias.data.copy_(ctx.init.get(n).flatten())
        phi = {
            "trunk_w": {str(d): layer.weight.detach() for d, layer in enumerate(trunk)},
            "trunk_b": {str(d): layer.bias.detach() for d, layer in enumerate(trunk)},
            "head_w": {n: layer.weight.detach() for n, layer in heads.items()},
            "head_b": {n: layer.bias.detach() for n, layer in heads.items()},
        }
        state = TensorDict({"phi": TensorDict(phi), "embeddings": embeddings, "template": ctx.init})
        still = {n: torch.zeros_like(t) for n, t in tree.leaves(state["phi"])}
        state["velocity"] = tree.nest(still.items())
        state["embedding_velocity"] = torch.zeros_like(embeddings)
        return state

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> PerClient:
        embeddings = server["embeddings"]
        # A client that joined later has no embedding: it gets the model of the mean embedding.
        rows = [embeddings[i] if i < len(embeddings) else embeddings.mean(0) for i in clients]
        template, phi = tree.tensors(server["template"]), dict(tree.leaves(server["phi"]))
        # One by one: a client's model must not depend, in the last bit, on the other receivers.
        written = [self.write(template, phi, e) for e in rows]
        payloads = {n: torch.stack([model[n] for model in written]) for n in template}
        return PerClient(TensorDict(payloads, batch_size=[len(clients)]))

    def write(self, template: dict[str, Tensor], phi: dict[str, Tensor], e: Tensor) -> dict[str, Tensor]:
        """Return the model h(e; φ); tensors that are not trained are those of `template`."""
        x = F.linear(e, phi["trunk_w/0"], phi["trunk_b/0"])
        for d in range(1, self.depth + 1):
            x = F.linear(F.relu(x), phi[f"trunk_w/{d}"], phi[f"trunk_b/{d}"])
        out = dict(template)
        for path, weight in phi.items():
            part, _, name = path.partition("/")
            if part == "head_w":
                out[name] = F.linear(x, weight, phi[f"head_b/{name}"]).reshape(template[name].shape)
        return out

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        trained = client.fit(received)
        return state, client.parameters(received) - client.parameters(trained)

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return tree.empty()

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        phi, rows = dict(tree.leaves(server["phi"])), list(replies.clients)
        g_phi, g_e = self.gradient(server, phi, replies)
        if self.server_clip is not None:
            norm = tree.norm(TensorDict({**g_phi, "embeddings": g_e}))
            scale = (self.server_clip / (norm + 1e-6)).clamp(max=1.0)
            g_phi, g_e = {n: g * scale for n, g in g_phi.items()}, g_e * scale
        velocity, old = dict(tree.leaves(server["velocity"])), server["embeddings"][rows]
        decay, momentum = self.server_weight_decay, self.server_momentum
        velocity = {n: momentum * velocity[n] + g_phi[n] + decay * t for n, t in phi.items()}
        e_velocity = server["embedding_velocity"].clone()
        e_velocity[rows] = momentum * e_velocity[rows] + g_e + decay * old
        phi = {n: t - self.server_lr * velocity[n] for n, t in phi.items()}
        embeddings = server["embeddings"].clone()
        embeddings[rows] = old - self.server_lr * e_velocity[rows]
        new = {"phi": tree.nest(phi.items()), "embeddings": embeddings}
        new |= {"velocity": tree.nest(velocity.items()), "embedding_velocity": e_velocity}
        return TensorDict({**server, **new})

    def gradient(
        self, server: TensorDict, phi: dict[str, Tensor], replies: Replies
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return (Σ a_i of the cohort's vjps in φ, vjp in each client's own embedding) of h at `phi` with Δ."""
        template = tree.tensors(server["template"])
        names = tuple(tree.tensors(replies.stack))

        def models(phi: dict[str, Tensor], e: Tensor) -> dict[str, Tensor]:
            return vmap(lambda row: {n: t for n, t in self.write(template, phi, row).items() if n in names})(
                e
            )

        pulled = vjp(models, phi, server["embeddings"][list(replies.clients)])
        back = pulled[1]
        a = replies.weights().to(server["embeddings"].dtype)
        g_phi, g_e = back({n: along(a, t) * t for n, t in tree.tensors(replies.stack).items()})
        # A client without samples has a = 0, and sent a change of 0.
        return g_phi, g_e / a.clamp(min=_TINY)[:, None]


@register
class PLGUGHN(PFedHN):
    """pFedHN whose hypernetwork takes sharpness-aware steps."""

    name = "plgu_ghn"
    title = "PLGU-GHN"
    paper = "Qu et al., CVPR 2023"
    family = "hypernet"
    use = "pFedHN that lifts the worst clients"
    grid = {"server_lr": (0.01, 0.1), "rho": (0.001, 0.05, 0.1, 0.5)}
    special_cases = [becomes("with ρ = 0", "pfedhn", options_but("rho"), other_model="personal", rho=0)]
    rho: float = Field(0.001, ge=0, description="ρ: radius of the ascent in φ (the paper: 0.05)")

    def gradient(
        self, server: TensorDict, phi: dict[str, Tensor], replies: Replies
    ) -> tuple[dict[str, Tensor], Tensor]:
        g, _ = super().gradient(server, phi, replies)
        norm = tree.norm(TensorDict(g))
        above = {n: t + g[n] * (self.rho / (norm + _TINY)) for n, t in phi.items()}
        return super().gradient(server, above, replies)
