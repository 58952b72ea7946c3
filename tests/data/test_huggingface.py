"""Hugging Face data sets: held, saved, streamed; the same numbers every way, in mapped files, converted once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from tailorfl.data import cache, huggingface
from tailorfl.data.build import build
from tailorfl.data.folder import from_folder
from tailorfl.data.own import from_datasets, from_table
from tailorfl.data.registry import load_source
from tailorfl.errors import DataError

datasets = pytest.importorskip("datasets")

OPTIONS: dict[str, Any] = {"label": "outcome", "features": ["age", "dose"], "client": "site"}


@pytest.fixture
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "site": rng.choice(["north", "south", "east"], 50),
            "age": rng.integers(20, 90, 50),
            "dose": rng.normal(size=50),
            "outcome": rng.choice(["well", "ill", "dead"], 50),
        }
    )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several blocks of rows, and a cache of the test's own."""
    monkeypatch.setattr(huggingface, "ROWS", 7)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
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


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
@pytest.mark.parametrize("streaming", [True, False])
def test_files_are_streamed_into_a_mapped_file(
    tmp_path: Path, frame: pd.DataFrame, suffix: str, streaming: bool
) -> None:
    file = tmp_path / f"patients.{suffix}"
    {
        "csv": lambda: frame.to_csv(file, index=False),
        "json": lambda: frame.to_json(file, orient="records", lines=True),
        "parquet": lambda: frame.to_parquet(file),
    }[suffix]()
    options = {"path": suffix, "data_files": str(file), "streaming": streaming, **OPTIONS}
    source = load_source("huggingface", **options)
    is_as_the_table(source, frame)
    assert mapped(source.x)
    federation = build("huggingface", path=suffix, options={k: v for k, v in options.items() if k != "path"})
    assert set(federation.names) == {"north", "south", "east"}


def test_what_save_to_disk_wrote_keeps_its_parts(tmp_path: Path, frame: pd.DataFrame) -> None:
    parts = {"train": frame[:40], "test": frame[40:]}
    whole = datasets.DatasetDict(
        {name: datasets.Dataset.from_pandas(part.reset_index(drop=True)) for name, part in parts.items()}
    )
    whole.save_to_disk(str(tmp_path / "saved"))
    source = load_source("huggingface", path=str(tmp_path / "saved"), **OPTIONS)
    is_as_the_table(source, frame)
    assert source.test is not None
    assert source.test.tolist() == [False] * 40 + [True] * 10
    one = load_source("huggingface", path=str(tmp_path / "saved"), train="test", **OPTIONS)
    assert len(one) == 10
    with pytest.raises(Exception, match=r"unknown split .*'tset'"):
        load_source("huggingface", path=str(tmp_path / "saved"), test="tset", **OPTIONS)


def test_a_streamed_set_is_the_held_one(frame: pd.DataFrame) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from frame.to_dict("records")

    stream = datasets.IterableDataset.from_generator(rows)
    source = from_datasets(stream, **OPTIONS)
    is_as_the_table(source, frame)
    assert mapped(source.x)  # the file has no name any more
    held = from_datasets(datasets.Dataset.from_pandas(frame), **OPTIONS)
    is_as_the_table(held, frame)
    assert not mapped(held.x)


def test_a_conversion_is_used_again_and_anew_for_other_data(
    tmp_path: Path, frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "patients.csv"
    frame.to_csv(file, index=False)
    options = {"path": "csv", "data_files": str(file), **OPTIONS}
    load_source("huggingface", **options)
    gather = huggingface._gather

    def refuse(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("read again")

    monkeypatch.setattr(huggingface, "_gather", refuse)
    is_as_the_table(load_source("huggingface", **options), frame)
    with pytest.raises(AssertionError, match="read again"):
        load_source("huggingface", **{**options, "features": ["age"]})
    monkeypatch.setattr(huggingface, "_gather", gather)
    other = frame.assign(age=frame["age"] + 1)
    other.to_csv(file, index=False)
    is_as_the_table(load_source("huggingface", **options), other)


@pytest.mark.parametrize("damage", ["samples.bin", "facts.json", "columns.parquet"])
def test_a_damaged_conversion_is_done_again(tmp_path: Path, frame: pd.DataFrame, damage: str) -> None:
    held = datasets.Dataset.from_pandas(frame)
    from_datasets(held, **OPTIONS, cache=tmp_path / "kept")
    (place,) = (tmp_path / "kept").iterdir()
    (place / damage).write_bytes((place / damage).read_bytes()[:-9])
    is_as_the_table(from_datasets(held, **OPTIONS, cache=tmp_path / "kept"), frame)


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, frame: pd.DataFrame) -> None:
    dead = tmp_path / "kept" / "abc.999999999.x.part"
    dead.mkdir(parents=True)  # of a process that was killed

    broken = [True]

    def rows() -> Iterator[dict[str, Any]]:
        for number, row in enumerate(frame.to_dict("records")):
            if broken[0] and number == 30:
                raise KeyboardInterrupt
            yield row

    stream = datasets.IterableDataset.from_generator(rows)
    given = {**OPTIONS, "cache": tmp_path / "kept", "fingerprint": "mine"}
    with pytest.raises(KeyboardInterrupt):
        from_datasets(stream, **given)
    assert list((tmp_path / "kept").iterdir()) == []
    broken[0] = False
    is_as_the_table(from_datasets(stream, **given), frame)


def test_images_are_those_of_a_folder_and_turn_coloured_late(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = []
    for number in range(20):
        grey = number < 15
        pixels = rng.integers(0, 256, (6, 5) if grey else (6, 5, 3), dtype=np.uint8)
        kind, site = ("cat", "dog")[number % 2], ("a", "b")[number // 10]
        file = tmp_path / "pets" / site / kind / f"{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
        rows.append({"image": str(file), "kind": kind, "site": site})
    wanted = from_folder(tmp_path / "pets")
    rows.sort(key=lambda row: row["image"])
    listed = pd.DataFrame(rows).to_dict("list")
    held = datasets.Dataset.from_dict(listed).cast_column("image", datasets.Image())
    for dataset in (held, held.to_iterable_dataset()):
        source = from_datasets(dataset, label="kind", image="image", client="site")
        assert torch.equal(source.x, wanted.x)
        assert source.x.shape == (20, 3, 6, 5)
        assert (source.mean, source.std) == (wanted.mean, wanted.std)
        assert source.info["classes"] == ("cat", "dog")
    resized = from_datasets(held, label="kind", image="image", client="site", size=(4, 4))
    assert torch.equal(resized.x, from_folder(tmp_path / "pets", size=(4, 4)).x)


@pytest.mark.parametrize("task", ["regression", "survival"])
def test_numbers_to_be_predicted(frame: pd.DataFrame, task: str) -> None:
    frame = frame.assign(event=(frame["age"] > 50).astype(int), time=frame["dose"] ** 2)
    label = "dose" if task == "regression" else ["event", "time"]
    stream = datasets.Dataset.from_pandas(frame).to_iterable_dataset()
    found = from_datasets(stream, label=label, features=["age"], client="site", task=task)
    wanted = from_table(frame, label=label, features=["age"], client="site", task=task)
    assert torch.equal(found.y, wanted.y)


def test_mistakes_are_named(tmp_path: Path, frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = datasets.Dataset.from_pandas(frame.assign(age="old")).to_iterable_dataset()
    with pytest.raises(DataError, match="column 'age' is not a number"):
        from_datasets(stream, **OPTIONS)
    with pytest.raises(DataError, match="Did you mean 'dose'"):
        from_datasets(stream, **{**OPTIONS, "features": ["doze"]})
    with pytest.raises(DataError, match="no image in row 0"):
        from_datasets(stream, label="outcome", image="age")
    with pytest.raises(DataError, match="cannot be read"):
        load_source("huggingface", path="csv", data_files=str(tmp_path / "nowhere.csv"), **OPTIONS)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        DataError, match=r"no file or folder 'somebody/something', and HF_HUB_OFFLINE says not"
    ):
        load_source("huggingface", path="somebody/something", **OPTIONS)
