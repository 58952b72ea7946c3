"""A client that joins rounds that have begun: as one that was always there and is asked for the first time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from methods.settings import NAMES, make, one_of, row
from methods.small import SIZES, everything, federation, simulation
from methods.test_lora_factors import simulation_with_lora
from tailorfl.data.federation import Federation
from tailorfl.errors import ConfigError
from tailorfl.rounds.groups import why_fixed
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree

FOUNDERS = 4
CHANGED: dict[str, dict[str, Any]] = {
    "ifca": {"warm_rounds": 4},
    "fedclup": {"schedule": {"kind": "heuristic", "switch": 2}},
}
"""Options under which a method needs all clients from the start, where it does not with those of its row."""
FEDERATED = [name for name in NAMES if not make(name).pooled]
JOINABLE = [name for name in FEDERATED if not why_fixed(make(name), None)]
FIXED = [name for name in FEDERATED if why_fixed(make(name, **CHANGED.get(name, {})), None)]


def founded() -> Federation:
    """The first four clients alone."""
    whole = federation()
    parts = {part: list(whole.part(part))[:FOUNDERS] for part in ("train", "val", "test")}
    return replace(whole, **parts, names=whole.names[:FOUNDERS], num_clients=FOUNDERS)


def rounds_of(name: str, sim: Simulation, grown: Federation | None = None) -> dict[str, Tensor]:
    """Two rounds of the first four clients and two of all five, who before them are `grown` to if they are not."""
    one_by_one = [(0,), (2,), (4,), (1,)]
    together = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3, 4), (1, 4)]
    for number, cohort in enumerate(one_by_one if row(name).promises.get("in_turn") else together):
        if number == 2 and grown is not None:
            sim.extend(grown)
        sim.step(sampled=cohort, training=cohort)
    return everything(sim)


@pytest.mark.parametrize("name", one_of(3, JOINABLE))
def test_a_client_that_joins_gets_the_numbers_of_one_that_was_always_there(name: str) -> None:
    late = rounds_of(name, simulation(name, data=founded()), federation())
    always = rounds_of(name, simulation(name))
    assert late.keys() == always.keys()
    assert all(late[path].equal(tensor) for path, tensor in always.items())


@pytest.mark.parametrize("name", one_of(2, FIXED))
def test_a_method_that_needs_all_clients_from_the_start_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = make(name, **CHANGED.get(name, {}))
    sim = simulation(method, data=founded())
    with pytest.raises(ConfigError, match=method.title):
        sim.extend(federation())
    # What it says is true: the numbers would be others, or its server has no place for one more client.
    monkeypatch.setattr("tailorfl.rounds.simulation.why_fixed", lambda *facts: "")
    if method.of_adapters:
        context = simulation_with_lora(name, 0).context
        states = [method.server_state(replace(context, num_clients=n)) for n in (FOUNDERS, FOUNDERS + 1)]
        first, second = (tree.shapes(tree.leaves(state)) for state in states)
        assert first != second
        return
    always = rounds_of(name, simulation(method))
    try:
        late = rounds_of(name, sim, federation())
    except ConfigError:
        return
    assert any(not late[path].equal(tensor) for path, tensor in always.items())


def test_privacy_that_counts_clients_refuses_another_one() -> None:
    assert "client-level privacy" in why_fixed(make("fedavg"), "client")
    assert why_fixed(make("fedavg"), "sample") == ""
    assert "architectures" in why_fixed(make("fedavg"), None, 2)


def test_the_states_of_those_who_are_there_are_untouched() -> None:
    sim = simulation("ditto", data=founded(), rounds=2)
    before = everything(sim)
    sim.extend(federation())
    after = everything(sim, range(FOUNDERS))
    assert before.keys() == after.keys()
    assert all(after[path].equal(tensor) for path, tensor in before.items())
    assert sim.participants == sim.context.num_clients == 5
    assert (sim.context.sizes, sim.context.samples) == (SIZES, sum(SIZES) / 5)  # without the held-out client
