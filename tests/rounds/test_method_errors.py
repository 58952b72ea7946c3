"""A mistake of a method's author is told alike by every engine: method, clients, round and stage, and the mend."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict

from tailorfl import Client, Context, Method, Simulation, Term
from tailorfl.data.build import build as build_federation
from tailorfl.engines.make import make_engine
from tailorfl.errors import ClientError, ConfigError, DivergenceError, TailorflError
from tailorfl.methods.fedavg import FedAvg
from tailorfl.models.functional import Model
from tailorfl.models.registry import build
from tailorfl.training import tree
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.update import Optimizer

ENGINES = ("sequential", "vectorized", "auto")
FLOATS = {False: torch.float32, True: torch.float64}
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


def mine(base: type[Method] = Mine, **members: Any) -> Method:
    """`Mine` with other members; of a function for `local` the class and what it returns differ only."""
    return type("Other", (base,), members)()


def writes_tensors(self, client, state, received):
    for tensor in tree.tensors(received).values():
        tensor += 1.0
    return state, received


def writes_entries(self, client, state, received):
    received["head.bias"] = received["head.bias"] + 1.0
    return state, received


def writes_state(self, client, state, received):
    state["head.bias"].mul_(2.0)
    return state, received


def fails(self, client, state, received):
    raise ValueError("no such luck")


def decides(self, client, state, received):
    return (state, received) if client.samples > 30 else (state, client.fit(received))


def with_more(of):
    """A `local` that sends something beside what it received, by the client."""
    return lambda self, client, state, received: (state, TensorDict({**received, **of(client)}))


def trained_with_more(of):
    return lambda self, client, state, received: (state, TensorDict({**client.fit(received), **of(client)}))


class Forgets(Mine):
    def local(self, client, state, received):
        trained = client.fit(received)
        return state, trained.select("head.weight") if client.round else trained

    def aggregate(self, server, replies):
        mean = replies.mean()
        return TensorDict({"w": mean.select(*tree.tensors(server["w"]))})


class TakesTurns(Mine):
    """A method that sends something in every other round only, which is right."""

    def local(self, client, state, received):
        trained = client.fit(received)
        return state, tree.empty() if client.round % 2 else trained

    def aggregate(self, server, replies):
        return super().aggregate(server, replies) if len(replies.stack.keys()) else server


class RootOfNothing(Mine):
    """The value is 0 and finite, its gradient is not."""

    def local(self, client, state, received):
        return state, client.fit(received, term=Term(root, given=(state["head.bias"],)))


class LogOfNothing(Mine):
    def local(self, client, state, received):
        def shares(seen, bias):
            return seen.mean((seen.outputs - seen.outputs).sum(1).log() * bias[0])

        terms = (Term(fine), Term(shares, given=(state["head.bias"] + 1.0,)))
        return state, client.fit(received, term=terms, purpose="own")


class Fine(Mine):
    """The model itself goes to infinity; its term is not to blame."""

    def local(self, client, state, received):
        return state, client.fit(received, term=Term(fine), optimizer=Optimizer(lr=1e38))


def root(seen, bias):
    return seen.mean((seen.outputs * 0.0 + bias * 0.0).sum(1).sqrt())


def fine(seen):
    return seen.mean(seen.outputs.square().sum(1))


def sets_itself(self, client, state, received):
    self.seen = received
    return state, client.fit(received)


def server_sets_itself(self, server, replies):
    self.last = server
    return FedAvg.aggregate(self, server, replies)


class NoAggregate(Method):
    """A global model that every client trains, and that nobody puts together again."""

    name: ClassVar[str] = "no_aggregate"
    title: ClassVar[str] = "No aggregate"
    paper: ClassVar[str] = "none"
    has_personal: ClassVar[bool] = False

    def server_state(self, ctx):
        return ctx.init

    def broadcast(self, server, clients):
        return server

    def local(self, client, state, received):
        return state, client.fit(received)


class RepliesForNothing(NoAggregate):
    has_personal: ClassVar[bool] = True
    has_global: ClassVar[bool] = False


class Silent(RepliesForNothing):
    def local(self, client, state, received):
        return state, tree.empty()


def means(self, server, replies):
    return TensorDict({**server, "w": replies.mean()})


@engines
@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"local": lambda self, c, s, r: c.fit(r)}, ["returned one TensorDict"]),
        (
            {"local": lambda self, c, s, r: (s, c.fit(r["theta"]))},
            ["theta", "received has head.weight, head.bias"],
        ),
        ({"local": writes_tensors}, ["written to", "a = a + b"]),
        ({"local": writes_entries}, ["`received` was written to"]),
        ({"local": writes_state}, ["`state` was written to"]),
        (
            {"personal": lambda self, c, s, r: tree.merge(s, TensorDict({"alpha": torch.tensor(0.5)}))},
            ["has alpha, which the model does not"],
        ),
        ({"personal": lambda self, c, s, r: s.select("head.bias")}, ["lacks head.weight"]),
        ({"local": fails}, ["ValueError: no such luck"]),
        (
            {"local": lambda self, c, s, r: (TensorDict({n: torch.stack([t, t]) for n, t in s.items()}), r)},
            ["private state has head.weight of shape [2, 10, 64] and not [10, 64]"],
        ),
        ({"local": lambda self, c, s, r: (s.select("head.bias"), r)}, ["private state lacks head.weight"]),
        (
            {"local": lambda self, c, s, r: (TensorDict({n: t.double() for n, t in s.items()}), r)},
            ["has head.weight of torch.float64 and not torch.float32"],
        ),
    ],
)
def test_a_mistake_is_named_with_method_client_round_and_stage(
    engine: str, members: dict[str, Any], words: list[str], federation: Any
) -> None:
    said, (stage,) = told(mine(**members), federation, engine), members
    assert said.startswith(f"Mine, '{stage}' of ")
    assert "client" in said
    assert ("round 1" if stage == "local" else "round 2") in said  # models are deployed before the next round
    assert all(word in said for word in words), said


@engines
@pytest.mark.parametrize(
    ("reply", "call", "entries", "lacking"),
    [
        (
            lambda c, r: TensorDict({"model": c.fit(r)}),
            "client.fit",
            "model/head.weight, model/head.bias",
            "head.weight, head.bias",
        ),
        (lambda c, r: TensorDict({"value": c.loss(r)}), "client.loss", "value", "head.weight, head.bias"),
        (lambda c, r: c.fit(r).select("head.bias"), "client.fit", "head.bias", "head.weight"),
    ],
)
def test_what_is_no_model_is_named_where_a_model_is_wanted(
    engine: str, reply: Any, call: str, entries: str, lacking: str, federation: Any
) -> None:
    """A reply of another structure than the broadcast shows a round later, at the clients."""
    method = mine(
        local=lambda self, client, state, received: (state, reply(client, received)), aggregate=means
    )
    sim = simulation(method, federation, engine)
    sim.step()
    with pytest.raises(ClientError) as caught:
        sim.step()
    said = str(caught.value)
    assert f"round 2: {call} takes a model, but got {entries}, which lacks {lacking}." in said
    assert "aggregate()" in said


@engines
@pytest.mark.parametrize(
    ("members", "name"), [({"local": sets_itself}, "seen"), ({"aggregate": server_sets_itself}, "last")]
)
def test_a_method_does_not_set_its_own_attributes(
    engine: str, members: dict[str, Any], name: str, federation: Any
) -> None:
    with pytest.raises(ClientError) as caught:
        simulation(mine(**members), federation, engine).step()
    assert f"Other: self.{name} cannot be set" in str(caught.value)
    assert "client_state()" in str(caught.value)


def test_a_global_model_that_no_round_changes_is_refused_before_the_first(federation: Any) -> None:
    with pytest.raises(ConfigError, match=r"NoAggregate defines no aggregate\(server, replies\)"):
        simulation(NoAggregate(), federation, "auto")


def test_replies_of_which_nothing_is_made_are_refused(federation: Any) -> None:
    with pytest.raises(ClientError, match=r"replies with head.weight, head.bias, but RepliesForNothing"):
        simulation(RepliesForNothing(), federation, "auto").step()
    assert whole(simulation(Silent(), federation, "auto")) == 1


@pytest.mark.parametrize("engine", ["vectorized", "auto"])
@pytest.mark.parametrize(
    ("local", "mend"),
    [
        (decides, "torch.where"),
        (lambda self, c, s, r: (s, c.fit(r) * float(c.samples)), "calculate with the tensor"),
    ],
)
def test_conditions_on_values_are_no_reason_for_the_slow_engine(
    engine: str, local: Any, mend: str, federation: Any
) -> None:
    assert mend in told(mine(local=local), federation, engine)


@engines
def test_nothing_of_this_is_said_of_what_is_right(engine: str, federation: Any) -> None:
    assert whole(simulation(Mine(), federation, engine)) == 1


# Engines that cut a cohort into parts: what differs between clients or chunks has to fit together.
PARTED = {
    "sequential": {"name": "sequential"},
    "vectorized": {"name": "vectorized", "chunk": 2},
    "workers": {"name": "vectorized", "chunk": 2, "workers": 2},
}
parted = pytest.mark.parametrize("engine", PARTED)


@pytest.fixture(scope="module")
def unequal() -> Any:
    """Training samples of 4 clients: 7, 33, 49 and 23."""
    return build_federation("digits", clients=4, samples=160, partition="quantity", seed=1)


def parted_simulation(method: Method, federation: Any, engine: str) -> Simulation:
    sim = simulation(method, federation, "sequential")
    found = make_engine(**PARTED[engine])
    return Simulation(method, federation, sim.model, sim.train, engine=found)


@parted
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (lambda c: {"seen": torch.ones(c.most_steps())}, "has seen of shape ["),
        (lambda c: {"seen": torch.ones(2, dtype=FLOATS[c.most_steps() > 3])}, "has seen of torch.float"),
        (lambda c: {"seen": torch.ones(2)} if c.most_steps() > 3 else {}, " seen"),
    ],
)
def test_replies_that_differ_between_clients_are_named(
    engine: str, more: Any, words: str, unequal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailorfl.engines.sequential.PIECE_BYTES", 0)  # no two clients run together
    with pytest.raises(ClientError) as caught:
        parted_simulation(mine(local=with_more(more)), unequal, engine).step()
    said = str(caught.value)
    assert said.startswith("Mine, 'local' of client ")
    assert "round 1" in said
    assert words in said


@parted
@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            mine(local=trained_with_more(lambda c: {"seen": torch.ones(c.round + 1)})),
            ["'local' of one of the clients", "has seen of shape [2] and not [1]"],
        ),
        (
            mine(local=trained_with_more(lambda c: {"seen": torch.ones(2, dtype=FLOATS[c.round > 0])})),
            ["'local' of one of the clients", "has seen of torch.float64 and not torch.float32"],
        ),
        (Forgets(), ["'aggregate' of round 2", "lack head.bias, which earlier ones had"]),
    ],
)
def test_replies_that_differ_between_rounds_are_named(
    engine: str, method: Method, words: list[str], federation: Any
) -> None:
    sim = parted_simulation(method, federation, engine)
    sim.step()
    before = {path: t.clone() for path, t in tree.leaves(sim.server)}
    with pytest.raises(ClientError) as caught:
        sim.step()
    said = str(caught.value)
    assert said.startswith("Mine, ")
    assert "round 2" in said
    assert all(word in said for word in words), said
    assert sim.round == 1
    assert all(torch.equal(before[path], t) for path, t in tree.leaves(sim.server))


@parted
def test_a_method_may_send_in_some_rounds_only(engine: str, federation: Any) -> None:
    sim = parted_simulation(TakesTurns(), federation, engine)
    moved = []
    for _ in range(4):
        before = sim.server["w"]["head.weight"].clone()
        sim.step()
        moved.append(not torch.equal(before, sim.server["w"]["head.weight"]))
    assert moved == [True, False, True, False]


@parted
@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            RootOfNothing,
            "term 1 (root) of its fit 'train' is 0 with a gradient that is not finite at batch 1",
        ),
        (LogOfNothing, "term 2 (shares) of its fit 'own' is -inf at batch 1"),
    ],
)
def test_a_term_that_is_not_finite_is_named(
    engine: str, method: type[Method], words: str, federation: Any
) -> None:
    sim = parted_simulation(method(), federation, engine)
    with pytest.raises(DivergenceError) as caught:
        sim.step()
    said = str(caught.value)
    assert f"Mine, 'local' of client 0, round 1: {words}, where the run's loss is 2." in said
    assert "keep roots, logarithms and quotients away from 0" in said


@parted
def test_a_term_is_not_blamed_for_a_model_that_diverges(engine: str, federation: Any) -> None:
    with pytest.raises(DivergenceError, match=r"lower train\.lr"):
        parted_simulation(Fine(), federation, engine).step()


@parted
def test_the_term_of_a_single_client_is_named_once(
    engine: str, federation: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The others go on, and what a client diverged by is looked for the first time only."""

    class OfOne(Mine):
        def local(self, client, state, received):
            def shares(seen, samples):
                return seen.mean(torch.where(samples > most, seen.outputs - seen.outputs, 1.0).log().sum(1))

            return state, client.fit(received, term=Term(shares, given=(client.samples,)))

    sizes = federation.sizes()
    most = float(sorted(sizes)[-2])
    sim = parted_simulation(OfOne(), federation, engine)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert sim.step().rejected == (int(sizes.argmax()),)
    first, second = [r.getMessage() for r in caplog.records if "rejected" in r.getMessage()]
    assert f"client {sizes.argmax()}, round 1: term 1 (shares)" in first
    assert "learning rate" in second
