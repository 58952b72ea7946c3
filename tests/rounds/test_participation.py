"""A recorded round played again: the same states to the bit, whoever was missing; and what a trace must look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from methods.small import simulation
from rounds.helpers import digest
from tailorfl.errors import ConfigError, RunError
from tailorfl.rounds.participation import NOT_FINITE, TOO_FEW, ClientOutcome, RoundTrace, Trace
from tailorfl.settings.system import SystemConfig
from tailorfl.training import tree


def absent(round: int, asked: tuple[int, ...], missing: dict[int, str]) -> RoundTrace:
    answers = tuple(ClientOutcome(i, missing.get(i, "accepted"), 1.0 + i) for i in asked)  # type: ignore[arg-type]
    return RoundTrace(round, asked, answers, 9.0)


def test_whoever_is_absent_keeps_everything_and_sends_nothing() -> None:
    sim = simulation("ditto", rounds=1)
    before = {i: [t.clone() for _, t in tree.leaves(sim.states.get((i,)))] for i in range(5)}
    whole = simulation("ditto", rounds=2).traffic
    done = sim.step(trace=absent(2, (0, 1, 2, 3, 4), {1: "late", 4: "unavailable"}))
    assert done.absent == (1, 4)
    for i in range(5):
        after = [t for _, t in tree.leaves(sim.states.get((i,)))]
        assert all(map(torch.equal, before[i], after)) is (i in (1, 4))
    # Of five clients three sent, and four received: who is late has received, who is unavailable has not.
    assert sim.traffic.up * 10 == whole.up * 8
    assert sim.traffic.down_unicast * 10 == whole.down_unicast * 9


def test_the_server_averages_those_that_answered() -> None:
    """FedAvg of clients 0, 2 and 3 alone, by their samples: 15, 7 and 9."""
    sim = simulation("fedavg", rounds=0)
    alone = {i: simulation("fedavg", rounds=0) for i in (0, 2, 3)}
    for i, one in alone.items():
        one.step(sampled=(i,), training=(i,))
    sim.step(trace=absent(1, (0, 1, 2, 3, 4), {1: "lost", 4: "late"}))
    for path, tensor in tree.leaves(sim.server):
        parts = {i: dict(tree.leaves(one.server))[path].double() for i, one in alone.items()}
        wanted = (15 * parts[0] + 7 * parts[2] + 9 * parts[3]) / 31
        assert torch.allclose(tensor.double(), wanted, atol=1e-7)


def test_a_round_of_nobody_leaves_the_server_and_is_counted() -> None:
    sim = simulation("scaffold", rounds=1)
    before = digest(sim)
    done = sim.step(trace=absent(2, (0, 3), {0: "lost", 3: "lost"}))
    assert (done.absent, done.losses, sim.round) == ((0, 3), {}, 2)
    assert digest(sim) == before


def test_too_few_replies_change_nothing() -> None:
    sim, again = (simulation("ditto", rounds=1) for _ in range(2))
    sim.min_replies = 4
    before = digest(sim)
    done = sim.step(trace=absent(2, (0, 1, 2, 3, 4), {1: "lost", 4: "late"}))
    assert digest(sim) == before
    assert done.trace is not None
    fates = {a.client: (a.fate, a.reason) for a in done.trace.answers}
    refused = ("refused", TOO_FEW)
    assert fates == {0: refused, 1: ("lost", ""), 2: refused, 3: refused, 4: ("late", "")}
    played = again.step(trace=done.trace)  # though it does not ask for four replies itself
    assert digest(again) == before
    assert (played.trace, again.traffic, again.gradients) == (done.trace, sim.traffic, sim.gradients)
    sim.step(trace=absent(3, (0, 1, 2, 3, 4), {1: "lost"}))
    assert digest(sim) != before


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 5),
        ({"fraction": 0.6}, 3),
        ({"fraction": 0.6, "sampling": "bernoulli"}, 5),
        ({"sampling": "cyclic"}, 1),
    ],
)
def test_more_replies_than_a_round_can_have_are_refused(settings: dict[str, Any], most: int) -> None:
    given = {"method": "fedavg", "rounds": 0, **settings}
    assert simulation(**given, system=SystemConfig(min_replies=most)).min_replies == most
    with pytest.raises(ConfigError, match=f"min_replies={most + 1} .* the {most} clients"):
        simulation(**given, system=SystemConfig(min_replies=most + 1))


def test_pooled_training_waits_for_nobody() -> None:
    sim = simulation("centralized", rounds=0, system=SystemConfig(min_replies=3))
    before = digest(sim)
    sim.step()
    assert digest(sim) != before


def test_a_checkpoint_after_too_few_replies_mixes_no_states_on_disk(tmp_path: Path) -> None:
    """The rows of refused states are free, and no row has two clients."""
    in_memory, on_disk = (simulation("local", rounds=0, state_folder=f) for f in (None, tmp_path))
    for sim in (in_memory, on_disk):
        sim.min_replies = 2
        for clients in ((2, 3, 4), (0,), (2, 3), (0, 1, 2)):
            sim.step(sampled=clients)
            if len(clients) == 1:
                sim.dump()
    states = [dict(tree.leaves(sim.states.get(range(5)))) for sim in (in_memory, on_disk)]
    assert all(torch.equal(tensor, states[1][path]) for path, tensor in states[0].items())


def test_a_reply_that_is_not_finite_has_arrived_and_one_of_too_few_has_not() -> None:
    refused = absent(1, (0, 1, 2, 3, 4), {}).refused((2,), NOT_FINITE)
    assert (refused.answered, refused.absent) == ((0, 1, 2, 3, 4), ())
    assert refused.refused(refused.asked, TOO_FEW).absent == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting property name"),
        ('{"round": 1}', "sampled"),
        ('{"round": 1, "loss/train": 0.3, "clients": [0]}', "sampled"),
        ('{"round": 1, "sampled": [0], "answers": [{"client": 0, "fate": "asleep"}]}', "fate"),
        ('{"round": 1, "sampled": [0], "answers": [{"client": 0, "mood": 1}]}', "mood"),
        ('{"round": 1, "sampled": [0], "answers": [{"client": -1}]}', "client"),
        ('{"round": 1, "sampled": [0], "answers": [{"client": 0}], "more": 1}', "more"),
        ('{"round": 1, "sampled": [0], "answers": [{"client": 0}, {"client": 0}]}', "twice"),
        ('{"round": 1, "sampled": [3], "answers": [{"client": 0}]}', "not asked"),
        ('{"round": 2, "sampled": [0], "answers": [{"client": 0}]}', "round 2, but"),
    ],
)
def test_a_line_that_is_none_is_named(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(line + "\n")
    with pytest.raises(RunError, match=r"line 1 of .* is not a line of a trace") as caught:
        Trace.read(tmp_path / "trace.jsonl")
    assert said in str(caught.value)


def test_a_trace_of_other_data_is_refused() -> None:
    sim = simulation("fedavg", rounds=0)
    with pytest.raises(ConfigError, match="client 7 in round 1, but there are 5"):
        sim.step(trace=absent(1, (0, 7), {}))
    with pytest.raises(ConfigError, match=r"round 1 cannot be .* round 2"):
        sim.step(trace=absent(2, (0, 1), {}))
    with pytest.raises(RunError, match="has no round 1: it ends after 0"):
        Trace([]).of(1)
