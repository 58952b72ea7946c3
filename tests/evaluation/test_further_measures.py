"""Sharpness and feature distances against closed forms and plain torch, and which records have them."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.func import functional_call

from methods.settings import make
from methods.small import personal, simulation
from tailorfl.data.source import Source
from tailorfl.evaluation import further_measures as module
from tailorfl.evaluation.further_measures import feature_distances, features, mean_loss, sharpness
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.evaluation.summary import summaries
from tailorfl.models.functional import Model

# -- sharpness -------------------------------------------------------------------------------------------------------


def regression(rows: int = 40) -> tuple[Model, TensorDict, Source]:
    """A linear model without bias: the loss is ½ (w − w*)ᵀ H (w − w*) + constant, H = XᵀX/n."""
    torch.manual_seed(0)
    x = torch.randn(rows, 3) * torch.tensor([3.0, 1.0, 0.5])
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1 * torch.randn(rows, 1)
    model = Model.of(nn.Linear(3, 1, bias=False))
    return model, model.init(0), Source("linear", x, y, "regression", 1)


def test_on_a_quadratic_it_is_rho_times_the_slope_and_half_the_curvature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, state, source = regression()
    rows, rho = torch.arange(len(source.x)), 0.3
    h = source.x.T @ source.x / len(source.x)
    w = state["weight"][0]
    g = h @ w - source.x.T @ source.y[:, 0] / len(source.x)
    u = g / g.norm()
    expected = rho * float(g.norm()) + rho**2 / 2 * float(u @ h @ u)
    whole = sharpness(model, state, source, rows, rho), mean_loss(model, state, source, rows)
    assert whole[0] == pytest.approx(expected, rel=1e-4)
    monkeypatch.setattr(module, "rows_at_once", lambda _: 7)  # 40 = 5 * 7 + 5: blocks of unequal size
    blocks = sharpness(model, state, source, rows, rho), mean_loss(model, state, source, rows)
    assert blocks == pytest.approx(whole, rel=1e-5)


def test_where_nothing_slopes_it_is_zero_and_without_samples_nothing() -> None:
    model, state, source = regression()
    rows = torch.arange(len(source.x))
    best = torch.linalg.lstsq(source.x.double(), source.y.double()).solution.T.float()
    flat = TensorDict({"weight": torch.zeros(1, 3)}, batch_size=[])
    still = Source("zero", torch.zeros(4, 3), torch.zeros(4, 1), "regression", 1)
    assert sharpness(model, flat, still, torch.arange(4), 0.5) == 0.0
    assert math.isnan(sharpness(model, state, source, rows[:0], 0.5))
    at_best = sharpness(model, TensorDict({"weight": best}, batch_size=[]), source, rows, 1e-2)
    assert 0 <= at_best < 1e-3  # nothing but curvature


def test_records_have_it_of_every_model_where_it_is_asked_for() -> None:
    sim = simulation(make("ditto"), "batch_norm", rounds=2)
    before = {n: t.clone() for n, t in personal(sim).items()}
    plain = evaluate(sim, Protocol(sets=("local", "global")))
    records = evaluate(sim, Protocol(sets=("local", "global"), sharpness=0.05))
    for record, other in zip(records, plain, strict=True):
        assert record == {**other, "sharpness": record["sharpness"]}  # and changes nothing else
    assert all(torch.equal(t, before[n]) for n, t in personal(sim).items())
    rows = torch.from_numpy(sim.federation.test[2])
    x, y = sim.federation.source.take(rows), sim.federation.source.y[rows]
    network = sim.model.module.eval()
    for model, state in (
        ("personal", {n: t[2] for n, t in before.items()}),
        ("global", dict(sim.server.items())),
    ):
        leaves = {n: state[n].clone().requires_grad_() for n in sim.model.parameters}
        loss = nn.functional.cross_entropy(functional_call(network, {**state, **leaves}, (x,)), y)
        g = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        norm = torch.cat([t.flatten() for t in g.values()]).norm()
        moved = {n: leaves[n].detach() + 0.05 * g[n] / norm for n in g}
        with torch.no_grad():
            up = nn.functional.cross_entropy(functional_call(network, {**state, **moved}, (x,)), y)
        mine = next(r for r in records if (r["client"], r["set"], r["model"]) == (2, "local", model))
        assert mine["sharpness"] == pytest.approx(float(up - loss.detach()), rel=1e-3, abs=1e-6)
    worst = summaries(records)["personal"]["local"]["sharpness"]
    assert worst["worst10"] == worst["max"]  # a steep model is a bad one


# -- the distance of personal from global features -------------------------------------------------------------------


def test_it_is_the_mean_norm_of_the_difference() -> None:
    sim = simulation(make("fedoa"), rounds=2)
    ((_, models),) = sim.personal_models((0,))
    source, rows = sim.federation.source, torch.tensor([3, 1, 8])
    x = source.take(rows)
    w, v = sim.server, models[0]

    def hidden(state: object) -> torch.Tensor:
        found: torch.Tensor = sim.model.outputs_and_features(state, x)[1]  # type: ignore[arg-type]
        return found

    def distances(one: TensorDict, other: TensorDict, where: torch.Tensor) -> torch.Tensor:
        return feature_distances(*(features(sim.model, state, source, where) for state in (one, other)))

    torch.testing.assert_close(distances(v, w, rows), (hidden(v) - hidden(w)).square().sum(1).sqrt())
    assert float(distances(w, w, rows).max()) == 0.0
    assert distances(v, w, rows[:0]).shape == (0,)


def test_records_of_personal_models_have_it_where_it_is_asked_for() -> None:
    sim = simulation(make("fedoa"), rounds=2)
    plain = evaluate(sim, Protocol(sets=("local", "global")))
    assert not any("feature_distance" in record for record in plain)
    records = evaluate(sim, Protocol(sets=("local", "global"), feature_distance=True))
    for record in records:
        assert ("feature_distance" in record) == (record["model"] == "personal")
    ((_, models),) = sim.personal_models((2,))
    rows = torch.from_numpy(sim.federation.test[2])
    mine_and_shared = (features(sim.model, s, sim.federation.source, rows) for s in (models[0], sim.server))
    wanted = float(feature_distances(*mine_and_shared).mean())
    (mine,) = [r for r in records if (r["client"], r["set"], r["model"]) == (2, "local", "personal")]
    assert mine["feature_distance"] == wanted
    assert "feature_distance" in summaries(records)["personal"]["local"]
    assert "feature_distance" not in summaries(records)["global"]["local"]


def test_without_a_global_model_there_is_nothing_to_measure_from() -> None:
    records = evaluate(simulation("local", rounds=1), Protocol(sets=("local",), feature_distance=True))
    assert not any("feature_distance" in record for record in records)
