"""Whether the jobs of a result folder are whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tailorfl.errors import RunError
from tailorfl.runs.job import other_job
from tailorfl.runs.reading import numbers
from tailorfl.runs.store import TRACE, RunStore
from tailorfl.runs.variants import expand
from tailorfl.settings.experiment import ExperimentConfig
from tailorfl.settings.names import slug


def jobs_of(folder: Path, config: ExperimentConfig) -> Iterator[tuple[str, Path]]:
    """Yields (name, folder) of every job that an experiment has, those of its variants too."""
    for variant, experiment in expand(config).items():
        place = folder / slug(variant) if variant else folder
        for method in experiment.methods:
            for seed in experiment.seeds:
                name = ", ".join(filter(None, (variant, method.label, f"seed {seed}")))
                yield name, place / slug(method.label) / f"seed-{seed}"


def job_problems(place: Path) -> list[tuple[bool, str]]:
    """Returns (is it damage?, what) of all that is to be said of a job's folder; nothing of a whole, finished one."""
    if not (place / "config.json").is_file():
        return [(False, "not started")]
    store = RunStore.open(place, readonly=True)
    try:
        told = (*store.problems(), *other_job(store), *store.checkpoint_problems())
        found = [(True, text) for text in told]
        status = store.status
        store.clients()
        for name in ("rounds.jsonl", TRACE):
            rounds = numbers(place / name)
            if rounds != list(range(1, len(rounds) + 1)):
                found.append((True, f"{name} has holes, or several records of a round"))
    except RunError as error:
        return [(True, str(error))]
    return found if status == "finished" else [*found, (False, f"not finished ({status})")]
