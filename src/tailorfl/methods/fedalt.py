"""FedAlt and FedSim (Pillutla et al., "Federated Learning with Partial Model Personalization", ICML 2022).

    state (u, v_i): u shared, averaged by the server; v_i any part of the model, personal, never sent
    server sends u
    client i:  FedAlt: τ_v epochs of v_i with u fixed, then τ_u epochs of u with v_i fixed;   FedSim: both together
               keeps v_i, sends u_i
    server:    u = u − η_s Σ_S a_i (u − u_i)

a_i are equal in the paper. Both methods can keep v_i near c by a penalty (λ/2)‖v_i − c‖², c = its start v_i⁰ or 0.

| symbol | here |
|---|---|
| u | server state |
| v_i (and v_i⁰) | client state (`v`, and `start`, if it is the centre) |
| λ, c, η_s | `lam`, `centre`, `server_lr` |
| τ_v, τ_u | `head_epochs`, `body_epochs`; counted in steps: `head_steps`, `body_steps` |
| final epochs on v_i, not kept | `final_personal_epochs`, `final_personal_steps` |
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Literal

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import RUN, Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import Reduction
from tailorfl.methods.fedrep import FedRep
from tailorfl.methods.partial import FedPer, KeepsPart
from tailorfl.training import tree
from tailorfl.training.gradients import Gradient
from tailorfl.training.plan import Length


class Penalised(KeepsPart):
    """A personal part with an optional penalty, and a server step."""

    server_lr: float = Field(1.0, gt=0, description="η_s: server step")
    lam: float = Field(0.0, ge=0, description="λ of the penalty (λ/2)‖v_i − centre‖²; 0: none")
    centre: Literal["start", "zero"] = Field(
        "start", description="centre of the penalty on the personal part: its start, or 0"
    )

    @property
    def keeps_start(self) -> bool:
        """Whether clients keep v_i⁰ in addition to v_i."""
        return self.lam > 0 and self.centre == "start"

    def client_state(self, ctx: Context) -> TensorDict:
        v = super().client_state(ctx)
        return TensorDict({"v": v, "start": v}) if self.keeps_start else v

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        v = self.own(state)
        model = tree.merge(received, v)
        penalised = [n for n in client.split.personal if n in client.split.trainable]
        if self.lam > 0 and penalised:
            centre = (state["start"] if self.keeps_start else v).select(*penalised)
            model = self.train_held(client, model, centre if self.keeps_start else centre * 0.0)
        else:
            model = self.train(client, model)
        v, u = client.split.select_personal(model), client.split.select_shared(model)
        if not self.holds_start(state):
            return v, u
        return TensorDict({"v": v, "start": state["start"]}), u

    @abstractmethod
    def train_held(self, client: Client, model: TensorDict, centre: TensorDict) -> TensorDict:
        """Return the whole model after local training with the penalty; `centre` has the personal parameters."""

    def holds_start(self, state: TensorDict) -> bool:
        """Return whether a client's state has v_i⁰ in addition to v_i; it is empty if nothing is personal."""
        return self.keeps_start and len(tuple(state.keys())) > 0

    def own(self, state: TensorDict) -> TensorDict:
        """Return v_i."""
        v: TensorDict = state["v"] if self.holds_start(state) else state
        return v

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return super().personal(client, self.own(state), received)

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return replies.towards(server, self.server_lr)

    @property
    def server_step(self) -> float:
        return self.server_lr

    def alone(self, length: Length = RUN) -> tuple[Reduction, ...]:
        reductions = super().alone(length)
        if not self.lam or not reductions[0].other:
            return reductions
        return (replace(reductions[0], other="", remark="is LocalTrain with its penalty"),)


@register
class FedAlt(Penalised, FedRep):
    """FedRep's alternation for any personal part."""

    name = "fedalt"
    title = "FedAlt"
    paper = "Pillutla et al., ICML 2022"
    family = "parts"
    use = "shared body and personal part, trained in turn"
    grid = {"lam": (0.0, 0.01, 0.1, 1.0), "final_personal_epochs": (0, 1)}
    head_epochs: int = Field(
        1, ge=0, description="τ_v: epochs on the personal part with the shared one fixed"
    )
    body_epochs: int = Field(
        1, ge=0, description="τ_u: epochs on the shared part with the personal one fixed"
    )

    def train_held(self, client: Client, model: TensorDict, centre: TensorDict) -> TensorDict:
        return self.train_shared(client, self.train_personal(client, model, prox=(self.lam, centre)))


@register
class FedSim(Penalised, FedPer):
    """FedPer's simultaneous training for any personal part."""

    name = "fedsim"
    title = "FedSim"
    paper = "Pillutla et al., ICML 2022"
    family = "parts"
    use = "shared body and personal part, trained together"
    grid = {"lam": (0.0, 0.01, 0.1, 1.0), "final_personal_epochs": (0, 1)}

    def train_held(self, client: Client, model: TensorDict, centre: TensorDict) -> TensorDict:
        def held(at: TensorDict, grad: Gradient, centre: TensorDict) -> TensorDict:
            pull = (at.select(*centre.keys()) - centre) * self.lam
            g = grad(at)
            return tree.merge(g, g.select(*centre.keys()) + pull)

        return client.fit(model, direction=held, given=(centre,))
