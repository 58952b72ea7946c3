"""Methods of one comparison may train different parts of a model, or different models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailorfl.errors import ConfigError
from tailorfl.report.experiment import run_experiment
from tailorfl.runs.build import check
from tailorfl.settings.loading import load

SMALL: dict[str, Any] = {
    "name": "small",
    "seeds": [0],
    "data": {"name": "digits", "samples": 120, "clients": 3, "partition": "iid"},
    "model": {"name": "mlp", "hidden": [8]},
    "rounds": 2,
    "eval": {"every": 0},
}
ALL, HEAD, LOGISTIC = 64 * 8 + 8 + 8 * 10 + 10, 8 * 10 + 10, 64 * 10 + 10


def test_changes_are_laid_over_the_experiments_model() -> None:
    changed = {"name": "ditto", "model": {"trainable": "head"}}
    config = load({**SMALL, "methods": ["local", changed, {"name": "fedavg", "model": {"name": "logistic"}}]})
    models = [config.model_of(method) for method in config.methods]
    assert [m.name for m in models] == ["mlp", "mlp", "logistic"]
    assert [m.trainable for m in models] == [None, "head", None]
    assert models[1].options == {"hidden": [8]}
    assert models[2].options == {}  # another model starts from its own defaults
    assert load(config.to_dict()) == config


def test_each_method_trains_and_sends_its_part(tmp_path: Path) -> None:
    methods = [
        {"name": "fedavg"},
        {"name": "ditto", "model": {"trainable": "head"}},
        {"name": "fedavg", "label": "linear", "model": {"name": "logistic"}},
    ]
    run_experiment(load({**SMALL, "methods": methods}), tmp_path)
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("*/seed-0/summary.json")]
    sent = {s["label"]: (s["trained_scalars"], s["traffic"]["up"]) for s in summaries}
    assert sent == {
        "fedavg": (ALL, 6 * ALL),
        "ditto": (2 * HEAD, 6 * HEAD),
        "linear": (LOGISTIC, 6 * LOGISTIC),
    }


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"methods\.ditto\.model\.weights = 3"):
        load({**SMALL, "methods": [{"name": "ditto", "model": {"weights": 3}}]})
    with pytest.raises(ConfigError, match=r"hiden.*hidden"):
        check(load({**SMALL, "methods": [{"name": "ditto", "model": {"hiden": [3]}}]}))
