"""Portions: how many clients and samples are looked at together changes no record and no order of records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from methods.settings import in_turn
from methods.small import federation, model, simulation
from tailorfl.data.federation import Federation
from tailorfl.evaluation import judges
from tailorfl.evaluation.judges import Portions, alike
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.evaluation.summary import OF_RECORD, Record, means, summaries
from tailorfl.settings.eval import SETS

EVERYTHING = Protocol(SETS, adapt_steps=(0, 2))


def uneven() -> Federation:
    """The tiny federation, its test samples unequally dealt: one client has most, one has none."""
    base = federation()
    rows = np.concatenate(base.test)
    cuts = np.split(rows, [1, 1, len(rows) - 4, len(rows) - 3, len(rows) - 1])
    return replace(base, test=tuple(cuts))


def assert_alike(found: list[Record], expected: list[Record]) -> None:
    """The same records in the same order: what is counted exactly, what is calculated to float rounding."""
    for mine, other in zip(found, expected, strict=True):
        assert list(mine) == list(other)
        assert {n: mine[n] for n in OF_RECORD if n in mine} == {n: other[n] for n in OF_RECORD if n in other}
        rest = [{n: v for n, v in record.items() if n not in OF_RECORD} for record in (mine, other)]
        assert rest[0] == pytest.approx(rest[1], rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize(
    ("method", "engine"), in_turn(("vectorized",), ("sequential",), names=("ditto", "fedavg"))
)
def test_portions_of_any_size_give_the_same_records(
    method: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = simulation(method, "cnn2", engine, data=uneven(), rounds=1)
    expected = evaluate(sim, EVERYTHING)
    for name, value in {"FEWEST_CLIENTS": 1, "MOST_CLIENTS": 2, "LAYER_BYTES": 1, "PADDING": 1.0}.items():
        monkeypatch.setattr(judges, name, value)
    assert_alike(evaluate(sim, EVERYTHING), expected)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_test_set_that_all_have_is_looked_at_once(engine: str) -> None:
    """One array that all clients have, against copies of it."""
    base = federation()
    rows = np.concatenate(base.test[: base.num_clients])
    data = replace(base, test=(rows,) * len(base))
    copies = replace(base, test=tuple(rows.copy() for _ in base.test))
    found, expected = (
        evaluate(simulation("ditto", engine=engine, data=d, rounds=1), EVERYTHING) for d in (data, copies)
    )
    assert_alike(found, expected)
    assert {r["samples"] for r in found if r["set"] == "global"} == {len(rows)}


def test_clients_together_have_samples_alike() -> None:
    rng = np.random.default_rng(0)
    for sizes in (rng.integers(1, 5, 20), rng.zipf(1.5, 60).clip(0, 500), np.zeros(3, dtype=np.int64)):
        groups = alike(sizes)
        assert sorted(np.concatenate(groups).tolist()) == list(range(len(sizes)))
        for group in groups:
            assert len(group) * sizes[group].max() <= judges.PADDING * sizes[group].sum()
    assert len(alike(np.array([3, 4, 3]))) == 1
    assert len(alike(np.array([1, 100, 1, 1]))) == 2


def test_wide_layers_take_fewer_samples() -> None:
    narrow, wide = Portions(simulation("ditto", "logistic")), Portions(simulation("ditto", "cnn2"))
    assert wide.rows(model("cnn2"), 1) < narrow.rows(model("logistic"), 1)
    assert wide.rows(model("cnn2"), 8) == wide.rows(model("cnn2"), 1) // 8
    assert wide.clients(samples=20.0, common=0) <= narrow.clients(samples=20.0, common=0)
    assert narrow.clients(samples=0.0, common=10**9) == 1


def test_the_measurement_of_layers_leaves_nothing_behind() -> None:
    sim = simulation("ditto", "mlp")
    Portions(sim).rows(sim.model, 1)
    with sim.model.bound(sim.model.init(0)) as module:
        assert not [m for m in module.modules() if m._forward_hooks]


def test_means_are_those_of_the_summaries() -> None:
    records = evaluate(simulation("ditto", data=uneven(), rounds=1), EVERYTHING)
    expected = {
        f"{kind}/{name}/{metric}": statistics["mean"]
        for kind, sets in summaries(records).items()
        for name, metrics in sets.items()
        for metric, statistics in metrics.items()
    }
    found = means(records)
    assert list(found) == list(expected)
    np.testing.assert_array_equal(list(found.values()), list(expected.values()))


def sized(widths: list[int], largest: int, outputs: int = 4) -> Portions:
    """Portions of models whose widest layers have so many numbers, of samples of 64 numbers."""
    out = Portions.__new__(Portions)
    out._widths, out._largest = dict(enumerate(widths)), largest
    out._source = replace(federation().source, outputs=outputs)
    return out


@pytest.mark.parametrize(
    ("widths", "largest", "own", "common", "clients"),
    [
        ([1], 2**20, 1.0, 0, 8),  # 32 MiB of models of 4 MiB
        ([1], 3 * 2**20, 1.0, 0, 4),  # two would fit, but never fewer than four
        ([1, 2**18], 1, 1.0, 0, 16),  # 16 MiB of layers of 1 MiB, of the model with the widest
        ([1, 2**17], 1, 4.0, 0, 8),
        ([1, 2**17], 1, 0.25, 0, 32),  # at least one sample each
        ([1], 1, 1.0, 0, 2048),
        ([1], 1, 1.0, 2**20, 4),  # 64 MiB of outputs of 16 MiB
        ([1], 1, 1.0, 2**25, 1),
        ([1, 2**18], 1, 1.0, 8, 2),  # eight samples of 1 MiB a client
        ([1, 2**12], 1, 1.0, 1000, 6),  # 160 samples of 16 KiB in one pass
    ],
)
def test_a_portion_is_what_fits(
    widths: list[int], largest: int, own: float, common: int, clients: int
) -> None:
    assert sized(widths, largest).clients(own, common) == clients
