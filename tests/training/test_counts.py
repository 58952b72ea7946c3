"""Counts: a Poisson regression trained by the library is scikit-learn's, and says how many are expected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import PoissonRegressor
from sklearn.metrics import mean_absolute_error, mean_poisson_deviance

import tailorfl
from tailorfl.data.build import build
from tailorfl.data.own import from_table
from tailorfl.errors import DataError
from tailorfl.export.predict import predict


def visits(rows: int = 240) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "site": np.repeat(["ash", "elm"], rows // 2),
            "age": rng.normal(60, 10, rows),
            "bmi": rng.normal(25, 4, rows),
        }
    )
    frame["visits"] = rng.poisson(
        np.exp(0.4 * (frame["age"] - 60) / 10 - 0.3 * (frame["bmi"] - 25) / 4 + 0.5)
    )
    return frame


def test_the_pooled_model_is_scikit_learns(tmp_path: Path) -> None:
    frame = visits()
    source = from_table(frame, label="visits", client="site", task="counts")
    data = {"normalise": "federated", "split": {"train": 0.8, "test": 0.2}}
    result = tailorfl.run(
        source=source, data=data, model={"name": "linear", "bias": True}, method="centralized", rounds=40, seeds=1,
        train={"lr": 0.3, "batch_size": 1000}, eval={"every": 0}, out=tmp_path / "run",
    )  # fmt: skip
    whole = build(source=source, **data, seed=0)  # type: ignore[arg-type]
    rows = np.concatenate(list(whole.train))
    reference = PoissonRegressor(alpha=0, tol=1e-10).fit(whole.source.x[rows], whole.source.y[rows, 0])
    said = predict(tmp_path / "run", frame, client="global", source=source)
    np.testing.assert_allclose(said["predicted"], reference.predict(whole.source.x), rtol=1e-3)
    test = whole.test[0]
    truth, expected = whole.source.y[test, 0].numpy(), reference.predict(whole.source.x[test])
    assert result.table["mean"].iloc[0] > 0
    found = result.clients
    mine = found[(found["client"] == 0) & (found["set"] == "local")].iloc[-1]
    assert mine["deviance"] == pytest.approx(mean_poisson_deviance(truth, expected), rel=1e-3)
    assert mine["mae"] == pytest.approx(mean_absolute_error(truth, expected), rel=1e-3)


@pytest.mark.parametrize("wrong", [-1, 0.5])
def test_other_numbers_are_no_counts(wrong: float) -> None:
    frame = visits(8).astype({"visits": float})
    frame.loc[3, "visits"] = wrong
    with pytest.raises(DataError, match=r"counts task .*1 of 8 .*first sample 3"):
        from_table(frame, label="visits", client="site", task="counts")
