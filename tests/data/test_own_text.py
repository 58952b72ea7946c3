"""A user's own texts: token ids of a table's column, clients, and predictions for new texts."""

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
BERT = {"name": "bert", "head": "classification", "vocabulary": 259}


def notes(rows: int = 24) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    urgent = rng.integers(0, 2, rows)
    return pd.DataFrame(
        {
            "clinic": np.repeat(["ash", "elm"], rows // 2),
            "note": [f"{'chest pain, sudden é' if u else 'yearly visit'} {k}" for k, u in enumerate(urgent)],
            "answer": [None if k % 3 else f"seen by {k}" for k in range(rows)],
            "when": np.where(urgent, "today", "next week"),
        }
    )


def by_hand(first: str, second: str | None, length: int) -> list[int]:
    """UTF-8 bytes, each 3 higher, 1 after every text, filled with 0."""
    ids = [*(b + 3 for b in first.encode()), 1]
    if second is not None:
        ids += [*(b + 3 for b in second.encode()), 1]
    return ids + [0] * (length - len(ids))


def test_texts_of_a_table_are_their_bytes(tmp_path: Path) -> None:
    frame = notes()
    source = from_texts(frame, label="when", text="note", second="answer", client="clinic", length=60)
    assert source.x.tolist() == [
        by_hand(n, None if pd.isna(a) else a, 60) for n, a in zip(frame["note"], frame["answer"], strict=True)
    ]
    assert source.info["classes"] == ("next week", "today")
    assert source.y.tolist() == (frame["when"] == "today").astype(int).tolist()
    assert source.group_names["client"] == ("ash", "elm")
    for name, mine in frame.groupby("clinic"):
        mine.drop(columns="clinic").to_csv(tmp_path / f"{name}.csv", index=False)
    options = {"label": "when", "text": "note", "second": "answer", "length": 60}
    files = load_source("text_table", path=str(tmp_path), **options)
    assert torch.equal(files.x, source.x)
    assert torch.equal(files.groups["client"], source.groups["client"])
    one = from_texts(frame, label="when", text="note", padding="left", length=60)
    assert one.x[0, -1] == 1
    assert one.x[0, 0] == 0
    assert not one.groups


def test_what_a_table_of_texts_lacks_is_said() -> None:
    frame = notes()
    with pytest.raises(DataError, match=r"no column 'text'.*Columns: clinic, note"):
        from_texts(frame, label="when")
    with pytest.raises(DataError, match=r"column 'answer' is empty \(NaN\) in 16 of 24 rows"):
        from_texts(frame, label="when", text="answer")
    with pytest.raises(ConfigError, match="padding"):
        from_texts(frame, label="when", text="note", padding="top")
    with pytest.raises(ConfigError, match="task of texts"):
        from_texts(frame, label="when", text="note", task="generation")
    with pytest.raises(DataError, match=r"normalise='federated' is for float features.*tokens"):
        build(source=from_texts(frame, label="when", text="note", client="clinic"), normalise="federated")


@pytest.mark.slow
@pytest.mark.parametrize("handed", [False, True])
def test_new_texts_are_read_as_those_of_training(tmp_path: Path, handed: bool) -> None:
    pytest.importorskip("transformers")
    frame = notes()
    frame.to_csv(tmp_path / "notes.csv", index=False)
    options = {"label": "when", "text": "note", "second": "answer", "client": "clinic", "length": 32}
    source = from_texts(frame, **options) if handed else None  # type: ignore[arg-type]
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
