"""Base classes of several methods: a server model, personal models in addition to it, corrections on both sides."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import Method
from tailorfl.core.reduction import as_settings, untrained
from tailorfl.core.server_training import ServerDistillation
from tailorfl.training import tree


class ServerModel(Method):
    """The server holds one model w, sends it to all clients, and averages their replies."""

    @property
    def averages_replies(self) -> bool:
        return True

    def server_state(self, ctx: Context) -> TensorDict:
        return ctx.init

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return replies.mean()


class SendsChange(Method):
    """A reply is a change of what its client received; the server adds the mean of these changes to its model."""

    def anchor(self, server: TensorDict, received: TensorDict) -> TensorDict:
        return tree.empty()

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return server + replies.mean()


class OwnModel(Method):
    """Every client keeps and deploys its own model; all start from the same initial one."""

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.init

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return state


class TwoModels(OwnModel, ServerModel):
    """In addition to w, every client keeps a personal model; both start from the same initial one."""

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return received


class Distilled(Method):
    """The server distils a model from those that clients send, on the public set."""

    distil: ServerDistillation = Field(
        ServerDistillation(),
        description="the server's distillation: steps, lr, batch_size, average, select, ...; {steps: 0}: none",
    )

    @property
    def averages_replies(self) -> bool:
        return not self.needs_public  # each reply is a teacher

    @property
    def needs_public(self) -> bool:
        return self.distil.steps > 0

    def server_state(self, ctx: Context) -> TensorDict:
        if self.needs_public:
            self.distil.check(ctx)
        return super().server_state(ctx)


class PersonalLength(Method):
    """Personal models train separately, by default as long as the run's local training."""

    special_cases = [untrained("without personal epochs", "personal", personal_length=0)]

    personal_epochs: int | None = Field(
        None, ge=0, description="epochs of personal training; default: the run's"
    )
    personal_steps: int | None = Field(None, ge=0, description="steps instead of personal_epochs")

    @property
    def personal_training(self) -> dict[str, Any]:
        return as_settings(self.length("personal"))


class Corrected(Method):
    """A server model, and corrections on the server and on every client, which start at zero."""

    has_personal = False
    fixed_clients = "a reply is weighted by its share of all clients' samples"

    @property
    def averages_replies(self) -> bool:
        return True

    def server_state(self, ctx: Context) -> TensorDict:
        return TensorDict({"w": ctx.init, "correction": zeros_like_trainable(ctx)})

    def client_state(self, ctx: Context) -> TensorDict:
        return zeros_like_trainable(ctx)

    def shared(self, server: TensorDict) -> TensorDict:
        w: TensorDict = server["w"]
        return w

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        w: TensorDict = received["w"]
        return w


def zeros_like_trainable(ctx: Context) -> TensorDict:
    """Return zeros in the shapes of the trainable parameters."""
    names = ctx.split.trainable
    return TensorDict({n: torch.zeros_like(ctx.init.get(n)) for n in names})
