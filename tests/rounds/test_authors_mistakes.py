"""A mistake of a method's author is told alike by every engine: method, clients, round and stage, and the mend."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict

from tailorfl import Client, Context, Method, Simulation, Term
from tailorfl.data.build import build as build_federation
from tailorfl.engines.make import make_engine
from tailorfl.errors import TailorflError
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig

ENGINES = ("sequential", "vectorized", "auto")
engines = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(scope="module")
def federation() -> Any:
    return build_federation("digits", clients=4, samples=80)


class Mine(FedAvg):
    """Averages, and keeps the last model."""

    name: ClassVar[str] = "mine"
    title: ClassVar[str] = "Mine"
    has_personal: ClassVar[bool] = True

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.init

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return state


def simulation(method: Method, federation: Any, engine: str) -> Simulation:
    source = federation.source
    model = Model(lambda: build("logistic", source.input_shape, source.outputs))
    return Simulation(
        method, federation, model, TrainConfig(epochs=1, batch_size=10, lr=0.1), engine=make_engine(engine)
    )


def told(method: Method, federation: Any, engine: str) -> str:
    """What a round, then the deployed models, end with."""
    with pytest.raises(TailorflError) as caught:
        whole(simulation(method, federation, engine))
    return str(caught.value)


def whole(sim: Simulation) -> int:
    """How many groups of models a round leaves."""
    sim.step()
    return len(list(sim.personal_models(range(4))))


class OneModel(Mine):
    def local(self, client, state, received):
        return client.fit(received)


class NoSuchKey(Mine):
    def local(self, client, state, received):
        return state, client.fit(received["theta"])


class Decides(Mine):
    def local(self, client, state, received):
        if client.samples > 30:
            return state, received
        return state, client.fit(received)


class TakesOut(Mine):
    def local(self, client, state, received):
        return state, client.fit(received) * float(client.samples)


class WritesTensors(Mine):
    def local(self, client, state, received):
        for tensor in tree.tensors(received).values():
            tensor += 1.0
        return state, received


class WritesEntries(Mine):
    def local(self, client, state, received):
        received["head.bias"] = received["head.bias"] + 1.0
        return state, received


class WritesState(Mine):
    def local(self, client, state, received):
        state["head.bias"].mul_(2.0)
        return state, received


class ClosesOver(Mine):
    def local(self, client, state, received):
        return state, client.fit(received, direction=lambda w, grad: grad(w) + (w - state) * 0.1)


class TermClosesOver(Mine):
    def local(self, client, state, received):
        bias = state["head.bias"]
        return state, client.fit(received, term=Term(lambda seen: (seen.outputs - bias).square().mean()))


class Extra(Mine):
    def personal(self, client, state, received):
        return tree.merge(state, TensorDict({"alpha": torch.tensor(0.5)}))


class Half(Mine):
    def personal(self, client, state, received):
        return state.select("head.bias")


class Fails(Mine):
    def local(self, client, state, received):
        raise ValueError("no such luck")


@engines
@pytest.mark.parametrize(
    ("method", "stage", "words"),
    [
        (OneModel, "local", ["returned one TensorDict", "(new private state, reply)"]),
        (NoSuchKey, "local", ["there is no", "theta", "received has head.weight, head.bias"]),
        (WritesTensors, "local", ["written to", "a = a + b"]),
        (WritesEntries, "local", ["`received` was written to", "a = a + b"]),
        (WritesState, "local", ["`state` was written to"]),
        (Extra, "personal", ["has alpha, which the model does not"]),
        (Half, "personal", ["lacks head.weight"]),
        (Fails, "local", ["ValueError: no such luck"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_mistake_is_named_with_method_client_round_and_stage(
    engine: str, method: type[Method], stage: str, words: list[str], federation: Any
) -> None:
    said = told(method(), federation, engine)
    assert said.startswith(f"Mine, '{stage}' of ")
    assert "client" in said
    assert ("round 1" if stage == "local" else "round 2") in said  # models are deployed before the next round
    assert all(word in said for word in words), said


@pytest.mark.parametrize("engine", ["vectorized", "auto"])
@pytest.mark.parametrize(
    ("method", "mend"), [(Decides, "torch.where"), (TakesOut, "calculate with the tensor")]
)
def test_conditions_on_values_are_no_reason_for_the_slow_engine(
    engine: str, method: type[Method], mend: str, federation: Any
) -> None:
    assert mend in told(method(), federation, engine)


@engines
def test_nothing_of_this_is_said_of_what_is_right(engine: str, federation: Any) -> None:
    assert whole(simulation(Mine(), federation, engine)) == 1
