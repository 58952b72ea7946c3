"""Every engine reports a mistake of a method's author alike: method, clients, round and stage, and the fix."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict

from methods.small import SIZES, assert_same, everything, simulation
from tailorfl import Client, Context, Method, Simulation, Term
from tailorfl.engines.choice import make_engine
from tailorfl.errors import ClientError, ConfigError, DivergenceError, TailorflError
from tailorfl.methods.fedavg import FedAvg
from tailorfl.rounds.client_privacy import ClientDP
from tailorfl.settings.system import SystemConfig
from tailorfl.training import tree
from tailorfl.training.update import Optimizer

FLOATS = {False: torch.float32, True: torch.float64}
engines = pytest.mark.parametrize("engine", ["sequential", "vectorized", "auto"])
PARTED: dict[str, dict[str, Any]] = {"chunks": {"chunk": 2}, "workers": {"chunk": 2, "workers": 2}}
"""Engines that cut a cohort into parts: what differs between clients or chunks has to fit together."""
parted = pytest.mark.parametrize("engine", ["sequential", *PARTED])


class Mine(FedAvg):
    """Averages, and keeps the last model."""

    name: ClassVar[str] = "mine"
    title: ClassVar[str] = "Mine"
    has_personal: ClassVar[bool] = True

    def client_state(self, ctx: Context) -> TensorDict:
        return ctx.init

    def personal(self, client: Client, state: TensorDict, received: TensorDict) -> TensorDict:
        return state


def mine(**members: Any) -> Method:
    """`Mine` with other members."""
    return type("Other", (Mine,), members)()


def run(method: Method, engine: str, model: str = "logistic", **settings: Any) -> Simulation:
    name = "vectorized" if engine in PARTED else engine
    return simulation(method, model, make_engine(name, **PARTED.get(engine, {})), **settings)


def deploy_after_a_round(method: Method, engine: str) -> int:
    """How many groups of models a round leaves."""
    sim = run(method, engine)
    sim.step()
    return len(list(sim.personal_models(range(5))))


def replying(more: Any, trained: bool = True) -> Method:
    """Sends entries, by the client, beside the model."""

    def local(self, client, state, received):
        return state, TensorDict({**(client.fit(received) if trained else received), **more(client)})

    return mine(local=local)


def writing(change: Any) -> Any:
    """A `local` that writes into what it was given."""

    def local(self, client, state, received):
        change(state, received)
        return state, received

    return local


def fails(self, client, state, received):
    raise ValueError("no such luck")


def sets_itself(self, client, state, received):
    self.seen = received
    return state, client.fit(received)


def server_sets_itself(self, server, replies):
    self.last = server
    return FedAvg.aggregate(self, server, replies)


def in_all(change: Any) -> Any:
    """A `local` whose private state is changed, entry by entry."""
    return lambda self, c, s, r: (TensorDict({n: change(t) for n, t in s.items()}), r)


@engines
@pytest.mark.parametrize(
    ("stage", "hook", "words"),
    [
        ("local", lambda self, c, s, r: c.fit(r), "returned one TensorDict"),
        ("local", lambda self, c, s, r: (s, c.fit(r["theta"])), "received has head.weight, head.bias"),
        ("local", writing(lambda s, r: [t.add_(1.0) for t in tree.tensors(r).values()]), "a = a + b"),
        ("local", writing(lambda s, r: r.set("head.bias", r["head.bias"] + 1.0)), "`received` was written"),
        ("local", writing(lambda s, r: s["head.bias"].mul_(2.0)), "`state` was written to"),
        ("local", fails, "ValueError: no such luck"),
        ("local", in_all(lambda t: torch.stack([t, t])), "head.weight of shape [2, 4, 64] and not [4, 64]"),
        ("local", in_all(torch.Tensor.double), "head.weight of torch.float64 and not torch.float32"),
        ("local", lambda self, c, s, r: (s.select("head.bias"), r), "private state lacks head.weight"),
        ("personal", lambda self, c, s, r: s.select("head.bias"), "lacks head.weight"),
        (
            "personal",
            lambda self, c, s, r: TensorDict({**s, "alpha": torch.ones(())}),
            "has alpha, which the",
        ),
    ],
)
def test_a_mistake_is_named_with_method_client_round_and_stage(
    engine: str, stage: str, hook: Any, words: str
) -> None:
    with pytest.raises(TailorflError) as caught:
        deploy_after_a_round(mine(**{stage: hook}), engine)
    message = str(caught.value)
    assert message.startswith(f"Mine, '{stage}' of ")
    assert "client" in message
    assert ("round 1" if stage == "local" else "round 2") in message  # models are deployed before the next
    assert words in message


@engines
@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (lambda c, r: TensorDict({"model": c.fit(r)}), "fit needs a model, but got model/head.weight, model"),
        (
            lambda c, r: TensorDict({"value": c.loss(r)}),
            "loss needs a model, but got value, which lacks head",
        ),
        (
            lambda c, r: c.fit(r).select("head.bias"),
            "fit needs a model, but got head.bias, which lacks head.",
        ),
    ],
)
def test_what_is_no_model_is_named_where_a_model_is_wanted(engine: str, reply: Any, words: str) -> None:
    """A reply of another structure than the broadcast shows a round later, at the clients."""
    method = mine(
        local=lambda self, client, state, received: (state, reply(client, received)),
        aggregate=lambda self, server, replies: TensorDict({**server, "w": replies.mean()}),
    )
    sim = run(method, engine)
    sim.step()
    with pytest.raises(ClientError, match=rf"round 2: client\.{words}.*aggregate\(\)"):
        sim.step()


@engines
@pytest.mark.parametrize(
    ("members", "name"), [({"local": sets_itself}, "seen"), ({"aggregate": server_sets_itself}, "last")]
)
def test_a_method_does_not_set_its_own_attributes(engine: str, members: dict[str, Any], name: str) -> None:
    with pytest.raises(ClientError, match=rf"Other: self\.{name} cannot be set.*client_state\(\)"):
        run(mine(**members), engine).step()


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


def test_a_round_whose_replies_lead_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"NoAggregate defines no aggregate\(server, replies\)"):
        run(NoAggregate(), "auto")
    with pytest.raises(ClientError, match=r"replies with head.weight, head.bias, but RepliesForNothing"):
        run(RepliesForNothing(), "auto").step()
    assert deploy_after_a_round(Silent(), "auto") == 1


@pytest.mark.parametrize("engine", ["vectorized", "auto"])
@pytest.mark.parametrize(
    ("local", "fix"),
    [
        (lambda self, c, s, r: (s, r) if c.samples > 30 else (s, c.fit(r)), "torch.where"),
        (lambda self, c, s, r: (s, c.fit(r) * float(c.samples)), "calculate with the tensor"),
    ],
)
def test_conditions_on_values_are_no_reason_for_the_slow_engine(engine: str, local: Any, fix: str) -> None:
    with pytest.raises(TailorflError, match=fix):
        run(mine(local=local), engine).step()


# -- cohorts in parts ----------------------------------------------------------------------------------------------


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
    engine: str, more: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailorfl.engines.in_process.PIECE_BYTES", 0)  # no two clients run together
    with pytest.raises(ClientError, match=r"^Mine, 'local' of client .*round 1") as caught:
        run(replying(more, trained=False), engine).step()
    assert words in str(caught.value)


LOCAL = "'local' of one of the clients.*round 2.*"


class Forgets(Mine):
    def local(self, client, state, received):
        trained = client.fit(received)
        return state, trained.select("head.weight") if client.round else trained

    def aggregate(self, server, replies):
        return TensorDict({"w": replies.mean().select(*tree.tensors(server["w"]))})


@parted
@pytest.mark.parametrize(
    ("method", "words"),
    [
        (replying(lambda c: {"seen": torch.ones(c.round + 1)}), f"{LOCAL} has seen of shape .2. and not .1."),
        (
            replying(lambda c: {"seen": torch.ones(2, dtype=FLOATS[c.round > 0])}),
            f"{LOCAL} has seen of torch.float64 and not torch.float32",
        ),
        (Forgets(), "'aggregate' of round 2.* lack head.bias, which earlier ones had"),
    ],
)
def test_replies_that_differ_between_rounds_are_named(engine: str, method: Method, words: str) -> None:
    """And change nothing."""
    sim = run(method, engine)
    sim.step()
    before = {path: t.clone() for path, t in everything(sim).items()}
    with pytest.raises(ClientError, match=f"^Mine, {words}"):
        sim.step()
    assert sim.round == 1
    assert_same(before, everything(sim))


class TakesTurns(Mine):
    """A method that sends something in every other round only, which is right."""

    def local(self, client, state, received):
        trained = client.fit(received)
        return state, tree.empty() if client.round % 2 else trained

    def aggregate(self, server, replies):
        return super().aggregate(server, replies) if len(replies.stack.keys()) else server


@parted
def test_a_method_may_send_in_some_rounds_only(engine: str) -> None:
    sim = run(TakesTurns(), engine)
    moved = []
    for _ in range(4):
        before = sim.server["w"]["head.weight"].clone()
        sim.step()
        moved.append(not torch.equal(before, sim.server["w"]["head.weight"]))
    assert moved == [True, False, True, False]


# -- terms of the loss ---------------------------------------------------------------------------------------------


def root(seen, bias):
    """The value is 0 and finite, its gradient is not."""
    return seen.mean((seen.outputs * 0.0 + bias * 0.0).sum(1).sqrt())


def shares(seen, bias):
    return seen.mean((seen.outputs - seen.outputs).sum(1).log() * bias[0])


def fine(seen):
    return seen.mean(seen.outputs.square().sum(1))


def deep(seen):
    """As `root`, of the features alone."""
    return seen.mean((seen.features * 0.0).sum(1).sqrt())


def fitting(**settings: Any) -> Any:
    """A `local` that trains with terms of the loss, which see a bias of ones."""

    def local(self, client, state, received):
        ones = state["head.bias"] * 0.0 + 1.0
        terms = [Term(f, given=() if f in (fine, deep) else (ones,)) for f in settings["terms"]]
        rest = {key: value for key, value in settings.items() if key != "terms"}
        return state, client.fit(received, term=terms[0] if len(terms) == 1 else tuple(terms), **rest)

    return local


@parted
@pytest.mark.parametrize(
    ("local", "words"),
    [
        (
            fitting(terms=[root]),
            r"term 1 \(root\) of its fit 'train' is 0 with a gradient that is not finite",
        ),
        (fitting(terms=[fine, shares], purpose="own"), r"term 2 \(shares\) of its fit 'own' is -inf"),
    ],
)
def test_a_term_that_is_not_finite_is_named(engine: str, local: Any, words: str) -> None:
    words = rf"Mine, 'local' of client 0, round 1: {words} at batch 1, where the run's loss is \d"
    with pytest.raises(DivergenceError, match=words):
        run(mine(local=local), engine).step()


@parted
def test_a_term_of_the_features_is_named(engine: str) -> None:
    with pytest.raises(DivergenceError, match=r"term 1 \(deep\) .* is 0 with a gradient that is not finite"):
        run(mine(local=fitting(terms=[deep])), engine, "mlp").step()


@parted
def test_a_term_is_not_blamed_for_a_model_that_diverges(engine: str) -> None:
    with pytest.raises(DivergenceError, match=r"lower train\.lr"):
        run(mine(local=fitting(terms=[fine], optimizer=Optimizer(lr=1e38))), engine).step()


@parted
def test_the_term_of_a_single_client_is_named_once(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    """The others go on, and what a client diverged by is looked for the first time only; never under privacy."""

    def large(seen, samples):
        return seen.mean(torch.where(samples == 9, seen.outputs - seen.outputs, 1.0).log().sum(1))

    def local(self, client, state, received):
        return state, client.fit(received, term=Term(large, given=(client.samples,)))

    hostile = SystemConfig.model_validate({"malicious": {"clients": [1], "kind": "nan"}})
    sim = run(mine(local=local), engine, system=hostile)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert sim.step().rejected == (1, SIZES.index(9))
    first, second = [r.getMessage() for r in caplog.records if "rejected" in r.getMessage()]
    assert "client 3, round 1: term 1 (large)" in first
    assert "learning rate" in second
    caplog.clear()
    private = run(mine(local=local), engine, weights="uniform", client_dp=ClientDP(1.0, 0.0))
    with caplog.at_level(logging.WARNING):
        assert private.step().rejected == (SIZES.index(9),)
    assert "large" not in caplog.text
