"""A paper's numbers beside ours."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from tailorfl.errors import ConfigError
from tailorfl.report.published import beside, notes
from tailorfl.report.tables import Column


def job(label: str, seed: int, accuracies: list[float]) -> tuple[dict[str, Any], Any]:
    """A finished job whose last round is 2; records of other rounds, sets and models are decoys."""
    final = [
        {"round": 2, "set": "local", "model": "personal", "client": client, "accuracy": accuracy}
        for client, accuracy in enumerate(accuracies)
    ]
    decoys = [
        {**final[0], "accuracy": 9.0, key: value}
        for key, value in (("round", 1), ("set", "val"), ("model", "global"))
    ]
    frame = pd.DataFrame([*decoys, *final])
    return {"label": label, "seed": seed, "rounds": 2, "model": "personal"}, SimpleNamespace(
        clients=lambda: frame
    )


def result() -> Any:
    table = pd.DataFrame({"mean": [0.8], "mean_ci": [0.05]}, index=["ditto"])
    jobs = [job("ditto", 0, [0.6, 0.7]), job("ditto", 1, [0.8, 0.9])]
    return cast(
        Any, SimpleNamespace(table=table, jobs=jobs, metric="accuracy", columns=[Column("mean", "mean")])
    )


def test_columns_of_the_table() -> None:
    (row,) = beside(result(), {"source": "Table 2", "ditto": {"mean": 0.75}}).to_dict("records")
    assert (row["label"], row["quantity"], row["published"], row["ours"]) == ("ditto", "mean", 0.75, 0.8)
    assert row["ours_ci"] == 0.05
    assert row["difference"] == pytest.approx(0.05)


def test_every_client_is_a_mean_over_seeds_of_its_final_local_metric() -> None:
    rows = beside(result(), {"ditto": {"clients": [0.5, 0.5, 0.5]}})
    assert rows["ours"].tolist()[:2] == pytest.approx([0.7, 0.8])
    assert math.isnan(rows["ours"].tolist()[2])


def test_method_without_a_result_has_no_number() -> None:
    (row,) = beside(result(), {"fedrep": {"mean": 0.9}}).to_dict("records")
    assert math.isnan(row["ours"])


def test_number_that_is_no_column() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'mean'"):
        beside(result(), {"ditto": {"maen": 0.9}})


def test_remarks() -> None:
    assert notes({"source": "Table 2", "ditto": {"mean": 0.1}}) == ["source: Table 2"]
