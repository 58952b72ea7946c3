"""The numbers of a result, against numbers worked out by hand; also where smaller is better, and after a resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tailorfl
from tailorfl.data.own import from_tensors
from tailorfl.data.source import Source
from tailorfl.errors import ConfigError, RunError
from tailorfl.evaluation.comparisons import noise
from tailorfl.report.columns import columns_of
from tailorfl.report.findings import findings
from tailorfl.report.page.charts import Look
from tailorfl.report.page.others import other_sets
from tailorfl.report.published import beside, notes, verdict
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.job import Job, Observer
from tailorfl.runs.store import RunStore
from tailorfl.runs.trained_models import restore

CLIENTS = 10
Stored = Callable[..., Any]


@pytest.mark.parametrize(("metric", "shares"), [("accuracy", (0.3, 0.9)), ("mse", (0.6, 0.0))])
def test_the_share_beating_local_is_counted_against_local_of_the_same_seed(
    metric: str, shares: tuple[float, float], stored: Stored, tmp_path: Path
) -> None:
    """Of ten clients seed 0 has three above, six below and one equal; seed 1 has nine above and one equal."""
    jobs = []
    for seed, differences in ((0, [1] * 3 + [-1] * 6 + [0]), (1, [1] * 9 + [0])):
        local = [10.0 * seed + 0.01 * c for c in range(CLIENTS)]
        ditto = [v + 0.001 * d for v, d in zip(local, differences, strict=True)]
        jobs += [stored("local", seed, local, metric), stored("ditto", seed, ditto, metric)]
    result = ExperimentResult(tmp_path, jobs)
    values = {(r.method, r.seed): r.values for r in result.seed_results()}
    assert [values["ditto", seed]["share_beating_local"] for seed in (0, 1)] == pytest.approx(list(shares))
    assert all("share_beating_local" not in values["local", seed] for seed in (0, 1))
    assert result.table.loc["ditto", "share_beating_local"] == pytest.approx(np.mean(shares))


def test_clients_that_were_not_evaluated_with_both_methods_are_not_compared(
    stored: Stored, tmp_path: Path
) -> None:
    """In a deployment a client may miss the last evaluation of one method."""
    jobs = [
        stored("local", 0, [0.1, 0.6, 0.3]),
        stored("ditto", 0, [0.2, 0.5]),
        stored("fedrep", 0, [0.2] * 4),
    ]
    numbers = {r.method: r.values for r in ExperimentResult(tmp_path, jobs).seed_results()}
    assert numbers["ditto"]["share_beating_local"] == 1 / 2
    assert numbers["fedrep"]["share_beating_local"] == pytest.approx(1 / 3)


def test_clients_whose_data_are_pooled_were_all_sampled(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []
    for method, cohort in (("centralized", [0]), ("fedavg", [0, 2])):
        summary, store = stored(method, 0, [0.2, 0.1, 0.6])
        monkeypatch.setattr(
            store, "rounds", partial(pd.DataFrame, {"round": [1, 2], "clients": [cohort] * 2})
        )
        jobs.append((summary, store))
    result = ExperimentResult(tmp_path, jobs)
    (table,) = other_sets(result, Look.of(result)).tables
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["centralized", "30.00 %", "–"],
        ["fedavg", "40.00 %", "10.00 %"],
    ]
    pooled = other_sets(ExperimentResult(tmp_path, jobs[:1]), Look.of(result))
    assert not pooled.tables


def test_differences_are_paired_by_seed(stored: Stored, tmp_path: Path) -> None:
    """Ditto is .1 and .3 above LocalTrain of the same seed: .2 ± t(0.975, 1) · .1 with t = 12.7062."""
    levels = {"local": (0.2, 0.5), "ditto": (0.3, 0.8)}
    jobs = [stored(m, seed, [v] * CLIENTS) for m, values in levels.items() for seed, v in enumerate(values)]
    table = ExperimentResult(tmp_path, jobs).differences()
    assert table.loc["ditto", "difference"] == pytest.approx(0.2)
    assert table.loc["ditto", "ci"] == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert table.loc["local", "difference"] == 0
    assert ExperimentResult(tmp_path, jobs[2:]).differences().empty
    relabelled = ExperimentResult(tmp_path, [({**s, "label": s["label"].title()}, job) for s, job in jobs])
    assert relabelled.differences("Ditto").loc["Local", "difference"] == pytest.approx(-0.2)
    assert relabelled.differences("ditto").equals(relabelled.differences("Ditto"))
    # Of two lines of LocalTrain the first counts, as in tables and findings.
    second = [({**s, "label": "second", "method": "local"}, job) for s, job in jobs[2:]]
    both = ExperimentResult(tmp_path, [*relabelled.jobs, *second])
    assert both.reference == "Local"
    assert both.differences().loc["Ditto", "difference"] == pytest.approx(0.2)
    with pytest.raises(ConfigError, match=r"'dito'.*'Ditto'"):
        relabelled.differences("dito")


@pytest.mark.usefixtures("plotting")
def test_a_metric_that_no_client_has_leaves_tables_without_pictures(stored: Stored, tmp_path: Path) -> None:
    """Such as an AUC where every client has one class: the run is not in vain."""
    undefined = {"metrics": {"mean": None, "personal": {"local": {"auc": {"mean": None}}}}}
    jobs = [stored(label, 0, [math.nan] * CLIENTS, "auc", **undefined) for label in ("ditto", "local")]
    result = ExperimentResult(tmp_path, jobs)
    assert result.write() == []
    assert "| Ditto | – |" in (tmp_path / "comparison.md").read_text()
    assert findings(result)[0] == "No two methods have AUC with the same seed, so none can be compared."


def test_a_folder_of_variants_is_no_result(tmp_path: Path) -> None:
    config = tailorfl.load_config({"variants": {"even": {"rounds": 1}}})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    for read in (ExperimentResult.load, restore):
        with pytest.raises(ConfigError, match=r"variants \(even\)"):
            read(tmp_path)


@pytest.mark.usefixtures("plotting")
def test_pictures_go_to_a_folder_by_its_name(stored: Stored, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="file"):
        ExperimentResult(tmp_path, [stored("ditto", 0, [0.1])]).plot(f"{tmp_path}/file")


def test_columns_are_those_that_some_job_has_a_number_for(stored: Stored, tmp_path: Path) -> None:
    metrics = {"auc": 0.5, "balanced_accuracy": 0.4, "accuracy": 0.6}
    personal = {"local": {k: {"mean": v} for k, v in metrics.items()}, "far": {"auc": {"mean": 0.3}}}
    more = {
        "clients": 11, "privacy": {"epsilon": {"max": 2.5}}, "selection": {"round": 1}, "gradients_each": 7,
        "metrics": {"mean": 0.5, "worst10": None, "personal": personal},
    }  # fmt: skip
    jobs = [stored("ditto", 0, [0.1], "auc", **more), stored("local", 0, [0.2], "auc", rounds=1)]
    result = ExperimentResult(tmp_path, jobs)
    assert [column.key for column in result.columns] == [
        "mean", "worst10", "epsilon", "bytes", "share_beating_local", "accuracy", "weighted_mean", "std", "best10",
        "deployed.far", "selected_round", "rounds", "gradients_each", "seconds",
    ]  # fmt: skip
    line = result.table.loc["ditto"]
    expected = {
        "accuracy": 0.6,
        "deployed.far": 0.3,
        "selected_round": 1,
        "epsilon": 2.5,
        "bytes": 3,
        "rounds": 2,
    }
    assert {name: line[name] for name in expected} == expected
    assert math.isnan(line["worst10"])
    assert result.table.loc["local", "epsilon"] == math.inf  # a row without privacy guarantees nothing


def test_published_numbers_stand_beside_means_over_seeds(stored: Stored, tmp_path: Path) -> None:
    jobs = [stored("ditto", seed, [0.6 + 0.1 * seed, 0.7 + 0.1 * seed]) for seed in range(3)]
    cells = {"mean": 0.7, "clients": [0.5, 0.5, 0.5]}
    published = {"source": "Table 2", "ditto": cells, "fedrep": {"mean": 0.9}}
    result = ExperimentResult(tmp_path, jobs)
    rows = beside(result, published)
    assert rows["quantity"].tolist() == ["mean", "client 0", "client 1", "client 2", "mean"]
    assert rows["ours"].tolist() == pytest.approx([0.75, 0.7, 0.8, math.nan, math.nan], nan_ok=True)
    assert rows["ours_ci"][0] == result.table.loc["ditto", "mean_ci"] > 0
    assert rows["difference"].tolist() == pytest.approx([0.05, 0.2, 0.3, math.nan, math.nan], nan_ok=True)
    assert notes(published) == ["source: Table 2"]
    with pytest.raises(ConfigError, match="'mean'"):
        beside(result, {"ditto": {"maen": 0.9}})


def test_a_published_number_within_the_noise_is_reproduced(stored: Stored, tmp_path: Path) -> None:
    jobs = [
        stored("ditto", seed, [v], metrics={"mean": v, "worst10": 0.5, "personal": {}})
        for seed, v in enumerate([0.7, 0.8])
    ]
    cells = {"mean": 0.755, "worst10": {"value": 0.99, "std": 0.01}}
    rows = beside(ExperimentResult(tmp_path, jobs), {"runs": 3, "ditto": cells})
    assert rows["noise"].tolist() == pytest.approx([noise([0.7, 0.8], None, 3), noise([0.5, 0.5], 0.01, 3)])
    assert rows["published"].tolist() == [0.755, 0.99]
    assert rows["std"].tolist() == pytest.approx([math.nan, 0.01], nan_ok=True)
    assert rows["difference"].tolist() == pytest.approx([-0.005, -0.49])
    assert rows["verdict"].tolist() == ["reproduced", "off by -0.4900"]
    alone = beside(ExperimentResult(tmp_path, jobs[:1]), {"ditto": cells})
    assert alone["verdict"].tolist() == ["", ""]  # one run on either side


@pytest.mark.parametrize(
    ("published", "ours", "spread", "expected"),
    [
        (0.8, 0.8, 0.0, "reproduced"),
        (0.8, 0.807, 0.007, "reproduced"),
        (0.8, 0.807, 0.0069, "off by +0.0070"),
        (0.8, 0.75, 0.04, "off by -0.0500"),
        (-2.0, -2.019, 0.2, "reproduced"),
        (0.8, 0.791, 0.3, "undecided"),  # more than a hundredth, though within the noise
        (0.8, math.nan, 0.1, ""),
        (0.8, 0.8, math.nan, ""),
    ],
)
def test_verdicts_of_published_numbers(published: float, ours: float, spread: float, expected: str) -> None:
    assert verdict(published, ours, spread + 1e-12) == expected


@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_published_numbers_of_rounds_chosen_on_test_data(metric: str, tmp_path: Path) -> None:
    by_round = np.array([[0.3, 0.2], [0.9, 0.7], [0.1, 0.8]])  # of two clients after each of three rounds
    with RunStore.create(tmp_path / "job", {}) as store:
        for number, values in enumerate(by_round, start=1):
            row = {"round": number, "model": "global", "samples": 1}
            parts = {"local": values, "val": values + 9.0}
            rows = [(part, c, v) for part, vs in parts.items() for c, v in enumerate(vs)]
            store.append_clients([{**row, "client": c, "set": part, metric: v} for part, c, v in rows])
            store.append_round({"round": number, f"global/local/{metric}": float(values.mean())})
        summary = {
            "method": "fedavg", "label": "A", "seed": 0, "rounds": 3, "model": "global", "metric": metric,
            "metrics": {"mean": 0.0, "global": {}}, "bytes_up": 1, "bytes_down": 2, "seconds": 1.0,
        }  # fmt: skip
        store.finish(summary)
    best = np.min if metric == "mse" else np.max
    expected = {"best_on_test": best(by_round.mean(axis=1)), "best_of_each": best(by_round, axis=0).mean()}
    published = dict.fromkeys("AB", dict.fromkeys(expected, 0.5))
    rows = beside(ExperimentResult(tmp_path, [(summary, store)]), published)
    assert rows["ours"].tolist() == pytest.approx([*expected.values(), math.nan, math.nan], nan_ok=True)


def test_tables_have_titles_of_methods_and_programs_their_labels(stored: Stored, tmp_path: Path) -> None:
    """A label that nobody chose begins with the name of its method, whose title then takes the name's place."""
    mine = {"method": "mine", "title": "My Method"}
    names = {
        "local": ({}, "LocalTrain"),
        "fedavg_ft": ({}, "FedAvg+FT"),
        "fedavg_ft lam=1": ({"method": "fedavg_ft"}, "FedAvg+FT lam=1"),
        "my own": ({"method": "fedavg_ft"}, "my own"),
        "mine": (mine, "My Method"),
        "mine lam=2": (mine, "My Method lam=2"),
        "other": (mine, "other"),
    }
    jobs = [stored(label, 0, [0.5], **more) for label, (more, _) in names.items()]
    result = ExperimentResult(tmp_path, jobs)
    assert result.display_names == {label: shown for label, (_, shown) in names.items()}
    assert result.displayed.labels == result.displayed.displayed.labels == list(result.display_names.values())
    assert result.displayed.table["mean"].tolist() == result.table["mean"].tolist()
    assert result.labels == list(names), "the result itself is as before"
    assert "| FedAvg+FT lam=1 |" in result.markdown
    taken = ExperimentResult(tmp_path, [*jobs, stored("FedAvg+FT", 0, [0.5], method="ditto")])
    assert taken.display_names == {label: label for label in taken.labels}, "no two rows are called the same"


def test_columns_of_test_sets_say_whose_data_they_are() -> None:
    expected = {
        "global": "on all clients' data",
        "heldout": "on held-out clients",
        "heldout+1": "on held-out clients after 1 step",
        "heldout+10": "on held-out clients after 10 steps",
        "official": "on the official test set",
        "participants": "on participants",
        "c+d": "on c+d",
    }
    measured = {name: {"accuracy": {"mean": 0.5}} for name in expected}
    summary = {"metrics": {"personal": {"local": {}, **measured}, "global": measured}}
    columns = columns_of([{**summary, "model": "personal", "rounds": 1}], "accuracy")
    titles = {column.key: column.title for column in columns}
    for name, title in expected.items():
        assert titles[f"deployed.{name}"] == title
        assert titles[f"shared.{name}"] == f"server model {title}"


@pytest.mark.parametrize(("metric", "bad"), [("accuracy", 0.1), ("mse", 1.7)])
def test_worst_clients_of_several_seeds_stand_by_how_often_they_are(
    metric: str, bad: float, stored: Stored, tmp_path: Path
) -> None:
    names = ("bern", "chur", "davos", "elm", "fex")
    jobs = [
        stored("fedavg", seed, [bad if c == k else 0.9 for c in range(5)], metric, names=names, clients=5)
        for seed, k in enumerate([0, 1, 2, 3, 1, 4, 1, 2])
    ]
    result = ExperimentResult(tmp_path, jobs)
    assert result.worst_clients == [
        "worst client of fedavg: chur (in 3 of 8 seeds), davos (in 2 of 8 seeds), bern (in 1 of 8 seeds) and 2 more"
    ]
    assert {"worst client", "best client"} < {column.title for column in result.columns}
    many = ExperimentResult(tmp_path, [stored("local", 0, [0.5] * 11, metric, clients=11)])
    assert many.worst_clients == []
    assert "worst 10 % of clients" in {column.title for column in many.columns}


def regression(clients: int = CLIENTS) -> Source:
    """Every client has 20 training and 10 test samples of a line; noise grows from client to client."""
    rng = np.random.default_rng(0)
    owner = np.arange(30 * clients) % clients
    x = rng.normal(size=(30 * clients, 3))
    y = x @ [1.0, -2.0, 0.5] + 0.1 * (1 + owner) * rng.normal(size=len(x))
    test = np.arange(30 * clients) // clients >= 20
    return from_tensors(x, y, owner, "regression", test)


SETTINGS: dict[str, Any] = {
    "seeds": 1, "rounds": 6, "model": "logistic", "train": {"lr": 0.05, "batch_size": 4}, "engine": "sequential",
    "eval": {"every": 1}, "data": {"split": {"val": 0.3, "test": "official"}}, "checkpoint_every": 1,
}  # fmt: skip


def test_where_smaller_is_better_the_best_round_and_the_tails_turn_round(tmp_path: Path) -> None:
    """Of ten clients the worst tenth is the one with the largest error."""
    result = tailorfl.run(SETTINGS, methods=["local"], source=regression(), out=tmp_path / "out")
    summary, store = result.jobs[0]
    frame = store.clients()
    means = frame[frame["set"] == "val"].groupby("round")["mse"].mean()
    assert means.idxmin() != means.idxmax()
    local = frame[frame["set"] == "local"].set_index("round")
    best = {"round": means.idxmin(), "val": means.min(), "local": local.loc[means.idxmin(), "mse"].mean()}
    found = summary["best_by_validation"]
    assert {name: found[name] for name in best} == pytest.approx(best)
    metrics, own = summary["metrics"], local.loc[6]
    assert metrics["worst10"] == metrics["worst5"] == pytest.approx(own["mse"].max())
    assert metrics["best10"] == pytest.approx(own["mse"].min())
    assert metrics["worst10"] == metrics["personal"]["local"]["mse"]["worst10"]
    assert metrics["weighted_mean"] == pytest.approx(np.average(own["mse"], weights=own["samples"]))
    assert result.table["worst10"].tolist() == pytest.approx([own["mse"].max()])


def test_bytes_of_the_summary_are_those_of_the_messages(tmp_path: Path) -> None:
    """A line of 3 features has 4 numbers of 4 bytes; FedAvg sends them both ways, 5 of 10 clients in each round."""
    result = tailorfl.run(
        SETTINGS, methods=["fedavg"], fraction=0.5, source=regression(), out=tmp_path / "out"
    )
    summary, store = result.jobs[0]
    assert summary["bytes_up"] == summary["bytes_down"] == 6 * 5 * 4 * 4
    rounds = store.rounds()
    assert rounds["bytes"].tolist() == [r * 2 * 5 * 16 for r in range(1, 7)]
    assert rounds["bytes_up"].tolist() == rounds["bytes_down"].tolist() == [r * 5 * 16 for r in range(1, 7)]
    assert result.table.loc[:, "bytes"].tolist() == [2 * 6 * 5 * 16]


def test_time_goes_on_where_an_interrupted_run_left_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that is moved on by an hour in the second round, after which Ctrl-C is pressed."""
    moved, real = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + moved[0])

    class Hour(Observer):
        rounds = 0

        def evaluated(self, job: Job, round: int, metrics: dict[str, float]) -> None:
            moved[0] += 3600.0 if self.rounds == 0 else 0.0

        def round_done(self, job: Job, done: Any) -> None:
            self.rounds += 1
            if self.rounds == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tailorfl.run(SETTINGS, methods=["fedavg"], source=regression(), out=tmp_path / "out", observer=Hour())
    moved[0] = -7200.0  # another process has another clock
    result = tailorfl.run(source=regression(), out=tmp_path / "out", resume=True)
    seconds = result.rounds["seconds"].tolist()
    assert seconds == sorted(seconds)
    assert seconds[0] < 600
    assert 3600 <= seconds[1] < seconds[-1] < 4200
    assert 3600 <= result.jobs[0][0]["seconds"] < 4200
