"""What methods say of themselves where it is no other method of the library (`REMARKS` of reductions.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from methods.settings import make
from methods.small import (
    SIZES,
    TRAIN,
    assert_close,
    assert_same,
    federation,
    personal,
    replaced,
    shared,
    simulation,
)
from tailorfl.rounds.simulation import Simulation
from tailorfl.training import tree
from tailorfl.training.plan import Length


def after(name: str, rounds: int = 3, **settings: Any) -> Simulation:
    options = {k: settings.pop(k) for k in list(settings) if k in type(make(name)).model_fields}
    return simulation(make(name, **options), rounds=rounds, **settings)


@pytest.mark.parametrize("name", ["fedoa", "fedsdr"])
@pytest.mark.parametrize("start", [0, 2])
def test_without_pull_personal_models_train_alone_from_their_round_on(name: str, start: int) -> None:
    """Against LocalTrain of so many fewer rounds; batches of a whole client, which no round draws differently."""
    full = replace(TRAIN, batch_size=0)
    mine = after(name, 3, lam=0.0, personal_start=start, own_init=False, train=full)
    assert_close(personal(mine), personal(simulation("local", train=full, rounds=3 - start)), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedoa", {"lam": 0.0, "own_init": True}),
        ("fedsdr", {"lam": 0.0, "own_init": True}),
        ("perfed_ckt", {"lam": 0.0, "own_init": True, "first_round": "upload"}),
    ],
)
def test_without_pull_no_client_sees_what_another_has(name: str, options: dict[str, Any]) -> None:
    changed = replaced(federation(), 3, lambda x: -x)
    a, b = (personal(after(name, data=data, **options)) for data in (federation(), changed))
    others = [i for i in range(len(SIZES)) if i != 3]
    assert_same({n: t[others] for n, t in a.items()}, {n: t[others] for n, t in b.items()})
    assert any(not torch.equal(t[3], b[n][3]) for n, t in a.items())


def test_pfedmes_personal_models_are_what_clients_send() -> None:
    """So their mean is the next global model; with ηλ = ½ it is not."""

    def gap(lr: float) -> float:
        sim = after("pfedme", 2, lam=4.0, lr=lr, inner_steps=3, weights="uniform")
        w = shared(sim)
        return max(float((t.mean(0) - w[n]).abs().max()) for n, t in personal(sim).items())

    assert gap(0.25) < 1e-6 < 1e-4 < gap(0.125)


def test_as_many_clusters_as_clients_are_their_own_predictions() -> None:
    sim = after("perfed_ckt", 1, clusters=len(SIZES))
    centroids = tree.tensors(sim.server)["centroids"]
    ids = tuple(range(len(SIZES)))
    assert sim.federation.public is not None
    x = sim.federation.public.x
    for one in range(len(ids)):
        state = {n: t[one] for n, t in personal(sim, ids).items()}
        distance = (centroids - sim.model(state, x).softmax(-1)).abs().amax((1, 2)).min()
        assert float(distance) < 1e-6


@pytest.mark.parametrize("name", ["fedrep", "fedalt"])
def test_without_body_epochs_what_clients_share_is_not_trained(name: str) -> None:
    sim = after(name, body_epochs=0)
    assert_close(tree.tensors(sim.server), dict(sim.split.select_shared(sim.init).items()), atol=1e-7)


def test_a_personal_whole_with_final_epochs_is_local_training_with_more_of_them() -> None:
    options = {"personal_part": "all"}
    sim = after("fedper", **options, final_personal_epochs=1)
    alone = simulation("local", rounds=3)
    assert_same(dict(tree.leaves(sim.states.get((0, 1)))), dict(tree.leaves(alone.states.get((0, 1)))))
    assert any(not torch.equal(t, personal(alone)[n]) for n, t in personal(sim).items())


def test_a_personal_whole_with_a_penalty_is_what_the_penalty_makes_of_local_training() -> None:
    """Ditto's personal step around a model that stays where it started."""
    sim = after("fedsim", 1, personal_part="all", lam=0.5)
    assert_close(personal(sim), personal(after("ditto", 1, lam=0.5)), atol=1e-6)


@pytest.mark.parametrize(("warm", "own_init"), [(0, False), (1, False), (0, True)])
def test_without_pull_and_with_an_upload_first_it_is_local_training_of_the_other_rounds(
    warm: int, own_init: bool
) -> None:
    """Batches of a whole client, which no round draws differently."""
    full = replace(TRAIN, batch_size=0)
    options = {"lam": 0.0, "own_init": own_init, "first_round": "upload", "warm_rounds": warm}
    mine = after("perfed_ckt", 3, **options, train=full)
    alone = after("local", 2, own_init=own_init, train=full)
    assert_close(personal(mine), personal(alone), atol=1e-6)


def test_a_head_that_is_all_of_the_model_trains_alone_for_its_own_steps() -> None:
    fedrep = make("fedrep", personal_part="all", head_epochs=10)
    (found,) = fedrep.alone(Length(steps=4))  # type: ignore[attr-defined]
    assert (found.other, found.model, dict(found.train)) == (
        "local",
        "personal",
        {"epochs": None, "steps": 4},
    )
    (found,) = fedrep.alone(Length(epochs=3))  # type: ignore[attr-defined]
    assert dict(found.train) == {"epochs": 3, "steps": None}
