"""A result folder alone says how raw samples become inputs, and what the outputs stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file

import tailorfl
from runs.small import facts, records
from tailorfl.data.own import from_table, from_tensors
from tailorfl.errors import ConfigError

SITES = ("north", "south", "west")


def patients() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(90, 3)) * [1, 10, 100] + [0, 5, 7], columns=["age", "bp", "chol"])
    frame["ill"] = np.where(frame["age"] + frame["bp"] / 10 > 0.5, "yes", "no")
    frame["site"] = np.repeat(SITES, 30)
    frame["part"] = np.tile(["train", "train", "test"], 30)
    return frame


def test_raw_rows_are_judged_as_the_run_judged_them_from_the_folder_alone(tmp_path: Path) -> None:
    frame = patients()
    source = from_table(frame, label="ill", client="site", split="part")
    out = tmp_path / "run"
    tailorfl.run(
        source=source, data={"normalise": "client"}, model="logistic", methods=["local"], rounds=2, seeds=1,
        train={"lr": 0.5}, eval={"final": ["local"]}, out=out,
    )  # fmt: skip
    job = out / "local" / "seed-0"
    kept = facts(job / "config.json")
    inputs, sites = kept["inputs"], kept["clients"]
    assert sites == list(SITES)
    assert inputs["classes"] == ["no", "yes"]
    states = load_file(job / "checkpoint-000002.safetensors")
    lines = records(job / "clients.jsonl")
    stored = {r["client"]: r["accuracy"] for r in lines if r["set"] == "local" and r["round"] == 2}
    for client, site in enumerate(sites):
        rows = frame[(frame["site"] == site) & (frame["part"] == "test")]
        own = inputs["preparation"]["clients"][site]["columns"]
        x = np.stack([(rows[name] - c["mean"]) / c["deviation"] for name, c in own.items()], axis=1)
        scores = x @ states["clients/state/head.weight"][client].T + states["clients/state/head.bias"][client]
        said = np.array(inputs["classes"])[scores.argmax(1)]
        assert (said == rows["ill"]).mean() == pytest.approx(stored[client], abs=1e-6)
    assert min(stored.values()) > 0.6  # constants that are off would show


def test_pixels_come_with_the_constants_of_their_channels(tmp_path: Path) -> None:
    x = torch.randint(0, 256, (40, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    source = from_tensors(x, torch.arange(40) % 2, test=torch.arange(40) >= 30)
    out = tmp_path / "run"
    tailorfl.run(source=source, data={"clients": 2}, model="logistic", methods=["local"], rounds=1, out=out)
    inputs = facts(out / "local" / "seed-0" / "config.json")["inputs"]
    assert inputs["type"] == "image"
    pixels = x[:30].to(torch.float64) / 255
    np.testing.assert_allclose(inputs["image"]["mean"], pixels.mean(dim=(0, 2, 3)))
    np.testing.assert_allclose(inputs["image"]["deviation"], pixels.std(dim=(0, 2, 3), correction=0))


def test_data_that_were_handed_over_are_not_recorded_as_another_set(tmp_path: Path) -> None:
    out = tmp_path / "run"
    source = from_table(patients(), label="ill", client="site", split="part")
    tailorfl.run(source=source, model="logistic", methods=["local"], rounds=1, seeds=1, out=out)
    text = (out / "config.yaml").read_text()
    assert "digits" not in text
    assert "name: given" in text
    with pytest.raises(ConfigError, match="source=") as caught:
        tailorfl.run(str(out / "config.yaml"), out=tmp_path / "again")
    assert "data.name=given" in str(caught.value)
