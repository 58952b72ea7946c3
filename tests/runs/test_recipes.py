"""Recipes of the package: the smoke of each runs, and no default of a method is far below local training."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import tailorfl
from scripts import loaded
from tailorfl.core.method import methods
from tailorfl.data.storage import data_file
from tailorfl.errors import DataError
from tailorfl.report.experiment import run_experiment
from tailorfl.settings.loading import load, recipes

SMOKES = [name for name in recipes() if "smoke" in load(name).scales]
QUICK = ("fedclup_logit", "plgu_cifar", "fedoa_features", "ckt_phases", "school")
"""One a paper and kind of data; the others take a minute together."""
IMAGES = ("mnist.npz", "cifar10_jpeg.npz", "tinyimagenet32_jpeg.npz", "pacs64_jpeg.npz")
FILES = (*IMAGES, "school/school.npz", "weights/resnet20_cifar10.npz")
TIMES = {"afl": 10, "cyclic": 10, "fedem": 2}
"""Method -> times as many rounds: one step a round, one client a round, and steps that three networks share."""
BELOW = 0.02
"""Points of accuracy that a default may end below LocalTrain."""


@pytest.fixture(scope="module")
def files() -> None:
    """Skip what needs data files where they are missing."""
    try:
        for file in FILES:
            data_file(file)
    except DataError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def made_up(files: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `features`, with random numbers for the features of images, which take seconds to compute."""
    here, rng = tmp_path_factory.mktemp("made up"), np.random.default_rng(0)
    (here / "runs/features").mkdir(parents=True)
    classes = [f"class {k}" for k in range(10)]
    domains = ["art_painting", "cartoon", "photo", "sketch"]
    for which, width, more in (
        ("cifar10", 128, {"test": np.arange(1500) % 6 == 0}),
        ("pacs", 64, {"domain": np.arange(1500) % 4, "domains": domains}),
    ):
        x, y = rng.normal(size=(1500, width)).astype(np.float32), rng.integers(0, 10, 1500)
        np.savez(here / f"runs/features/{which}.npz", x=x, y=y, classes=classes, **more)
    return here


@pytest.fixture(scope="module")
def features(files: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which runs/features holds the files that recipes read, of 1,500 images each."""
    study = loaded("studies/features.py")
    here = tmp_path_factory.mktemp("smokes")
    for which in ("cifar10", "mnist", "pacs"):
        with pytest.MonkeyPatch.context() as patch:
            out = str(here / f"runs/features/{which}.npz")
            patch.setattr(sys, "argv", ["features.py", which, out, "--samples", "1500"])
            study.main()
    return here


@pytest.mark.slow
@pytest.mark.parametrize(("name", "width"), [("cifar10", 128), ("pacs", 64), ("mnist", 784)])
def test_features_of_images(name: str, width: int, features: Path) -> None:
    with np.load(features / f"runs/features/{name}.npz") as found:
        x, spread = found["x"], found["x"].std(0)
        assert x.shape == (1500, width)
        if name == "cifar10":
            assert found["test"].sum() == round(1500 * 10 / 55)
            assert (spread[:-1] > 0.8 * spread[1:]).all()  # components come by their spread
            assert 0.5 < spread[0] < 2
            return
        assert np.abs(x.mean(0)).max() < 1e-4
        if name == "pacs":
            assert sorted(set(found["domain"])) == [0, 1, 2, 3]
        else:
            assert ((spread == 0) | (abs(spread - 1) < 0.1)).all()  # black in all images, or standardised


def assert_runs(name: str, out: Path) -> None:
    for result in tailorfl.reproduce(name, scale="smoke", out=out, progress=False).values():
        assert not result.missing
        assert result.table["mean"].notna().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKES)
def test_every_smoke_runs(name: str, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(features)
    assert_runs(name, tmp_path / "out")


@pytest.mark.parametrize("name", QUICK)
def test_a_smoke_runs(name: str, made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made_up)
    assert_runs(name, tmp_path / "out")


def test_the_recipe_of_defaults_has_every_method_and_no_settings_of_theirs() -> None:
    config = load("defaults_digits")
    assert {m.name for m in config.methods} == set(methods())
    assert not any(m.options or m.rounds or dict(**m.train) for m in config.methods)


@pytest.mark.slow
def test_no_default_ends_far_below_local_training(tmp_path: Path) -> None:
    config = load("defaults_digits", {"seeds": [0], "eval": {"every": 0, "final": ["local"]}})
    jobs = []
    for times in sorted({1, *TIMES.values()}):
        lines = [m for m in config.methods if TIMES.get(m.name, 1) == times]
        part = config.model_copy(update={"methods": lines, "rounds": times * config.rounds})
        jobs += run_experiment(part, tmp_path / str(times)).jobs
    mean = {summary["method"]: summary["metrics"]["mean"] for summary, _ in jobs}
    assert set(mean) == set(methods())
    assert not {n: value for n, value in mean.items() if value < mean["local"] - BELOW}, mean["local"]
