"""Texts with a class: the sets of the data folder, their parts and their natural users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tailorfl.data.build import build
from tailorfl.data.registry import load_source
from tailorfl.data.tokenizers import load_tokenizer
from tailorfl.errors import ConfigError

WORDS = load_tokenizer("byte")


@pytest.mark.parametrize(
    ("name", "classes"),
    [("sst2", 2), ("sentiment140", 2), ("snli", 3), ("anli", 3), ("mrpc", 2), ("boolq", 2)],
)
def test_texts_with_a_class(name: str, classes: int, need_data: Callable[[str], Path]) -> None:
    import pandas as pd

    frame = pd.read_parquet(need_data(f"text/{name}.parquet"))
    source = load_source("text", set=name, length=2000)
    assert (len(source), source.outputs, len(source.info["classes"])) == (2400, classes, classes)
    assert source.test is not None
    assert source.test.tolist() == [False] * 2000 + [True] * 400
    first = frame[frame["split"] == "test"].iloc[3]
    ids = [*WORDS.encode(first.text_a), WORDS.end]
    ids += [*WORDS.encode(first.text_b), WORDS.end] if first.text_b else []
    assert source.x[2003, : len(ids)].tolist() == ids
    assert not source.x[2003, len(ids) :].any()
    assert int(source.y[2003]) == first.label
    assert source.info["classes"][first.label] == first.label_text


def test_few_texts_of_each_part(need_data: Callable[[str], Path]) -> None:
    need_data("text/sst2.parquet")
    source = load_source("text", samples=50, padding="left", length=40)
    assert source.test is not None
    assert source.test.tolist() == [False] * 50 + [True] * 50
    assert bool((source.x[:, -1] == WORDS.end).all())
    with pytest.raises(ConfigError, match=r"unknown set of data source 'text' 'sst'.*'sst2'"):
        load_source("text", set="sst")


def test_airline_tweets_by_users_and_airlines(need_data: Callable[[str], Path]) -> None:
    need_data("text/airline_tweets.parquet")
    source = load_source("airline")
    assert len(source.group_names["client"]) == 460
    assert len(source.group_names["domain"]) == 6
    assert torch.bincount(source.groups["client"]).min() >= 5
    assert source.info["classes"] == ("negative", "neutral", "positive")
    federation = build("airline", options={"min_tweets": 10})
    assert federation.num_clients == 74
    assert build("airline", partition="domain").num_clients == 6
    with pytest.raises(ConfigError, match="no user of data source 'airline' has min_tweets=1000"):
        load_source("airline", min_tweets=1000)
