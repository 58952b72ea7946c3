"""A client that diverges is named and left out; the others never notice; if all diverge, the run says so."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from methods.settings import in_turn, make, row
from methods.small import (
    SIZES,
    TRAIN,
    after,
    assert_close,
    assert_same,
    everything,
    federation,
    replaced,
    simulation,
)
from tailorfl.core.method import Method
from tailorfl.engines.base import all_finite, finite_clients
from tailorfl.errors import DivergenceError
from tailorfl.rounds.divergence import check_server, why_all_diverged
from tailorfl.training import tree

BAD = 3
REST = [i for i in range(len(SIZES)) if i != BAD]


def exploding(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, torch.inf)


@pytest.mark.parametrize(
    ("name", "model_name", "engine"),
    in_turn(("mlp", "sequential"), ("mlp", "vectorized"), ("batch_norm", "vectorized"), share=5),
)
def test_a_diverging_client_is_rejected_and_the_others_proceed(
    name: str, engine: str, model_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "apple" and model_name == "batch_norm":
        pytest.skip(
            "only parameters are sent, which batch norm keeps finite; the statistics stay and are discarded"
        )
    if row(name).promises.get("in_turn"):
        pytest.skip("no others are in the round; see tests/methods/test_cyclic.py")
    bad = replaced(federation(), BAD, exploding)
    sim = simulation(name, model_name, engine, data=bad)
    if sim.method.pooled:
        with pytest.raises(DivergenceError):
            sim.step()
        return
    clean = simulation(name, model_name, engine)
    clean.step()
    with caplog.at_level(logging.WARNING, logger="tailorfl"):
        result = sim.step()
    assert result.rejected == (BAD,)
    assert (result.clients, result.absent) == (tuple(range(len(SIZES))), ())
    assert f"client {BAD} " in caplog.text
    assert all(torch.isfinite(torch.tensor(v)) for v in result.losses.values())
    mine, theirs = dict(tree.leaves(sim.states.get(REST))), dict(tree.leaves(clean.states.get(REST)))
    assert_close(mine, theirs, atol=0, rtol=0)
    assert_same(sim.states.starts((BAD,)), dict(tree.leaves(sim.states.get((BAD,)))))
    assert all(torch.isfinite(t.float()).all() for t in everything(sim).values())
    sim.step()
    assert all(torch.isfinite(t.float()).all() for t in everything(sim).values())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [("a", 0), ("a", 5), ("b", 2), ("other", 3)])
def test_one_bad_number_anywhere_marks_its_client_alone(bad: float, place: tuple[str, int]) -> None:
    state = TensorDict({"a": torch.ones(3, 2, 3), "b": torch.ones(3, 3)}, batch_size=[3])
    reply = TensorDict({"other": torch.ones(3, 4), "counts": torch.full((3, 4), 2**62)}, batch_size=[3])
    assert finite_clients(state, reply).tolist() == [True, True, True]
    name, position = place
    held = (reply if name == "other" else state)[name]
    held.view(3, -1)[1, position] = bad
    assert finite_clients(state, reply).tolist() == [True, False, True]
    for client in range(3):
        assert bool(all_finite(*(dict(part[client].items()) for part in (state, reply)))) == (client != 1)


@pytest.mark.parametrize(("name", "engine"), in_turn(("sequential",), ("vectorized",), share=6))
def test_when_all_diverge_the_round_fails_and_changes_nothing(name: str, engine: str) -> None:
    base = federation()
    data = replace(base, source=replace(base.source, x=exploding(base.source.x)))
    sim = simulation(name, "cnn2", engine, data=data)
    before = {p: t.clone() for p, t in everything(sim).items()}
    with pytest.raises(DivergenceError, match=r"round 1.*lr"):
        sim.step()
    assert_same(before, everything(sim))
    assert sim.round == 0


def test_clipping_keeps_a_large_gradient_finite() -> None:
    """What the message recommends helps."""
    large = replaced(federation(), BAD, lambda x: 1e6 * x)
    sim = simulation("fedavg", train=replace(TRAIN, clip=1.0), data=large)
    assert sim.step().rejected == ()


def test_with_all_participating_a_diverging_sample_leaves_the_server() -> None:
    """The others trained well, but none of them was sampled: the server keeps its model."""
    method = make("ditto", participation="all")
    (sampled,) = simulation(method, "cnn2", fraction=0.2).sample(0)
    sim = simulation(method, "cnn2", data=replaced(federation(), sampled, exploding), fraction=0.2)
    assert sim.step().rejected == (sampled,)
    assert_same(dict(sim.server.items()), dict(sim.init.items()))
    assert len(sim.states) == len(SIZES) - 1
    scalars = sim.model.scalars  # all receive and train, and the sampled one answers
    assert (sim.traffic.down_unicast, sim.traffic.up, sim.turns) == (len(SIZES) * scalars, scalars, 1)


@pytest.mark.parametrize(
    ("method", "named"),
    [
        (make("fedavg", server={"kind": "adam", "lr": 1e38}), "server"),
        (make("fedavg", server={"kind": "sgd", "lr": 3e38, "momentum": 0.9}), "server"),
        (make("feddf", distil={"lr": 1e30, "steps": 3}), "distil"),
    ],
)
def test_a_server_that_diverges_is_blamed_itself_and_the_round_changes_nothing(
    method: Method, named: str
) -> None:
    sim = simulation(method, "cnn2")
    with pytest.raises(DivergenceError, match=rf"server's step is too large, not train\.lr.*{named}"):
        after(sim, 6)
    assert_same(everything(after(simulation(method, "cnn2"), sim.round)), everything(sim))


def test_a_server_may_go_on_holding_what_was_not_finite_before() -> None:
    old = TensorDict({"best": torch.tensor([torch.inf, 1.0]), "w": torch.ones(2)}, batch_size=[])
    new = TensorDict({"best": torch.tensor([torch.inf, 2.0]), "w": torch.ones(2)}, batch_size=[])
    check_server(old, new, 1, ())
    new["best"] = torch.tensor([2.0, torch.nan])
    with pytest.raises(DivergenceError, match="'best'"):
        check_server(old, new, 1, ())


def test_a_server_without_a_step_of_its_own_is_not_blamed_for_what_clients_made() -> None:
    sent = TensorDict({"w": torch.full((2,), 8e14)}, batch_size=[])
    assert "server's step" in why_all_diverged(sent, ("server",))
    for server, grown in ((sent, True), (TensorDict({"w": torch.ones(2)}, batch_size=[]), False)):
        said = why_all_diverged(server, ())
        assert ("values up to 8e+14" in said) is grown
        assert said.endswith("lower train.lr, set train.clip, or check the scale of the data")
