"""The Source type, the places where data files are looked for, and sources by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tailorfl.data.registry import load_source, sources
from tailorfl.data.source import Source, check_finite
from tailorfl.data.storage import data_file, data_folders
from tailorfl.errors import ConfigError, DataError

NAN = float("nan")
IDS = {"client": torch.tensor([0, 0, 1, 2])}


def features(**changes: Any) -> Source:
    fields = {"x": torch.arange(12.0).reshape(4, 3), "y": torch.tensor([0, 2, 1, 2]), "outputs": 3}
    return Source(**{"name": "made", "task": "classification", **fields, **changes})


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
    assert features().strata.tolist() == [0, 2, 1, 2]
    labels = torch.tensor([[0.0, 1], [1, 1], [0, 1], [0, 0]])
    one, two, again, three = features(y=labels, task="multilabel", outputs=2).strata.tolist()
    assert one == again
    assert len({one, two, three}) == 3
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
        ({"outputs": 0}, "outputs=0"),
        ({"task": "binary", "outputs": 1}, r"0..1"),
        ({"task": "ranking"}, "'ranking'"),
        ({"test": torch.zeros(4)}, "test .*float32"),
        ({"groups": IDS, "group_names": {}}, r"\['client'\]"),
        ({"groups": IDS, "group_names": {"client": ("a", "b")}}, r"\['client'\]"),
        ({"task": "multilabel", "y": [[0], [1], [0.5], [1]]}, "1 of 4 .* sample 2"),
        ({"task": "survival", "y": [[0, 1], [2, 1], [1, 0], [3, 1]]}, "2 of 4 .* sample 1"),
        ({"task": "survival", "y": [[0, 1], [1, 1], [1, 0], [0, -1]]}, "1 of 4 .* sample 3"),
        ({"task": "counts", "y": [[0], [-1], [1.5], [1]]}, "2 of 4 .* sample 1"),
        ({"credit": torch.zeros(4, 4)}, r"credit .*\[4, 3\]"),
        ({"credit": torch.full((4, 3), 2.0)}, "credit .*0..1"),
        ({"task": "regression", "y": [[0.0]] * 4, "credit": torch.zeros(4, 1)}, "credit .*regression"),
        ({"mean": (0.0,)}, "mean and std"),
        ({"mean": (0.0,), "std": (1.0,)}, "uint8"),
        ({"x": torch.zeros(4, 1, 2, 2, dtype=torch.uint8), "mean": (0.0,), "std": (0.0,)}, "above zero"),
        ({"x": torch.zeros(4, 1, 2, 2, dtype=torch.uint8), "mean": (0.0,) * 3, "std": (1.0,) * 3}, "channel"),
    ],
)
def test_contradictory_fields_are_refused(changes: dict[str, object], words: str) -> None:
    if isinstance(changes.get("y"), list):
        changes = {**changes, "outputs": 1, "y": torch.tensor(changes["y"], dtype=torch.float32)}
    with pytest.raises(DataError, match=words):
        features(**changes)


def test_check_finite_names_count_sample_and_client() -> None:
    x, y = torch.zeros(4, 3), torch.tensor([[NAN], [0], [0], [0]])
    x[2, 1], x[3, 0] = NAN, float("inf")
    clients = {"groups": {"client": torch.tensor([0, 0, 1, 1])}, "group_names": {"client": ("a", "b")}}
    for source, words in (
        (features(x=x, **clients), r"x holds NaN or infinity in 2 of 4 .*first is sample 2 \(client 'b'\)"),
        (features(y=y, task="regression", outputs=1), r"y holds NaN or infinity in 1 of 4 .*sample 0;"),
    ):
        with pytest.raises(DataError, match=words):
            check_finite(source)
    check_finite(features(credit=torch.eye(4, 3)))  # where none and all of it are allowed


def test_where_data_files_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, project = tmp_path / "shared" / "data", tmp_path / "project"
    for folder in (beside, project):
        folder.mkdir(parents=True)
        (folder / f"{folder.name}.npz").write_bytes(b"")
    monkeypatch.chdir(project)
    monkeypatch.setenv("TAILORFL_DATA", str(project))  # which is then searched alone
    assert data_folders() == (project,)
    assert data_file("project.npz") == project / "project.npz"
    with pytest.raises(DataError, match=rf"'omniglot28.npz' was not .* {project}.*export TAILORFL_DATA="):
        load_source("omniglot")
    monkeypatch.delenv("TAILORFL_DATA")
    assert data_file("data.npz") == beside / "data.npz"
    with pytest.raises(DataError, match=r"TAILORFL_DATA is not set"):
        data_file("nowhere.npz")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("digts", {}, "'digts'.*'digits'"),
        ("synthetic_linear", {"clientz": 3}, "'clientz'.*'clients'"),
        ("table", {"label": "y"}, "'path'"),
    ],
)
def test_names_and_options_are_refused_with_the_nearest(name: str, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_source(name, **options)


def test_every_listed_source_has_one_line_of_description() -> None:
    listed = sources()
    names = "digits mnist cifar10 pacs heart tcga synthetic_quadratic folder table"
    assert set(names.split()) <= set(listed)
    assert all(description and "\n" not in description for description in listed.values())


def test_features_of_a_file(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(30, 4)), np.arange(30) % 3
    more: dict[str, Any] = {"test": np.arange(30) > 20, "domain": np.arange(30) % 2, "domains": ["x", "y"]}
    np.savez(tmp_path / "some.npz", x=x, y=y, classes=["a", "b", "c"], **more)
    source = load_source("features", path=str(tmp_path / "some.npz"))
    assert (source.name, source.outputs, source.info["classes"]) == ("features", 3, ("a", "b", "c"))
    assert (int(source.test.sum()), source.group_names["domain"]) == (9, ("x", "y"))
    assert np.allclose(source.x.numpy(), x)
    np.savez(tmp_path / "bad.npz", x=x, y=y)
    for file, words in (("absent.npz", r"studies/features\.py"), ("bad.npz", "classes")):
        with pytest.raises(DataError, match=words):
            load_source("features", path=str(tmp_path / file))
