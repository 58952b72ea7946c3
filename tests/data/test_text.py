"""Texts with a class: of a user's own table, and the sets of the data folder with their parts and users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import tailorfl
from tailorfl.data.build import build
from tailorfl.data.registry import load_source
from tailorfl.data.text import from_texts
from tailorfl.errors import ConfigError, DataError
from tailorfl.export.folder import export
from tailorfl.export.predict import predict
from tailorfl.runs.trained_models import restore

QUICK: dict[str, Any] = {"seeds": [0], "rounds": 1, "engine": "sequential", "eval": {"every": 0}}
ROLES = {"label": "when", "client": "clinic"}
BERT = {"name": "bert", "head": "classification", "vocabulary": 259}


def notes(rows: int = 24) -> pd.DataFrame:
    urgent = np.random.default_rng(0).integers(0, 2, rows)
    note = [f"{'chest pain, sudden é' if u else 'yearly visit'} {k}" for k, u in enumerate(urgent)]
    answer = [None if k % 3 else f"seen by {k}" for k in range(rows)]
    frame = pd.DataFrame({"clinic": np.repeat(["ash", "elm"], rows // 2), "note": note, "answer": answer})
    return frame.assign(when=np.where(urgent, "today", "next week"))


def by_hand(*texts: str, length: int) -> list[int]:
    """UTF-8 bytes, each 3 higher, 1 after every text, filled with 0."""
    ids = [number for text in texts for number in (*(byte + 3 for byte in text.encode()), 1)]
    return ids + [0] * (length - len(ids))


def test_texts_of_a_table_are_their_bytes(tmp_path: Path) -> None:
    frame, options = notes(), {"label": "when", "text": "note", "second": "answer", "length": 60}
    source = from_texts(frame, client="clinic", **options)
    pairs = frame[["note", "answer"]].itertuples(index=False)
    assert source.x.tolist() == [by_hand(*filter(pd.notna, pair), length=60) for pair in pairs]
    assert source.info["classes"] == ("next week", "today")
    assert source.y.tolist() == (frame["when"] == "today").astype(int).tolist()
    assert source.group_names["client"] == ("ash", "elm")
    for name, mine in frame.groupby("clinic"):
        mine.drop(columns="clinic").to_csv(tmp_path / f"{name}.csv", index=False)
    files = load_source("text_table", path=str(tmp_path), **options)
    assert torch.equal(files.x, source.x)
    assert torch.equal(files.groups["client"], source.groups["client"])
    left = from_texts(frame, label="when", text="note", padding="left", length=60)
    assert (left.x[0, [0, -1]].tolist(), left.groups) == ([0, 1], {})


def test_a_text_may_be_a_word_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,more,seen\nNone,NA,yes\nn/a,,no\n")
    source = from_texts(tmp_path / "t.csv", label="seen", second="more", length=12)
    assert source.x.tolist() == [by_hand("None", "NA", length=12), by_hand("n/a", length=12)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"text": "text"}, r"no column 'text'.*Columns: clinic, note"),
        ({"text": "answer"}, r"column 'answer' is empty .* in 16 of 24 rows"),
        ({"padding": "top"}, "padding"),
        ({"task": "generation"}, "task of texts"),
        ({}, r"normalise='federated' is for float features.*tokens"),
    ],
)
def test_what_a_table_of_texts_lacks_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises((DataError, ConfigError), match=words):
        build(source=from_texts(notes(), **{**ROLES, "text": "note", **options}), normalise="federated")


@pytest.mark.slow
@pytest.mark.parametrize("handed", [False, True])
def test_new_texts_are_read_as_those_of_training(tmp_path: Path, handed: bool) -> None:
    pytest.importorskip("transformers")
    frame = notes()
    frame.to_csv(tmp_path / "notes.csv", index=False)
    options = {"label": "when", "text": "note", "second": "answer", "client": "clinic", "length": 32}
    source = from_texts(frame, **options) if handed else None
    data = {} if handed else {"name": "text_table", "path": str(tmp_path / "notes.csv"), "options": options}
    if not handed:
        frame.drop(columns="clinic").head(5).to_csv(tmp_path / "late.csv", index=False)
        data["shifts"] = {"late": str(tmp_path / "late.csv")}
    tailorfl.run(QUICK, method="local", source=source, data=data, model=BERT, out=tmp_path / "run")
    new = frame[frame["clinic"] == "elm"][["answer", "note", "when"]]
    found = predict(tmp_path / "run", new, client="elm", source=source)
    run = restore(tmp_path / "run", source=source)
    inside = run.sim.federation.source
    with torch.no_grad():
        wanted = next(run.models([1])).module(inside.x[12:]).softmax(1)
    np.testing.assert_allclose(found[["p(next week)", "p(today)"]], wanted, atol=1e-6)
    (one,) = export(tmp_path / "run", tmp_path / "models", clients=["elm"], source=source)
    new.drop(columns="when").to_csv(tmp_path / "new.csv", index=False)
    pd.testing.assert_frame_equal(predict(one.path, tmp_path / "new.csv"), found)
    with pytest.raises(DataError, match="lacks note, which the model reads"):
        predict(one.path, new[["answer"]])


def test_tweets_to_airlines_are_predicted(tmp_path: Path, need_data: Callable[[str], Path]) -> None:
    pytest.importorskip("transformers")
    tweets = pd.read_parquet(need_data("text/airline_tweets.parquet"))
    data = {"name": "airline", "options": {"min_tweets": 20, "length": 24}, "samples": 60}
    tailorfl.run(QUICK, method="fedavg", data=data, model=BERT, out=tmp_path / "run")
    run = restore(tmp_path / "run")
    source = run.sim.federation.source
    kept = tweets[tweets.groupby("user")["user"].transform("size") >= 20].head(9)
    with torch.no_grad():
        wanted = next(run.global_models()).module(source.x[:9]).softmax(1)
    found = predict(tmp_path / "run", kept.rename(columns={"text_a": "text"}), client="global")
    np.testing.assert_allclose(found[[f"p({name})" for name in source.info["classes"]]], wanted, atol=1e-6)


# the sets of the data folder

MORE_CORPORA = {"sentiment140": 2, "anli": 3, "mrpc": 2, "boolq": 2}


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("sst2", 2),
        ("snli", 3),
        *(pytest.param(name, n, marks=pytest.mark.slow) for name, n in MORE_CORPORA.items()),
    ],
)
def test_texts_with_a_class(name: str, classes: int, need_data: Callable[[str], Path]) -> None:
    frame = pd.read_parquet(need_data(f"text/{name}.parquet"))
    source = load_source("text", set=name, length=2000)
    assert (len(source), source.outputs, len(source.info["classes"])) == (2400, classes, classes)
    assert source.test.tolist() == [False] * 2000 + [True] * 400
    first = frame[frame["split"] == "test"].iloc[3]
    texts = [first.text_a, first.text_b] if first.text_b else [first.text_a]
    assert source.x[2003].tolist() == by_hand(*texts, length=2000)
    assert int(source.y[2003]) == first.label
    assert source.info["classes"][first.label] == first.label_text


def test_few_texts_of_each_part(need_data: Callable[[str], Path]) -> None:
    need_data("text/sst2.parquet")
    source = load_source("text", samples=50, padding="left", length=40)
    assert source.test.tolist() == [False] * 50 + [True] * 50
    assert bool((source.x[:, -1] == 1).all())
    with pytest.raises(ConfigError, match=r"unknown set of data source 'text' 'sst'.*'sst2'"):
        load_source("text", set="sst")


def test_airline_tweets_by_users_and_airlines(need_data: Callable[[str], Path]) -> None:
    need_data("text/airline_tweets.parquet")
    source = load_source("airline")
    assert [len(source.group_names[kind]) for kind in ("client", "domain")] == [460, 6]
    assert torch.bincount(source.groups["client"]).min() >= 5
    assert source.info["classes"] == ("negative", "neutral", "positive")
    assert build("airline", options={"min_tweets": 10}).num_clients == 74
    assert build("airline", partition="domain").num_clients == 6
    with pytest.raises(ConfigError, match="no user of data source 'airline' has min_tweets=1000"):
        load_source("airline", min_tweets=1000)
