"""FedRep (Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021).

    state (u, v_i): u the body, shared and averaged by the server; v_i the head, personal, never sent
    server sends u
    client i:  E_h epochs of v_i with u fixed, then E_b epochs of u with v_i fixed; keeps v_i, sends u_i
    server:    u = Σ_S a_i u_i

a_i are by samples in the paper. Before a model is used, its head can be tuned once more; these epochs are not kept.

| symbol | here |
|---|---|
| u | server state |
| v_i | client state |
| E_h, E_b (τ_v, τ_u) | `head_epochs`, `body_epochs`; counted in steps: `head_steps`, `body_steps` |
| final epochs on v_i | `final_personal_epochs`, `final_personal_steps` |
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.method import register
from tailorfl.core.reduction import Reduction, RunSetup, as_settings, nothing
from tailorfl.methods.partial import KeepsPart


@register
class FedRep(KeepsPart):
    """Shared body, personal head, trained one after the other."""

    name = "fedrep"
    title = "FedRep"
    paper = "Collins et al., ICML 2021"
    family = "parts"
    use = "label skew: personal head trained first, then the body"
    grid = {"head_epochs": (1, 5, 10)}
    head_epochs: int = Field(10, ge=0, description="E_h: epochs on the head with the body fixed")
    head_steps: int | None = Field(None, ge=0, description="steps instead of head_epochs")
    body_epochs: int = Field(1, ge=0, description="E_b: epochs on the body with the head fixed")
    body_steps: int | None = Field(None, ge=0, description="steps instead of body_epochs")

    def train(self, client: Client, model: TensorDict) -> TensorDict:
        model = self.train_personal(client, model)
        return self.train_shared(client, model)

    def train_personal(self, client: Client, model: TensorDict, **fit: Any) -> TensorDict:
        """Return the model after E_h epochs of v_i alone."""
        return client.fit(model, train=client.split.personal, length=self.length("head"), **fit)

    def train_shared(self, client: Client, model: TensorDict) -> TensorDict:
        """Return the model after E_b epochs of u alone."""
        return client.fit(model, train=client.split.shared, length=self.length("body"))

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        head, body = self.length("head"), self.length("body")
        if run.all_personal:
            return self.alone(head)
        if nothing(body):
            return (Reduction("without body epochs", "personal", remark="never trains the shared part"),)
        if run.all_shared:
            return self.everywhere(**as_settings(body))
        if not nothing(head) or self.tunes_at_the_end or self.server_step != 1:
            return ()
        options = {"weights": self.weights, "personal_part": self.personal_part, "ft_epochs": 0}
        return (
            Reduction("without head epochs", "personal", "fedbabu", "personal", options, as_settings(body)),
        )
