"""FedOA (2025): personal adapters whose features stay close to a global one's, to generalise to shifted data.

    φ_g: the global adapter, exactly FedIT's;   φ_e: a second one on client e, never sent
    min over φ_e:  R_e(φ_e) + λ · D( Φ(φ_e; x), Φ(φ_g; x) )

    server sends φ_g
    client e:  φ = LocalSGD(φ_g, E)                                                   sends φ
               φ_e = LocalSGD(φ_e, E) on  R_e(φ_e) + λ D(z_e, z_g),   z_g = Φ(φ_g; x) of the RECEIVED φ_g, fixed
    server:    φ_g = mean_S φ

Φ is the input of the head: the last hidden state at the last position of a language model, the pooled feature of a
classifier. D is one of the distances of `tailorfl.methods.feature_distances`. The released code's is the norm of the
difference of a whole micro-batch (`batch_l2`), which depends on its size; the default is the mean over samples
(`mean_l2`).

The algorithm box updates φ with a single gradient step; the text says that the global path is FedIT's and the code
trains E epochs, as here. A personal adapter first trains in round 1 of rounds counted from 0, as in the code;
the paper has no such pause (`personal_start` = 0). There it also has its own random start (`own_init: true`); the
default is a copy of φ_g, since features of models from different random starts have nothing in common, unless a
pretrained backbone makes them. Global features are in evaluation mode; the code leaves LoRA's dropout on for them.

FedSDR (after "Federated Learning with Shortcut Discovery and Removal", ICLR 2024) as in FedOA's code, its only
definition: the same with D = (1/B) Σ_b |⟨z_b, |z_b^g − mean of z^g|⟩|. FedOA's text describes another method there.

| symbol | here |
|---|---|
| φ_g | server state |
| φ_e | client state |
| λ, D | `lam`, `distance` |
| E, η | the run's training settings |
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.method import register
from tailorfl.core.reduction import Reduction, RunSetup
from tailorfl.methods.bases import TwoModels
from tailorfl.methods.feature_distances import feature_pull
from tailorfl.training.objective import Term


class FeatureRegularised(TwoModels):
    """A personal model in addition to the global one, with a pull on its features."""

    models_trained = 2
    lam: float = Field(0.5, ge=0, description="λ: pull of the personal features towards the global ones")
    personal_start: int = Field(
        1, ge=0, description="first round in which personal models train, counted from 0"
    )
    own_init: bool = Field(
        False, description="initialise personal models independently, not as copies of the global one"
    )

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.fresh(0) if self.own_init else ctx.init

    @abstractmethod
    def pull(self, centre: TensorDict) -> Term:
        """Return the term that keeps features close to those of `centre`."""

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        phi = client.fit(received)
        if client.round >= self.personal_start:
            state = client.fit(state, term=self.pull(received) if self.lam else ())
        return state, phi

    def reductions(self, run: RunSetup) -> tuple[Reduction, ...]:
        if self.personal_start >= run.rounds:
            because = f"with personal models that train from round {self.personal_start} on (from 0) of {run.rounds}"
            return (Reduction(because, "personal"),)
        because = self.without_pull(run)
        if not because:
            return ()
        if self.personal_start == 0 and not self.own_init:
            return (Reduction.local(because),)
        start = " from initial models of their own" if self.own_init else ""
        late = f" in the rounds from {self.personal_start} on (from 0)" if self.personal_start else ""
        return (
            Reduction(
                because, "personal", remark=f"trains personal models alone{start}{late}, as LocalTrain"
            ),
        )

    def without_pull(self, run: RunSetup) -> str:
        """Return why nothing pulls the personal models; "" if something does."""
        return "" if self.lam else "with λ = 0"


@register
class FedOA(FeatureRegularised):
    """FedIT, and personal adapters whose features stay near the global one's."""

    name = "fedoa"
    title = "FedOA"
    paper = "FedOA, 2025"
    family = "two models"
    use = "a personal LoRA that keeps features for unseen domains"
    grid = {"lam": (0.01, 0.1, 0.5, 1.0, 2.0)}
    distance: Literal["mean_l2", "batch_l2", "cosine", "pearson"] = Field(
        "mean_l2", description="D: distance between features"
    )
    micro_batch: int = Field(8, ge=1, description="samples of one norm of batch_l2")

    def pull(self, centre: TensorDict) -> Term:
        return feature_pull(self.lam, self.distance, centre, self.micro_batch)


@register
class FedSDR(FeatureRegularised):
    """FedOA with a penalty on the features in which the global model differs between samples."""

    # FedOA's distance is a norm, this one a product of two features: the same λ pulls with another strength.
    lam: float = Field(0.01, ge=0, description="λ: pull of the personal features (FedOA's code: 0.5)")
    name = "fedsdr"
    title = "FedSDR"
    paper = "Tang et al., ICLR 2024, as adapted in FedOA (2025)"
    family = "two models"
    use = "a personal model whose shared features avoid shortcuts"
    grid = {"lam": (0.001, 0.01, 0.1, 0.5)}

    def pull(self, centre: TensorDict) -> Term:
        return feature_pull(self.lam, "sdr", centre)

    def without_pull(self, run: RunSetup) -> str:
        if run.train.batch_size == 1:
            return "with batches of a single sample, which equals the batch mean,"
        return super().without_pull(run)
