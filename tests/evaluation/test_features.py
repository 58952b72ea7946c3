"""The distance of personal from global features: its formula, and where it is recorded."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from methods.settings import make
from methods.small import simulation
from tailorfl.evaluation.features import feature_distances, features
from tailorfl.evaluation.protocols import Protocol, evaluate
from tailorfl.evaluation.summary import summaries


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
