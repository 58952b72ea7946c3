"""Methods that share one part of a model and keep the other on the client.

    state (u, v_i): u shared, averaged by the server; v_i personal, never sent
    server sends u
    client i:  trains (u, v_i), keeps v_i, sends u_i
    server:    u = Σ_S a_i u_i

| method | paper | personal v_i | local training | a_i of the paper |
|---|---|---|---|---|
| FedPer | Arivazhagan et al., 2019 | head | u and v_i together, E epochs | samples |
| LG-FedAvg | Liang et al., 2020 | feature extractor | together | uniform |
| FedBN | Li et al., ICLR 2021 | norm layers, parameters and running statistics | together | samples |

FedRep (`fedrep.py`), FedAlt and FedSim (`fedalt.py`) and FedBABU (`fedbabu.py`) are built on the classes here.

| symbol | here |
|---|---|
| u | server state |
| v_i | client state |
| final epochs on v_i, not kept | `final_personal_epochs`, `final_personal_steps` |
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import RUN, Client
from tailorfl.core.context import Context
from tailorfl.core.method import register
from tailorfl.core.reduction import Reduction, RunSetup, as_settings, nothing
from tailorfl.methods.bases import ServerModel
from tailorfl.models.functional import Model
from tailorfl.models.split import Split
from tailorfl.training import tree
from tailorfl.training.plan import Length


class SplitMethod(ServerModel):
    """A model in two parts, trained together."""

    has_global = False
    nothing_personal: ClassVar[str] = (
        "with nothing of this model in its personal part ('{self.personal_part}')"
    )
    personal_part: str = Field(
        "head", description="part that stays on the client: head, extractor, norm, input, all, none, a+b"
    )

    def make_split(self, model: Model) -> Split:
        return model.split(self.personal_part)

    def server_state(self, ctx: Context) -> TensorDict:
        return ctx.split.select_shared(ctx.init)

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.split.select_personal(ctx.init)

    def train(self, client: Client, model: TensorDict) -> TensorDict:
        """Return the whole model after one client's local training."""
        return client.fit(model)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        model = self.train(client, tree.merge(received, state))
        return client.split.select_personal(model), client.split.select_shared(model)

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return tree.merge(received, state)

    @property
    def server_step(self) -> float:
        """The server's step size towards the mean of the replies."""
        return 1.0

    def everywhere(self, **train: Any) -> tuple[Reduction, ...]:
        """Return the reduction to FedAvg, which holds without a personal part."""
        options = {"weights": self.weights, "server": {"lr": self.server_step}}
        return (
            Reduction(
                self.nothing_personal.format(self=self), "personal", "fedavg", "global", options, train
            ),
        )


class KeepsPart(SplitMethod):
    """A personal part that is trained in every round, and optionally once more before a model is used."""

    final_personal_epochs: int = Field(
        0,
        ge=0,
        description="epochs on the personal part before a model is used (official code: FedRep 10, FedAlt, FedSim 1)",
    )
    final_personal_steps: int | None = Field(None, ge=0, description="steps instead of final_personal_epochs")

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        model = super().personal(client, state, received)
        return client.fit(
            model, train=client.split.personal, length=self.length("final_personal"), purpose="finetune"
        )

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        if not run.split.shared:
            return self.alone()
        return () if run.split.personal else self.everywhere()

    @property
    def tunes_at_the_end(self) -> bool:
        """Whether the personal part is trained once more before a model is used."""
        return not nothing(self.length("final_personal"))

    def alone(self, length: Length = RUN) -> tuple[Reduction, ...]:
        """Return the reduction to LocalTrain of a length, by default the run's, which holds if nothing is shared."""
        because = f"with all of this model in its personal part ('{self.personal_part}')"
        if nothing(length):
            return (Reduction(because, "personal"),)
        if self.tunes_at_the_end:
            remark = "is LocalTrain with more epochs before a model is used"
            return (Reduction(because, "personal", remark=remark),)
        return (Reduction.local(because, **as_settings(length)),)


@register
class FedPer(KeepsPart):
    """Shared body, personal head, trained together."""

    name = "fedper"
    title = "FedPer"
    paper = "Arivazhagan et al., 2019"
    family = "parts"
    use = "label skew: shared body, personal head"
    grid = {"final_personal_epochs": (0, 1)}


@register
class LGFedAvg(KeepsPart):
    """Personal representation, shared head."""

    name = "lg_fedavg"
    title = "LG-FedAvg"
    paper = "Liang et al., 2020"
    family = "parts"
    use = "personal features, one shared head; little traffic"
    grid = {"final_personal_epochs": (0, 1)}
    personal_part: str = Field(
        "extractor", description="part that stays on the client; extractor:k shares the last k linear layers"
    )
    broadcast_all: bool = Field(
        False, description="send the shared layers to all clients every round, as the official code does"
    )

    @property
    def reaches_all(self) -> bool:
        return self.broadcast_all


@register
class FedBN(KeepsPart):
    """Everything except the norm layers is shared; without norm layers it is FedAvg."""

    name = "fedbn"
    title = "FedBN"
    paper = "Li et al., ICLR 2021"
    family = "parts"
    use = "shifts of the inputs (scanners, sites)"
    grid = {"final_personal_epochs": (0, 1)}
    personal_part: str = Field("norm", description="part that stays on the client")

    def make_split(self, model: Model) -> Split:
        return model.split(self.personal_part, allow_empty=True)
