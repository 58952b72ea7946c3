"""FedCP (Zhang et al., KDD 2023).

"FedCP: Separating Feature Information for Personalized Federated Learning via Conditional Policy."

    a gate splits the features of every sample between a personal head and a common one
    out = h_i(r ⊙ z) + h((1 − r) ⊙ z),    r = softmax over a pair of (G(z ⊙ c_i/‖c_i‖) + Gumbel noise), its first
    G: Linear(d_z, 2 d_z), LayerNorm, ReLU;    c_i the sum of the rows of h_i's weight

    server sends φ, h, G
    client i:  (φ_i, h_i, G_i) by SGD on  CE + λ MMD²(f(x; φ_i), f(x; φ)),   h and the received φ as they are
               new c_i;   keeps h_i, c_i                                       sends φ_i, G_i, ½ (h_i + h)
    server:    the mean of each                                                deployed: out, with r without noise

MMD² is the V-statistic with kernels exp(−d²/2a), a in {10, 15, 20, 50}, the received φ in evaluation mode. It compares
the samples of a batch, so sample-level privacy refuses it if λ > 0. The official code also draws noise in evaluation
(here evaluation draws none, since its results must not depend on the division into batches), begins with a random c_i
(here that of the first h_i), and sends h and G only to clients that take part (here to all). A newcomer has h_i = h.

| symbol | here |
|---|---|
| φ, h, G | server state; in the head `common`, `gate` |
| h_i, c_i | client state; in the head `weight`, `bias`, `context` |
| λ | `lam` (official code: 5 in its script, 0 by default) |
"""

from __future__ import annotations

import copy

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.method import register
from tailorfl.core.reduction import exposure
from tailorfl.methods.bases import ServerModel
from tailorfl.methods.class_features import trained_head
from tailorfl.methods.feature_distances import mmd
from tailorfl.models.dropout import Gumbel
from tailorfl.models.functional import Model
from tailorfl.models.layers import replace_head
from tailorfl.models.split import Split
from tailorfl.training import tree
from tailorfl.training.objective import Seen, Term

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)
OWN = ("weight", "bias", "context")
"""Names of a client's own tensors: W, b and the context."""


@register
class FedCP(ServerModel):
    """A gate splits the features of every sample between a personal head and a common one."""

    name = "fedcp"
    title = "FedCP"
    paper = "Zhang et al., KDD 2023"
    family = "parts"
    use = "label skew: shared and personal parts, separated for each feature"
    grid = {"lam": (0.0, 0.1, 1.0, 5.0)}
    exposures = [
        exposure("the discrepancy of the features of a batch, in its loss (lam)", "sample", lam__not=0)
    ]
    has_global = False
    lam: float = Field(
        0.1, ge=0, description="λ: pull of the features to those of the received body (official code: 5)"
    )

    def wrap(self, model: Model) -> Model:
        return model.changed(add_gate)

    def make_split(self, model: Model) -> Split:
        return model.split(is_own, held=common(model.module))

    def server_state(self, ctx: Context) -> TensorDict:
        trained_head(ctx, self.title)
        return ctx.split.select_shared(ctx.init)

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.split.select_personal(ctx.init)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        start = tree.merge(received, state)
        term = Term(self.apart, given=(start,), mixes=True) if self.lam > 0 else ()
        trained = client.fit(start, term=term)
        personal, sent = client.split.select_personal(trained), client.split.select_shared(trained)
        halves = {n: (personal[twin(n)] + received[n]) / 2 for n in client.split.held}
        return with_context(personal), tree.merge(sent, TensorDict(halves))

    def apart(self, batch: Seen, start: TensorDict) -> Tensor:
        """Return λ MMD² of the features of the body in training and of the one from which it started."""

        def kernel(square: Tensor) -> Tensor:
            return torch.stack([torch.exp(-square / (2 * a)) for a in BANDWIDTHS]).sum(0)

        return self.lam * mmd(batch.features, batch.of(start)[1], batch.weight, kernel)

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return tree.merge(received, state)

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        head = {twin(str(n)): t for n, t in received.items() if twin(str(n)) in state}
        return with_context(tree.merge(state, TensorDict(head)))


def twin(name: str) -> str:
    """Return the name of the tensor of h_i that corresponds to the one of h with this name."""
    return ".".join(name.rsplit(".common.", 1))


def with_context(personal: TensorDict) -> TensorDict:
    """Return h_i with a new context: the sum of the rows of its weight."""
    names = [str(n) for n in personal.keys()]  # noqa: SIM118
    (weight,), (context,) = ([n for n in names if n.endswith(end)] for end in ("weight", "context"))
    return tree.merge(personal, TensorDict({context: personal[weight].sum(0)}))


class Gate(nn.Module):
    """A share of each feature: the first of two softmax probabilities of (logit + Gumbel noise)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.ReLU())
        self.noise = Gumbel()

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> shares r [..., width]."""
        first, second = self.noise(self.inner(x)).chunk(2, -1)
        return torch.sigmoid(first - second)


class GatedHead(nn.Module):
    """A linear head for a share of the features and another head, `common`, for the rest.

    y = W (r ⊙ z) + b + W' ((1 − r) ⊙ z) + b'
    """

    context: Tensor

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.common = copy.deepcopy(head)
        self.gate = Gate(head.in_features)
        self.register_buffer("context", head.weight.detach().sum(0))

    def forward(self, z: Tensor) -> Tensor:
        """Features [..., width] -> outputs [..., classes]."""
        r = self.gate(z * normalize(self.context, dim=0))
        out: Tensor = linear(r * z, self.weight, self.bias) + self.common((1 - r) * z)
        return out


def add_gate(module: nn.Module) -> None:
    """Turn the head of a network into a `GatedHead` of two equal heads; in place.

    Raises:
        ModelError: the head is not an ordinary linear layer inside a network.
    """
    replace_head(module, GatedHead, "a gate needs")


def is_own(name: str, tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor is the weight, the bias or the context of such a head; a selector."""
    return isinstance(module, GatedHead) and name.rpartition(".")[2] in OWN


def common(module: nn.Module) -> list[str]:
    """Return the names of the tensors of the other head, as a selector."""
    return [
        f"{path}.common.{name}"
        for path, part in module.named_modules()
        if isinstance(part, GatedHead)
        for name, _ in part.common.named_parameters()
    ]
