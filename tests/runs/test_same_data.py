"""Whether data are the same is asked of what was given, not of what a seed's training rows made of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tailorfl
from runs.small import StopAt, contents, facts
from tailorfl.data.own import from_table, from_tensors
from tailorfl.data.source import Source
from tailorfl.data.text import from_texts
from tailorfl.errors import RunError
from tailorfl.report.document import write_report
from tailorfl.report.matrix import by_federation
from tailorfl.report.result import ExperimentResult
from tailorfl.runs.files import MANIFEST, write_manifest
from tailorfl.runs.fingerprint import samples_of
from tailorfl.runs.trained_models import restore

ROWS = 48
BERT = {"name": "bert", "head": "classification", "vocabulary": 259, "hidden": 8, "layers": 1, "heads": 1}


def frame(change: int = 0) -> pd.DataFrame:
    """A table with a number, a word and a label; `change` moves one cell of the number (1) or of the word (2)."""
    rng = np.random.default_rng(0)
    columns = {"age": rng.normal(60, 10, ROWS).round(1), "pain": rng.choice(["dull", "sharp"], ROWS)}
    table = pd.DataFrame({**columns, "ward": np.arange(ROWS) % 3, "ill": rng.integers(0, 2, ROWS)})
    if change == 1:
        table.loc[5, "age"] += 0.1
    if change == 2:
        table.loc[5, "pain"] = {"dull": "sharp", "sharp": "dull"}[str(table.loc[5, "pain"])]
    return table


def numbers() -> Source:
    rng = np.random.default_rng(1)
    return from_tensors(rng.normal(3, 2, (ROWS, 4)), rng.integers(0, 2, ROWS), np.arange(ROWS) % 3)


def images() -> Source:
    rng = np.random.default_rng(2)
    x = rng.integers(0, 256, (ROWS, 1, 4, 4)).astype(np.uint8)
    return from_tensors(x, rng.integers(0, 2, ROWS), np.arange(ROWS) % 3)


def table(change: int = 0) -> Source:
    return from_table(frame(change), label="ill", client="ward")


def texts() -> Source:
    return from_texts(frame(), label="ill", text="pain", client="ward", length=8)


KINDS: dict[str, tuple[Callable[[], Source], str]] = {
    "plain": (numbers, "none"),
    "by all clients": (numbers, "federated"),
    "by client": (numbers, "client"),
    "table by all clients": (table, "federated"),
    "table by client": (table, "client"),
    "images": (images, "none"),
    "texts": (texts, "none"),
}


def settings(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "methods": ["local"],
        "rounds": 1,
        "model": BERT if kind == "texts" else "logistic",
        "data": {"normalise": KINDS[kind][1], "split": {"train": 0.5, "val": 0.1, "test": 0.4}},
        "train": {"steps": 1},
        "engine": "sequential",
        "eval": {"final": ["local"]},
        **more,
    }


def ran(kind: str, out: Path, seeds: list[int], **run: Any) -> Source:
    if kind == "texts":
        pytest.importorskip("transformers")
    source = KINDS[kind][0]()
    tailorfl.run(settings(kind, seeds=seeds), out=out, source=source, **run)
    return source


def values(result: ExperimentResult) -> dict[int, float]:
    return {found.seed: found.values["mean"] for found in result.seed_results()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_seeds_are_resumed_extended_and_merged(kind: str, tmp_path: Path) -> None:
    source = ran(kind, tmp_path / "whole", [0, 1])
    wanted = values(ExperimentResult.load(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        ran(kind, tmp_path / "stopped", [0, 1], observer=StopAt("local, seed 1"))
    assert values(tailorfl.run(out=tmp_path / "stopped", resume=True, source=source)) == wanted
    ran(kind, tmp_path / "first", [0])
    shutil.copytree(tmp_path / "first", tmp_path / "longer")
    assert values(tailorfl.run(out=tmp_path / "longer", extend=True, seeds=[0, 1], source=source)) == wanted
    ran(kind, tmp_path / "second", [1])
    parts = [tmp_path / "first", tmp_path / "second"]
    merged = tailorfl.merge(parts, tmp_path / "merged")[""]
    assert not merged.unlike
    assert merged.table["seeds"].to_dict() == {"local": 2}
    assert list(by_federation({part: ExperimentResult.load(part) for part in parts}).values()) == [parts]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("table by all clients", 1),
        ("table by client", 2),
        pytest.param("table by all clients", 2, marks=pytest.mark.slow),
        pytest.param("table by client", 1, marks=pytest.mark.slow),
    ],
)
def test_one_other_cell_is_other_data_for_every_seed(kind: str, change: int, tmp_path: Path) -> None:
    ran(kind, tmp_path / "first", [0])
    other = table(change)
    before = contents(tmp_path / "first")
    for seeds in ([0, 1], [0]):
        with pytest.raises(RunError, match="local, seed 0: the samples were different"):
            tailorfl.run(out=tmp_path / "first", extend=True, seeds=seeds, rounds=2, source=other)
    assert contents(tmp_path / "first") == before
    tailorfl.run(settings(kind, seeds=[1]), out=tmp_path / "second", source=other)
    merged = tailorfl.merge([tmp_path / "first", tmp_path / "second"], tmp_path / "merged")[""]
    assert list(merged.table.index) == ["local (first)", "local (second)"]
    assert len(merged.unlike) == 1
    with pytest.raises(RunError, match="the data differ"):
        restore(tmp_path / "first", source=other)


@pytest.mark.parametrize("kind", ["plain", "by client"])
def test_folders_that_digest_prepared_samples_are_opened_or_refused_with_their_version(
    kind: str, tmp_path: Path
) -> None:
    """As folders were written before digests were of what is given."""
    source = ran(kind, tmp_path / "run", [0])
    (file,) = tmp_path.rglob("config.json")
    stored = facts(file)
    run = restore(tmp_path / "run", source=source)
    prepared = hashlib.blake2b(digest_size=16)
    run.sim.given.source.feed(prepared)
    stored["data"] = {"samples": prepared.hexdigest(), "dealt": stored["data"]["dealt"]}
    file.write_text(json.dumps(stored))
    write_manifest(file.parent, list(facts(file.parent / MANIFEST)["files"]))
    assert restore(tmp_path / "run", source=source).sim.round == 1
    tailorfl.run(out=tmp_path / "run", extend=True, rounds=2, source=source)  # the same seed
    more: dict[str, Any] = {"extend": True, "seeds": [0, 1], "source": source}
    if kind == "plain":
        tailorfl.run(out=tmp_path / "run", **more)
    else:
        with pytest.raises(RunError, match=r"local, seed 0: .*tailorfl 0\.1\.0"):
            tailorfl.run(out=tmp_path / "run", **more)


def test_a_report_has_the_digest_of_the_samples(tmp_path: Path) -> None:
    ran("by client", tmp_path / "run", [0])
    result = ExperimentResult.load(tmp_path / "run")
    digest = samples_of(result.jobs[0][1].config)
    assert digest is not None
    assert any(digest in page.read_text() for page in write_report(result))


def test_results_of_several_folders_are_looked_at_again(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        source = ran("plain", tmp_path / name, [seed])
    merged = tailorfl.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")[""]
    tailorfl.run(out=tmp_path / "b", extend=True, seeds=[5], source=source)
    assert merged.table["seeds"].tolist() == [2]
    again = merged.again()
    assert (again.table["seeds"].tolist(), again.path) == ([3], merged.path)
