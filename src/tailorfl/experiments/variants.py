"""One recipe, several settings of it: a paper's table whose rows differ in the data, say.

    variants:
      2 classes: {data: {partition_options: {classes: 2}}, published: {...}}
      6 classes: {data: {partition_options: {classes: 6}}, published: {...}}

Each variant is an experiment of its own, in a folder of its own below the recipe's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tailorfl.errors import RunError
from tailorfl.experiments.config import load
from tailorfl.experiments.folders import check_folder, check_name, discard_jobs
from tailorfl.experiments.jobs import Observer
from tailorfl.experiments.names import slug
from tailorfl.experiments.result import ExperimentResult
from tailorfl.experiments.runner import run_experiment
from tailorfl.experiments.starting import Way
from tailorfl.printable import quoted
from tailorfl.runs.files import reporting, write_text
from tailorfl.settings.experiment import ExperimentConfig


def expand(config: ExperimentConfig) -> dict[str, ExperimentConfig]:
    """Returns the experiments of a configuration by name of the variant; one under "" where it has none.

    Raises:
        ConfigError: a variant has a mistake.
    """
    if not config.variants:
        return {"": config}
    plain = {key: value for key, value in config.to_dict().items() if key != "variants"}
    return {
        name: load({**plain, "name": f"{config.name}, {name}"}, changes)
        for name, changes in config.variants.items()
    }


def run_variants(
    config: ExperimentConfig,
    out: Path,
    *,
    way: Way = "new",
    overwrite: bool = False,
    observer: Observer | None = None,
    force: bool = False,
    tuning: Path | None = None,
) -> Iterator[ExperimentResult]:
    """Runs every variant and yields its result when it is done.

    `way`, `force` and `tuning` are those of `run_experiment`.

    Raises:
        TailorflError: see the message; what was finished stays on disk.
    """
    check_name(out)
    experiments = expand(config)
    if config.variants and way == "new":
        check_folder(out, False, overwrite)
        with reporting(out, "create the result folder"):
            out.mkdir(parents=True, exist_ok=True)
        for name in experiments:
            discard_jobs(out / slug(name))
    if config.variants and way != "resume":
        write_text(out / "config.yaml", config.to_yaml())
    for name, experiment in experiments.items():
        folder = out / slug(name) if name else out
        started = (folder / "config.yaml").is_file()
        yield run_experiment(
            experiment,
            folder,
            way=way if started else "new",
            overwrite=overwrite,
            observer=observer,
            force=force,
            tuning=tuning,
        )


def results(folder: Path) -> dict[str, ExperimentResult]:
    """Returns the results in a folder: of its variants by name, or its own as "". Raises RunError if there are none."""
    config = load(folder / "config.yaml") if (folder / "config.yaml").is_file() else None
    if config is None or not config.variants:
        return {"": ExperimentResult.load(folder)}
    found = {name: folder / slug(name) for name in config.variants}
    done = {
        n: ExperimentResult.load(place) for n, place in found.items() if (place / "config.yaml").is_file()
    }
    if not done:
        raise RunError(f"'{folder}' has no finished job yet; continue it with --resume {quoted(folder)}")
    return done
