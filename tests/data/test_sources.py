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


def test_take_scales_and_normalises_images_by_channel_and_leaves_them_alone() -> None:
    x = torch.randint(0, 256, (5, 2, 3, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before, y = x.clone(), torch.zeros(5, dtype=torch.int64)
    source = Source("made", x, y, "classification", 2, mean=(0.2, 0.4), std=(0.5, 2.0))
    rows = torch.tensor([[4, 1], [1, 0]])
    taken = source.take(rows)
    assert (len(source), source.input_shape, taken.shape) == (5, (2, 3, 4), (2, 2, 2, 3, 4))
    for channel, (mean, std) in enumerate(((0.2, 0.5), (0.4, 2.0))):
        torch.testing.assert_close(taken[:, :, channel], (x[rows, channel].float() / 255 - mean) / std)
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
    ("changes", "words"),
    [
        ({"x": torch.zeros(4, 3, dtype=torch.float64)}, "float64"),
        ({"x": torch.zeros(4, 3, dtype=torch.uint8)}, "uint8"),
        ({"y": torch.zeros(3, dtype=torch.int64)}, r"y .*\[4\]"),
        ({"y": torch.tensor([0, 1, 2, 3])}, r"0..2, but 1 of 4 .* sample 3, which is 3"),
        ({"task": "binary"}, "outputs=3"),
        ({"task": "binary", "outputs": 1}, r"0..1"),
        ({"task": "ranking"}, "'ranking'"),
        ({"test": torch.zeros(4)}, "test .*float32"),
        *(
            ({"groups": {"client": torch.tensor([0, 0, 1, 2])}, "group_names": names}, r"\['client'\]")
            for names in ({}, {"client": ("a", "b")})
        ),
        ({"task": "multilabel", "y": [[0], [1], [0.5], [1]]}, "1 of 4 .* sample 2"),
        ({"task": "survival", "y": [[0, 1], [2, 1], [1, 0], [3, 1]]}, "2 of 4 .* sample 1"),
        ({"task": "survival", "y": [[0, 1], [1, 1], [1, 0], [0, -1]]}, "1 of 4 .* sample 3"),
        ({"task": "counts", "y": [[0], [-1], [1.5], [1]]}, "2 of 4 .* sample 1"),
        ({"mean": (0.0,)}, "mean and std"),
        ({"mean": (0.0,), "std": (1.0,)}, "uint8"),
    ],
)
def test_contradictory_fields_are_refused(changes: dict[str, object], words: str) -> None:
    if isinstance(changes.get("y"), list):
        changes = {**changes, "outputs": 1, "y": torch.tensor(changes["y"], dtype=torch.float32)}
    with pytest.raises(DataError, match=words):
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
        DataError,
        match=rf"'omniglot28.npz' was not found in {re.escape(str(tmp_path))}.*export TAILORFL_DATA=",
    ):
        load_source("omniglot")


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


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("digts", {}, "'digts'.*'digits'"),
        ("synthetic_linear", {"clientz": 3}, "'clientz'.*'clients'"),
        ("table", {"label": "y"}, "'path'"),
    ],
)
def test_names_and_options_are_checked_with_the_nearest_valid_one(
    name: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_source(name, **options)


def test_every_listed_source_has_one_line_of_description() -> None:
    listed = sources()
    names = "digits mnist cifar10 pacs heart tcga synthetic_quadratic folder table"
    assert set(names.split()) <= set(listed)
    assert all(description and "\n" not in description for description in listed.values())
