"""Payloads of one's own: a method that sends every client something else, and that reads its losses."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from tensordict import TensorDict
from torch.nn import functional as F

import tailorfl.core.method as registry
from methods.small import (
    federation,
    simulation,
)
from tailorfl.core.client import Client
from tailorfl.core.context import Context
from tailorfl.core.messages import PerClient, Replies
from tailorfl.core.method import Method, make_method
from tailorfl.errors import ConfigError
from tailorfl.training import tree


class Table(Method):
    """The server keeps every client's last model, and sends client i the mean of its own and the overall
    mean.

    The client answers with its trained model and with how much it gained; a model that validates worse
    is not kept.
    """

    name: ClassVar[str] = "table_of_a_test"
    title: ClassVar[str] = "Table"
    paper: ClassVar[str] = "none"
    has_global: ClassVar[bool] = False
    share: float = 0.5

    def server_state(self, ctx: Context) -> TensorDict:
        copies = [(p, t.expand(ctx.num_clients, *t.shape).clone()) for p, t in tree.leaves(ctx.init)]
        return tree.nest([(f"table/{p}", t) for p, t in copies])

    def client_state(self, ctx: Context) -> TensorDict:
        return TensorDict({"gain": torch.zeros(()), "model": ctx.init}, batch_size=[])

    def broadcast(self, server: TensorDict, clients: tuple[int, ...]) -> PerClient:
        index = torch.tensor(clients)
        out = {}
        for n, t in server["table"].items():
            own = t[index]
            out[n] = own * self.share + t.mean(0) * (1 - self.share) if t.is_floating_point() else own
        return PerClient(TensorDict(out, batch_size=[len(clients)]))

    def local(self, client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, TensorDict]:
        model = client.fit(received)
        gain = client.loss(received, "val") - client.loss(model, "val")
        kept = {n: torch.where(gain > 0, t, received[n]) for n, t in model.items()}
        new = TensorDict(kept, batch_size=[])
        return TensorDict({"gain": gain, "model": new}, batch_size=[]), TensorDict(
            {"model": new, "gain": gain}, batch_size=[]
        )

    def aggregate(self, server: TensorDict, replies: Replies) -> TensorDict:
        table = {n: t.clone() for n, t in server["table"].items()}
        for n, t in replies.stack["model"].items():
            table[n][list(replies.clients)] = t
        return TensorDict({"table": TensorDict(table, batch_size=[])}, batch_size=[])

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        model: TensorDict = state["model"]
        return model


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_each_client_gets_its_own_payload(engine: str) -> None:
    """With nothing in common (share 1) the table is local training from one's own last model.

    The others have no influence.
    """
    sim = simulation(Table(share=1.0), engine=engine)
    marked = {
        n: t + torch.arange(5.0).reshape(-1, *[1] * (t.ndim - 1)) for n, t in sim.server["table"].items()
    }
    sim.server = TensorDict({"table": TensorDict(marked, batch_size=[])}, batch_size=[])
    message = sim.method.broadcast(sim.server, (3, 0, 4))
    (seen,) = sim.run((3, 0, 4), sim.states.get((3, 0, 4)), message, lambda c, s, r: (r,))
    for n, t in seen.items():
        assert torch.equal(t, marked[n][[3, 0, 4]])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("part", ["train", "val"])
def test_losses_are_means_over_the_part_in_evaluation_mode(engine: str, part: str) -> None:
    sim = simulation("local", "batch_norm", engine, rounds=1)
    ids = (0, 1, 3)
    data, source = federation(), federation().source

    def measure(client: Client, state: TensorDict, received: TensorDict) -> tuple[TensorDict, ...]:
        return (TensorDict({"loss": client.loss(state, part)}, batch_size=[]),)

    states = sim.states.get(ids)
    (found,) = sim.run(ids, states, tree.empty(), measure)
    module = sim.model.module.eval()
    for k, i in enumerate(ids):
        rows = torch.from_numpy((data.train if part == "train" else data.val)[i])
        outputs = torch.func.functional_call(module, {n: t[k] for n, t in states.items()}, (source.x[rows],))
        torch.testing.assert_close(
            found["loss"][k], F.cross_entropy(outputs, source.y[rows]), atol=1e-6, rtol=1e-5
        )


def test_a_registered_method_is_made_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", registry.all_methods())
    registry.register(Table)
    assert make_method("table_of_a_test", {"share": 0.25}) == Table(share=0.25)
    with pytest.raises(ConfigError, match="share"):
        make_method("table_of_a_test", {"shar": 0.25})
