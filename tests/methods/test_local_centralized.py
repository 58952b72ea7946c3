"""LocalTrain and Centralized."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from methods import plain
from methods.quadratics import (
    CLIENTS,
    LR,
    Reference,
    personal_weights,
    quadratic_federation,
    quadratic_simulation,
)
from methods.reductions import local
from methods.settings import Card, Limit, Row, make, none
from methods.small import NEWCOMER, SIZES, assert_close, federation, personal, shared, simulation
from tailorfl.testing.contract import whole

CONTRACTS = {
    "local": Row(
        Card(none, none, whole, True, False),
        limit=Limit("local"),
        unweighted=True,
        proved="everything else is compared with it; test_local_centralized.py",
        never="the end itself",
    ),
    # Only reports the mean of the local models: it is sent up and never comes back.
    "local_average": Row(
        Card(none, whole, whole, True, True),
        limit=Limit("local_and_mean"),
        same=(local(said=False),),
        never="LocalTrain's personal models whatever its settings",
    ),
    "centralized": Row(
        Card(none, none, whole, False, True),
        limit=Limit("pooled"),
        unweighted=True,
        proved="one client: test_method_reductions.py",
        never="the end itself",
    ),
}


@pytest.mark.parametrize("model_name", ["mlp", "batch_norm"])
def test_local_training_is_the_textbook_loop_and_sends_nothing(model_name: str) -> None:
    sim = simulation("local", model_name, fraction=0.6)
    own: list[plain.State] = [dict(sim.init.items()) for _ in SIZES]
    for _ in range(3):
        for i in sim.sample(sim.round):
            own[i] = plain.train(sim, own[i], plain.batches(sim, i))
        sim.step()
    for i, state in enumerate(own):
        assert_close({n: t[i] for n, t in personal(sim).items()}, dict(state))
    assert set(sim.traffic.as_dict().values()) == {0}
    assert sim.global_model() is None


def test_local_training_of_all_clients_does_not_follow_the_sample() -> None:
    """Participation "all": everyone trains every round, so the fraction changes nothing."""
    few, all_of_them = (
        simulation(make("local", participation="all"), rounds=3, fraction=f) for f in (0.2, 1.0)
    )
    assert_close(personal(few), personal(all_of_them), atol=0, rtol=0)


def test_local_training_contracts_to_the_own_optimum() -> None:
    sim, local = quadratic_simulation("local", steps=2), Reference()
    v = personal_weights(sim)
    for _ in range(10):
        v = np.array([local.descend(i, v[i], 2, LR) for i in range(CLIENTS)])
        sim.step()
        np.testing.assert_allclose(personal_weights(sim), v, atol=1e-5)


def test_centralized_is_the_textbook_loop_on_the_union() -> None:
    sim = simulation("centralized")
    w: plain.State = dict(sim.init.items())
    for _ in range(2):
        rows = plain.batches(sim, 0)
        assert sorted(torch.cat(rows).tolist()) == sorted(
            np.concatenate(federation().train[: len(SIZES)]).tolist()
        )
        w = plain.train(sim, w, rows)
        sim.step()
    assert_close(shared(sim), dict(w))


def test_centralized_never_sees_held_out_clients() -> None:
    sim = simulation("centralized")
    held_out = set(federation().train[NEWCOMER].tolist())
    assert not held_out & set(np.concatenate(sim.cohort((0,)).members).tolist())


def test_centralized_weights_clients_by_their_samples() -> None:
    """One pooled gradient step is the sample-weighted mean of the clients' steps."""
    sim, local = quadratic_simulation("centralized"), Reference()
    w = sim.init["head.weight"][0].double().numpy()
    sizes = quadratic_federation().sizes()
    sim.step()
    expected = sum(n / sizes.sum() * local.descend(i, w, 1) for i, n in enumerate(sizes))
    np.testing.assert_allclose(shared(sim)["head.weight"][0].numpy(), expected, atol=1e-5)
