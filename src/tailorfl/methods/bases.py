"""Two shapes that many methods share: one model on the server, and a personal one of its kind beside it."""

from __future__ import annotations

from tensordict import TensorDict

from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import Replies
from tailorfl.core.method import Method


class ServerModel(Method):
    """The server holds one model w, sends it to everyone, and averages what comes back."""

    @property
    def averages_replies(self) -> bool:
        return True

    def server_state(self, ctx: Context) -> TensorDict:
        return ctx.init

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> TensorDict:
        return server

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        return replies.mean()


class TwoModels(ServerModel):
    """Beside w, every client keeps a personal model of its own, which starts where w starts."""

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.init

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return state

    def newcomer(self, state: TensorDict, received: TensorDict) -> TensorDict:
        return received
