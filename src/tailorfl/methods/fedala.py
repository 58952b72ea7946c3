"""FedALA (Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023).

    FedAvg whose clients start from a mixture, learnt entry by entry:   θ̂ = W_i ⊙ w + (1 − W_i) ⊙ θ_i  on the last
    layers,   θ̂ = w elsewhere

    server sends w
    client i:  on batches of a share s of its data:   W_i = clip(W_i − η_W ∇F_i(θ̂) ⊙ (w − θ_i), 0, 1),  then new θ̂
               θ_i = LocalSGD(θ̂, E)                                                       sends θ_i
    server:    w = Σ_S a_i θ_i                              deployed: θ̂ of the current w, after W_i has learnt on it

A client learns for one pass over its share; the first time that w ≠ θ_i for `first_passes`. (The official code then
continues until the standard deviation of the last ten losses is below 0.1, a length that depends on the data.) If
w = θ_i, as in the first round, W_i does not change. The share is of the batches of a pass in random order; in the code
it is one window of consecutive samples. Running statistics are w's. `train.clip` bounds ∇F_i(θ̂), not W_i's step.

| symbol | here |
|---|---|
| w; θ_i, W_i on the last layers, whether W_i has learnt | server state `w`; client state `theta`, `mix`, `met` |
| last layers, s, η_W | `mixed_part`, `share`, `eta` |
"""

from __future__ import annotations

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.method import register
from tailorfl.core.reduction import exposure, to_fedavg
from tailorfl.methods.fedavg import FedAvg
from tailorfl.training import tree
from tailorfl.training.gradients import Gradient
from tailorfl.training.plan import Length
from tailorfl.training.update import Optimizer


@register
class FedALA(FedAvg):
    """FedAvg that starts on every client from an entry-wise mixture of the received model and the client's last one."""

    name = "fedala"
    title = "FedALA"
    paper = "Zhang et al., AAAI 2023"
    family = "parts"
    use = "a start that mixes local and global head with learnt weights"
    grid = {"share": (0.2, 0.4, 0.6, 0.8, 1.0)}
    special_cases = [
        to_fedavg("with η_W = 0", start=1, eta=0),
        to_fedavg("with a single round, which starts at w,", models=("global",), rounds=1),
    ]
    exposures = [exposure("a number of steps of W that is only known while it runs", "sample")]
    has_personal = True
    mixed_part: str = Field("head", description="the part of the model that is mixed")
    eta: float = Field(1.0, ge=0, description="η_W: rate of the weights of the mixture")
    share: float = Field(0.8, gt=0, le=1, description="s: share of the data that a pass of W uses")
    first_passes: int = Field(10, ge=1, description="passes the first time that W learns; later there is one")
    start: float = Field(1.0, ge=0, le=1, description="W before training: share of the received model")

    def client_state(self, ctx: Context) -> TensorDict:
        names = ctx.model.split(self.mixed_part).personal
        theta = ctx.init.select(*(n for n in names if n in ctx.split.trainable))
        return TensorDict({"theta": theta, "mix": theta * 0.0 + self.start, "met": torch.zeros(())})

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        mix = self.learn(client, state, received)
        theta = client.fit(tree.merge(received, mixture(mix, tail(state, received), state["theta"])))
        met = torch.maximum(state["met"], apart(state, received))
        return TensorDict({"theta": tail(state, theta), "mix": mix, "met": met}), theta

    def learn(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        """Return W_i after its steps towards a mixture that suits the client's data."""
        mix, w, theta = state["mix"], tail(state, received), state["theta"]
        passes = torch.where(state["met"] > 0, 1.0, float(self.first_passes)) * apart(state, received)
        steps = client.steps(Length(epochs=self.share)) * passes

        def change(mix: TensorDict, grad: Gradient, w: TensorDict, theta: TensorDict) -> TensorDict:
            slope = grad(mixture(mix, w, theta)) * (w - theta)
            return mix - (mix - slope * self.eta).clamp(0.0, 1.0)

        learnt = client.fit(
            tree.merge(received, mix),
            train=tuple(mix.keys()),
            direction=change,
            given=(w, theta),
            length=Length(steps=steps),
            optimizer=Optimizer.plain(1.0, clip_each=True),
            purpose="mixture",
        )
        return tail(state, learnt).clamp(0.0, 1.0)

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        mixed = mixture(self.learn(client, state, received), tail(state, received), state["theta"])
        return tree.merge(received, mixed)

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return TensorDict({**dict(state.items()), "theta": tail(state, received)})


def tail(state: TensorDict, model: TensorDict) -> TensorDict:
    """Return the part of a model that is mixed."""
    return model.select(*state["theta"].keys())


def mixture(mix: TensorDict, w: TensorDict, theta: TensorDict) -> TensorDict:
    """Return W ⊙ w + (1 − W) ⊙ θ."""
    return mix * w + (1.0 - mix) * theta


def apart(state: TensorDict, received: TensorDict) -> Tensor:
    """Return 1 if w and θ_i differ in the part that is mixed, else 0."""
    gap = (tail(state, received) - state["theta"]).abs()
    return (torch.stack([t.amax() for _, t in tree.leaves(gap)]).amax() > 0).float()
