"""Methods whose clients may have different architectures, against their references."""

from __future__ import annotations

import pytest

from references import world
from references.cases import MAIN
from references.settings import CKT, DISTIL, FEDGH, FEDTGP, Case
from references.test_references import PLAIN, SOME, compare, same
from tailorfl.core.method import make_method
from tailorfl.engines.choice import make_engine
from tailorfl.rounds.simulation import Simulation

ANY = ("mlp", "deep", "deep", "mlp", "norm")
ALIKE = ("mlp", "norm", "norm", "mlp", "mlp")
"""Of features of one width."""
CASES = {
    "feddf": (ANY, Case({"weights": "samples", "distil": {**DISTIL, "average": "probabilities"}})),
    "perfed_ckt": (ANY, Case(CKT)),
    "fedproto": (ALIKE, Case({"weights": "samples", "lam": 2.0}, rounds=3)),
    "fedgh": (ALIKE, Case(FEDGH, rounds=3)),
    "fedtgp": (ALIKE, Case(FEDTGP, rounds=3)),
}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_architectures_teach_each_other_as_the_reference_says(name: str, engine: str) -> None:
    kinds, case = CASES[name]
    sim = Simulation(
        make_method(name, case.of_method()),
        world.federation(),
        {kind: world.model(kind) for kind in kinds},
        PLAIN,
        assignment=kinds,
        engine=make_engine(engine, None),
        seed=world.SEED,
        fraction=SOME,
    )
    wanted = MAIN[name][0](world.several(sim, case.rounds, kinds), **case.options)
    for _ in range(case.rounds):
        sim.step()
    if not sim.method.has_global:
        compare(sim, wanted)
    else:
        server = world.flat(sim.server)
        same("the server", {n: server[n] for n in wanted.server}, wanted.server)
