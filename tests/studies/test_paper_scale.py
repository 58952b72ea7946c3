"""The order of work for a GPU: what is begun, left and continued, and that its items are experiments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from scripts import loaded
from studies.claims.claim import papers
from tailorfl.data.storage import data_file
from tailorfl.errors import DataError
from tailorfl.settings.loading import expand, load


@pytest.fixture(scope="module")
def study() -> ModuleType:
    return loaded("studies/paper_scale.py")


def clock_of(times: list[float]) -> Callable[[], float]:
    return lambda: times[0]


def test_items_are_begun_in_order_while_there_is_time(study: ModuleType, tmp_path: Path) -> None:
    now, begun = [0.0], []

    def runner(item: object, folder: Path, seconds: float) -> bool:
        begun.append((item.name, seconds))  # type: ignore[attr-defined]
        now[0] += min(50.0, seconds)
        return seconds >= 50

    names = [item.name for item in study.ITEMS]
    done = study.work(study.ITEMS, tmp_path, 2.0, "paper", "cpu", runner, clock_of(now))
    assert begun == [(names[0], 120.0), (names[1], 70.0), (names[2], 20.0)]
    assert done == names[:2]
    begun.clear()
    now[0] = 1000.0
    assert study.work(study.ITEMS, tmp_path, 0.05, "paper", "cpu", runner, clock_of(now)) == names[:2]
    assert begun == []  # three seconds are too few
    study.work(study.ITEMS, tmp_path, 1.0, "paper", "cpu", runner, clock_of(now))
    assert begun[0][0] == names[2]


def test_every_item_is_an_experiment_of_its_recipe_that_claims_are_about(study: ModuleType) -> None:
    asked = {claim.recipe for paper in papers().values() for claim in paper.claims}
    for item in study.ITEMS:
        config = study.experiment(item, "paper", "cpu")
        assert (config.name, config.scale, config.seeds) == (item.recipe, "paper", item.seeds)
        assert item.recipe in asked
        for one in expand(config).values():
            assert not item.methods or {method.label for method in one.methods} >= set(item.methods)
        assert expand(study.experiment(item, "smoke", "cpu"))


@pytest.mark.slow
def test_work_that_ran_out_of_time_is_continued(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        data_file("cifar10_jpeg.npz")
    except DataError as error:
        pytest.skip(str(error))
    (item,) = (item for item in study.ITEMS if item.name == "images")
    folder = tmp_path / "images"
    monkeypatch.setattr(study, "LEAST", 0.0)
    assert study.work([item], tmp_path, 0.04, "smoke", "cpu") == []
    assert study.work([item], tmp_path, 5, "smoke", "cpu") == ["images"], (folder / "log.txt").read_text()
    assert load(folder / "run" / "config.yaml").scale == "smoke"
