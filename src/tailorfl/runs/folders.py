"""Result folders: where a new experiment goes, who may write there, and what the experiment in one was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tailorfl.errors import ConfigError, RunError
from tailorfl.printable import harmful, quoted
from tailorfl.runs.files import FolderLock, reporting
from tailorfl.runs.store import RunStore
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.loading import load, read
from tailorfl.settings.names import slug

ROOT = Path("runs")
ALWAYS = ("seeds", "data", "model", "methods", "train", "rounds")
"""Settings that the config.yaml of a result folder has, whatever version wrote it."""


def new_folder(config: ExperimentConfig, overwrite: bool = False) -> Path:
    """runs/NAME, or where that exists and must stay, the first free of runs/NAME-2, runs/NAME-3, ...

    Of a scale of a recipe, NAME-SCALE.
    """
    folder = first = ROOT / slug(config.name if config.scale is None else f"{config.name}-{config.scale}")
    number = 2
    while folder.exists() and not overwrite:
        folder = first.with_name(f"{first.name}-{number}")
        number += 1
    return folder


def experiment_in(folder: Path) -> ExperimentConfig:
    """Return the experiment a result folder was started with.

    Raises:
        ConfigError: there is none, or its file has lost what every such file has.
    """
    check_name(folder)
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"'{folder}' is no result folder: it has no config.yaml; check the name")
    return whole_experiment(file)


def whole_experiment(file: Path) -> ExperimentConfig:
    """Return the experiment in a file that this library wrote.

    Raises:
        ConfigError: it cannot be read, or has lost what every such file has.
    """
    written = read(file)
    lost = [key for key in ALWAYS if key not in written]
    if lost:
        raise ConfigError(
            f"'{file}' lacks {', '.join(lost)}, which every experiment writes there, so it is damaged or was edited; "
            "restore it from a copy"
        )
    return load(file)


def check_name(folder: Path) -> None:
    """Nothing if a folder can be called so.

    Raises:
        ConfigError: its name holds control characters, or is longer than file systems take.
    """
    character = harmful(str(folder))
    if character is not None:
        raise ConfigError(
            f"the folder {str(folder)!r} has the character {character!r} in its name; leave it out"
        )
    with reporting(folder, "use the folder"):
        folder.exists()


def experiment_to_resume(folder: Path) -> ExperimentConfig:
    """Return the experiment a result folder was started with; its ConfigError also says how one is begun there."""
    check_name(folder)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"'{folder}' cannot be resumed: it has no config.yaml; check the name, or give the experiment too (CONFIG, "
            "KEY=VALUE), and it is begun there"
        )
    return experiment_in(folder)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the lock of the result folder, which is made first, and unmade if nothing came to lie in it."""
    check_name(out)
    with reporting(out, "create the result folder"):
        out.mkdir(parents=True, exist_ok=True)
    with FolderLock(out):
        try:
            yield
        finally:
            if not (out / "config.yaml").exists():
                with suppress(OSError):  # files of somebody else's keep the folder
                    (out / ".lock").unlink()
                    out.rmdir()


def check_folder(out: Path, resume: bool, overwrite: bool) -> None:
    """Raise RunError if `out` holds no experiment to resume, or one that may not be replaced."""
    check_name(out)
    exists = (out / "config.yaml").exists()
    if resume and not exists:
        raise RunError(f"'{out}' cannot be resumed: it has no config.yaml; start it without --resume")
    if exists and not resume and not overwrite:
        raise RunError(
            f"'{out}' already holds an experiment; continue it with --resume {quoted(out)}, replace it with "
            "--overwrite, or choose another folder with --out"
        )


def discard_jobs(out: Path) -> None:
    """Delete the jobs of an earlier experiment, which would pass for finished ones of the next.

    Raises:
        RunError: one of them is a link to another place, where nothing is deleted.
    """
    for file in out.glob("*/seed-*/config.json"):
        for folder in (file.parent, file.parent.parent):
            if folder.is_symlink():
                raise RunError(
                    f"'{folder}' is a link out of the result folder, behind which nothing is deleted; remove the link, "
                    "or choose another folder with --out"
                )
        RunStore.discard(file.parent)


def check_source(out: Path, source: Any) -> None:
    """Raise ConfigError if an experiment that was started on the caller's own data would go on with others."""
    for file in sorted(out.glob("*/seed-*/config.json")):
        if RunStore.open(file.parent, readonly=True).config.get("own_source", False) != (source is not None):
            had, has = ("without", "") if source is not None else ("with", ", source=...")
            raise ConfigError(
                f"'{out}' was started {had} data of your own; continue it the same way: "
                f"tailorfl.run(out=..., resume=True{has})"
            )
