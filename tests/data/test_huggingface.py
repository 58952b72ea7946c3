"""Hugging Face data sets: held, saved, streamed; the same numbers every way, in mapped files, converted once."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from tailorfl.data import huggingface, storage
from tailorfl.data.build import build
from tailorfl.data.folder import from_folder
from tailorfl.data.own import from_datasets, from_table
from tailorfl.data.registry import load_source
from tailorfl.errors import ConfigError, DataError, MissingExtraError

datasets = pytest.importorskip("datasets")

OPTIONS: dict[str, Any] = {"label": "outcome", "features": ["age", "dose"], "client": "site"}


@pytest.fixture
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.integers(20, 90, 50), "dose": rng.normal(size=50)})
    frame["site"] = rng.choice(["north", "south", "east"], 50)
    return frame.assign(outcome=rng.choice(["well", "ill", "dead"], 50))


def stored(frame: pd.DataFrame, file: Path) -> str:
    """Write a table in the format that the file's name says, and return its path."""
    if file.suffix == ".csv":
        frame.to_csv(file, index=False)
    elif file.suffix == ".json":
        frame.to_json(file, orient="records", lines=True)
    else:
        frame.to_parquet(file)
    return str(file)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several blocks of rows, and a cache of the test's own."""
    monkeypatch.setattr(huggingface, "ROWS", 7)
    monkeypatch.setenv(storage.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")


def mapped(x: torch.Tensor) -> bool:
    """Whether the numbers lie in a file that is mapped."""
    at = x.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= at < high:
            return "samples.bin" in line
    return False


def is_as_the_table(source: Any, frame: pd.DataFrame) -> None:
    wanted = from_table(frame, **OPTIONS)
    assert torch.equal(source.x, wanted.x)
    assert torch.equal(source.y, wanted.y)
    assert source.info["classes"] == ("dead", "ill", "well")
    assert torch.equal(source.groups["client"], wanted.groups["client"])
    assert source.group_names == wanted.group_names


@pytest.mark.parametrize(
    ("suffix", "streaming"),
    [
        ("csv", True),
        ("parquet", False),
        *(pytest.param(suffix, False, marks=pytest.mark.slow) for suffix in ("csv", "json")),
    ],
)
def test_files_are_streamed_into_a_mapped_file(
    tmp_path: Path, frame: Any, suffix: str, streaming: bool
) -> None:
    options = {"data_files": stored(frame, tmp_path / f"all.{suffix}"), "streaming": streaming, **OPTIONS}
    source = load_source("huggingface", path=suffix, **options)
    is_as_the_table(source, frame)
    assert mapped(source.x)
    assert set(build("huggingface", path=suffix, options=options).names) == {"north", "south", "east"}


def test_what_save_to_disk_wrote_keeps_its_parts(tmp_path: Path, frame: pd.DataFrame) -> None:
    parts = {"train": frame[:40], "test": frame[40:].reset_index(drop=True)}
    path = str(tmp_path / "saved")
    datasets.DatasetDict({n: datasets.Dataset.from_pandas(part) for n, part in parts.items()}).save_to_disk(
        path
    )
    source = load_source("huggingface", path=path, **OPTIONS)
    is_as_the_table(source, frame)
    assert source.test.tolist() == [False] * 40 + [True] * 10
    assert len(load_source("huggingface", path=path, train="test", **OPTIONS)) == 10
    swapped = load_source("huggingface", path=path, train="test", test="train", **OPTIONS)
    assert swapped.test.tolist() == [False] * 10 + [True] * 40
    with pytest.raises(ConfigError, match=r"unknown split .*'tset'"):
        load_source("huggingface", path=path, test="tset", **OPTIONS)


def test_a_streamed_set_is_the_held_one(frame: pd.DataFrame) -> None:
    stream = datasets.IterableDataset.from_generator(lambda: iter(frame.to_dict("records")))
    held = datasets.Dataset.from_pandas(frame)
    for dataset, file in ((stream, True), (held, False)):  # the file of a stream has no name any more
        source = from_datasets(dataset, **OPTIONS)
        is_as_the_table(source, frame)
        assert mapped(source.x) == file


def test_a_conversion_is_used_again_and_anew_for_other_data(
    tmp_path: Path, frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "patients.csv"
    options = {"path": "csv", "data_files": stored(frame, file), **OPTIONS}
    load_source("huggingface", **options)
    gathered, gather = [], huggingface._gather
    monkeypatch.setattr(huggingface, "_gather", lambda *a, **more: gathered.append(1) or gather(*a, **more))
    is_as_the_table(load_source("huggingface", **options), frame)
    assert gathered == []
    load_source("huggingface", **{**options, "features": ["age"]})
    assert gathered == [1]
    other = frame.assign(age=frame["age"] + 1)
    stored(other, file)
    is_as_the_table(load_source("huggingface", **options), other)


@pytest.mark.parametrize("damage", ["samples.bin", "facts.json", "columns.parquet"])
def test_a_damaged_conversion_is_done_again(tmp_path: Path, frame: pd.DataFrame, damage: str) -> None:
    held = datasets.Dataset.from_pandas(frame)
    from_datasets(held, **OPTIONS, cache=tmp_path / "kept")
    (place,) = (tmp_path / "kept").iterdir()
    (place / damage).write_bytes((place / damage).read_bytes()[:-9])
    is_as_the_table(from_datasets(held, **OPTIONS, cache=tmp_path / "kept"), frame)


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, frame: pd.DataFrame) -> None:
    kept = tmp_path / "kept"
    dead = kept / f"abc.{platform.node()}.999999999.x.part"
    others = [kept / "abc.elsewhere.999999999.x.part", kept / "mine.part"]
    for folder in (
        dead,
        *others,
    ):  # of a process that was killed, of one on another machine, of somebody else
        folder.mkdir(parents=True)

    failures = [30]

    def rows() -> Iterator[dict[str, Any]]:
        for number, row in enumerate(frame.to_dict("records")):
            if number in failures:
                failures.clear()
                raise KeyboardInterrupt
            yield row

    stream = datasets.IterableDataset.from_generator(rows)
    given = {**OPTIONS, "cache": kept, "fingerprint": "mine"}
    with pytest.raises(KeyboardInterrupt):
        from_datasets(stream, **given)
    assert sorted(kept.iterdir()) == others
    is_as_the_table(from_datasets(stream, **given), frame)


def test_images_are_those_of_a_folder_and_turn_coloured_late(tmp_path: Path) -> None:
    rng, rows, roles = np.random.default_rng(1), [], {"label": "kind", "image": "image", "client": "site"}
    for number in range(20):
        pixels = rng.integers(0, 256, (6, 5) if number < 15 else (6, 5, 3), dtype=np.uint8)
        kind, site = ("cat", "dog")[number % 2], ("a", "b")[number // 10]
        file = tmp_path / site / kind / f"{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
        rows.append({"image": str(file), "kind": kind, "site": site})
    listed = pd.DataFrame(rows).sort_values("image").to_dict("list")
    held = datasets.Dataset.from_dict(listed).cast_column("image", datasets.Image())
    held = held.cast_column("kind", datasets.ClassLabel(names=["dog", "none", "cat"]))
    wanted = from_folder(tmp_path)
    for dataset in (held, held.to_iterable_dataset()):
        source = from_datasets(dataset, **roles)
        assert torch.equal(source.x, wanted.x)
        assert source.x.shape == (20, 3, 6, 5)
        assert (source.mean, source.std) == (wanted.mean, wanted.std)
        assert source.info["classes"] == ("dog", "none", "cat")
        assert (source.outputs, source.y.tolist()) == (3, (2 * (1 - wanted.y)).tolist())
    assert torch.equal(from_datasets(held, **roles, size=(4, 4)).x, from_folder(tmp_path, size=(4, 4)).x)


@pytest.mark.parametrize("task", ["regression", "survival"])
def test_numbers_to_be_predicted(frame: pd.DataFrame, task: str) -> None:
    frame = frame.assign(event=(frame["age"] > 50).astype(int), time=frame["dose"] ** 2)
    label = "dose" if task == "regression" else ["event", "time"]
    stream = datasets.Dataset.from_pandas(frame).to_iterable_dataset()
    found = from_datasets(stream, label=label, features=["age"], client="site", task=task)
    wanted = from_table(frame, label=label, features=["age"], client="site", task=task)
    assert torch.equal(found.y, wanted.y)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (None, OPTIONS, "column 'age' is not a number"),
        (None, {**OPTIONS, "features": ["doze"]}, "Did you mean 'dose'"),
        (None, {"label": "outcome", "image": "age"}, "column 'age' .*row 0"),
        (None, {"label": "outcome"}, "image= .* features="),
        ([1, 2], OPTIONS, "a list"),
        ({"train": 1, "validation": 1}, OPTIONS, "validation"),
        ("huggingface", {**OPTIONS, "path": "csv", "data_files": "nowhere.csv"}, "cannot be read"),
        (
            "huggingface",
            {**OPTIONS, "path": "somebody/some"},
            r"no file or folder 'somebody/some', and HF_HUB_OFFLINE forbids",
        ),
    ],
)
def test_mistakes_are_named(frame: Any, monkeypatch: Any, given: Any, options: Any, words: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    held = datasets.Dataset.from_pandas(frame.assign(age="old"))
    if isinstance(given, dict):
        given = datasets.DatasetDict(dict.fromkeys(given, held))
    read = load_source if isinstance(given, str) else from_datasets
    with pytest.raises(DataError, match=words):
        read(held.to_iterable_dataset() if given is None else given, **options)


def test_client_1_and_the_class_true_keep_their_names() -> None:
    sites = datasets.Dataset.from_dict({"age": [1.0] * 4, "ill": [True, False] * 2, "site": [0, 1, 2, 1]})
    source = from_datasets(sites, label="ill", features="age", client="site")
    assert (source.group_names["client"], source.info["classes"]) == (("0", "1", "2"), ("False", "True"))


def test_parts_have_the_same_columns_and_classes() -> None:
    def part(*classes: str) -> Any:
        kinds = datasets.Features(
            {"age": datasets.Value("float32"), "ill": datasets.ClassLabel(names=classes)}
        )
        return datasets.Dataset.from_dict({"age": [1.0, 2.0], "ill": [0, 1]}, features=kinds)

    train, roles = part("well", "ill"), {"label": "ill", "features": ["age"]}
    assert from_datasets(train, **roles, task="binary").info["classes"] == ("well", "ill")
    for test in (part("ill", "well"), train.cast_column("ill", datasets.Value("int64"))):
        with pytest.raises(DataError, match="'ill' differently"):
            from_datasets(datasets.DatasetDict(train=train, test=test), **roles)
    with pytest.raises(DataError, match="no column 'age'"):
        from_datasets(datasets.DatasetDict(train=train, test=train.remove_columns("age")), **roles)
    with pytest.raises(DataError, match="'ill' holds a value of type list"):
        from_datasets(datasets.Dataset.from_dict({"age": [1.0], "ill": [[0, 1]]}), **roles)
    with pytest.raises(DataError, match="size should be"):
        from_datasets(train, label="ill", image="age", size=4)  # type: ignore[arg-type]


def test_a_missing_datasets_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match="'datasets"):
        from_datasets(object(), label="y", features=["x"])
