"""MOON (Li et al., "Model-Contrastive Federated Learning", CVPR 2021).

    FedAvg whose features are pulled to those of the received model and pushed away from those of the client's previous
    models:   ℓ = −log( e^{cos(z, z^w)/τ} / (e^{cos(z, z^w)/τ} + Σ_{k≤Q} e^{cos(z, z^(k))/τ}) ),   mean over samples

    server sends w
    client i:  θ = LocalSGD(w, E) on  CE + μ·ℓ;   z^w of the RECEIVED w, z^(k) of θ^(k): evaluation mode, no gradient
               θ^(1) = θ, and the others move up by one                                         sends θ
    server:    w = Σ_S a_i θ

Before a client has trained there is no θ^(k): the term is log 1 = 0. (Ports that start with θ^(1) = w differ by log 2
in the value and not at all in the gradient.) z is the input of the head of the run's own model; `projection` puts two
layers (d_z → d_z, ReLU, → `projection`; official code: 256) before the head, as in the official networks.

| symbol | here |
|---|---|
| w | server state `w` |
| θ^(1) … θ^(Q), how many of them there are | client state `1` … `Q`, `trained` |
| μ, τ, Q | `mu`, `tau`, `history` |
| width of z, if it is projected | `projection` |
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.method import register
from tailorfl.core.reduction import to_fedavg
from tailorfl.errors import ModelError
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.functional import Model
from tailorfl.models.layers import head_layer
from tailorfl.training.objective import Seen, Term


@register
class MOON(FedAvg):
    """FedAvg with features that stay close to the global model's and away from those of the client's last models."""

    name = "moon"
    title = "MOON"
    paper = "Li et al., CVPR 2021"
    family = "one model"
    use = "one image model whose features drift apart"
    grid = {"mu": (0.1, 1.0, 5.0), "tau": (0.1, 0.5, 1.0)}
    # With a projection it could only equal FedAvg of another network.
    special_cases = [
        to_fedavg("with μ = 0", projection=0, mu=0),
        to_fedavg("with Q = 0", projection=0, history=0),
        to_fedavg(
            "with a single round, before which no client has a previous model,", projection=0, rounds=1
        ),
    ]
    mu: float = Field(1.0, ge=0, description="μ: strength of the contrast (official code: 5 on CIFAR-10)")
    tau: float = Field(0.5, gt=0, description="τ: temperature of the contrast")
    history: int = Field(1, ge=0, description="Q: number of earlier models that a client compares with")

    projection: int = Field(
        0, ge=0, description="width of a two-layer projection before the head, compared; 0: none"
    )

    def wrap(self, model: Model) -> Model:
        return model.changed(partial(project, width=self.projection)) if self.projection else model

    def client_state(self, ctx: Context) -> TensorDict:
        models = {str(k + 1): ctx.init for k in range(self.history)}
        return TensorDict({**models, "trained": torch.zeros(())})

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        theta = client.fit(received, term=self.contrast(client, state, received))
        older = {str(k + 1): state[str(k)] for k in range(1, self.history)}
        new = {"1": theta, **older} if self.history else {}
        return TensorDict({**new, "trained": state["trained"] + 1}), theta

    def contrast(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[Term, ...]:
        """Return the term −μ log softmax of the received model among the models; none if it is 0."""
        if self.mu == 0 or self.history == 0 or client.round == 0:
            return ()

        def compared(batch: Seen, trained: Tensor, w: TensorDict, *models: TensorDict) -> Tensor:
            alike = [
                cosine_similarity(batch.features, batch.of(m)[1], dim=-1) / self.tau for m in (w, *models)
            ]
            for k in range(len(models)):
                alike[k + 1] = torch.where(trained > k, alike[k + 1], -torch.inf)
            return self.mu * batch.mean(torch.logsumexp(torch.stack(alike), 0) - alike[0])

        models = tuple(state[str(k + 1)] for k in range(self.history))
        return (Term(compared, given=(state["trained"], received, *models)),)


def project(module: nn.Module, width: int) -> None:
    """Put Linear(d, d), ReLU, Linear(d, width) before a new head for that width; in place.

    Raises:
        ModelError: the network has no linear head, or the head is the whole network.
    """
    head = head_layer(module)
    name = next((path for path, part in module.named_modules() if part is head), "")
    if not isinstance(head, nn.Linear) or not name:
        raise ModelError(
            f"a projection needs a linear head inside the network, which a {type(module).__name__} does not have"
        )
    inner = head.in_features
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        inner=nn.Linear(inner, inner),
        relu=nn.ReLU(),
        outer=nn.Linear(inner, width),
        head=nn.Linear(width, head.out_features, bias=head.bias is not None),
    )
    module.set_submodule(name, nn.Sequential(layers).to(head.weight))
    if hasattr(module, "feature_layer"):
        module.feature_layer = f"{name}.head"  # type: ignore[assignment]
