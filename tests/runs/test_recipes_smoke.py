"""Every recipe that has a smoke runs it; features are those of a few images."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import tailorfl
from scripts import loaded
from tailorfl.data.locations import data_file
from tailorfl.errors import DataError
from tailorfl.report.result import ExperimentResult
from tailorfl.settings.loading import load, recipes

SMOKES = [name for name in recipes() if "smoke" in load(name).scales]
QUICK = ("fedclup_logit", "plgu_cifar", "fedoa_features", "ckt_phases", "school")
"""One a paper and kind of data; the others take a minute together."""
FILES = (
    "mnist.npz",
    "cifar10_jpeg.npz",
    "tinyimagenet32_jpeg.npz",
    "pacs64_jpeg.npz",
    "school/school.npz",
    "weights/resnet20_cifar10.npz",
)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which runs/features holds the files that recipes read, of 1,500 images each."""
    try:
        for file in FILES:
            data_file(file)
    except DataError as error:
        pytest.skip(str(error))
    study = loaded("studies/features.py")
    here = tmp_path_factory.mktemp("smokes")
    for which in ("cifar10", "mnist", "pacs"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sys,
                "argv",
                ["features.py", which, str(here / f"runs/features/{which}.npz"), "--samples", "1500"],
            )
            study.main()
    return here


@pytest.mark.slow
def test_features_of_images(features: Path) -> None:
    with np.load(features / "runs/features/cifar10.npz") as found:
        assert found["x"].shape == (1500, 128)
        assert found["test"].sum() == round(1500 * 10 / 55)
        spread = found["x"].std(0)
        assert (spread[:-1] > 0.8 * spread[1:]).all()  # components come by their spread
        assert 0.5 < spread[0] < 2
    with np.load(features / "runs/features/pacs.npz") as found:
        assert found["x"].shape == (1500, 64)
        assert np.abs(found["x"].mean(0)).max() < 1e-4
        assert sorted(set(found["domain"])) == [0, 1, 2, 3]
    with np.load(features / "runs/features/mnist.npz") as found:
        assert found["x"].shape == (1500, 784)
        assert np.abs(found["x"].mean(0)).max() < 1e-4
        spread = found["x"].std(0)
        assert ((spread == 0) | (abs(spread - 1) < 0.1)).all()  # black in all images, or standardised


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SMOKES]
)
def test_a_smoke_runs(name: str, features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(features)
    monkeypatch.setattr(ExperimentResult, "plot", lambda result: [])
    found = tailorfl.reproduce(name, scale="smoke", out=tmp_path / "out", progress=False)
    for result in found.values():
        assert not result.missing
        assert result.table["mean"].notna().all()


def test_each_quick_one_is_there() -> None:
    assert set(QUICK) < set(SMOKES)
    assert len(SMOKES) >= 14
