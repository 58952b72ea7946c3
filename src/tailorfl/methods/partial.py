"""Methods that share one part of a model and keep the other on the client.

    state (u, v_i): u shared, averaged by the server; v_i personal, never sent
    server sends u
    client i:  trains (u, v_i), keeps v_i, sends u_i
    server:    u = Σ_S a_i u_i

| method | paper | personal v_i | local training | a_i of the paper |
|---|---|---|---|---|
| FedPer | Arivazhagan et al., 2019 | head | u and v_i together, E epochs | samples |
| FedRep | Collins et al., ICML 2021 | head | E_h epochs of v_i alone, then E_b epochs of u alone | samples |
| LG-FedAvg | Liang et al., 2020 | feature extractor | together | uniform |
| FedAlt | Pillutla et al., ICML 2022 | any part | as FedRep, E_h = E_b = 1 by default | uniform |
| FedSim | Pillutla et al., ICML 2022 | any part | as FedPer | uniform |
| FedBN | Li et al., ICLR 2021 | norm layers, parameters and running statistics | together | samples |

FedAlt and FedSim may hold v_i by a penalty (λ/2)‖v_i − c‖², c = its start v_i⁰ or 0, and take a server step η_s:
u = u − η_s Σ_S a_i (u − u_i).

| symbol | here |
|---|---|
| u | server state |
| v_i (and v_i⁰) | client state (`v`, and `start`, where it is the centre) |
| λ, c, η_s | `lam`, `centre`, `server_lr` |
| E_h, E_b (τ_v, τ_u) | `head_epochs`, `body_epochs`; counted in steps: `head_steps`, `body_steps` |
| final epochs on v_i, not kept | `final_personal_epochs`, `final_personal_steps` |
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import Facts, Reduction, length, none, to_local, untrained
from tailorfl.methods.bases import ServerModel
from tailorfl.models.functional import Model
from tailorfl.models.split import Split
from tailorfl.training import tree
from tailorfl.training.gradients import Gradient
from tailorfl.training.plan import Length


class SplitMethod(ServerModel):
    """A model in two parts, trained together."""

    has_global = False
    personal_part: str = Field(
        "head", description="what stays on the client: head, extractor, norm, input, all, none, a+b"
    )

    def make_split(self, model: Model) -> Split:
        return model.split(self.personal_part)

    def server_state(self, ctx: Context) -> TensorDict:
        return ctx.split.select_shared(ctx.init)

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.split.select_personal(ctx.init)

    def train(self, client: Client, model: TensorDict) -> TensorDict:
        """Returns the whole model after one client's local training."""
        trained: TensorDict = client.fit(model)
        return trained

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        model = self.train(client, tree.merge(received, state))
        return client.split.select_personal(model), client.split.select_shared(model)

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return tree.merge(received, state)

    @property
    def nothing_personal(self) -> str:
        """Why nothing stays on the client, where nothing does."""
        return f"with nothing of this model in its personal part ('{self.personal_part}')"

    @property
    def server_step(self) -> float:
        """How far the server goes towards the mean of what clients send."""
        return 1.0

    def everywhere(self, **train: Any) -> tuple[Reduction, ...]:
        """Without a personal part it is FedAvg."""
        options = {"weights": self.weights, "server": {"lr": self.server_step}}
        return (Reduction(self.nothing_personal, "personal", "fedavg", "global", options, train),)


class KeepsPart(SplitMethod):
    """A personal part that is trained in every round, and once more before a model is used if asked to."""

    final_personal_epochs: int = Field(
        0,
        ge=0,
        description="epochs on the personal part before a model is used (official code: FedRep 10, FedAlt, FedSim 1)",
    )
    final_personal_steps: int | None = Field(
        None, ge=0, description="steps in place of final_personal_epochs"
    )

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        model = super().personal(client, state, received)
        tuned: TensorDict = client.fit(
            model,
            train=client.split.personal,
            length=Length(epochs=self.final_personal_epochs, steps=self.final_personal_steps),
            purpose="finetune",
        )
        return tuned

    def reductions(self, facts: Facts) -> tuple[Reduction, ...]:
        if not facts.split.shared:
            return self.alone()
        return () if facts.split.personal else self.everywhere()

    @property
    def tunes_at_the_end(self) -> bool:
        """Whether the personal part is trained once more before a model is used."""
        return not none(self.final_personal_epochs, self.final_personal_steps)

    def alone(self, epochs: int | None = None, steps: int | None = None) -> tuple[Reduction, ...]:
        """With nothing shared it is LocalTrain, of so many epochs or steps; without both the run's."""
        because = f"with all of this model in its personal part ('{self.personal_part}')"
        if none(epochs, steps):
            return (untrained(because, "personal"),)
        if self.tunes_at_the_end:
            remark = "is LocalTrain with more epochs before a model is used"
            return (Reduction(because, "personal", remark=remark),)
        return (to_local(because, **length(epochs, steps)),)


@register
class FedPer(KeepsPart):
    """Shared body, personal head, trained together."""

    name = "fedper"
    title = "FedPer"
    paper = "Arivazhagan et al., 2019"
    family = "parts"
    use = "label skew: shared body, own head"
    grid = {"final_personal_epochs": (0, 1)}


@register
class FedRep(KeepsPart):
    """Shared body, personal head, trained one after the other."""

    name = "fedrep"
    title = "FedRep"
    paper = "Collins et al., ICML 2021"
    family = "parts"
    use = "label skew: own head fitted first, then the body"
    grid = {"head_epochs": (1, 5, 10)}
    head_epochs: int = Field(10, ge=0, description="E_h: epochs on the head with the body fixed")
    head_steps: int | None = Field(None, ge=0, description="steps in place of head_epochs")
    body_epochs: int = Field(1, ge=0, description="E_b: epochs on the body with the head fixed")
    body_steps: int | None = Field(None, ge=0, description="steps in place of body_epochs")

    def train(self, client: Client, model: TensorDict) -> TensorDict:
        model = client.fit(
            model, train=client.split.personal, length=Length(epochs=self.head_epochs, steps=self.head_steps)
        )
        trained: TensorDict = client.fit(
            model, train=client.split.shared, length=Length(epochs=self.body_epochs, steps=self.body_steps)
        )
        return trained

    def reductions(self, facts: Facts) -> tuple[Reduction, ...]:
        if not facts.split.shared:
            return self.alone(self.head_epochs, self.head_steps)
        if none(self.body_epochs, self.body_steps):
            remark = "never trains what clients share"
            return (Reduction("without body epochs", "personal", remark=remark),)
        if not facts.split.personal:
            return self.everywhere(**length(self.body_epochs, self.body_steps))
        heads = not none(self.head_epochs, self.head_steps)
        if heads or self.tunes_at_the_end or self.server_step != 1:
            return ()
        options = {"weights": self.weights, "personal_part": self.personal_part, "ft_epochs": 0}
        because, train = "without head epochs", length(self.body_epochs, self.body_steps)
        return (Reduction(because, "personal", "fedbabu", "personal", options, train),)


@register
class LGFedAvg(KeepsPart):
    """Personal representation, shared head."""

    name = "lg_fedavg"
    title = "LG-FedAvg"
    paper = "Liang et al., 2020"
    family = "parts"
    use = "own features, one shared head; few bytes"
    grid = {"final_personal_epochs": (0, 1)}
    personal_part: str = Field(
        "extractor", description="what stays on the client; extractor:k shares the last k linear layers"
    )
    broadcast_all: bool = Field(
        False, description="send the shared layers to all clients every round, as the official code does"
    )

    @property
    def reaches_all(self) -> bool:
        return self.broadcast_all


@register
class FedBN(KeepsPart):
    """Everything is shared but the norm layers; without norm layers it is FedAvg."""

    name = "fedbn"
    title = "FedBN"
    paper = "Li et al., ICLR 2021"
    family = "parts"
    use = "shifts of the inputs (scanners, sites)"
    grid = {"final_personal_epochs": (0, 1)}
    personal_part: str = Field("norm", description="what stays on the client")

    def make_split(self, model: Model) -> Split:
        return model.split(self.personal_part, allow_empty=True)


class Penalised(KeepsPart):
    """A personal part that a penalty may hold, and a server step."""

    server_lr: float = Field(1.0, gt=0, description="η_s: server step")
    lam: float = Field(0.0, ge=0, description="λ of the penalty (λ/2)‖v_i − centre‖²; 0 has none")
    centre: Literal["start", "zero"] = Field(
        "start", description="what the penalty pulls the personal part to: where it started, or 0"
    )

    @property
    def keeps_start(self) -> bool:
        """Whether clients hold v_i⁰ beside v_i."""
        return self.lam > 0 and self.centre == "start"

    def client_state(self, ctx: Context) -> TensorDict:
        v = super().client_state(ctx)
        return TensorDict({"v": v, "start": v}) if self.keeps_start else v

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        v = self.own(state)
        model = tree.merge(received, v)
        held = [n for n in client.split.personal if n in client.split.trainable]
        if self.lam > 0 and held:
            centre = (state["start"] if self.keeps_start else v).select(*held)
            model = self.train_held(client, model, centre if self.keeps_start else centre * 0.0)
        else:
            model = self.train(client, model)
        v, u = client.split.select_personal(model), client.split.select_shared(model)
        if not self.holds_start(state):
            return v, u
        return TensorDict({"v": v, "start": state["start"]}), u

    @abstractmethod
    def train_held(self, client: Client, model: TensorDict, centre: TensorDict) -> TensorDict:
        """Returns the whole model after local training with the penalty; `centre` has the personal parameters."""

    def holds_start(self, state: TensorDict) -> bool:
        """Whether a client's state has v_i⁰ beside v_i: not where nothing is personal, and the state is empty."""
        return self.keeps_start and len(tuple(state.keys())) > 0

    def own(self, state: TensorDict) -> TensorDict:
        """Returns v_i."""
        v: TensorDict = state["v"] if self.holds_start(state) else state
        return v

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return super().personal(client, self.own(state), received)

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return replies.towards(server, self.server_lr)

    @property
    def server_step(self) -> float:
        return self.server_lr

    def alone(self, epochs: int | None = None, steps: int | None = None) -> tuple[Reduction, ...]:
        found = super().alone(epochs, steps)
        if not self.lam or not found[0].other:
            return found
        return (replace(found[0], other="", remark="is LocalTrain with its penalty"),)


@register
class FedAlt(Penalised, FedRep):
    """FedRep's alternation for any personal part."""

    name = "fedalt"
    title = "FedAlt"
    paper = "Pillutla et al., ICML 2022"
    family = "parts"
    use = "shared body, own part, trained in turns"
    grid = {"lam": (0.0, 0.01, 0.1, 1.0), "final_personal_epochs": (0, 1)}
    head_epochs: int = Field(
        1, ge=0, description="τ_v: epochs on the personal part with the shared one fixed"
    )
    body_epochs: int = Field(
        1, ge=0, description="τ_u: epochs on the shared part with the personal one fixed"
    )

    def train_held(self, client: Client, model: TensorDict, centre: TensorDict) -> TensorDict:
        own = client.split.personal
        model = client.fit(
            model,
            train=own,
            length=Length(epochs=self.head_epochs, steps=self.head_steps),
            prox=(self.lam, centre),
        )
        trained: TensorDict = client.fit(
            model, train=client.split.shared, length=Length(epochs=self.body_epochs, steps=self.body_steps)
        )
        return trained


@register
class FedSim(Penalised, FedPer):
    """FedPer's simultaneous training for any personal part."""

    name = "fedsim"
    title = "FedSim"
    paper = "Pillutla et al., ICML 2022"
    family = "parts"
    use = "shared body and own part, trained together"
    grid = {"lam": (0.0, 0.01, 0.1, 1.0), "final_personal_epochs": (0, 1)}

    def train_held(self, client: Client, model: TensorDict, centre: TensorDict) -> TensorDict:
        def held(at: TensorDict, grad: Gradient, centre: TensorDict) -> TensorDict:
            pull = (at.select(*centre.keys()) - centre) * self.lam
            g = grad(at)
            return tree.merge(g, g.select(*centre.keys()) + pull)

        trained: TensorDict = client.fit(model, direction=held, given=(centre,))
        return trained
