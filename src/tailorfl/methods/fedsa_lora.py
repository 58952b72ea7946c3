"""FedSA-LoRA (Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025).

    y = W x + s B_i A x:   the factors A learn what clients have in common and are averaged, B_i stay at home

    server sends A
    client i:  (A_i, B_i) = LocalSGD((A, B_i), E), both together;   keeps B_i, sends A_i
    server:    A = Σ_S a_i A_i                                      deployed: (A, B_i)

What else the model trains is shared, too; with `personal_part` = lora_B+head the classifier is personal, as in the
paper's experiments on GLUE. A newcomer has B = 0, the function of the base; `final_personal_epochs` tunes its B
first. The released settings make all clients one model object (by reading), so that B passes from client to client;
here every client has its own. A model without LoRA has nothing personal: there it is FedAvg. The official setting is
r = 8, α = 16, dropout 0.05.

| symbol | here |
|---|---|
| A, and what is trained beside it | server state |
| B_i | client state |
| what stays at home | `personal_part` |
"""

from __future__ import annotations

from pydantic import Field

from tailorfl.core.method import register
from tailorfl.methods.partial import KeepsPart
from tailorfl.models.functional import Model
from tailorfl.models.split import Split


@register
class FedSALoRA(KeepsPart):
    """LoRA with shared factors A and personal factors B."""

    name = "fedsa_lora"
    title = "FedSA-LoRA"
    paper = "Guo et al., ICLR 2025"
    family = "parts"
    use = "LoRA under skew: what is shared travels, the rest stays"
    grid = {"final_personal_epochs": (0, 1)}
    of_adapters = True
    personal_part: str = Field("lora_B", description="what stays on the client; lora_B+head: the head, too")

    def make_split(self, model: Model) -> Split:
        return model.split(self.personal_part, allow_empty=True)
