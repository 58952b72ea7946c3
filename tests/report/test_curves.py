"""Rounds and bytes to a target, and the choice of a round."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import tailorfl
from report.tiny import invoke
from tailorfl.errors import ConfigError
from tailorfl.evaluation.leading import check_target
from tailorfl.report.curves import best_rounds, sections, to_target
from tailorfl.report.document import write_report
from tailorfl.report.result import ExperimentResult

CURVES = {
    # label, seed: (accuracy after rounds 2, 4, 6), (bytes until then), best by validation
    ("A", 0): ((0.5, 0.8, 0.7), (10, 20, 30), 0.7),
    ("A", 1): ((0.8, 0.9, 0.85), (10, 20, 30), 0.9),
    ("A", 2): ((0.7, 0.7, 0.85), (10, 20, 30), 0.8),
    ("B", 0): ((0.2, 0.3, 0.4), (0, 0, 0), 0.4),
    ("B", 1): ((0.2, 0.8, 0.1), (0, 0, 0), 0.2),
}


def made_up(metric: str = "accuracy", curves: Any = CURVES) -> ExperimentResult:
    jobs: Any = []
    for (label, seed), (values, sent, chosen) in curves.items():
        every = [v for value in values for v in (math.nan, value)]
        columns = {"round": range(1, 7), "bytes": np.repeat(sent, 2), f"personal/local/{metric}": every}
        store = SimpleNamespace(rounds=partial(pd.DataFrame, columns))
        summary = {"label": label, "seed": seed, "model": "personal", "metric": metric, "method": "ditto"}
        last = None if math.isnan(values[-1]) else values[-1]
        more = {"best_by_validation": {"local": chosen}, "metrics": {"mean": last}}
        jobs.append((summary | more, store))
    return ExperimentResult(Path("nowhere"), jobs)


def test_the_first_round_that_is_good_enough_counts_and_seeds_that_never_get_there_do_not() -> None:
    table = to_target(made_up(), 0.8)
    a, b = table.loc["A"], table.loc["B"]
    assert (a["seeds"], a["reached"], b["seeds"], b["reached"]) == (3, 3, 2, 1)
    assert (a["rounds"], a["bytes"]) == (4.0, 20.0)  # rounds 4, 2 and 6
    assert a["rounds_ci"] == pytest.approx(stats.t.ppf(0.975, 2) * np.std([4, 2, 6], ddof=1) / np.sqrt(3))
    assert (b["rounds"], b["bytes"]) == (4.0, 0.0)
    assert math.isnan(b["rounds_ci"])
    none = to_target(made_up(), 0.95)
    assert none["reached"].tolist() == [0, 0]
    assert none["rounds"].isna().all()


def test_smaller_is_better_for_errors() -> None:
    result = made_up("mse")
    table = to_target(result, 0.2)
    assert table["reached"].tolist() == [0, 2]
    assert table.loc["B", "rounds"] == 2.0
    assert best_rounds(result).loc["B", "best_on_test"] == pytest.approx((0.2 + 0.1) / 2)


def test_the_last_round_the_validated_one_and_the_best_on_test_are_three_columns() -> None:
    table = best_rounds(made_up())
    for label, expected in (("A", [0.8, 0.8, 2.55 / 3]), ("B", [0.25, 0.3, 0.6])):
        assert table.loc[label, ["last", "by_validation", "best_on_test"]].tolist() == pytest.approx(expected)
    rounds = sections(made_up())[-1]
    assert "optimistic" in rounds.head[-1]
    assert rounds.rows[0][1].text.startswith("80.00 ± ")


def test_a_metric_that_no_client_has_in_the_last_round_is_no_number_there() -> None:
    """Not that of an earlier round; nor does a method without any number keep the others from the table."""
    curves = {
        ("A", 0): ((0.5, 0.8, math.nan), (1, 2, 3), 0.8),
        ("B", 0): ((math.nan,) * 3, (1, 2, 3), None),
        ("C", 0): ((0.1, 0.2, 0.3), (1, 2, 3), 0.3),
    }
    table = best_rounds(made_up(curves=curves))
    expected = {"A": [math.nan, 0.8, 0.8], "B": [math.nan] * 3, "C": [0.3, 0.3, 0.3]}
    for label, numbers in expected.items():
        found = table.loc[label, ["last", "by_validation", "best_on_test"]].tolist()
        assert found == pytest.approx(numbers, nan_ok=True)
    assert [row[1].text for row in sections(made_up(curves=curves))[-1].rows] == ["–", "–", "30.00 %"]


def test_a_target_in_percent_is_refused_with_the_share_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"between 0 and 1, but is 95; .*0\.95"):
        check_target(95, "accuracy")
    check_target(95, "mse")
    check_target(None, "accuracy")
    with pytest.raises(ConfigError, match="between 0 and 1"):
        tailorfl.run(eval={"target": 90}, rounds=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_participants_are_those_of_the_round_on_their_own_test_parts(run: ExperimentResult) -> None:
    clients, rounds = run.clients, run.rounds
    for label, number in (("local", 1), ("local", 3), ("ditto", 1), ("ditto", 3)):
        here = f"label == {label!r} and seed == 2 and round == {number}"
        records = clients.query(f"{here} and model == 'personal'").set_index("client")
        row = rounds.query(here).iloc[0]
        some, own = records[records["set"] == "participants"], records[records["set"] == "local"]
        assert sorted(some.index) == sorted(row["clients"])
        assert len(some) == 3  # of 5
        assert (some["accuracy"] == own.loc[some.index, "accuracy"]).all()
        assert row["personal/participants/accuracy"] == pytest.approx(some["accuracy"].mean())
    assert "deployed.participants" in run.table.columns
    assert "deployed_sharpness" in run.table.columns


def test_alone_they_are_the_only_ones_that_are_looked_at(tmp_path: Path, run: ExperimentResult) -> None:
    changes = {"methods": ["local"], "seeds": [2], "eval": {"every": 1, "sets": ["participants"]}}
    alone = tailorfl.run(run.config.to_dict() | changes, out=tmp_path / "alone").clients
    early = alone[alone["round"] == 2]
    assert set(early["set"]) == {"participants"}
    both = run.clients.query("label == 'local' and seed == 2 and round == 2 and set == 'participants'")
    columns = ["label", "model", "client", "accuracy", "samples"]
    first, second = (f[columns].sort_values(columns).reset_index(drop=True) for f in (early, both))
    pd.testing.assert_frame_equal(first, second)


def test_where_the_cohort_is_secret_nobody_is_told_who_took_part(tmp_path: Path) -> None:
    settings = {
        "data": {"clients": 6}, "fraction": 0.5, "sampling": "bernoulli", "model": "logistic",
        "train": {"dp": {"level": "client", "clip": 1.0, "noise": 1.0, "accountant": "rdp"}},
        "method": {"name": "fedavg", "weights": "uniform"}, "eval": {"sets": ["participants"]},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="participants"):
        tailorfl.run(settings, out=tmp_path / "x")


@pytest.mark.slow
def test_the_report_has_the_target_and_the_choice_of_rounds(run: ExperimentResult) -> None:
    markdown, page = (file.read_text() for file in write_report(run))
    for text in (markdown, page):
        assert "Until accuracy is 50 %" in text
        assert "Best on TEST (optimistic)" in text
    assert "Until accuracy is 30 %" in invoke("report", run.path, "--target", 0.3)
    assert "0.3 for 30 %" in invoke("report", run.path, "--target", 30, code=2)
