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

import tailorfl
from tailorfl.data.build import build
from tailorfl.data.own import from_table, from_tensors
from tailorfl.errors import ConfigError, DataError

OPTIONS = {"label": "outcome", "client": "site"}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "site": np.repeat(["north", "south"], 30),
            "age": rng.normal(50, 9, 60).round(2),
            "dose": rng.normal(3, 2, 60).round(2),
            "outcome": rng.choice(["dead", "ill", "well"], 60),
        }
    )
    frame.to_csv(tmp_path / "patients.csv", index=False)
    return tmp_path / "patients.csv"


def winter(folder: Path) -> pd.DataFrame:
    """Other order of columns, two of three classes, no client, a column that nobody asked for."""
    frame = pd.DataFrame(
        {
            "outcome": ["well", "ill", "well"],
            "dose": [1.0, 2.0, 4.0],
            "noise": list("abc"),
            "age": [40, 60, 80],
        }
    )
    frame.to_parquet(folder / "winter.parquet")
    return frame


@pytest.mark.parametrize("normalise", ["none", "client"])
def test_a_table_is_read_with_the_features_classes_and_constants_of_the_training_data(
    table: Path, normalise: str
) -> None:
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


def test_a_table_in_memory_and_a_source_serve_too(table: Path) -> None:
    frame = winter(table.parent)
    source = from_table(table, **OPTIONS)
    other = from_table(frame, label="outcome", features=["age", "dose"])  # its classes: ill, well
    federation = build(source=source, shifts={"winter": frame, "other": other})
    assert torch.equal(federation.shifted["winter"].y, federation.shifted["other"].y)
    assert torch.equal(federation.shifted["winter"].x, federation.shifted["other"].x)


def test_images_are_those_of_a_folder_with_the_channels_of_the_training_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def save(place: str, *shape: int) -> None:
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(file)

    for number in range(24):
        save(f"scans/{'ab'[number % 2]}/{('ill', 'well')[number // 2 % 2]}/{number}.png", 6, 6, 3)
    for number in range(3):
        save(f"dark/c/well/{number}.png", 9, 9)
    federation = build(
        "folder",
        path=str(tmp_path / "scans"),
        options={"size": (6, 6)},
        shifts={"dark": str(tmp_path / "dark")},
    )
    found = federation.shifted["dark"]
    assert found.x.shape == (3, 3, 6, 6)
    assert torch.equal(found.x[:, 0], found.x[:, 2])
    assert found.y.tolist() == [1, 1, 1]  # "well" alone, and yet class 1
    assert (found.mean, found.std) == (federation.source.mean, federation.source.std)


def test_texts_are_tokenized_alike(tmp_path: Path) -> None:
    def write(name: str, count: int) -> str:
        lines = [
            {
                "instruction": f"Case {k}\n\nOPTIONS:\n- yes\n- no",
                "output": ("yes", "no")[k % 2],
                "client": str(k % 2),
            }
            for k in range(count)
        ]
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
        return str(tmp_path / name)

    options = {"length": 32, "options": 2}
    federation = build(
        "instructions",
        path=write("notes.jsonl", 24),
        options=options,
        shifts={"later": write("later.jsonl", 5)},
    )
    found = federation.shifted["later"]
    assert len(found) == 5
    assert found.x.shape[1:] == federation.source.x.shape[1:]
    assert found.info["tokenizer"] == federation.source.info["tokenizer"]


@pytest.mark.parametrize("task", ["regression", "survival", "binary"])
def test_other_tasks(tmp_path: Path, task: str) -> None:
    rng = np.random.default_rng(0)
    label = {"regression": ["pain"], "survival": ["event", "time"], "binary": ["event"]}[task]
    frame = pd.DataFrame(
        {"site": np.repeat(["a", "b"], 20), "age": rng.normal(size=40), "pain": rng.normal(size=40)}
    ).assign(event=rng.integers(0, 2, 40), time=rng.integers(1, 9, 40))
    source = from_table(frame, label=label, client="site", features=["age"], task=task)  # type: ignore[arg-type]
    ones = frame[frame["event"] == 1]
    found = build(source=source, shifts={"later": ones}).shifted["later"]
    assert len(found) == len(ones)
    wanted = ones[label].to_numpy(dtype=np.float32)
    np.testing.assert_array_equal(found.y.numpy().reshape(wanted.shape), wanted)


@pytest.mark.parametrize(
    ("name", "shift", "words"),
    [
        ("winter", lambda frame: "nowhere.csv", "'winter'.*does not exist"),
        ("winter", lambda frame: frame.drop(columns="age"), "no column 'age'"),
        ("winter", lambda frame: frame.assign(outcome="better"), "'better'"),
        ("winter", lambda frame: frame.assign(age="old"), "is not a number"),
        (
            "winter",
            lambda frame: from_tensors(torch.zeros(3, 2), torch.zeros(3), task="regression"),
            "regression",
        ),
        ("winter", lambda frame: from_tensors(torch.zeros(3, 5), ["ill", "ill", "well"]), r"\[5\]"),
        ("official", lambda frame: frame, "'official' cannot name"),
    ],
)
def test_mistakes_are_named(table: Path, name: str, shift: Callable[[pd.DataFrame], Any], words: str) -> None:
    with pytest.raises((DataError, ConfigError), match=words):
        build(source=from_table(table, **OPTIONS), shifts={name: shift(winter(table.parent))})  # type: ignore[arg-type]


def test_tensors_say_nothing_of_how_a_file_is_read() -> None:
    with pytest.raises(DataError, match="were handed over"):
        build(source=from_tensors(torch.zeros(30, 2), torch.arange(30) % 3), clients=2, shifts={"a": "x.csv"})


def test_every_model_is_tested_on_it_as_a_column_of_its_own(table: Path, tmp_path: Path) -> None:
    winter(table.parent)
    data = {
        "name": "table",
        "path": str(table),
        "options": OPTIONS,
        "shifts": {"winter": str(table.parent / "winter.parquet")},
    }
    settings = {"model": "logistic", "methods": ["local", "fedavg"], "rounds": 1, "seeds": 1}
    result = tailorfl.run(settings, data=data, out=tmp_path / "r")
    assert result.table["deployed.winter"].notna().all()
