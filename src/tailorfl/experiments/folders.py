"""Result folders: where a new experiment goes, and what the experiment in a folder was."""

from __future__ import annotations

from pathlib import Path

from tailorfl.errors import ConfigError
from tailorfl.experiments.config import load
from tailorfl.experiments.schema import ExperimentConfig

ROOT = Path("runs")


def new_folder(config: ExperimentConfig, overwrite: bool = False) -> Path:
    """runs/NAME, or where that exists and must stay, the first free of runs/NAME-2, runs/NAME-3, ..."""
    from tailorfl.experiments.result import slug

    folder = first = ROOT / slug(config.name)
    number = 2
    while folder.exists() and not overwrite:
        folder = first.with_name(f"{first.name}-{number}")
        number += 1
    return folder


def experiment_in(folder: Path) -> ExperimentConfig:
    """The experiment a result folder was started with. Raises ConfigError if there is none."""
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"'{folder}' is no result folder that could be resumed: it has no config.yaml")
    return load(file)
