"""The numbers of a table, against numbers worked out by hand; also where smaller is better, and after a resume."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tailorfl
from tailorfl.data.own import from_tensors
from tailorfl.data.source import Source
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.job import Job, Observer
from tailorfl.runs.store import RunStore

CLIENTS = 10


def stored(
    folder: Path, method: str, seed: int, values: list[float], metric: str
) -> tuple[dict[str, Any], RunStore]:
    """A finished job of two rounds whose clients end with `values`; the first round's are the other way round."""
    rows = [
        {"round": r, "client": c, "set": s, "model": "personal", "samples": c + 1, metric: v + (s != "local")}
        for r, found in ((1, values[::-1]), (2, values))
        for s in ("val", "local")
        for c, v in enumerate(found)
    ]
    summary = {
        "method": method, "label": method, "seed": seed, "rounds": 2, "model": "personal", "metric": metric,
        "metrics": {"mean": float(np.mean(values)), "personal": {}}, "bytes_up": 1, "bytes_down": 2, "seconds": 1.0,
    }  # fmt: skip
    with RunStore.create(folder / method / f"seed-{seed}", {}) as store:
        store.append_clients(rows[::-1])  # whatever their order
        store.append_round({"round": 2})
        store.finish(summary)
    return summary, store


@pytest.mark.parametrize(("metric", "shares"), [("accuracy", (0.3, 0.9)), ("mse", (0.6, 0.0))])
def test_the_share_beating_local_is_counted_against_local_of_the_same_seed(
    metric: str, shares: tuple[float, float], tmp_path: Path
) -> None:
    """Of ten clients seed 0 has three above, six below and one equal; seed 1 has nine above and one equal."""
    jobs = []
    for seed, differences in ((0, [1] * 3 + [-1] * 6 + [0]), (1, [1] * 9 + [0])):
        local = [10.0 * seed + 0.01 * c for c in range(CLIENTS)]
        own = [v + 0.001 * d for v, d in zip(local, differences, strict=True)]
        jobs += [
            stored(tmp_path, "local", seed, local, metric),
            stored(tmp_path, "ditto", seed, own, metric),
        ]
    result = ExperimentResult(tmp_path, jobs)
    found = {(r.method, r.seed): r.values for r in result.seed_results()}
    assert [found["ditto", seed]["share_beating_local"] for seed in (0, 1)] == pytest.approx(list(shares))
    assert all("share_beating_local" not in found["local", seed] for seed in (0, 1))
    assert result.table.loc["ditto", "share_beating_local"] == pytest.approx(np.mean(shares))


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    """Ditto is .1 and .3 above LocalTrain of the same seed: .2 ± t(0.975, 1) · .1 with t = 12.7062."""
    jobs = [
        stored(tmp_path, method, seed, [level] * CLIENTS, "accuracy")
        for method, levels in (("local", (0.2, 0.5)), ("ditto", (0.3, 0.8)))
        for seed, level in enumerate(levels)
    ]
    found = ExperimentResult(tmp_path, jobs).differences()
    assert found.loc["ditto", "difference"] == pytest.approx(0.2)
    assert found.loc["ditto", "ci"] == pytest.approx(12.7062 * 0.1, rel=1e-4)
    assert found.loc["local", "difference"] == 0


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
    "eval": {"every": 1}, "data": {"split": {"val": 0.3, "test": "official"}},
}  # fmt: skip


def test_where_smaller_is_better_the_best_round_and_the_tails_turn_round(tmp_path: Path) -> None:
    """Of ten clients the worst tenth is the one with the largest error."""
    settings = {**SETTINGS, "methods": ["local"]}
    result = tailorfl.run(settings, source=regression(), out=tmp_path / "out")
    summary, store = result.jobs[0]
    assert summary["metric"] == "mse"
    frame = store.clients()
    means = frame[frame["set"] == "val"].groupby("round")["mse"].mean()
    assert means.idxmin() != means.idxmax()
    best = summary["best_by_validation"]
    assert best["round"] == means.idxmin()
    assert best["val"] == pytest.approx(means.min())
    own = frame[(frame["round"] == 6) & (frame["set"] == "local")]
    at_best = frame[(frame["round"] == means.idxmin()) & (frame["set"] == "local")]["mse"]
    assert best["local"] == pytest.approx(at_best.mean())
    metrics = summary["metrics"]
    assert metrics["worst10"] == metrics["worst5"] == pytest.approx(own["mse"].max())
    assert metrics["best10"] == pytest.approx(own["mse"].min())
    assert metrics["worst10"] == metrics["personal"]["local"]["mse"]["worst10"]
    assert metrics["weighted_mean"] == pytest.approx(np.average(own["mse"], weights=own["samples"]))
    assert result.table["worst10"].tolist() == pytest.approx([own["mse"].max()])


def test_bytes_of_the_summary_are_those_of_the_messages(tmp_path: Path) -> None:
    """A line of 3 features has 4 numbers of 4 bytes; FedAvg sends them both ways, 5 of 10 clients in each round."""
    settings = {**SETTINGS, "methods": ["fedavg"], "fraction": 0.5}
    result = tailorfl.run(settings, source=regression(), out=tmp_path / "out")
    summary, store = result.jobs[0]
    assert summary["bytes_up"] == summary["bytes_down"] == 6 * 5 * 4 * 4
    rounds = store.rounds()
    assert rounds["bytes"].tolist() == [r * 2 * 5 * 16 for r in range(1, 7)]
    assert rounds["bytes_up"].tolist() == rounds["bytes_down"].tolist() == [r * 5 * 16 for r in range(1, 7)]
    assert result.table.loc[:, "bytes"].tolist() == [2 * 6 * 5 * 16]


class Stop(Observer):
    """Ends the experiment after a round, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round_done(self, job: Job, done: Any) -> None:
        """Counts."""
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt


def test_time_goes_on_where_an_interrupted_run_left_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that is moved on by an hour before the interruption and by a minute after it."""
    moved = [0.0]
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + moved[0])

    class Hour(Stop):
        def evaluated(self, job: Job, round: int, metrics: dict[str, float]) -> None:
            moved[0] += 3600.0 if self.after == 2 else 0.0

    settings = {**SETTINGS, "methods": ["fedavg"], "checkpoint_every": 1}
    with pytest.raises(KeyboardInterrupt):
        tailorfl.run(settings, source=regression(), out=tmp_path / "out", observer=Hour(2))
    moved[0] = -7200.0  # another process has another clock
    result = tailorfl.run(source=regression(), out=tmp_path / "out", resume=True)
    seconds = result.rounds["seconds"].tolist()
    assert seconds == sorted(seconds)
    assert seconds[0] < 600
    assert 3600 <= seconds[1] < seconds[-1] < 4200
    assert 3600 <= result.jobs[0][0]["seconds"] < 4200
