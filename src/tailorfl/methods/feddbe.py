"""FedDBE: FedAvg + DBE (Zhang et al., NeurIPS 2023).

"Eliminating Domain Bias for Federated Learning in Representation Space."

    a private bias in feature space, and feature means that are pulled to one consensus
    F(h(z + b_i)) + κ/d_z Σ_k ½ (r_k − m̄_k)²,    z the features, r their running mean in a round

    round 0:   clients train w with b_i = 0, discard it and send r_i;    m̄ = Σ_S a_i r_i, fixed from then on
    later:     server sends w, m̄
    client i:  r = 0;  each step:  r = (1 − μ) sg(r) + μ mean_B z,   (w, b_i) by SGD on the sum above      sends w_i
    server:    w = Σ_S a_i w_i                                                         deployed: h(z + b_i)

The gradient of the pull passes only through the mean of the current batch (factor μ), and with μ < 1 r begins near
0, as in the official code. With μ = 1, that code's setting, r_i is the mean of the last batch. If not all clients
take part in round 0, m̄ is of those that do; if it has no effect, because too few of them reply, the next one does the
same. m̄ is sent along with w in every round, since in any of them a client may
take part for the first time (the paper counts it once). A newcomer has b_i = 0.

| symbol | here |
|---|---|
| w, m̄ | server state `w`, `mean` (0 until it is `known`) |
| b_i | client state: the vector `offset` that the method adds to the head |
| κ, μ, whether b_i is learned | `kappa`, `mu`, `bias` |
"""

from __future__ import annotations

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import exposure
from tailorfl.errors import ModelError
from tailorfl.methods.bases import ServerModel
from tailorfl.models.functional import Model
from tailorfl.models.layers import head_layer
from tailorfl.models.split import Split
from tailorfl.training import tree
from tailorfl.training.objective import Seen, Term

MEAN = "running mean of the features"
"""Name of r among the tensors that are trained."""
KNOWN, UNKNOWN = "known", "no mean yet"
"""Entry of the server's state once m̄ is known, and name of m̄'s place in messages until then."""


@register
class FedDBE(ServerModel):
    """FedAvg with a private bias on the features, whose means are pulled to one consensus."""

    name = "feddbe"
    title = "FedDBE"
    paper = "Zhang et al., NeurIPS 2023"
    family = "parts"
    use = "features whose mean differs between clients"
    grid = {"kappa": (0.0, 1.0, 10.0, 50.0), "mu": (0.1, 0.5, 1.0)}
    exposures = [exposure("the running mean of a client's features, in its loss", "sample")]
    has_global = False
    replies_change = True
    kappa: float = Field(
        1.0, ge=0, description="κ: pull of mean features to the consensus (official code: 50)"
    )
    mu: float = Field(1.0, gt=0, le=1, description="μ: share of the current batch in the running mean")
    bias: bool = Field(True, description="learn the private bias b_i; if false, it stays 0")

    def wrap(self, model: Model) -> Model:
        return model.changed(add_offset)

    def make_split(self, model: Model) -> Split:
        return model.split(is_offset)

    def server_state(self, ctx: Context) -> TensorDict:
        (offset,) = ctx.split.personal
        return TensorDict({"w": ctx.split.select_shared(ctx.init), "mean": ctx.init[offset] * 0.0})

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.split.select_personal(ctx.init)

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        # The entry's name says whether clients collect the mean, so that messages of all rounds have the same size.
        name = "mean" if KNOWN in server.keys() else UNKNOWN  # noqa: SIM118
        return TensorDict({"w": server["w"], name: server["mean"]})

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        model, split = tree.merge(received["w"], state), client.split
        known = UNKNOWN not in received.keys()  # noqa: SIM118
        train = None if self.bias and known else split.shared
        if known and self.kappa == 0:
            trained = client.fit(model, train=train)
        else:
            target = received["mean" if known else UNKNOWN]
            term = self.held(self.kappa if known else 0.0, target)
            start = tree.merge(model, TensorDict({MEAN: torch.zeros_like(target)}))
            trained = client.fit(start, train=train, term=term)
            if not known:
                return state, TensorDict({"mean": trained[MEAN]})
        personal, w = trained.select(*state.keys()), trained.select(*received["w"].keys())
        return split.select_personal(personal), TensorDict({"w": w})

    def held(self, kappa: float, target: Tensor) -> Term:
        """Return the term κ · mean over entries of ½ (r − target)², which also updates r."""

        def pull(batch: Seen, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            r = (1 - self.mu) * batch.own[MEAN] + self.mu * batch.mean(batch.features)
            return kappa * 0.5 * (r - target).square().mean(), {MEAN: r}

        return Term(pull, given=(target,), mixes=True, keeps=(MEAN,))

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        mean = replies.mean()
        if KNOWN in server.keys():  # noqa: SIM118
            return TensorDict({**dict(server.items()), "w": mean["w"]})
        return TensorDict({"w": server["w"], "mean": mean["mean"], KNOWN: torch.tensor(1)})

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return tree.merge(received["w"], state)


OFFSET = "offset"
"""Name of the vector in its layer."""


class OffsetLinear(nn.Linear):
    """A linear layer that first adds a vector to its input: y = W (z + b) + c."""

    offset: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """Features [..., inputs] -> outputs [..., outputs]."""
        return nn.functional.linear(input + self.offset, self.weight, self.bias)


def add_offset(module: nn.Module) -> None:
    """Turn the head of a network into an `OffsetLinear` with the vector 0, in place: no name and no output changes.

    Raises:
        ModelError: the head is not an ordinary linear layer.
    """
    head = head_layer(module)
    if type(head) is not nn.Linear:
        raise ModelError(
            f"a bias on the features needs a head that is a linear layer, but that of a {type(module).__name__} is "
            f"{'missing' if head is None else f'a {type(head).__name__}'}"
        )
    head.__class__ = OffsetLinear
    head.register_parameter(OFFSET, nn.Parameter(torch.zeros_like(head.weight[0])))


def is_offset(name: str, tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor of a model is such a vector; a selector."""
    return isinstance(module, OffsetLinear) and name.rpartition(".")[2] == OFFSET
