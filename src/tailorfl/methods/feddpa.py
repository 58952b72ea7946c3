"""FedDPA (Long et al., "Dual-Personalizing Adapter for Federated Foundation Models", NeurIPS 2024).

    a global set of LoRA φ_g and a local one φ_e, which answer together, weighted for every input
    y = W x + w_g Δ_{φ_g} x + w_e Δ_{φ_e} x       in every layer with LoRA

    server sends φ_g
    client i, from the second round on:  φ_e = LocalSGD(φ_e) with w = (1 − a, a), the received φ_g fixed
              always:                    φ = LocalSGD(φ_g) with w = (1, 0)          keeps φ_e, sends φ
    server:   φ_g = Σ_S a_i φ                                        (the paper: equal weights)
    deployed: w = (ω, 1 − ω),  ω(x) = ω_max · mean_{j ≤ S} cos(e(x), e(x_j)),  x_j own training samples at random,
              e the features (of a sequence at its last position) under φ_e alone

With `when` = after (FedDPA-F) no φ_e is kept: it is φ_g, tuned alone for `ft_epochs` before a model is used. As in
the official code the global set has the larger share if an input is familiar; `dynamic_on` = local reverses that.
(Its generation script answers a whole batch before any weight is set, with φ_g alone.) Other trained parts of a model,
such as a classifier, are shared and train with φ_g. A client that has not trained φ_e, such as a newcomer, deploys φ_g
alone. A model without LoRA has no second set: the method is then FedAvg. Generative models are refused.

| symbol | here |
|---|---|
| φ_g | server state `w` |
| φ_e | client state `own` (and whether it was trained) |
| a, S, ω_max | `a`, `compared`, `most_dynamic` |
| weights of the sets | the model's `mix`, and `memory` = ω_max · the mean e(x_j)/‖e(x_j)‖ |
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import normalize

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import register
from tailorfl.core.reduction import exposure, to_fedavg
from tailorfl.errors import ConfigError, ModelError
from tailorfl.methods.bases import ServerModel
from tailorfl.methods.fedit import lora_pairs
from tailorfl.models.functional import Model
from tailorfl.models.layers import head_layer, head_name
from tailorfl.models.split import Split
from tailorfl.training import tree
from tailorfl.training.objective import Seen

OWN = "own"
"""Name of the second set; the first is `shared`."""


@register
class FedDPA(ServerModel):
    """A global and a local adapter that answer together, weighted for every input."""

    name = "feddpa"
    title = "FedDPA"
    paper = "Long et al., NeurIPS 2024"
    family = "two models"
    use = "a personal LoRA next to a shared one, weighted for every input"
    grid = {"a": (0.3, 0.5, 0.7), "most_dynamic": (0.3, 0.5, 1.0)}
    special_cases = [to_fedavg("on a model without LoRA", all_shared=True)]
    exposures = [
        exposure(
            "features of a client's own samples in its deployed model (most_dynamic)",
            "sample",
            most_dynamic__not=0,
        )
    ]
    of_adapters = True
    a: float = Field(0.5, ge=0, le=1, description="weight of the local adapter during its training")
    when: Literal["beside", "after"] = Field(
        "beside", description="train the local adapter with the global one, or once before a model is used"
    )
    compared: int = Field(5, ge=1, description="S: training samples of the client to compare an input with")
    most_dynamic: float = Field(0.5, ge=0, le=1, description="ω_max: largest input-dependent weight")
    dynamic_on: Literal["global", "local"] = Field(
        "global", description="adapter weighted by the familiarity of an input; global as in the code"
    )
    ft_epochs: int = Field(1, ge=0, description="epochs of the local adapter if it trains afterwards")
    ft_steps: int | None = Field(None, ge=0, description="steps instead of ft_epochs")

    def wrap(self, model: Model) -> Model:
        return model.inside(with_two_adapters, "network") if lora_pairs(model.parameters) else model

    def make_split(self, model: Model) -> Split:
        return model.split(is_own, allow_empty=True)

    def server_state(self, ctx: Context) -> TensorDict:
        if ctx.split.personal and ctx.task == "generation":
            raise ConfigError(
                "FedDPA weights its adapters by the features of a whole input, which a model that generates text does "
                "not have; use a classification task"
            )
        own_set = ctx.split.select_personal(ctx.init)
        return TensorDict({"w": ctx.split.select_shared(ctx.init), "rest": own_set}, batch_size=[])

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        sent: TensorDict = server["w"]
        return sent

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return TensorDict({"w": replies.mean(), "rest": server["rest"]}, batch_size=[])

    def shared(self, server: TensorDict) -> TensorDict:
        return tree.merge(server["w"], server["rest"])

    def client_state(self, ctx: Context) -> TensorDict:
        if not ctx.split.personal:
            return tree.empty()
        own_set = ctx.split.select_personal(ctx.init)
        return TensorDict({"own": own_set, "trained": torch.zeros((), dtype=ctx.dtype)}, batch_size=[])

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        split = client.split
        if not split.personal:
            return state, client.fit(received)
        own_set, trained = state["own"], state["trained"]
        if self.when == "beside" and client.round > 0:
            fitted = client.fit(weighed(received, own_set, 1 - self.a, self.a), train=factors(client))
            own_set = weighed(fitted.select(*own_set.keys()), own_set.select("mix"), 1.0, 0.0)
            trained = trained * 0 + 1
        tuned = client.fit(weighed(received, own_set, 1.0, 0.0), train=split.shared)
        return TensorDict({"own": own_set, "trained": trained}, batch_size=[]), tuned.select(*received.keys())

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        if not client.split.personal:
            return received
        own_set, trained = state["own"], state["trained"]
        if self.when == "after":
            own_set = tree.merge(own_set, TensorDict({n: received[twin(n)] for n in factors(client)}))
            tuning = self.length("ft")
            start = weighed(received, own_set, 0.0, 1.0)
            fitted = client.fit(start, train=factors(client), length=tuning, purpose="finetune")
            own_set, trained = fitted.select(*own_set.keys()), torch.ones_like(trained)
        memory = self.remembered(client, weighed(received, own_set, 0.0, 1.0))
        first = 0.0 if self.dynamic_on == "global" else 1.0
        answering = weighed(received, own_set, first, 1 - first)
        weighing = {
            "mix": torch.where(
                trained > 0, answering["mix"], own_set["mix"] * 0 + torch.tensor([1.0, 0.0]).to(trained)
            ),
            "memory": trained * (memory if self.dynamic_on == "global" else -memory),
        }
        return tree.merge(answering, TensorDict(weighing))

    def remembered(self, client: Client, local: TensorDict) -> Tensor:
        """Return ω_max times the mean of S normalised features of the client's own samples, [d_z]."""
        if self.most_dynamic == 0:
            zero: Tensor = local["memory"] * 0
            return zero

        def direction(batch: Seen) -> Tensor:
            return normalize(batch.features, dim=-1)

        total = client.summed(local, direction, most=self.compared)
        count = client.samples.clamp(min=1, max=self.compared).to(total.dtype)
        return self.most_dynamic * total / count


def weighed(received: TensorDict, own_set: TensorDict, of_shared: float, of_own: float) -> TensorDict:
    """Return the model with both sets, with the same weights for every input."""
    model = tree.merge(received, own_set)
    mix = torch.tensor([of_shared, of_own]).to(own_set["mix"])
    return tree.merge(model, TensorDict({"mix": mix}))


def factors(client: Client) -> list[str]:
    """Return the names of the factors of the local set."""
    return [n for n in client.split.trainable if n in client.split.personal]


def twin(name: str) -> str:
    """Return the name of the tensor of the global set that corresponds to one of the local set."""
    return ".".join("shared" if part == OWN else part for part in name.split("."))


class _Pair(nn.Module):
    def __init__(self, shared: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, own


class TwoDown(_Pair):
    """The factors A of both sets: x -> (A_g x, A_e x)."""

    @property
    def weight(self) -> Any:
        """The weight of the first set, whose dtype layers with LoRA read."""
        return self.shared.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., 2 r]."""
        return torch.cat([self.shared(x), self.own(x)], -1)


class TwoUp(_Pair):
    """The factors B of both sets: (h_g, h_e) -> B_g h_g + B_e h_e."""

    def forward(self, h: Tensor) -> Tensor:
        """[..., 2 r] -> [..., out]."""
        first, second = h.chunk(2, -1)
        out: Tensor = self.shared(first) + self.own(second)
        return out


class TwoAdapters(nn.Module):
    """A network with two sets of LoRA, whose weights depend on the input.

    y = W x + s (w_g B_g A_g x + w_e B_e A_e x)        in every layer with LoRA
    w_g = mix_0 + κ(x),   w_e = mix_1 − κ(x),   κ(x) = ⟨e(x)/‖e(x)‖, memory⟩

    e(x) are the features of x under the second set alone. With memory = 0, and always in training, the weights are
    those of `mix` for every input.
    """

    mix: Tensor
    memory: Tensor
    feature_layer = "features"

    def __init__(self, network: nn.Module, head: str, width: int, adapted: list[str], like: Tensor) -> None:
        super().__init__()
        self.network, self.head, self.adapted = network, head, adapted
        self.features = nn.Identity()
        declared = getattr(network, "feature_boundary", ())
        names = (declared,) if isinstance(declared, str) else declared
        self.feature_boundary = tuple(f"network.{name}" for name in names)
        self.register_buffer("mix", torch.tensor([1.0, 0.0]).to(like))
        self.register_buffer("memory", torch.zeros(width).to(like))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for samples `x`."""
        if self.training:
            outputs, z = self.weighted(x, self.mix)
            self.features(z)
            return outputs
        _, e = self.weighted(x, torch.stack([self.mix[0] * 0, self.mix[1] * 0 + 1]))
        kappa = normalize(self.features(e), dim=-1) @ self.memory
        return self.weighted(x, torch.stack([self.mix[0] + kappa, self.mix[1] - kappa], -1))[0]

    def weighted(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and features with weights [2], or [batch, 2], of the two sets."""
        features: list[Tensor] = []
        layers = [self.network.get_submodule(name) for name in self.adapted]
        handles = [
            layer.register_forward_hook(lambda _, arguments, out: self.scaled(out, weights))
            for layer in layers
        ]
        head = self.network.get_submodule(self.head)
        handles.append(head.register_forward_pre_hook(lambda _, arguments: features.append(arguments[0])))
        try:
            outputs = self.network(x)
        finally:
            for handle in handles:
                handle.remove()
        z = features[0]
        return outputs, z[:, -1] if z.dim() == 3 else z

    def scaled(self, both: Tensor, weights: Tensor) -> Tensor:
        """Return (A_g x, A_e x) [batch, ..., 2 r], each half times its weight."""
        pair = both.reshape(*both.shape[:-1], 2, both.shape[-1] // 2)
        factor_weights = weights[:, None]
        if weights.dim() == 2:
            factor_weights = weights.reshape(len(weights), *[1] * (pair.dim() - 3), 2, 1)
        return (pair * factor_weights).reshape(both.shape)


def with_two_adapters(network: nn.Module) -> TwoAdapters:
    """Return a network whose layers with LoRA have a second set of factors, drawn like the first.

    Raises:
        ModelError: it has no such layer, or no features of a known width.
    """
    head, name = head_layer(network), head_name(network)
    width = getattr(head, "in_features", None)
    linears = (path for path, part in network.named_modules() if isinstance(part, nn.Linear))
    downs = [path for path in linears if "lora_A" in path.split(".")]
    if name is None or width is None or not downs:
        raise ModelError(
            f"two sets of LoRA need a network with LoRA and a linear head, but a {type(network).__name__} has "
            f"{len(downs)} layers with LoRA and {'no such head' if width is None else 'a head'}"
        )
    for path in downs:
        for factor, kind in (("lora_A", TwoDown), ("lora_B", TwoUp)):
            factor_path = path.replace("lora_A", factor)
            part: Any = network.get_submodule(factor_path)
            second = nn.Linear(part.in_features, part.out_features, bias=False).to(part.weight)
            if factor == "lora_B":
                nn.init.zeros_(second.weight)
            network.set_submodule(factor_path, kind(part, second))
    like = next(iter(network.parameters()))
    return TwoAdapters(network, name, int(width), downs, like)


def is_own(name: str, tensor: Tensor, module: nn.Module) -> bool:
    """Whether a tensor belongs to the second set or to the weights of the two sets; a selector."""
    return OWN in name.split(".") or isinstance(module, TwoAdapters)
