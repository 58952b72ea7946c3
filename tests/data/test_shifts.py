"""Test sets of a user's own: read like the training data, with its classes, features and constants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from tailorfl.data.build import build
from tailorfl.data.own import from_table, from_tensors
from tailorfl.errors import ConfigError, DataError

OPTIONS = {"label": "outcome", "client": "site"}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    numbers = rng.normal((50, 3), (9, 2), (60, 2)).round(2)
    frame = pd.DataFrame(numbers, columns=["age", "dose"]).assign(site=np.repeat(["north", "south"], 30))
    frame.assign(outcome=rng.choice(["dead", "ill", "well"], 60)).to_csv(
        tmp_path / "patients.csv", index=False
    )
    return tmp_path / "patients.csv"


def winter(folder: Path) -> pd.DataFrame:
    """Other order of columns, two of three classes, no client, a column that nobody asked for."""
    frame = pd.DataFrame({"outcome": ["well", "ill", "well"], "dose": [1.0, 2.0, 4.0], "noise": list("abc")})
    frame["age"] = [40, 60, 80]
    frame.to_parquet(folder / "winter.parquet")
    return frame


@pytest.mark.parametrize("normalise", ["none", "client"])
def test_a_table_is_read_with_features_classes_and_constants_of_training(table: Path, normalise: str) -> None:
    frame = winter(table.parent)
    shifts = {"winter": str(table.parent / "winter.parquet")}
    federation = build("table", path=str(table), options=OPTIONS, normalise=normalise, shifts=shifts, seed=1)
    found = federation.shifted["winter"]
    assert found.y.tolist() == [2, 1, 2]  # as numbered in training: dead, ill, well
    assert found.outputs == 3
    x = frame[["age", "dose"]].to_numpy(dtype=np.float64)
    if normalise == "client":  # the constants of all training rows together
        raw = pd.read_csv(table)[["age", "dose"]].to_numpy(dtype=np.float64)
        pooled = raw[np.concatenate([*federation.train])]
        x = (x - pooled.mean(axis=0)) / pooled.std(axis=0, ddof=1)
    np.testing.assert_allclose(found.x.numpy(), x, rtol=1e-4)


@pytest.mark.parametrize("normalise", ["none", "client", "federated"])
def test_a_table_in_memory_and_a_source_serve_too(table: Path, normalise: Any) -> None:
    """A source is prepared by the constants of training, also as a public set."""
    frame = winter(table.parent)
    other = from_table(frame, label="outcome", features=["age", "dose"])  # its classes: ill, well
    shifts = {"winter": frame, "other": other}
    federation = build(source=from_table(table, **OPTIONS), shifts=shifts, public=other, normalise=normalise)
    shifted = federation.shifted
    assert torch.equal(shifted["winter"].y, shifted["other"].y)
    assert torch.equal(shifted["winter"].x, shifted["other"].x)
    assert torch.equal(shifted["winter"].x, federation.public.x)


def test_images_are_those_of_a_folder_with_the_channels_of_the_training_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kinds = [(f"scans/{'ab'[n % 2]}/{('ill', 'well')[n // 2 % 2]}/{n}.png", (6, 6, 3)) for n in range(24)]
    for place, shape in (*kinds, *((f"dark/c/well/{n}.png", (9, 9)) for n in range(3))):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(tmp_path / place)
    shifts = {"dark": str(tmp_path / "dark")}
    federation = build("folder", path=str(tmp_path / "scans"), options={"size": (6, 6)}, shifts=shifts)
    found = federation.shifted["dark"]
    same = build(source=federation.source, shifts={"scans": tmp_path / "scans"}).shifted[
        "scans"
    ]  # handed over
    assert torch.equal(same.x, federation.source.x)
    with pytest.raises(DataError, match="but got a list"):
        build(source=federation.source, shifts={"odd": [1.0]})
    assert found.x.shape == (3, 3, 6, 6)
    assert torch.equal(found.x[:, 0], found.x[:, 2])
    assert found.y.tolist() == [1, 1, 1]  # "well" alone, and yet class 1
    assert (found.mean, found.std) == (federation.source.mean, federation.source.std)


def test_texts_are_tokenized_alike(tmp_path: Path) -> None:
    prompts = [f"Case {k}\n\nOPTIONS:\n- yes\n- no" for k in range(24)]
    lines = [json.dumps({"instruction": p, "output": "no", "client": k % 2}) for k, p in enumerate(prompts)]
    for name, count in (("notes", 24), ("later", 5)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines[:count]))
    data = {"path": str(tmp_path / "notes.jsonl"), "shifts": {"later": str(tmp_path / "later.jsonl")}}
    federation = build("instructions", options={"length": 32, "options": 2}, **data)
    assert torch.equal(federation.shifted["later"].x, federation.source.x[:5])
    assert federation.shifted["later"].info["tokenizer"] == federation.source.info["tokenizer"]


@pytest.mark.parametrize(
    ("task", "label"), [("regression", ["pain"]), ("survival", ["event", "time"]), ("binary", ["event"])]
)
def test_other_tasks(task: Any, label: list[str]) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(40, 2)), columns=["age", "pain"]).assign(site=["a", "b"] * 20)
    frame = frame.assign(event=rng.integers(0, 2, 40), time=rng.integers(1, 9, 40))
    source = from_table(frame, label=label, client="site", features=["age"], task=task)
    later = frame[frame["event"] == 1]
    found = build(source=source, shifts={"later": later}).shifted["later"].y.numpy()
    np.testing.assert_array_equal(found.reshape(len(later), -1), later[label].to_numpy(dtype=np.float32))


@pytest.mark.parametrize(
    ("name", "shift", "words"),
    [
        ("winter", lambda frame: "nowhere.csv", "'winter'.*does not exist"),
        ("winter", lambda frame: frame.drop(columns="age"), "no column 'age'"),
        ("winter", lambda frame: frame.assign(outcome="better"), "'better'"),
        ("winter", lambda frame: frame.assign(age="old"), "is not a number"),
        ("winter", lambda frame: from_tensors(torch.zeros(3, 2), [0.5] * 3, task="regression"), "regression"),
        ("winter", lambda frame: from_tensors(torch.zeros(3, 5), ["ill", "ill", "well"]), r"\[5\]"),
        *((name, lambda frame: frame, f"data.shifts: '{name}'") for name in ("official", "malicious")),
    ],
)
def test_mistakes_are_named(table: Path, name: str, shift: Callable[[pd.DataFrame], Any], words: str) -> None:
    with pytest.raises((DataError, ConfigError), match=words):
        build(source=from_table(table, **OPTIONS), shifts={name: shift(winter(table.parent))})
    with pytest.raises(DataError, match=r"tailorfl.Source"):  # tensors say nothing of how a file is read
        build(source=from_tensors(torch.zeros(30, 2), torch.arange(30) % 3), clients=2, shifts={"a": "x.csv"})
