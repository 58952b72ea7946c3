"""Every method's rounds, against references in plain torch that share no code with the library (float64)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from references import world
from references.cases import REFERENCES, Case
from references.plain import Outcome, State
from tailorfl.core.messages import PerArchitecture
from tailorfl.core.method import methods
from tailorfl.rounds.simulation import Simulation
from tailorfl.training.cohort import TrainConfig

PLAIN = TrainConfig(epochs=1, batch_size=3, lr=0.1)
ALL = replace(PLAIN, epochs=2, clip=0.4, momentum=0.5, weight_decay=0.1, schedule="linear")
TRAIN = {
    "plain": PLAIN,
    "momentum": replace(PLAIN, momentum=0.9),
    "decay": ALL,
    "steps": replace(PLAIN, epochs=None, steps=4),
    "client": replace(ALL, class_weights="client"),
    "federated": replace(ALL, class_weights="federated"),
    "adamw": replace(PLAIN, lr=0.01, optimizer="adamw", weight_decay=0.1, schedule="linear"),
}
OWN_LOSS = ("fedrod", "fedas", "fedem")
"""A loss of theirs takes the place of the run's."""
SOME = 0.6
CLOSE = 1e-12
"""Largest difference allowed, of entries up to 1: a run in float64 computes in float64 throughout."""
AFTER_ADAM = 1e-9
"""That of PerAda, whose server distils by Adam, which divides gradients of nearly 0 by their own size."""


def cases() -> list[Any]:
    """(method, number of the case, training settings, fraction, engine).

    In the quick suite are one of the first two cases of every method and a quarter of the options, both in turn.
    """
    out, count = [], 0
    for number, (name, (_, options)) in enumerate(REFERENCES.items()):
        for turn, (engine, weights, fraction) in enumerate(
            (("sequential", "client", 1.0), ("vectorized", "federated", SOME))
        ):
            train = "decay" if name in OWN_LOSS else weights  # engines agree in their own tests
            marks = [] if number % 2 == turn else [pytest.mark.slow]
            out.append(
                pytest.param(name, 0, train, fraction, engine, id=f"{name}-{train}-{engine}", marks=marks)
            )
        for k, case in enumerate(options):
            marks = [] if k and count % 4 == 0 else [pytest.mark.slow]
            count += k > 0
            out.append(
                pytest.param(name, k, case.train, SOME, "vectorized", id=f"{name}-{case.why}", marks=marks)
            )
    return out


def test_every_registered_method_has_a_reference() -> None:
    missing = methods().keys() - REFERENCES
    assert not missing, f"write a reference of {missing} and name it in tests/references/cases.py"


@pytest.mark.parametrize(("name", "number", "train", "fraction", "engine"), cases())
def test_the_library_computes_what_the_reference_does(
    name: str, number: int, train: str, fraction: float, engine: str
) -> None:
    reference, cases_of_method = REFERENCES[name]
    case = cases_of_method[number]
    start = partial(world.simulation, name, case.of_method(), case.model, engine, fraction, TRAIN[train])
    sim = start()
    problem = world.problem(sim, case.rounds)
    if name == "l2gd":
        problem.draws["coins"] = world.coins(case.options["coin_seed"], _coin(case), case.rounds)
    if name == "fedcp":
        problem.draws["noise"] = partial(world.gumbel, sim)
    if name == "flora":
        problem.draws["factors"] = partial(world.factors, sim)
    if name == "fedfomo":
        problem.draws["downloads"] = downloads(start(), case.rounds)
    wanted = reference(problem, **case.options)
    for _ in range(case.rounds):
        sim.step()
    compare(sim, wanted, AFTER_ADAM if name == "perada" else CLOSE)


def _coin(case: Case) -> float:
    """Probability of a step towards the mean."""
    lam, smoothness = case.options["lam"], case.options["smoothness"]
    return float(case.options["p_mean"] if smoothness is None else lam / (lam + smoothness))


def downloads(sim: Simulation, rounds: int) -> list[dict[int, list[int]]]:
    """Whose models each client is sent in each round, in runs where that is not the method's choice but chance."""
    out = []
    for t in range(rounds):
        sampled = sim.sample(t)
        out.append(world.owners_sent(sim, sampled))
        sim.step()
    return out


def compare(sim: Simulation, wanted: Outcome, close: float = CLOSE) -> None:
    ids = tuple(range(len(world.SIZES)))
    if wanted.shared is not None:
        found = sim.global_model()
        assert found is not None
        assert not isinstance(found, PerArchitecture)
        same("the global model", world.flat(found), wanted.shared, close)
    else:
        assert not sim.method.has_global
    assert bool(wanted.personal) == sim.method.has_personal
    if wanted.personal:
        models = {i: world.flat(m, k) for part, m in sim.personal_models(ids) for k, i in enumerate(part)}
        for i in ids:
            same(f"the personal model of client {i}", models[i], wanted.personal[i], close)
    server = world.flat(sim.server)
    if "centroids" in server:  # their order says nothing
        server["centroids"] = torch.stack(sorted(server["centroids"], key=lambda c: float(c[0, 0])))
    same("the server", {n: server[n] for n in wanted.server}, wanted.server, close)
    for i, state in enumerate(wanted.private):
        own = world.flat(sim.states.get((i,)), 0)
        same(f"the state of client {i}", {n: own[n] for n in state}, state, close)


def same(what: str, found: Mapping[str, Tensor], wanted: State, close: float = CLOSE) -> None:
    if found.keys() != wanted.keys():
        pytest.fail(f"{what}: {sorted(found)} instead of {sorted(wanted)}")
    for name, tensor in wanted.items():
        assert torch.isfinite(tensor).all()
        assert found[name].dtype == tensor.dtype, f"{what}: {name}"
        gap = float((found[name].double() - tensor.double()).abs().max())
        size = float(tensor.double().abs().max())
        if gap > close * max(1.0, size):
            pytest.fail(f"{what}: {name} differs by {gap:.2g} from the reference's numbers, up to {size:.2g}")
