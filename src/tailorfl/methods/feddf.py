"""FedDF (Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020).

    server holds one model w_g for every architecture g, and an unlabelled public set P
    server sends w_g to the clients of architecture g
    client i:  θ_i = LocalSGD(w_g, E);   sends θ_i
    server:    w_g = Σ_{S ∩ g} a_i θ_i                                        (unchanged if no client of g took part)
               then R steps of Adam on  (1/B) Σ_{x in P} KL( σ(mean_k f_k(x)) ‖ σ(f_{w_g}(x)) )

The teachers are ALL received models of the round, of every architecture: that is how knowledge passes between
architectures whose weights cannot be averaged. With one architecture it is FedAvg followed by distillation.

The authors take up to 10 000 steps a round and stop after 1 000 without a better validation loss: `distil: {steps:
10000, select: best, lr: 1e-3}`. The default here is 100 steps at rate 1e-4, and the last model.

| symbol | here |
|---|---|
| w_g | server state, entry g |
| a_i | shares of training samples within the architecture |
| R, Adam's rate, B, ... | `distil` |
| E, η | the run's training settings |
"""

from __future__ import annotations

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerArchitecture, Replies
from tailorfl.core.method import Method, register
from tailorfl.core.reduction import to_fedavg
from tailorfl.core.server_training import ServerDistillation

PREFIX = "w "


@register
class FedDF(Method):
    """FedAvg for each architecture, fused by distilling the ensemble of all clients' models on public data."""

    name = "feddf"
    title = "FedDF"
    paper = "Lin et al., NeurIPS 2020"
    family = "one model"
    use = "averages that are worse than the ensemble, with public data"
    grid = {"distil.lr": (1e-5, 1e-4, 1e-3, 1e-2)}
    special_cases = [to_fedavg("without distillation", distil__off=True, architectures=1)]
    has_personal = False
    heterogeneous = True
    distil: ServerDistillation = Field(
        ServerDistillation(),
        description="the server's distillation: steps, lr, batch_size, temperature, average, select, ...",
    )

    @property
    def needs_public(self) -> bool:
        return True

    def server_state(self, ctx: Context) -> TensorDict:
        self.distil.check(ctx)
        return TensorDict({_key(name): c.init for name, c in ctx.architectures.items()})

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> PerArchitecture:
        return self.shared(server)

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        return state, client.fit(received)

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        contexts, public = replies.context.architectures, replies.context.public
        assert public is not None
        parts = dict(replies.by_architecture())
        means = {_key(name): part.mean() for name, part in parts.items()}
        if self.distil.steps == 0:
            return TensorDict({**dict(server.items()), **means})
        teacher = self.distil.teacher([(contexts[n].model, part.stack) for n, part in parts.items()], public)
        fused = {}
        for name, context in contexts.items():
            start = means.get(_key(name), server[_key(name)])
            fused[_key(name)] = self.distil.distil(start, teacher, context, replies.round)
        return TensorDict(fused)

    def shared(self, server: TensorDict) -> PerArchitecture:
        keys = (str(key) for key in server.keys())  # noqa: SIM118
        return PerArchitecture({key.removeprefix(PREFIX): server[key] for key in keys})


def _key(architecture: str) -> str:
    """Return the entry of an architecture in the server's state: a single one has no name, but an entry needs one."""
    return PREFIX + architecture
