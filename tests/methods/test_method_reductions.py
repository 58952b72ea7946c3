"""Settings under which one method is another one, under partial participation (matrix T01 to T04)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.reductions import ELSEWHERE, REDUCTIONS, TRAININGS, Same, Which
from methods.settings import NAMES, make, with_limit
from methods.small import (
    EXACT,
    TRAIN,
    assert_close,
    assert_same,
    everything,
    federation,
    personal,
    shared,
    simulation,
)
from tailorfl.core import tree
from tailorfl.data.federation import Federation
from tailorfl.engines.simulation import Simulation

RUN: dict[str, Any] = {"rounds": 4, "fraction": 0.6}
CASES = [
    pytest.param(
        name, same, model_name, id=f"{same.line} {name} {same.options} is {same.other} on {model_name}"
    )
    for name, found in REDUCTIONS.items()
    for same in found
    for model_name in same.models
]


def test_every_method_is_compared_with_another_or_with_its_optimum() -> None:
    proved = {n for n, found in REDUCTIONS.items() if found} | set(with_limit()) | set(ELSEWHERE)
    missing = sorted(set(NAMES) - proved)
    assert not missing, f"add a reduction, a limit or a reason to tests/methods/reductions.py for: {missing}"
    assert not (set(REDUCTIONS) | set(ELSEWHERE)) - set(NAMES)
    lines = {same.line for found in REDUCTIONS.values() for same in found}
    assert lines == {"T01", "T02", "T03", "T04", "T07", "T09"}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(("name", "same", "model_name"), CASES)
def test_with_these_settings_it_is_the_other_method(
    name: str, same: Same, model_name: str, engine: str
) -> None:
    """T01 to T04, T07 and T09, under partial participation."""
    train = replace(TRAIN, **same.train)
    mine, theirs = (
        simulation(make(method, **options), model_name, engine, train=train, **RUN)
        for method, options in ((name, same.options), (same.other, same.other_options))
    )
    a, b = models_of(mine, same.which), models_of(theirs, same.other_which)
    if same.which != same.other_which:
        b = {n: t.expand_as(a[n]) for n, t in b.items()}
    (assert_same if same.exact else assert_close)(a, b)
    if same.options.get("personal_part") == "all":
        assert (mine.traffic.up, mine.traffic.down_unicast, mine.traffic.bytes_up) == (0, 0, 0)


UNDER = [
    pytest.param(name, same, training, id=f"{name} {same.options} is {same.other} under {training}")
    for name, found in REDUCTIONS.items()
    for same in found
    for training in TRAININGS
]


@pytest.mark.parametrize(("name", "same", "training"), UNDER)
def test_it_is_the_other_method_whatever_the_optimizer(name: str, same: Same, training: str) -> None:
    """In float64, where AdamW's first steps do not turn the rounding of a small gradient into a whole step."""
    train = replace(TRAIN, **{**TRAININGS[training], **same.train})
    run: dict[str, Any] = {"engine": "vectorized", "train": train, "rounds": 2, "fraction": 0.6}
    mine, theirs = (
        simulation(make(method, **options), same.models[0] + EXACT, **run)
        for method, options in ((name, same.options), (same.other, same.other_options))
    )
    a, b = models_of(mine, same.which), models_of(theirs, same.other_which)
    if same.which != same.other_which:
        b = {n: t.expand_as(a[n]) for n, t in b.items()}
    if same.exact:
        assert_same(a, b)
    else:
        assert_close(a, b, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("training", TRAININGS)
def test_every_training_is_another_one(training: str) -> None:
    """Each setting of that matrix changes what FedAvg computes, clipping in particular."""
    a, b = (
        shared(simulation("fedavg", train=t, rounds=1))
        for t in (TRAIN, replace(TRAIN, **TRAININGS[training]))
    )
    assert any(not torch.allclose(t, b[n], atol=1e-3) for n, t in a.items())


def models_of(sim: Simulation, which: Which) -> dict[str, Tensor]:
    return personal(sim) if which == "personal" else shared(sim)


def test_centralized_on_one_client_is_fedavg_and_local_training() -> None:
    one = federation((11,))
    runs = {
        name: simulation(name, rounds=3, data=one) for name in ("centralized", "fedavg", "local", "ditto")
    }
    w = shared(runs["centralized"])
    assert_same(w, shared(runs["fedavg"]))
    assert_same(w, {n: t[0] for n, t in personal(runs["local"]).items()})
    assert_close(w, shared(runs["ditto"]))


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


def test_apfl_with_alpha_zero_keeps_v_and_deploys_the_local_copy_of_fedavg() -> None:
    apfl = simulation(make("apfl", alpha=0.0, adaptive=False), train=_plain(TRAIN), fraction=0.6)
    fedavg = simulation(make("fedavg"), train=_plain(TRAIN), fraction=0.6)
    for _ in range(3):
        ids = apfl.sample(apfl.round)
        w = fedavg.server["w"]
        (theta,) = fedavg.run(ids, fedavg.states.get(ids), w, lambda c, s, r: (c.fit(r),))
        apfl.step()
        fedavg.step()
        assert_close(personal(apfl, ids), dict(theta.items()))
    start = {p: t.expand(5, *t.shape) for p, t in tree.leaves(apfl.init)}
    assert_same({p.removeprefix("client/v/"): t for p, t in everything(apfl).items() if "/v/" in p}, start)


def _plain(train: Any) -> Any:
    """Without momentum and weight decay: decay would shrink even a v whose gradient is zero."""
    return replace(train, momentum=0.0, weight_decay=0.0)
