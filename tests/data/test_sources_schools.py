"""School follows the published protocol: sizes, scores, standardisation by training pupils, and public constants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler

from data import twins
from tailorfl.data.build import build
from tailorfl.data.registry import load_source
from tailorfl.data.source import check_finite
from tailorfl.errors import ConfigError, DataError

SPLIT = {"train": 0.7, "val": 0.15, "test": 0.15}


@pytest.fixture(params=["real", "twin"])
def file(request: pytest.FixtureRequest) -> Path:
    return twins.files_of(request, twins.school, "school/school.npz") / "school/school.npz"


def test_school_has_the_published_sizes_and_scores_in_0_to_1(file: Path) -> None:
    source = load_source("school")
    with np.load(file) as raw:
        assert source.y[:, 0].double().numpy() * 69 + 1 == pytest.approx(raw["y"], abs=1e-4)
        assert torch.equal(source.x, torch.from_numpy(raw["x"]))
        assert torch.bincount(source.groups["client"]).tolist() == raw["sizes"].tolist()
        pupils, schools = len(raw["y"]), len(raw["sizes"])
    assert (len(source), source.input_shape, source.task, source.outputs) == (pupils, (28,), "regression", 1)
    assert source.group_names["client"] == tuple(f"school {number}" for number in range(1, schools + 1))
    if (file.parent / "README.md").exists():
        assert (pupils, schools) == (15_362, 139)
    assert float(source.y.min()) == 0
    assert float(source.y.max()) == 1
    check_finite(source)


def test_schools_are_cut_70_15_15_and_standardised_by_their_own_training_pupils(file: Path) -> None:
    raw = load_source("school").x
    cut = build("school", split=SPLIT, normalise="client", seed=100)
    for client in (0, len(cut) // 2, len(cut) - 1):
        train, val, test = (cut.part(part)[client] for part in ("train", "val", "test"))
        n = len(train) + len(val) + len(test)
        assert len(val) == pytest.approx(0.15 * n, abs=1)
        assert len(test) == pytest.approx(0.15 * n, abs=1)
        scaler = StandardScaler().fit(raw[train].double().numpy())
        ours = cut.source.x[test].double().numpy()
        varies = scaler.var_ > 0  # deviations divide by n - 1 here, by n there
        expected = scaler.transform(raw[test].double().numpy()) / np.where(
            varies, (len(train) / (len(train) - 1)) ** 0.5, 1
        )
        assert ours == pytest.approx(expected, abs=1e-5)


def test_public_constants_map_each_feature_from_its_range_to_minus_1_to_1(file: Path) -> None:
    public, raw = load_source("school", scaling="public"), load_source("school").x
    percent = [3, 4]
    rest = [k for k in range(28) if k not in percent]
    assert torch.equal(public.x[:, rest], 2 * raw[:, rest] - 1)
    torch.testing.assert_close(public.x[:, percent], raw[:, percent] / 50 - 1)
    torch.testing.assert_close(public.info["scaling"].apply(raw[:9]), public.x[:9])
    assert "private scaling" not in public.info


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"publik.*public"):
        load_source("school", scaling="publik")
    monkeypatch.setenv("TAILORFL_DATA", str(tmp_path))
    (tmp_path / "school").mkdir()
    np.savez(tmp_path / "school" / "school.npz", x=np.zeros((3, 28)), y=np.zeros(3))
    with pytest.raises(DataError, match="sizes"):
        load_source("school")
