"""The distance of personal from global features: its formula, and where it is recorded."""

from __future__ import annotations

import torch

from methods.settings import make
from methods.small import simulation
from tailorfl.evaluation.features import feature_distances
from tailorfl.evaluation.protocols import Protocol, evaluate, summaries


def test_it_is_the_mean_norm_of_the_difference() -> None:
    sim = simulation(make("fedoa"), rounds=2)
    ((_, models),) = sim.personal_models((0,))
    source, rows = sim.federation.source, torch.tensor([3, 1, 8])
    x = source.take(rows)
    w, v = sim.server, models[0]

    def features(state: object) -> torch.Tensor:
        hidden: torch.Tensor = sim.model.outputs_and_features(state, x)[1]  # type: ignore[arg-type]
        return hidden

    found = feature_distances(sim.model, v, w, source, rows)
    torch.testing.assert_close(found, (features(v) - features(w)).square().sum(1).sqrt())
    assert float(feature_distances(sim.model, w, w, source, rows).max()) == 0.0
    assert feature_distances(sim.model, v, w, source, rows[:0]).shape == (0,)


def test_records_of_personal_models_have_it_where_it_is_asked_for() -> None:
    sim = simulation(make("fedoa"), rounds=2)
    plain = evaluate(sim, Protocol(sets=("local", "global")))
    assert not any("feature_distance" in record for record in plain)
    records = evaluate(sim, Protocol(sets=("local", "global"), feature_distance=True))
    for record in records:
        assert ("feature_distance" in record) == (record["model"] == "personal")
    ((_, models),) = sim.personal_models((2,))
    rows = torch.from_numpy(sim.federation.test[2])
    wanted = float(feature_distances(sim.model, models[0], sim.server, sim.federation.source, rows).mean())
    (mine,) = [r for r in records if (r["client"], r["set"], r["model"]) == (2, "local", "personal")]
    assert mine["feature_distance"] == wanted
    assert "feature_distance" in summaries(records)["personal"]["local"]
    assert "feature_distance" not in summaries(records)["global"]["local"]


def test_without_a_global_model_there_is_nothing_to_measure_from() -> None:
    records = evaluate(simulation("local", rounds=1), Protocol(sets=("local",), feature_distance=True))
    assert not any("feature_distance" in record for record in records)
