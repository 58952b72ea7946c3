"""`tailorfl data show`: tables, chart, picture and JSON of data that nobody has trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image

from cli.commands import invoke
from tailorfl.data.build import build

SMALL = ["data.clients=5", "data.samples=300"]


def shown(*arguments: str, code: int = 0) -> Any:
    return invoke("data", "show", *arguments, code=code, columns=80)


def test_json_has_every_client_of_the_federation_that_a_run_would_have() -> None:
    found = json.loads(shown(*SMALL, "data.seed=3", "--json").stdout)
    federation = build("digits", clients=5, samples=300, seed=3)
    assert [row["name"] for row in found["clients"]] == list(federation.names)
    assert [row["train"] for row in found["clients"]] == federation.sizes("train").tolist()
    assert [row["counts"] for row in found["clients"]] == federation.describe("train").tolist()
    assert found["figures"]["total_variation"]["value"] > 0


def test_a_picture_is_written(tmp_path: Path) -> None:
    file = tmp_path / "clients.png"
    assert f"picture: {file}" in " ".join(shown(*SMALL, "-o", str(file)).stdout.split())
    with Image.open(file) as image:
        assert min(image.size) > 300
    assert "clients.gif" in shown(*SMALL, "-o", str(tmp_path / "clients.gif"), code=2).stderr


def test_columns_are_as_high_as_shares_and_bars_as_long_as_sizes(tmp_path: Path) -> None:
    rows = [("north", "a")] * 20 + [("north", "b")] * 20 + [("south", "b")] * 10 + [("south", "c")] * 10
    table = pd.DataFrame(rows, columns=["site", "kind"]).assign(age=range(60))
    table.to_csv(tmp_path / "t.csv", index=False)
    options = "data.options={label: kind, client: site}"
    text = shown("data=table", f"data.path={tmp_path / 't.csv'}", options).stdout
    assert "a full column is 50% of a client's" in text
    assert "│ north  │ ████··  │ ████████████ │" in text
    assert "│ south  │ ··████  │ ██████       │" in text


def test_many_clients_are_shown_by_some_of_them() -> None:
    text = shown(*SMALL, "--clients", "2").stdout
    assert "2 of them, from the largest to the smallest" in " ".join(text.split())
    assert text.count("client-") == 4  # in the table and in the chart


def test_no_model_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a module was made")

    monkeypatch.setattr(torch.nn.Module, "__init__", refuse)
    shown(*SMALL)


def test_shifted_sets_are_named(need_data: Callable[[str], Path]) -> None:
    need_data("pacs64_jpeg.npz")
    text = shown("data=pacs", "data.samples=400", "data.heldout_domain=sketch", "data.clients=3").stdout
    assert "shifted set sketch:" in text
    assert "held out" in text
