"""FedPAC (Xu et al., "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023).

    features close to the global class means P̄, and a head mixed from all clients' to minimise a bound on the test loss

    server sends (φ, P̄, H_i)
    client i:  μ_c its class means, π_c its class shares, M_i[c] = π_c μ_c,   V_i = (mean ‖z‖² − Σ_c ‖M_i[c]‖²)/n_i
               h = LocalSGD(H_i, E_h), φ fixed;   φ = LocalSGD(φ, E) on  CE + λ MSE(z, t_y), h fixed
               t_c = P̄_c if there is one, else the client's μ_c; no pull in the first round
               sends φ, h, M_i, V_i, class means μ'_c after training, class counts n_c
    server:    φ = Σ a_i φ_i;   P̄_c = Σ n_{i,c} μ'_{i,c} / Σ n_{i,c};   for every i in S:
               β = argmin over the simplex of βᵀ(diag V + G)β,   G_jk = Σ_c ⟨M_i[c] − M_j[c], M_i[c] − M_k[c]⟩
               β < 10⁻³ becomes 0, then Σβ = 1;   H_i = Σ_j β_j h_j            deployed: (φ, H_i)

An active-set method finds β exactly. (The official code cuts eigenvalues below 0.01 and falls back to the client's own
head if its solver fails.) A newcomer gets the mean of the last heads.

| symbol | here |
|---|---|
| φ, P̄, which classes have one, H_1 … H_N, mean of last h | state `body`, `prototypes`, `present`, `heads`, `head` |
| λ, E_h, rate of the head | `lam`, `head_epochs`, `head_lr` (default: the run's; official code 0.1) |
"""

from __future__ import annotations

import torch
from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient, Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import Reduction, RunSetup, as_settings, exposure
from tailorfl.methods.class_features import class_means, moments, near, no_prototypes, shared_prototypes
from tailorfl.methods.mixtures import copies, mixing_weights, replaced
from tailorfl.models.functional import Model
from tailorfl.models.split import Split
from tailorfl.training import tree
from tailorfl.training.objective import Term
from tailorfl.training.plan import Length
from tailorfl.training.update import Optimizer

NOBODY = 2**31  # the id of a client without its own head, which gets the mean


@register
class FedPAC(Method):
    """Features aligned to global class means, and heads mixed to help each client."""

    fixed_clients = "its server keeps the head of every client"
    name = "fedpac"
    title = "FedPAC"
    paper = "Xu et al., ICLR 2023"
    family = "parts"
    use = "label skew: aligned features, heads mixed by similarity"
    grid = {"lam": (0.1, 1.0, 10.0), "head_epochs": (1, 5)}
    exposures = [exposure("the class means of features and class counts, which a client sends as they are")]
    has_global = False
    lam: float = Field(1.0, ge=0, description="λ: pull of the features towards the mean of their class")
    head_epochs: int = Field(1, ge=0, description="E_h: epochs on the head with the body fixed")
    head_steps: int | None = Field(None, ge=0, description="steps instead of head_epochs")
    head_lr: float | None = Field(None, gt=0, description="learning rate of the head; default: the run's")
    mix: bool = Field(True, description="mix heads; if false, every client keeps its own")

    def make_split(self, model: Model) -> Split:
        return model.split("head")

    def server_state(self, ctx: Context) -> TensorDict:
        body, head = ctx.split.select_shared(ctx.init), ctx.split.select_personal(ctx.init)
        heads = copies(head, ctx.num_clients)
        return TensorDict({**no_prototypes(ctx, self.title), "body": body, "head": head, "heads": heads})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> PerClient:
        heads = {n: torch.cat([t, server["head"][n][None]]) for n, t in tree.tensors(server["heads"]).items()}
        chosen = {n: t[torch.tensor(clients).clamp(max=len(t) - 1)] for n, t in heads.items()}
        common = server.select("body", "prototypes", "present").expand(len(clients))
        message = {**dict(common.items()), "head": TensorDict(chosen)}
        return PerClient(TensorDict(message, batch_size=[len(clients)]))

    def welcome(self, server: TensorDict, clients: tuple[int, ...]) -> PerClient:
        return self.broadcast(server, (NOBODY,) * len(clients))

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        model, split = self.personal(client, state, received), client.split
        means, counts, square = class_means(client, model)
        term: tuple[Term, ...] = ()
        if self.lam > 0 and client.round > 0:
            targets = torch.where(received["present"][:, None], received["prototypes"], means)
            term = (near(self.lam, targets, torch.ones_like(counts)),)
        head, of_head = split.personal, self.length("head")
        model = client.fit(model, train=head, length=of_head, optimizer=Optimizer(client.rate(self.head_lr)))
        model = client.fit(model, train=split.shared, term=term)
        sent = {"body": split.select_shared(model), "head": split.select_personal(model)}
        after = {"means": class_means(client, model)[0], "counts": counts}
        return state, TensorDict({**sent, **moments(means, counts, square), **after})

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        sent, mean = replies.stack, replies.mean()
        trained, at = tree.tensors(sent["head"]), torch.tensor(replies.clients)
        if self.mix:
            beta = mixing_weights(sent["variance"], sent["moment"])
            trained = {n: torch.tensordot(beta.to(t.dtype), t, dims=1) for n, t in trained.items()}
        heads = replaced(server["heads"], at, trained)
        new = {"body": mean.get("body", tree.empty()), "head": mean["head"], "heads": heads}
        return TensorDict({**new, **shared_prototypes(server, sent["means"], sent["counts"])})

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return tree.merge(received.get("body", tree.empty()), received["head"])  # a linear model is all head

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        if (self.mix and run.cohort > 1) or (self.lam > 0 and run.rounds > 1) or self.head_lr is not None:
            return ()
        if self.participation == "all" and not run.everyone:
            return ()  # the server keeps only the heads of sampled clients
        because = "without mixing and pull" if run.rounds > 1 else "with a single round and without mixing"
        head, body = as_settings(self.length("head")), as_settings(Length(run.train.epochs, run.train.steps))
        lengths = [(f"{part}_{n}", v) for part, of in (("head", head), ("body", body)) for n, v in of.items()]
        options = {"weights": self.weights, **{n: v for n, v in lengths if v is not None}}
        return (Reduction(because, "personal", "fedrep", "personal", options),)
