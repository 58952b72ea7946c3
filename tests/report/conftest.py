"""One experiment that the tests of tables, curves, page and browser look at, and jobs of made-up numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tailorfl
from report.browsing import Tab, browser, why_not
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.store import RunStore

Job = tuple[dict[str, Any], RunStore]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> ExperimentResult:
    """Three methods with three seeds, half of the clients in a round, every round evaluated."""
    return tailorfl.run(
        methods=["local", "fedavg", "ditto"],
        rounds=3,
        seeds=3,
        fraction=0.5,
        model="logistic",
        engine="sequential",
        data={"clients": 5, "heldout_clients": 2, "samples": 300},
        eval={"every": 1, "sets": ["val", "local", "participants"], "sharpness": 0.05, "target": 0.5},
        out=tmp_path_factory.mktemp("report") / "run",
    )


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser without a window; skips where there is none."""
    if why_not():
        pytest.skip(why_not())
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def tab(chromium: Any) -> Iterator[Tab]:
    """A new page of the browser."""
    opened = Tab(chromium.new_page())
    yield opened
    opened.page.close()


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Job]:
    """`stored(label, seed, values)` is a finished job of two rounds whose clients end with these values.

    Records of the first round, of validation data and of the global model say something else.
    """

    def make(
        label: str,
        seed: int,
        values: list[float],
        metric: str = "accuracy",
        names: Sequence[str] = (),
        **more: Any,
    ) -> Job:
        rows = [
            {"round": r, "client": c, "set": s, "model": m, "samples": c + 1, metric: v}
            for r, ordered in ((1, values[::-1]), (2, values))
            for s in ("val", "local")
            for m in ("global", "personal")
            for c, v in enumerate(ordered if (s, m) == ("local", "personal") else [v + 1 for v in ordered])
        ]
        mean = float(np.mean(values))
        summary = {
            "method": label, "label": label, "seed": seed, "rounds": 2, "model": "personal", "metric": metric,
            "metrics": {"mean": mean, "personal": {}}, "bytes_up": 1, "bytes_down": 2, "seconds": 1.0, **more,
        }  # fmt: skip
        with RunStore.create(tmp_path / label / f"seed-{seed}", {"clients": list(names)}) as store:
            store.append_clients(rows[::-1])  # whatever their order
            store.append_round({"round": 2})
            store.finish(summary)
        return summary, store

    return make
