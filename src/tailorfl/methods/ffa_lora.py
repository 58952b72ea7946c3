"""FFA-LoRA (Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024).

    FedIT whose factors A never leave their common random start:   y = W x + s B A x,   mean(B) A = mean(B A)

    server sends φ: the factors B of LoRA, and what else the model trains
    client i:  φ_i = LocalSGD(φ, E), A fixed          sends φ_i
    server:    φ = Σ_S a_i φ_i                         deployed: φ

So the mean of factors is the mean of what clients add to the weights, and noise of privacy is not squared. A is drawn
once, with the frozen weights of the model, and is in no state and no message. A model without LoRA has nothing to
freeze: there it is FedAvg. The official setting is r = 8, α = 16, dropout 0.05.

| symbol | here |
|---|---|
| φ | server state `w` |
| A, B | parameters `…lora_A…weight` [r, in], `…lora_B…weight` [out, r] |
| E, η | the run's training settings |
"""

from __future__ import annotations

from tailorfl.core.method import register
from tailorfl.core.reduction import to_fedavg
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.functional import Model


@register
class FFALoRA(FedAvg):
    """FedIT that trains the factors B alone."""

    name = "ffa_lora"
    title = "FFA-LoRA"
    paper = "Sun et al., ICLR 2024"
    family = "one model"
    use = "LoRA that averages exactly, or with noise (one factor is frozen)"
    grid = {}
    special_cases = [to_fedavg("on a model without LoRA", lora=False)]
    of_adapters = True

    def wrap(self, model: Model) -> Model:
        return model.freezing("lora_A")
