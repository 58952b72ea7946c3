"""The Source type, the places where data files are looked for, and sources by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from tailorfl.data.locations import data_file, data_folders
from tailorfl.data.registry import load_source, sources
from tailorfl.data.source import Source, check_finite
from tailorfl.errors import ConfigError, DataError


def features(**changes: object) -> Source:
    fields: dict[str, object] = {
        "name": "made",
        "x": torch.arange(12.0).reshape(4, 3),
        "y": torch.tensor([0, 2, 1, 2]),
        "task": "classification",
        "outputs": 3,
    }
    return Source(**{**fields, **changes})  # type: ignore[arg-type]


def test_take_returns_float_features_for_rows_of_any_shape() -> None:
    source = features()
    rows = torch.tensor([[3, 0], [1, 1]])
    assert source.take(rows).shape == (2, 2, 3)
    assert torch.equal(source.take(rows)[0, 1], source.x[0])
    assert source.input_shape == (3,)
    assert len(source) == 4


def test_take_scales_and_normalises_images_by_channel_and_leaves_them_alone() -> None:
    x = torch.randint(0, 256, (5, 2, 3, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    source = Source(
        "made", x, torch.zeros(5, dtype=torch.int64), "classification", 2, mean=(0.2, 0.4), std=(0.5, 2.0)
    )
    taken = source.take(torch.tensor([4, 1]))
    for channel, (mean, std) in enumerate(((0.2, 0.5), (0.4, 2.0))):
        expected = (x[[4, 1], channel].float() / 255 - mean) / std
        torch.testing.assert_close(taken[:, channel], expected)
    assert torch.equal(x, before)
    plain = dataclasses.replace(source, mean=None, std=None).take(torch.arange(5))
    torch.testing.assert_close(plain, x.float() / 255)


def test_strata_follow_the_task() -> None:
    assert torch.equal(features().strata, torch.tensor([0, 2, 1, 2]))
    labels = torch.tensor([[0, 1], [1, 1], [0, 1], [0, 0]], dtype=torch.float32)
    combination = features(y=labels, task="multilabel", outputs=2).strata
    assert combination[0] == combination[2]
    assert len(set(combination.tolist())) == 3
    survival = torch.tensor([[1, 9.0], [0, 3.0], [1, 2.0], [0, 1.0]])
    assert features(y=survival, task="survival", outputs=1).strata.tolist() == [1, 0, 1, 0]
    assert features(y=torch.ones(4, 1), task="regression", outputs=1).strata.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4, 3, dtype=torch.float64)}, "x must be float32"),
        ({"x": torch.zeros(4, 3, dtype=torch.uint8)}, "uint8 images must be"),
        ({"y": torch.zeros(3, dtype=torch.int64)}, r"y must be torch.int64 of shape \[4\]"),
        (
            {"y": torch.tensor([0, 1, 2, 3])},
            r"labels must lie in 0..2, but 1 of 4 do not, first that of sample 3, which is 3",
        ),
        ({"task": "binary"}, "a binary task cannot have outputs=3"),
        ({"task": "binary", "outputs": 1}, r"labels must lie in 0..1"),
        ({"task": "ranking"}, "task must be one of"),
        ({"test": torch.zeros(4)}, "test must be torch.bool"),
        (
            {"groups": {"client": torch.tensor([0, 0, 1, 2])}, "group_names": {"client": ("a", "b")}},
            "must name every",
        ),
        ({"groups": {"client": torch.zeros(4, dtype=torch.int64)}}, "must name every id"),
        (
            {"task": "multilabel", "outputs": 1, "y": torch.tensor([[0.0], [1], [0.5], [1]])},
            "1 of 4 .* sample 2",
        ),
        (
            {"task": "survival", "outputs": 1, "y": torch.tensor([[0.0, 1], [2, 1], [1, 0], [3, 1]])},
            "2 of 4 .* sample 1",
        ),
        (
            {"task": "survival", "outputs": 1, "y": torch.tensor([[0.0, 1], [1, 1], [1, 0], [0, -1]])},
            "1 of 4 .* sample 3",
        ),
        (
            {"task": "counts", "outputs": 1, "y": torch.tensor([[0.0], [-1], [1.5], [1]])},
            "2 of 4 .* sample 1",
        ),
        ({"mean": (0.0,)}, "both mean and std"),
        ({"mean": (0.0,), "std": (1.0,)}, "for uint8 images"),
    ],
)
def test_contradictory_fields_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        features(**changes)


def test_check_finite_names_count_sample_and_client() -> None:
    x = torch.zeros(4, 3)
    x[2, 1], x[3, 0] = float("nan"), float("inf")
    client = torch.tensor([0, 0, 1, 1])
    source = features(x=x, groups={"client": client}, group_names={"client": ("north", "south")})
    with pytest.raises(
        DataError, match=r"x holds NaN or infinity in 2 of 4 .*first is sample 2 \(client 'south'\)"
    ):
        check_finite(source)
    with pytest.raises(DataError, match=r"y holds NaN or infinity in 1 of 4 .*sample 0;"):
        check_finite(features(y=torch.tensor([[float("nan")], [0], [0], [0]]), task="regression", outputs=1))
    check_finite(features())


def test_a_set_data_folder_is_searched_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILORFL_DATA", str(tmp_path))
    (tmp_path / "here.npz").write_bytes(b"")
    assert data_folders() == (tmp_path,)
    assert data_file("here.npz") == tmp_path / "here.npz"
    with pytest.raises(
        DataError, match=rf"'mnist.npz' was not found in {re.escape(str(tmp_path))}.*export TAILORFL_DATA="
    ):
        load_source("mnist")


def test_without_a_setting_the_folder_beside_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TAILORFL_DATA", raising=False)
    (tmp_path / "shared" / "data").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    (tmp_path / "shared" / "data" / "only_here.npz").write_bytes(b"")
    monkeypatch.chdir(tmp_path / "project")
    assert data_file("only_here.npz") == tmp_path / "shared" / "data" / "only_here.npz"
    with pytest.raises(DataError, match=r"TAILORFL_DATA is not set"):
        data_file("nowhere.npz")


def test_a_damaged_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILORFL_DATA", str(tmp_path))
    (tmp_path / "mnist.npz").write_bytes(b"not an archive")
    with pytest.raises(DataError, match=r"mnist.npz cannot be read"):
        load_source("mnist")


def test_names_and_options_are_checked_with_the_nearest_valid_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown data source 'digts'. Did you mean 'digits'"):
        load_source("digts")
    with pytest.raises(
        ConfigError, match=r"unknown option of data source 'synthetic_linear' 'clientz'.*'clients'"
    ):
        load_source("synthetic_linear", clientz=3)
    with pytest.raises(ConfigError, match=r"'table' needs the option 'path'"):
        load_source("table", label="y")


def test_every_listed_source_has_one_line_of_description() -> None:
    listed = sources()
    assert {
        "digits",
        "mnist",
        "cifar10",
        "pacs",
        "heart",
        "tcga",
        "synthetic_quadratic",
        "folder",
        "table",
    } <= set(listed)
    assert all(description and "\n" not in description for description in listed.values())
