"""FedSAM, SCAFFOLD, FedDyn and MR-MTL: exact convergence where FedAvg is biased."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from methods.quadratics import (
    global_weight,
    optimum,
    quadratic_simulation,
    shares,
)
from methods.reductions import FULL_STEP, PLAIN, fedavg, in_run, local
from methods.settings import LAM, PROX_STEPS, Card, Limit, Row
from methods.small import after
from tailorfl.core.method import make_method
from tailorfl.settings.experiment import Weights
from tailorfl.testing.contract import twice, whole

CONTRACTS = {
    "fedsam": Row(
        Card(whole, whole, whole, False, True),
        {"rho": 0.02},
        same=(fedavg("T01", rho=0.0, said=True),),
    ),
    "scaffold": Row(
        Card(twice, twice, whole, False, True, whole),
        limit=Limit("pooled"),
        over_all=True,
        same=(
            in_run(replace(fedavg("one round", exact=False), other_train=PLAIN), rounds=1),
            # With batch norm a client of one sample takes no step, and no correction.
            in_run(
                replace(
                    fedavg("one step", exact=False),
                    train=FULL_STEP,
                    other_train=PLAIN,
                    models=("mlp", "dropout"),
                ),
                fraction=1.0,
            ),
        ),
    ),
    "feddyn": Row(
        Card(whole, whole, whole, False, True, whole),
        {"alpha": 0.1},
        Limit("pooled", PROX_STEPS, {"alpha": LAM}),
        over_all=True,
        never="α > 0, and its server step differs from an average from the first round on",
    ),
    "mr_mtl": Row(
        Card(whole, whole, whole, True, False, whole),
        {"lam": 0.5},
        Limit("coupled", PROX_STEPS, {"lam": LAM}),
        over_all=True,
        same=(local(lam=0.0),),
    ),
}


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [("scaffold", {}, 4), ("feddyn", {"alpha": 2.0}, 6)],
    ids=["scaffold", "feddyn"],
)
@pytest.mark.parametrize(("engine", "weights"), [("sequential", "uniform"), ("vectorized", "samples")])
def test_partial_participation_reaches_the_pooled_optimum_exactly(
    name: str, options: dict[str, float], steps: int, engine: str, weights: Weights
) -> None:
    method, settings = make_method(name, options), {"fraction": 0.5, "lr": 0.1, "weights": weights}
    sim = after(quadratic_simulation(method, steps, engine=engine, **settings), 60)
    pooled, _ = optimum("pooled", shares(weights))
    assert pooled is not None
    np.testing.assert_allclose(global_weight(sim), pooled, atol=2e-5)


def test_feddyn_with_scaled_alpha_reaches_the_optimum_weighted_by_samples() -> None:
    """Where it stands still mean_i q_i = 0, q_i = −n_i ∇F_i(w)/(α n̄); the optimum of equal clients is elsewhere."""
    method = make_method("feddyn", {"alpha": 2.0, "scale_alpha": True})
    sim = after(quadratic_simulation(method, 12, fraction=0.5, lr=0.1), 60)
    weighted, _ = optimum("pooled", shares("samples"))
    equal, _ = optimum("pooled", shares("uniform"))
    assert weighted is not None
    assert equal is not None
    np.testing.assert_allclose(global_weight(sim), weighted, atol=2e-4)
    assert np.abs(global_weight(sim) - equal).max() > 0.1
