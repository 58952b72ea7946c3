"""FedRoD (Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022).

    generic task:    min over (φ, h):  Σ a_i mean_b BSM_i(h(z_b), y_b),   z = f(x; φ)
    personal task:   min over p_i:     mean_b CE(h(z_b) + p_i(z_b), y_b)  with z and h as they are
    BSM_i(g, y) = CE(g + γ log n_i, y),   n_{i,c} the client's samples of class c (balanced softmax)

    server sends (φ, h)
    client i, for every batch, one forward pass:   (φ, h) = (φ, h) − η ∇ BSM_i;   p_i = p_i − κη ∇ CE
               both gradients at the models before the step; steps by the run's optimizer   sends (φ, h)
    server:    (φ, h) = Σ_S a_i (φ, h)_i              deployed: x ↦ h(z) + p_i(z), folded into one linear head

Only the generic task trains the body. p_i is a second linear head that starts at 0, so a client that never trained
deploys the generic model (ports start it as a copy of h, or at random; the authors released no code). The paper also
makes p_i by a hypernetwork from the client's class shares, which is not implemented here.

p_i has the rate κη with every optimizer, including AdamW, like a parameter group of torch.optim with its own rate.

| symbol | here |
|---|---|
| (φ, h) | server state `w` |
| p_i | client state |
| γ, κ | `gamma`, `personal_rate` |
"""

from __future__ import annotations

from functools import partial

from pydantic import Field
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.method import register
from tailorfl.core.reduction import becomes, exposure, options_but, to_fedavg
from tailorfl.errors import ConfigError
from tailorfl.methods.class_features import linear_head
from tailorfl.methods.fedavg import FedAvg
from tailorfl.training import tree
from tailorfl.training.objective import Seen, Term, class_prior
from tailorfl.training.update import Optimizer

OWN = "personal."
"""Prefix of the names of p_i while it trains together with the model."""


@register
class FedRoD(FedAvg):
    """A generic model trained as if classes were balanced, and a second head for the client's own classes."""

    name = "fedrod"
    title = "FedRoD"
    paper = "Chen and Chao, ICLR 2022"
    family = "parts"
    use = "one balanced model and a personal head, from one training"
    grid = {"gamma": (0.25, 0.5, 1.0)}
    special_cases = [
        to_fedavg("with γ = 0", models=("global",), gamma=0),
        becomes("with κ = 0", "fedrod", options_but(), models=("personal",), personal_rate=0),
    ]
    exposures = [exposure("the number of a client's samples of each class, in its loss", "sample")]
    has_personal = True
    trained_twice = "head"
    gamma: float = Field(1.0, ge=0, description="γ: correction for unequal classes in the generic loss")
    personal_rate: float = Field(1.0, ge=0, description="κ: personal head's rate, as a multiple of the run's")

    def server_state(self, ctx: Context) -> TensorDict:
        if ctx.train.balanced:
            raise ConfigError(
                "FedRoD uses its own balanced softmax instead of the run's loss; set its gamma, and turn "
                "train.objective off for this method: {name: fedrod, train: {objective: task}}"
            )
        return super().server_state(ctx)

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.init.select(*linear_head(ctx, self.title)) * 0.0

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        names = tuple(str(n) for n in state.keys())  # noqa: SIM118
        prior = class_prior(client.class_counts().to(received[names[0]].dtype), self.gamma)
        start = tree.merge(received, TensorDict({OWN + n: state[n] for n in names}))
        both = Term(partial(two_heads, names=names), given=(prior,), replaces=True)
        trained = client.fit(start, term=both, optimizer=Optimizer(own=self.personal_rate))
        return TensorDict({n: trained[OWN + n] for n in names}), trained.select(*received.keys())

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return tree.merge(received, received.select(*state.keys()) + state)


def two_heads(batch: Seen, prior: Tensor, names: tuple[str, ...]) -> Tensor:
    """Return mean CE(g + prior, y) + mean CE(sg(g) + p(sg z), y); `names` are those of the head's weight and bias."""
    g, z, p = batch.outputs, batch.features, [batch.own[OWN + n] for n in names]
    generic = cross_entropy(g + prior, batch.y, reduction="none")
    personal = cross_entropy(g.detach() + linear(z.detach(), *p), batch.y, reduction="none")
    return batch.mean(generic) + batch.mean(personal)
