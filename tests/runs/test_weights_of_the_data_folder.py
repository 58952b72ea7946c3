"""Weights that lie in the data folder are named without its path, so that recipes hold on every machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tailorfl.data.registry import load_source
from tailorfl.errors import DataError
from tailorfl.models import build, save_weights
from tailorfl.runs.build import make_model
from tailorfl.settings.model import OneModelConfig


def test_data_is_where_the_variable_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    source = load_source("digits")
    saved = build("logistic", source.input_shape, source.outputs)
    save_weights(saved.state_dict(), tmp_path / "weights" / "small.safetensors")
    monkeypatch.setenv("TAILORFL_DATA", str(tmp_path))
    config = OneModelConfig(name="logistic", weights="data:weights/small.safetensors")
    started = make_model(config, source, seed=1).init(1)
    for name, tensor in saved.state_dict().items():
        torch.testing.assert_close(started[name], tensor)
    with pytest.raises(DataError, match=r"'weights/other.npz' was not found"):
        make_model(config.model_copy(update={"weights": "data:weights/other.npz"}), source, seed=1).init(1)
