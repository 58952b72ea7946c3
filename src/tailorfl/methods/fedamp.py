"""FedAMP and HeurFedAMP (Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021).

    min over w_1..w_N:  Σ_i F_i(w_i) + λ Σ_{i<j} A(‖w_i − w_j‖²),   A(x) = 1 − e^{−x/σ}

    server sends client i  u_i = Σ_j ξ_ij w_j  over itself and the clients that have uploaded
             FedAMP        ξ_ij = α A'(‖w_i − w_j‖²) = (α/σ) e^{−‖w_i − w_j‖²/σ},   ξ_ii = 1 − Σ_{j≠i} ξ_ij
             HeurFedAMP    ξ_ii fixed,   ξ_ij = (1 − ξ_ii) softmax_{j≠i}(σ cos(w_i, w_j))
    client i:  w_i = LocalSGD(w_i, E, prox (λ/α, u_i));   sends w_i
    server:    keeps w_i                                                       deployed: w_i

u_i = w_i − (α/2) ∇_{w_i} Σ A: a gradient step on the server, a proximal one on the client. Distances and cosines are
of parameters; running statistics are mixed with the same ξ. If Σ_{j≠i} ξ_ij > 1 (close models, a large α) it is
scaled to 1 and ξ_ii = 0. The paper does not say where training starts: at w_i, or `start=cloud` at u_i. Before its
first upload a client's w_i is the initial model. A newcomer starts from the mean of the uploads. Ports differ in the
values: α = 10⁴ and σ = 25, α falling over the rounds, or both 0.1; here α = 1 and λ = 0.03, which are stable with steps
of usual size. A port of HeurFedAMP compares w_i − w⁰ instead of w_i, with ξ_ii = 0.3 and σ = 10: `cosine_of=updates`.

| symbol | here |
|---|---|
| w_i | client state; on the server the parameters `models` [N, ...], other tensors `rest` |
| who has uploaded | server state `uploaded` [N] |
| λ, α, σ | `lam`, `alpha`, `sigma`; HeurFedAMP's `lam` is λ/α |
| ξ_ii | `self_weight` (default 1/N) |
| w⁰ | server state `origin` |
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient, Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import to_local
from tailorfl.methods.bases import OwnModel
from tailorfl.methods.mixtures import copies, cosines, mixed, replaced, squared_gaps
from tailorfl.training import tree


class Clouds(OwnModel):
    """Every client has a personal cloud model on the server, mixed from the last uploads of all clients."""

    fixed_clients = "its server keeps the model of every client"
    special_cases = [to_local("with λ = 0", lam=0, start="own")]
    family = "mixture"
    has_global = False
    personal_receives = False
    lam: float = Field(0.03, ge=0, description="λ: pull of a client's model towards its cloud model")
    start: Literal["own", "cloud"] = Field(
        "own", description="where training starts: the client's own model or its cloud model"
    )

    @property
    def pull(self) -> float:
        """Weight of ½‖w_i − u_i‖²."""
        return self.lam

    @abstractmethod
    def others(self, server: TensorDict, rows: Tensor, among: Tensor) -> Tensor:
        """Return ξ_ij of j ≠ i, [m, N] float64, 0 where not `among` [m, N]; `rows` [m] are the clients."""

    def server_state(self, ctx: Context) -> TensorDict:
        stacks, names = copies(ctx.init, ctx.num_clients), ctx.split.trainable
        uploaded = torch.zeros(ctx.num_clients, dtype=torch.bool)
        models, other_tensors = stacks.select(*names), stacks.exclude(*names)
        return TensorDict({"models": models, "rest": other_tensors, "uploaded": uploaded})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> PerClient:
        xi = self.mixing(server, clients)
        return PerClient(tree.merge(*(mixed(server[part], xi) for part in ("models", "rest"))))

    def mixing(self, server: TensorDict, clients: tuple[int, ...]) -> Tensor:
        """Return ξ of these clients, [m, N] float64; rows sum to 1."""
        rows = torch.tensor(clients)
        self_weights = torch.nn.functional.one_hot(rows, len(server["uploaded"])).bool()
        xi = self.others(server, rows, server["uploaded"] & ~self_weights)
        return torch.where(self_weights, (1 - xi.sum(1, keepdim=True)).clamp(min=0.0), xi)

    def welcome(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        uploaded = server["uploaded"] if bool(server["uploaded"].any()) else ~server["uploaded"]
        share = uploaded.double() / uploaded.sum()
        return tree.merge(*(tree.weighted_mean(server[part], share) for part in ("models", "rest")))

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        first = state if self.start == "own" else received
        w = client.fit(first, prox=(self.pull, received) if self.pull > 0 else None)
        return w, w

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        rows, new = torch.tensor(replies.clients), dict(server.items())
        for part in ("models", "rest"):
            new[part] = replaced(server[part], rows, replies.stack)
        return TensorDict({**new, "uploaded": server["uploaded"].index_fill(0, rows, True)})

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return received


@register
class FedAMP(Clouds):
    """Clients with similar models pull each other, the more strongly the closer they are."""

    name = "fedamp"
    title = "FedAMP"
    paper = "Huang et al., AAAI 2021"
    use = "few clients, some of them similar"
    grid = {"lam": (0.01, 0.03, 0.1, 1.0), "sigma": (1.0, 25.0, 100.0)}
    alpha: float = Field(1.0, gt=0, description="α: step of the cloud models; λ/α is the pull of a client's")
    sigma: float = Field(25.0, gt=0, description="σ: squared distance over which attention falls")

    @property
    def pull(self) -> float:
        return self.lam / self.alpha

    def others(self, server: TensorDict, rows: Tensor, among: Tensor) -> Tensor:
        return attention(squared_gaps(server["models"], rows), among, self.alpha, self.sigma)


@register
class HeurFedAMP(Clouds):
    """FedAMP with a fixed weight of the own model, and cosines, which suit large networks, instead of distances."""

    name = "heurfedamp"
    title = "HeurFedAMP"
    paper = "Huang et al., AAAI 2021"
    use = "FedAMP with cosines, for deep networks"
    grid = {"lam": (0.01, 0.03, 0.1, 1.0), "sigma": (1.0, 10.0, 25.0)}
    sigma: float = Field(25.0, ge=0, description="σ: how much more weight a larger cosine gives")
    self_weight: float | None = Field(None, ge=0, le=1, description="ξ_ii; default 1/N")
    cosine_of: Literal["models", "updates"] = Field(
        "models", description="cosines of models, or of their changes from the initial one"
    )

    def server_state(self, ctx: Context) -> TensorDict:
        state = super().server_state(ctx)
        if self.cosine_of == "updates":
            state["origin"] = ctx.init.select(*ctx.split.trainable)
        return state

    def others(self, server: TensorDict, rows: Tensor, among: Tensor) -> Tensor:
        compared = server["models"]
        if self.cosine_of == "updates":
            origin = server["origin"]
            compared = TensorDict({n: t - origin[n] for n, t in tree.tensors(compared).items()})
        self_weight = 1 / among.shape[1] if self.self_weight is None else self.self_weight
        return preference(cosines(compared, rows), among, self_weight, self.sigma)


def attention(gap: Tensor, among: Tensor, alpha: float, sigma: float) -> Tensor:
    """Return FedAMP's ξ_ij of j ≠ i from squared distances [m, N]; a row that sums to more than 1 is scaled to 1."""
    xi = torch.where(among, alpha / sigma * (-gap / sigma).exp(), 0.0)
    return xi / xi.sum(1, keepdim=True).clamp(min=1.0)


def preference(cosine: Tensor, among: Tensor, self_weight: float, sigma: float) -> Tensor:
    """Return HeurFedAMP's ξ_ij of j ≠ i from cosines [m, N]; a row without others is 0."""
    score = torch.where(among, sigma * cosine, -torch.inf)
    return torch.where(among, (1 - self_weight) * score.softmax(1), 0.0)
