"""Every method on every kind of model.

All engines, chunk sizes and orders of clients give the same numbers.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from methods.settings import NAMES, in_turn, make, one_of, row
from methods.small import (
    EXACT,
    FACTORIES,
    NEWCOMER,
    SIZES,
    assert_close,
    everything,
    federation,
    fits,
    personal,
    simulation,
)
from tailorfl.engines.base import Inference
from tailorfl.engines.make import make_engine
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree

APART = ("logistic", "batch_norm", "dropout")
PAIRS = [(name, model_name) for name in NAMES for model_name in APART if fits(name, model_name)]
"""A head without a body, statistics, and layers between that draw; the rest is one of these, in other numbers."""
CHUNKED = [
    (name, fitting[k % len(fitting)], chunk)
    for k, name in enumerate(NAMES)
    for fitting in [[model_name for model_name in FACTORIES if fits(name, model_name)]]
    for chunk, k in ((1, k), (3, k + 1))
]
"""One model a method, and all models in turn: cohorts are cut up around a method, whatever it and its model compute."""
ALL = (*range(len(SIZES)), NEWCOMER)


def outcome(sim: Simulation) -> dict[str, Tensor]:
    """States, deployable models (of the newcomer too) and the newcomer's model after two steps."""
    ((_, adapted),) = sim.newcomer_models((NEWCOMER,), 2)
    return {
        **everything(sim),
        **{f"personal/{n}": t for n, t in personal(sim, ALL).items()},
        **{f"adapted/{n}": t for n, t in adapted.items()},
    }


@cache
def reference(name: str, model_name: str) -> dict[str, Tensor]:
    """Two rounds of the sequential engine, clients of 15, 1, 7, 9 and 3 samples."""
    return outcome(simulation(name, model_name + EXACT, rounds=2))


WHOLE = [(*pair, None) for pair in PAIRS]
TURNS = [
    *((case, k % 2) for k, case in enumerate(WHOLE)),
    *((case, k % 4 in (0, 3)) for k, case in enumerate(CHUNKED)),
]


@pytest.mark.parametrize(
    ("name", "model_name", "chunk"),
    [pytest.param(*case, marks=[] if quick else [pytest.mark.slow]) for case, quick in TURNS],
)
def test_vectorized_equals_sequential_whatever_the_chunk(
    name: str, model_name: str, chunk: int | None
) -> None:
    """In float64: what single precision rounds away depends on the processor, and the first steps of Adam make a whole
    step of the sign of a gradient near zero.
    """
    sim = simulation(name, model_name + EXACT, "vectorized", chunk=chunk, rounds=2)
    assert_close(outcome(sim), reference(name, model_name), atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", one_of(3, NAMES))
def test_losses_and_traffic_do_not_depend_on_the_engine(name: str) -> None:
    a, b = (simulation(name, "batch_norm", engine, fraction=0.6) for engine in ("sequential", "vectorized"))
    for _ in range(2):
        left, right = a.step(), b.step()
        assert left.losses.keys() == right.losses.keys() != set()
        assert left.losses == pytest.approx(right.losses, rel=1e-4)
        assert (left.clients, left.rejected, left.traffic) == (right.clients, right.rejected, right.traffic)


def local(sim: Simulation, ids: tuple[int, ...]) -> dict[str, Tensor]:
    """New states and replies of `ids` in this order, without storing them."""
    message = sim.method.broadcast(sim.server, ids)
    new, reply = sim.run(ids, sim.states.get(ids), message, lambda c, s, r: sim.method.local(c, s, r))
    return {
        **{f"state/{p}": t for p, t in tree.leaves(new)},
        **{f"reply/{p}": t for p, t in tree.leaves(reply)},
    }


@pytest.mark.parametrize(
    ("name", "model_name", "engine"),
    in_turn(("dropout", "sequential"), ("dropout", "vectorized"), ("batch_norm", "vectorized")),
)
def test_order_and_company_of_clients_do_not_matter(name: str, model_name: str, engine: str) -> None:
    """Client i's update is the same alone, among all, and in any order."""
    # Bit for bit where clients run one by one; in float64, so that nothing has to be allowed for roundings, together.
    exact = engine == "sequential"
    sim = simulation(name, model_name if exact else model_name + EXACT, engine, rounds=1)
    if sim.method.pooled:
        pytest.skip("one pooled client")
    everyone = local(sim, (0, 1, 2, 3, 4))
    order = (3, 0, 4, 2, 1)
    shuffled = local(sim, order)
    tolerance = {"atol": 0.0, "rtol": 0.0} if exact else {"atol": 1e-9, "rtol": 1e-7}
    assert_close(shuffled, {p: t[list(order)] for p, t in everyone.items()}, **tolerance)
    for i in (0, 1):
        assert_close(local(sim, (i,)), {p: t[i : i + 1] for p, t in everyone.items()}, **tolerance)


@pytest.mark.parametrize(("name", "engine"), in_turn(("sequential",), ("vectorized",)))
def test_the_data_of_others_does_not_matter_within_a_round(name: str, engine: str) -> None:
    """Same id, same data, same received model: the others' data may be anything, and as large as it likes."""
    from methods.small import replaced

    changed = replaced(federation(), 0, lambda x: 50.0 * x.flip(0) + 3.0)
    a, b = (simulation(name, "batch_norm", engine, data=data) for data in (federation(), changed))
    if a.method.pooled:
        pytest.skip("one pooled client")
    left, right = local(a, (0, 2, 3, 4)), local(b, (0, 2, 3, 4))
    assert_close({p: t[1:] for p, t in left.items()}, {p: t[1:] for p, t in right.items()}, atol=0, rtol=0)
    assert any(not torch.equal(t[0], right[p][0]) for p, t in left.items())


@pytest.mark.parametrize("name", one_of(2, NAMES, 1))
def test_relabelling_clients_permutes_the_results(name: str) -> None:
    """With full batches nothing random depends on the id, so new names for clients are only new names."""
    from dataclasses import replace

    from methods.small import TRAIN
    from tailorfl.data.federation import Federation

    if row(name).indexed or row(name).in_turn or row(name).draws:
        pytest.skip("the server gives every id an embedding of its own, or a turn, or noise is drawn by it")
    base = federation()
    order = [4, 2, 0, 1, 3]
    moved = [*order, NEWCOMER]
    other = Federation(
        base.source,
        tuple(base.train[i] for i in moved),
        tuple(base.val[i] for i in moved),
        tuple(base.test[i] for i in moved),
        tuple(base.names[i] for i in moved),
        base.num_clients,
        public=base.public,
    )
    full = replace(TRAIN, batch_size=0, epochs=2)
    method = make(name, **row(name).alike)
    a, b = (simulation(method, "batch_norm", data=data, rounds=2, train=full) for data in (base, other))
    mine, theirs = personal(a), personal(b)
    assert_close({n: t[order] for n, t in mine.items()}, theirs, atol=2e-5, rtol=1e-3)
    if a.method.has_global:
        # Batch counters are the first client's, and clients of one sample count no batch.
        keep = list(a.model.parameters)
        w, u = a.global_model(), b.global_model()
        assert w is not None
        assert u is not None
        assert_close({n: w[n] for n in keep}, {n: u[n] for n in keep}, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_predictions_are_those_of_the_module(engine: str) -> None:
    """Also for clients without rows, and the same inputs for all."""
    sim = simulation("local", "batch_norm", engine, rounds=2)
    ids = (0, 1, 3)
    ((_, models),) = sim.personal_models(ids)
    rows = [torch.arange(5), torch.arange(0), torch.arange(20, 22)]
    source = sim.federation.source
    own = make_engine(engine).predict(Inference(sim.model, models, source, rows))
    common = make_engine(engine).predict(Inference(sim.model, models, source, torch.arange(7)))
    for k in range(3):
        module = sim.model.module.eval()
        expected_state = {n: t[k] for n, t in models.items()}
        expected = torch.func.functional_call(module, expected_state, (source.x[rows[k]],))
        torch.testing.assert_close(own[k], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            common[k],
            torch.func.functional_call(module, expected_state, (source.x[:7],)),
            atol=1e-5,
            rtol=1e-4,
        )


def test_chunks_hold_clients_of_similar_size() -> None:
    """Sorted by size, so that little is padded; results come back in the cohort's order all the same."""
    sizes: list[list[int]] = []
    sim = simulation("local", engine="vectorized", chunk=2)

    def look(client: object, state: TensorDict, received: TensorDict) -> tuple[TensorDict, ...]:
        sizes.append([len(m) for m in client._cohort.members])  # type: ignore[attr-defined]
        return (TensorDict({"samples": client.samples}, batch_size=[]),)  # type: ignore[attr-defined]

    (found,) = sim.run(range(5), sim.states.get(range(5)), TensorDict({}, batch_size=[]), look)
    assert found["samples"].tolist() == list(SIZES)
    assert sizes == [[15, 9], [7, 3], [1]]
    assert np.all(np.diff([s for part in sizes for s in part]) <= 0)
