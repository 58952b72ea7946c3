"""Settings under which one method is another one, under partial participation (matrix T01 to T04)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.reductions import TRAININGS, Same, Which
from methods.settings import ELSEWHERE, NAMES, NEVER_SAID, REDUCTIONS, REMARKS, make, with_limit
from methods.small import (
    EXACT,
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    federation,
    personal,
    shared,
    simulation,
)
from methods.test_lora_factors import LORA, simulation_with_lora
from tailorfl.core.method import Method, make_method
from tailorfl.core.reduction import Reduction
from tailorfl.data.federation import Federation
from tailorfl.rounds.simulation import Simulation
from tailorfl.runs.reductions import named, setup_of
from tailorfl.training.cohort import TrainConfig
from tailorfl.training.update import RoundSchedule

RUN: dict[str, Any] = {"rounds": 3, "fraction": 0.6}
EACH = [(name, same) for name, rows in REDUCTIONS.items() for same in rows]
CASES = [
    pytest.param(
        name,
        same,
        id=f"{same.line} {name} {same.options} is {same.other}",
        marks=[] if k % 2 else [pytest.mark.slow],
    )
    for k, (name, same) in enumerate(EACH)
]


def test_every_method_is_compared_with_another_or_with_its_optimum() -> None:
    proved = {n for n, found in REDUCTIONS.items() if found} | set(with_limit()) | set(ELSEWHERE)
    missing = sorted(set(NAMES) - proved)
    assert not missing, f"add same, a limit or proved to CONTRACTS in the tests of: {missing}"
    assert not (set(REDUCTIONS) | set(ELSEWHERE)) - set(NAMES)
    lines = {same.line for found in REDUCTIONS.values() for same in found}
    assert {"T01", "T02", "T03", "T04", "T05", "T07", "T08", "T09"} <= lines


ON_ENGINES = [
    pytest.param(
        name,
        same,
        (same.models * 2)[turn],
        engine,
        id=f"{same.line} {name} {same.options} is {same.other} on {engine}",
        marks=[] if k % 4 == -2 * turn - 2 else [pytest.mark.slow],
    )
    for k, (name, same) in enumerate(EACH)
    for engine, turn in (("sequential", -2), ("vectorized", -1))
]
"""Cohorts at once on the model that draws, the loop on the one before it: engines agree in their own tests.

The quick suite has one of them of every second row, in turn; the rows between are in `UNDER`.
"""


@pytest.mark.parametrize(("name", "same", "model_name", "engine"), ON_ENGINES)
def test_with_these_settings_it_is_the_other_method(
    name: str, same: Same, model_name: str, engine: str
) -> None:
    """T01 to T05 and T07 to T09, under partial participation unless the row says otherwise."""
    mine = run_of(make(name, **same.options), same, model_name, engine)
    a = models_of(mine, same.which)
    b = models_of_other(same, model_name, engine, same.other_train) if same.other else dict(mine.init.items())
    if same.which != same.other_which:
        b = {n: t.expand_as(a[n]) for n, t in b.items()}
    (assert_same if same.exact else assert_close)(a, b)
    if same.options.get("personal_part") == "all":
        assert (mine.traffic.up, mine.traffic.down_unicast, mine.traffic.bytes_up) == (0, 0, 0)


UNDER = [
    pytest.param(
        name,
        same,
        training,
        id=f"{name} {same.options} is {same.other} under {training}",
        marks=[] if k % 2 and k // 2 % len(TRAININGS) == j else [pytest.mark.slow],
    )
    for k, (name, same) in enumerate(EACH)
    for j, training in enumerate(TRAININGS)
]
"""One way to train of every second row in the quick suite, in turn; the others are among the slow tests."""


@pytest.mark.parametrize(("name", "same", "training"), UNDER)
def test_it_is_the_other_method_whatever_the_optimizer(name: str, same: Same, training: str) -> None:
    """In float64, where AdamW's first steps do not turn the rounding of a small gradient into a whole step.

    A row that methods name holds where they name it, with the training settings that they then name.
    """
    base = replace(TRAIN, **{**TRAININGS[training], **same.train})
    model_name = same.models[0] + EXACT
    run = replace(same, train={}, run={"rounds": 2, **same.run})
    mine = run_of(make(name, **same.options), run, model_name, "vectorized", rounds=0, base=base)
    rounds = run.run["rounds"]
    said = [r for r in mine.method.reductions(setup_of(mine, rounds)) if not r.remark]
    named_so = [r for r in said if key_of(r)[:3] == key_of_row(same)[:3]]
    if same.said and not named_so:
        assert (name, training) == ("pfedme", "adamw")  # it then says that the optimizer forgets
        return
    for _ in range(rounds):
        mine.step()
    a = models_of(mine, same.which)
    extra = named_so[0].train if same.said else same.other_train
    b = models_of_other(run, model_name, "vectorized", extra, base) if same.other else dict(mine.init.items())
    if same.which != same.other_which:
        b = {n: t.expand_as(a[n]) for n, t in b.items()}
    if same.exact:
        assert_same(a, b)
    else:
        assert_close(a, b, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize(
    "change", [*TRAININGS.values(), {"momentum": 0.0}, {"clip": 0.3}, {"schedule": "linear"}], ids=str
)
def test_every_training_is_another_one(change: Mapping[str, Any]) -> None:
    """Each setting of that matrix, and each training of it, changes what FedAvg computes."""
    a, b = (shared(simulation("fedavg", train=t, rounds=1)) for t in (TRAIN, replace(TRAIN, **change)))
    assert any(not torch.allclose(t, b[n], atol=1e-3) for n, t in a.items())


@pytest.mark.parametrize(("name", "same"), CASES)
def test_a_method_names_the_other_one_where_the_table_proves_it(name: str, same: Same) -> None:
    """Under the settings of a row it names that row, and nothing that has no row, on each model."""
    settings = (dict(same.options), dict(same.train), dict(same.run), dict(same.data))
    alike = [
        row
        for row in REDUCTIONS[name]
        if (dict(row.options), dict(row.train), dict(row.run), dict(row.data)) == settings
    ]
    rounds = {**RUN, **same.run}["rounds"]
    for model_name in same.models:
        sim = run_of(make(name, **same.options), same, model_name, rounds=0)
        reductions = {key_of(r) for r in sim.method.reductions(setup_of(sim, rounds)) if not r.remark}
        expected = {key_of_row(row) for row in alike if row.said and model_name in row.models}
        assert reductions == expected, model_name
        assert all(sentence.startswith(f"{sim.method.title} ") for sentence in named(sim, rounds))


def test_a_method_with_settings_of_its_own_names_no_other() -> None:
    for name in NAMES:
        if name in LORA:
            sim = simulation_with_lora(name, fraction=0.6)
        else:
            sim = simulation(make(name), "batch_norm" if name == "fedbn" else "mlp", fraction=0.6)
        assert named(sim, 4) == [], name


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [(name, options, words) for name, found in REMARKS.items() for options, words, _ in found],
)
def test_a_method_says_what_it_is_where_that_has_no_name(
    name: str, options: dict[str, Any], words: str
) -> None:
    sim = simulation(make(name, **options), fraction=0.6)
    [sentence] = [s for s in named(sim, 4) if words in s]
    assert sentence.startswith(sim.method.title)


SOME = {"fraction": 0.4}
ONE_STEP = replace(TRAIN, steps=1, epochs=None)


@pytest.mark.parametrize(
    ("name", "options", "run"),
    [
        ("scaffold", {"participation": "all"}, {**SOME, "train": ONE_STEP}),
        ("fedclup", {"participation": "all"}, SOME),
        ("fedpac", {"participation": "all", "mix": False, "lam": 0.0}, SOME),
        ("pfedgraph", {"participation": "all", "lam": 0.0}, {"fraction": 0.2}),
        (
            "pfedme",
            {"lam": 2.0, "lr": 0.5},
            {"train": replace(TRAIN, round_schedule=RoundSchedule("step", 4))},
        ),
    ],
)
def test_what_holds_of_all_clients_or_of_one_rate_is_not_said_otherwise(
    name: str, options: dict[str, Any], run: dict[str, Any]
) -> None:
    """Clients that train without being aggregated, and rates that fall from round to round."""
    assert named(simulation(make(name, **options), **run), 4) == []


def test_idle_clients_that_train_are_those_of_the_other_method() -> None:
    mine = simulation(make("ditto", lam=0.0, participation="all"), rounds=3, fraction=0.4)
    [sentence] = named(mine, 3)
    assert "participation = all" in sentence
    assert_same(*(personal(sim) for sim in (mine, simulation(make("local", participation="all"), **RUN))))


def test_every_method_can_name_another_or_has_a_reason_never_to() -> None:
    able = {name for name, found in REDUCTIONS.items() if any(same.said for same in found)} | set(REMARKS)
    assert able | set(NEVER_SAID) == set(NAMES)
    assert not able & set(NEVER_SAID)
    for found in REMARKS.values():
        assert all((Path(__file__).parent / where).is_file() for _, _, where in found)


def run_of(
    method: Method,
    same: Same,
    model_name: str,
    engine: str = "sequential",
    train: Mapping[str, Any] | None = None,
    rounds: int | None = None,
    base: TrainConfig = TRAIN,
) -> Simulation:
    settings = {**RUN, **same.run}
    if rounds is not None:
        settings["rounds"] = rounds
    config = replace(base, **{**same.train, **(train or {})})
    return simulation(method, model_name, engine, train=config, data=data_of(same), **settings)


_OTHERS: dict[str, dict[str, Tensor]] = {}


def models_of_other(
    same: Same, model_name: str, engine: str, train: Mapping[str, Any], base: TrainConfig = TRAIN
) -> dict[str, Tensor]:
    """Those of the other method, which many rows share, trained once."""
    of = (same.other, same.other_options, same.other_which, same.train, same.run, same.data)
    key = repr((of, model_name, engine, dict(train), base))
    if key not in _OTHERS:
        other = run_of(make(same.other, **same.other_options), same, model_name, engine, train, base=base)
        _OTHERS[key] = models_of(other, same.other_which)
    return dict(_OTHERS[key])


def data_of(same: Same) -> Federation:
    data = federation(same.data.get("sizes", SIZES))
    return data if same.data.get("validation", True) else replace(data, val=tuple(v[:0] for v in data.val))


def key_of(r: Reduction) -> tuple[Any, ...]:
    """What a reduction claims, comparable with a row of the table."""
    other = make_method(r.other, dict(r.options)) if r.other else None
    return (r.model, other, r.other_model, tuple(sorted(r.train.items())))


def key_of_row(same: Same) -> tuple[Any, ...]:
    other = make(same.other, **same.other_options) if same.other else None
    return (same.which, other, same.other_which, tuple(sorted(same.other_train.items())))


def models_of(sim: Simulation, which: Which) -> dict[str, Tensor]:
    return personal(sim) if which == "personal" else shared(sim)


def test_identical_clients_are_one_client() -> None:
    """Full batches, so that the order of samples, which differs by client id, plays no part."""
    base = federation((9,))
    same = Federation(
        base.source, [base.train[0]] * 3, [base.val[0]] * 3, [base.test[0]] * 3, ("a", "b", "c"), 3
    )
    full = replace(TRAIN, batch_size=0, epochs=3)
    for name in ("fedavg", "fedclup", "ditto", "fedrep", "pfedme"):
        one, three = (simulation(name, rounds=3, data=data, train=full) for data in (base, same))
        alone = {n: t[:1] for n, t in personal(one, (0,)).items()}
        for i in range(3):
            assert_close(alone, {n: t[i : i + 1] for n, t in personal(three).items()})
