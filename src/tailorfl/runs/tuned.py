"""`tuning.json`: how the settings of an experiment were tuned, beside the experiment that they were written into.

A comparison of tuned settings keeps the file in its own folder, and its report says what every method was given. The
content is that of `tailorfl.tuning.run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailorfl.core.method import make_method
from tailorfl.errors import RunError
from tailorfl.runs.files import decode
from tailorfl.settings.experiment import ExperimentConfig, MethodConfig

NAME = "tuning.json"


def value_of(config: ExperimentConfig, method: MethodConfig, setting: str) -> Any:
    """Return what a line of an experiment has for `train.lr`, `method.lam` or `method.distil.lr`.

    Raises:
        KeyError: it has no such setting.
    """
    group, _, path = setting.partition(".")
    value: Any = {
        "train": {**config.train.model_dump(mode="json"), **method.train},
        "method": make_method(method.name, method.options).all_options(),
    }[group]
    for step in path.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(setting)
        value = value[step]
    return value


def beside(file: str | Path | None, config: ExperimentConfig) -> Path | None:
    """Return the tuning.json beside an experiment's file, if the experiment has the settings that were chosen there.

    Raises:
        RunError: it cannot be read.
    """
    tuning = None if file is None else Path(file).parent / NAME
    if tuning is None or not Path(str(file)).is_file() or not tuning.is_file():
        return None
    lines, chosen = {m.label: m for m in config.methods}, read(tuning)["methods"]
    return (
        tuning
        if set(lines) == set(chosen) and all(_has(config, lines[n], chosen[n]) for n in lines)
        else None
    )


def _has(config: ExperimentConfig, method: MethodConfig, row: Mapping[str, Any]) -> bool:
    try:
        return all(value_of(config, method, key) == value for key, value in row["chosen"].items())
    except KeyError:
        return False


def read(file: Path) -> dict[str, Any]:
    """Return the content of a tuning.json. Raises RunError where it is none."""
    try:
        content = decode(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not {"budget", "sampler", "metric", "methods"} <= content.keys():
            raise ValueError("it lacks budget, sampler, metric or methods")
    except (OSError, ValueError) as error:
        raise RunError(f"'{file}' is damaged: {error}; restore it from a copy, or tune again") from error
    return content


def best_score(row: Mapping[str, Any]) -> float | None:
    """Return the score of the chosen settings of a method, or None where no trial came to its end."""
    scores = [t["score"] for t in row["trials"] if t["state"] == "complete" and t["values"] == row["chosen"]]
    return scores[0] if scores else None


def written(values: Mapping[str, Any]) -> str:
    """Return settings as a command line has them: `train.lr=0.1 method.lam=1`."""
    return " ".join(f"{key}={_plain(value)}" for key, value in values.items())


def _plain(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else {None: "null"}.get(value, str(value))
