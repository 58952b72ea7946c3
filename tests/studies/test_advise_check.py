"""Verdicts on advice, by tables and seeds small enough to be judged by hand."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pandas as pd
import pytest

from scripts import loaded


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return loaded("studies/advise_check.py")


def _table(**means: float) -> pd.DataFrame:
    rows = [(name, name.split("__")[0], mean, 0.01) for name, mean in means.items()]
    return pd.DataFrame(rows, columns=["label", "method", "mean", "mean_ci"])


def test_each_kind_is_judged_by_its_best_line(study: ModuleType) -> None:
    means = {"local": 0.5, "fedavg__a": 0.4, "fedavg__b": 0.6, "ditto": 0.7, "fedrep": 0.8}
    table = _table(**means, centralized=0.9, fedprox=0.9)
    for lower, shared, personal in ((False, "fedavg__b", "fedrep"), (True, "fedavg__a", "ditto")):
        best = {kind: line.label for kind, line in study.lines(table, lower=lower).items()}
        assert best == {"local": "local", "global": shared, "personal": personal}
    assert study.lines(_table(local=0.5, ditto=0.7), lower=False) is None


def test_without_seeds_both_intervals_are_put_together(study: ModuleType) -> None:
    # widths of .01 leave differences of .0141 open
    for personal, said in ((0.613, ("personal", "global")), (0.615, ("personal",))):
        found = study.lines(_table(local=0.5, fedavg=0.6, ditto=personal), lower=False)
        assert study.best(found, lower=False) == said
    found = study.lines(_table(local=0.5, fedavg=0.6, ditto=0.613), lower=True)
    assert study.best(found, lower=True) == ("local",)


def test_seeds_are_paired(study: ModuleType) -> None:
    found = study.lines(_table(local=0.5, fedavg=0.6, ditto=0.61), lower=False)
    # differences of .1, .1, .1 beside deviations of .1 between seeds; of .02, -.01, .02 their interval has 0
    seeds = {
        "ditto": {0: 0.5, 1: 0.6, 2: 0.7},
        "local": {0: 0.4, 1: 0.5, 2: 0.6},
        "fedavg": {0: 0.48, 1: 0.61, 2: 0.68},
    }
    assert study.best(found, lower=False, seeds=seeds) == ("personal", "global")
    one = {label: {0: numbers[0]} for label, numbers in seeds.items()}
    assert study.best(found, lower=False, seeds=one) == ("local", "personal", "global")
    assert study.best(found, lower=True, seeds=seeds) == ("local",)


def test_lines_that_were_run_again_are_judged_by_their_own_numbers(study: ModuleType) -> None:
    table = _table(local=0.5, fedavg=0.6, ditto=0.7, fedrep=0.8)
    seeds = {"ditto": {0: 0.5, 1: 0.7}, "local": {0: 0.6, 1: 0.8}, "fedavg": {0: 0.3, 1: 0.4}}
    found, near, paired = study.judge(table, seeds, lower=False)
    assert paired
    assert near == ("local", "global")  # .1 and .1; .3 and .4, whose interval of two seeds is .64 wide
    assert found["personal"].label == "ditto"
    assert found["personal"].mean == pytest.approx(0.6)
    assert found["personal"].half == pytest.approx(12.7062 * 0.1, rel=1e-4)
    for some in ({"ditto": seeds["ditto"]}, {}):
        found, near, paired = study.judge(table, some, lower=False)
        assert (found["personal"].label, near, paired) == ("fedrep", ("personal",), False)


def test_a_verdict_is_open_where_the_advice_is_one_of_several(study: ModuleType) -> None:
    def row(advised: str, *near: str) -> object:
        lines = {kind: study.Line(kind, 0.5, 0.1) for kind in study.KINDS}
        return study.Row("folder", advised, advised != "global", lines, near, True)

    rows = [row("local", "local"), row("local", "local", "personal"), row("global", "local", "personal")]
    assert [one.verdict for one in rows] == ["hit", "open", "miss"]
    said = study.counts(rows)
    assert said.startswith(
        "3 federations: 1 hits, 1 misses, 1 open. Of 2 advices that call themselves sure 1 hit and 0 miss"
    )
    assert said.endswith("always local 1 and 0, always personal 0 and 1, always global 0 and 3.")
    assert "| folder * | global (not sure) |" in study.table(rows)


def test_a_table_is_judged_by_the_metric_in_its_head(study: ModuleType) -> None:
    assert [study.metric(name) for name in ("school", "tcga", "heart_gains")] == ["mse", "c_index", None]


@pytest.mark.parametrize(
    ("radius2", "expected"),
    [(-1.0, "global"), (0.009, "global"), (0.011, "personal"), (0.09, "personal"), (0.11, "local")],
)
def test_regimes_are_those_of_the_noise(study: ModuleType, radius2: float, expected: str) -> None:
    """Thresholds of R^2: V / N and V, for V = 0.1 of ten clients."""
    facts = SimpleNamespace(radius2=radius2, noise=SimpleNamespace(value=0.1), clients=10)
    assert study.regime(facts) == expected
