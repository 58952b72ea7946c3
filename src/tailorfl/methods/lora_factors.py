"""LoRA of which only one factor is sent: FFA-LoRA freezes the factors A, FedSA-LoRA keeps the factors B on clients.

FFA-LoRA: Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024.
FedSA-LoRA: Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025.

    FFA-LoRA: FedIT whose factors A keep their common random values:   y = W x + s B A x,   mean(B) A = mean(B A)

    server sends φ: the factors B of LoRA, and all else that the model trains
    client i:  φ_i = LocalSGD(φ, E), A fixed          sends φ_i
    server:    φ = Σ_S a_i φ_i                         deployed: φ

    FedSA-LoRA: y = W x + s B_i A x:   factors A learn what clients have in common and are averaged, B_i stay personal

    server sends A
    client i:  (A_i, B_i) = LocalSGD((A, B_i), E), both together;   keeps B_i, sends A_i
    server:    A = Σ_S a_i A_i                                      deployed: (A, B_i)

FFA-LoRA: The mean of the factors is then the mean of what clients add to the weights, and privacy noise is not squared.
A is drawn once, with the frozen weights of the model, and is in no state and no message.

FedSA-LoRA: All else that the model trains is shared, too; with `personal_part` = lora_B+head the classifier is
personal, as in the paper's experiments on GLUE. A newcomer has B = 0, the function of the base model;
`final_personal_epochs` tunes its B first. With the released settings all clients are one model object (from reading the
code), so that B passes from client to client; here every client has its own.

A model without LoRA has nothing to freeze and nothing personal: both methods are then FedAvg. The official setting of
both is r = 8, α = 16, dropout 0.05.

| symbol | FFA-LoRA | FedSA-LoRA |
|---|---|---|
| φ | server state `w` | |
| A, and all else that is trained and shared | | server state |
| B_i | | client state |
| the personal tensors | | `personal_part` |
| A, B | parameters `…lora_A…weight` [r, in], `…lora_B…weight` [out, r] | the same |
| E, η | the run's training settings | the same |
"""

from __future__ import annotations

from pydantic import Field

from tailorfl.core.method import register
from tailorfl.core.reduction import to_fedavg
from tailorfl.methods.fedavg import FedAvg
from tailorfl.methods.partial import KeepsPart
from tailorfl.models.functional import Model
from tailorfl.models.split import Split


@register
class FFALoRA(FedAvg):
    """FedIT that trains only the factors B."""

    name = "ffa_lora"
    title = "FFA-LoRA"
    paper = "Sun et al., ICLR 2024"
    family = "one model"
    use = "LoRA that averages exactly, or with noise (one factor is frozen)"
    special_cases = [to_fedavg("on a model without LoRA", lora=False)]
    of_adapters = True

    def wrap(self, model: Model) -> Model:
        return model.freezing("lora_A")


@register
class FedSALoRA(KeepsPart):
    """LoRA with shared factors A and personal factors B."""

    name = "fedsa_lora"
    title = "FedSA-LoRA"
    paper = "Guo et al., ICLR 2025"
    family = "parts"
    use = "LoRA under skew: the shared factors are sent, the others stay"
    grid = {"final_personal_epochs": (0, 1)}
    of_adapters = True
    personal_part: str = Field("lora_B", description="kept on the client; lora_B+head: the head, too")

    def make_split(self, model: Model) -> Split:
        return model.split(self.personal_part, allow_empty=True)
